"""Actors that are plain objects here: their handles answer without Ray."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from satchel.actors.protocol.messages import ModelInfo, encode, encode_error
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
