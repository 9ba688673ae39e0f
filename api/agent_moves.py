"""Moving agents to other nodes: asked for by a user, or because they are answered elsewhere than where they live."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Coroutine
from typing import Any

from ..cluster.errors import AgentNotFound, InvalidRequest, SatchelError
from .agent_store import Store

_log = logging.getLogger(__name__)

FOLLOWING_MAX = 4
"""How many agents may follow at one time; the router says it again at another one's next turn."""

_NODE_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)


class AgentMoves:
    """The moves of one endpoint.

    Args:
        background: runs what nobody waits for.

    Attributes:
        total, bytes_total: agents that got another home, and the KV that went with them.
    """

    def __init__(self, store: Store, background: Callable[[Coroutine[Any, Any, None]], object]) -> None:
        self.total = self.bytes_total = 0
        self._store = store
        self._background = background
        self._following: set[str] = set()

    async def move(self, key: str, to: Any) -> dict[str, Any]:
        """Make the node `to` the agent's home. Nothing is done where it is that already.

        Returns:
            `from` ("" where nobody knew), `to`, `moved` (False where nothing was done), and what went: `tokens`,
            `blocks`, `bytes`, `seconds`.

        Raises:
            InvalidRequest: there is no such node.
            AgentNotFound, AgentBusy, Unavailable: the agent stays where it is.
        """
        if not isinstance(to, str) or not _NODE_NAME.fullmatch(to):
            raise InvalidRequest("to must be the name of a node, as GET /v1/cluster shows it", param="to")
        try:
            home = (await self._store.where(key))["home"]
        except AgentNotFound:
            # It may be new, so that nobody has told where it is.
            home = ""
        done: dict[str, Any] = {"tokens": 0, "blocks": 0, "bytes": 0, "seconds": 0.0}
        if home != to:
            try:
                done = await self._store.move(key, to)
            except InvalidRequest as error:
                raise InvalidRequest(error.message, param=error.param or "to") from None
            self.total += 1
            self.bytes_total += done["bytes"]
        counts = {name: done[name] for name in ("tokens", "blocks", "bytes", "seconds")}
        identity = {"id": key.partition("/")[2], "object": "agent.move"}
        return {**identity, "from": home, "to": to, "moved": home != to, **counts}

    def follow(self, key: str, to: str) -> None:
        """Move an agent's memory after it, behind its requests. Where that fails it stays where it is."""
        if key not in self._following and len(self._following) < FOLLOWING_MAX:
            self._following.add(key)
            self._background(self._follow(key, to))

    async def _follow(self, key: str, to: str) -> None:
        try:
            await self.move(key, to)
            _log.info("agent %s lives on %s now, where it is answered", key, to)
        except SatchelError as error:
            _log.warning("agent %s does not move to %s yet: %s", key, to, error.message)
        finally:
            self._following.discard(key)
