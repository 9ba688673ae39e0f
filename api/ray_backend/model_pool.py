"""Waits until a model that comes and goes is loaded."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from ...actors.protocol.clients import PoolClient
from ...actors.protocol.pool_messages import UNLOADING, PooledModel
from ...cluster.config.timing import Timing
from ...cluster.errors import InvalidRequest, Unavailable
from ..requests.loading import Loading
from .served import ServedModels

Report = Callable[[str, float | None], None]
"""Called with what is done and the fraction of it, None if unknown."""

TOLD_S = 1.0
"""How often the pool says how far it is."""

POLL_S = 0.25
"""How often the pool is asked whether a model is unloaded."""


class ModelPool:
    """The pool, as one event loop's requests see it."""

    def __init__(self, served: ServedModels, timing: Timing) -> None:
        self._served, self._timing = served, timing
        self._client = PoolClient(timing)

    async def comes_and_goes(self, name: str) -> bool:
        """Returns whether the pool loads and unloads the model."""
        return any(entry.model.name == name and entry.comes_and_goes for entry in await self._served.entries())

    async def is_loaded(self, name: str) -> bool:
        """Returns whether the model has replicas, by a list that is at most `registry_s` old; True for a model that
        stays loaded."""
        found = [entry for entry in await self._served.entries() if entry.model.name == name]
        return not (found and found[0].comes_and_goes and not found[0].replicas)

    async def pooled(self, name: str) -> str | None:
        """Returns the name of the model that comes and goes and has this name or alias, None if there is none."""
        found = [entry for entry in await self._served.entries() if entry.comes_and_goes]
        names = (entry.model.name for entry in found if name == entry.model.name or name in entry.model.aliases)
        return next(names, None)

    async def load(self, name: str, loading: Loading, report: Report | None = None) -> bool:
        """Waits until a model is loaded. The caller limits the time. If it is cancelled, the load goes on.

        Args:
            report: called with what is done and the fraction of it, None if unknown.

        Returns:
            Whether the model was not loaded. A replica that restarts does not count as such.

        Raises:
            ModelLoadError: it cannot be loaded.
            ModelNotFound: it does not come and go, or has just been removed.
            Unavailable: the pool has not answered for `recovery_s`.
        """
        was_away, silent_since = False, None
        try:
            while True:
                try:
                    state = await self._client.ensure(name, TOLD_S)
                except Unavailable:
                    # It restarts.
                    now = time.monotonic()
                    silent_since = now if silent_since is None else silent_since
                    if now - silent_since > self._timing.recovery_s:
                        raise
                    await asyncio.sleep(self._timing.retry_s)
                    continue
                silent_since = None
                if state.is_loaded:
                    self._served.refresh()
                    return was_away
                was_away = was_away or not state.restarts
                loading.progress = state.progress
                if report is not None:
                    report(f"{name}: {state.what or state.state}", state.fraction)
        finally:
            loading.progress = ""

    async def unload(self, name: str) -> None:
        """As `Backend.unload`."""
        if not await self.comes_and_goes(name):
            raise InvalidRequest(f"the model {name!r} stays loaded: its config has no `load: request`", param="model")
        await self._client.unload(name)

    async def until_unloaded(self, name: str) -> None:
        """Waits until a model is not being unloaded any more. The caller limits the time.

        Raises:
            Unavailable: the pool does not answer.
        """
        while any(model.name == name and model.state == UNLOADING for model in await self._client.models()):
            await asyncio.sleep(POLL_S)
        self._served.refresh()

    async def states(self) -> dict[str, PooledModel]:
        """Returns the models of the pool by name; none if it does not answer."""
        if not any(entry.comes_and_goes for entry in await self._served.entries()):
            return {}
        try:
            return {model.name: model for model in await self._client.models().within(self._timing.brief_answer_s)}
        except Unavailable:
            return {}
