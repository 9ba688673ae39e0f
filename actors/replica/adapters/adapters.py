"""The LoRA adapters of one model, which requests name by their digests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...model_files.identity.model_identity import adapter_digest
from .rows import Adapted


@dataclass(frozen=True)
class Adapter:
    """An adapter of a model.

    Attributes:
        name: what clients call it.
        files: SHA-256 in hexadecimal, by the files' names.
        rank: of its matrices.
    """

    name: str
    files: Mapping[str, str]
    rank: int

    @property
    def digest(self) -> bytes:
        """32 bytes that identify its files."""
        return adapter_digest(self.files)


class Adapters:
    """A model's adapters, with the numbers by which calls of the model name them: from 1, and 0 for none.

    Args:
        gathers: as for `Adapted`.

    Attributes:
        nbytes: of their matrices in memory.
        adapted: the adapters of the call that is made now.
    """

    def __init__(self, adapters: Sequence[Adapter] = (), *, gathers: bool = False) -> None:
        self.all = tuple(adapters)
        self.nbytes = 0
        self.adapted = Adapted(gathers=gathers)
        self._numbers = {b"": 0} | {adapter.digest: number for number, adapter in enumerate(self.all, 1)}

    def holds(self, digest: bytes) -> bool:
        """Whether the digest, which may be b"" for none, is of one of these."""
        return digest in self._numbers

    def number(self, digest: bytes) -> int:
        """Returns the number of an adapter that is one of these; 0 for b""."""
        return self._numbers[digest]
