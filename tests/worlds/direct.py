"""Actors that are plain objects here: their handles answer without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from types import SimpleNamespace
from typing import Any

from satchel.actors.protocol.replica_messages import ModelInfo
from satchel.actors.protocol.store_client import StoreClient
from satchel.actors.rpc.codec import encode, encode_error
from satchel.cluster.config.timing import USUAL, Timing
from satchel.cluster.errors import SatchelError


class Direct:
    """The handle of an object whose methods take and return what travels.

    Args:
        target: finds it anew at each call.
    """

    def __init__(self, target: Callable[[], Any]) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self._target(), name))


Carry = Callable[[str, bytes, float], Awaitable[bytes]]
"""Gets a method's name, what is asked of it, and how long that may take; gives what is answered."""


def carried(
    node: str, carry: Carry, loop: asyncio.AbstractEventLoop | None = None, timing: Timing = USUAL
) -> StoreClient:
    """The client of a store, whose calls `carry` takes there, on `loop` for threads that wait for the answer."""
    client, way = StoreClient(node, timing), _Way(carry, loop)
    client.actor = way  # pyright: ignore[reportAttributeAccessIssue]
    return client


class _Way:
    """As `ActorRef`."""

    def __init__(self, carry: Carry, loop: asyncio.AbstractEventLoop | None) -> None:
        self._carry, self._loop = carry, loop

    def call(self, send: Any, read: Any, timeout_s: float, *, large: bool = False) -> _CarriedCall:
        return _CarriedCall(self._carry, self._loop, send, read, timeout_s)


class _CarriedCall:
    """As `Call`."""

    def __init__(self, carry: Carry, loop: Any, send: Any, read: Any, timeout_s: float) -> None:
        self._carry, self._loop, self._send, self._read, self._timeout_s = carry, loop, send, read, timeout_s

    def within(self, timeout_s: float) -> _CarriedCall:
        return _CarriedCall(self._carry, self._loop, self._send, self._read, timeout_s)

    def __await__(self) -> Generator[Any, None, Any]:
        return self._ask().__await__()

    def wait(self) -> Any:
        return asyncio.run_coroutine_threadsafe(self._ask(), self._loop).result(30)

    async def _ask(self) -> Any:
        method, data = self._send(_Noting())
        return self._read(await self._carry(method, data, self._timeout_s))


class _Noting:
    """A handle that says what would be called."""

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda data: (method, data))


async def answer_of(said: Any) -> bytes:
    """What travels for a message, None, or an error."""
    return encode_error(said) if isinstance(said, SatchelError) else encode(said)


def model_info(**said: Any) -> ModelInfo:
    """Of a replica of which no more than this matters."""
    ids: dict[str, Any] = {"model_id": b"i", "files_id": b"f", "files": {}, "computing": {}}
    named = {"replica": "m-0", "node": "mac0", "name": "m", "folder": "/f", "dtype": "", "weights": "", "kv": ""}
    numbers = {"context_tokens": 8, "vocabulary_size": 5, "created": 0, "pid": 1}
    shape: dict[str, Any] = {"layers": "2 full; q4", "trust_remote_code": False}
    return ModelInfo(**{**ids, **named, **numbers, **shape, **said})
