"""Replicas that do a job by a script."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, ClassVar

from ray.exceptions import RayActorError

from satchel.actors.protocol.clients import ReplicaClient
from satchel.actors.rpc.codec import encode, encode_error
from satchel.cluster.config.timing import USUAL
from satchel.cluster.errors import SatchelError
from tests.api.ray_backend import test_dispatch as worlds
from tests.worlds.direct import Direct


class ScriptedReplica(worlds.FakeLink):
    """Refuses by its first word, or "take"s the request; then its further words are updates, None for nothing new, and
    an error or "end" in place of one.

    Attributes:
        begin, news: the methods that take the request and tell of it.
        done: the update that ends every script.
    """

    begin: ClassVar[str]
    news: ClassVar[str]
    done: ClassVar[Any]

    def __init__(self, backend: Any, name: str, *script: Any) -> None:
        super().__init__(backend, name, *script)
        self.asked: list[Any] = []
        self.open()

    def open(self) -> None:
        self.broken = asyncio.Event()
        methods = SimpleNamespace(**{self.begin: self._begin, self.news: self._next})
        self.client = ReplicaClient(self.replica, USUAL, Direct(lambda: methods))

    async def _begin(self, data: bytes) -> bytes:
        self.asked += getattr(ReplicaClient, self.begin).asked(data)
        return self._answer(self.script.pop(0) if self.script else "take")

    async def _next(self, data: bytes) -> bytes:
        return self._answer(self.script.pop(0) if self.script else self.done)

    @staticmethod
    def _answer(step: Any) -> bytes:
        if isinstance(step, SatchelError):
            return encode_error(step)
        if step == "end":
            raise RayActorError
        return encode(None if step == "take" else step)
