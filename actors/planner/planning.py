"""Divides a model among nodes by their memory: what runs on the nodes, in a process that ends afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ...cluster.config.config import Model, Scheduling
from ...cluster.config.nodes import Node
from ...cluster.config.stages import Split, Stage, divide
from ...cluster.environment import default_home
from ...cluster.errors import NoRoom
from ..model_files.source import found_here, headers_of
from ..patches import without_torch

if TYPE_CHECKING:
    from ..replica.group.division.needs import Headers


def memory_of(node: Node, scheduling: Scheduling) -> int:
    """Returns the bytes that a further model and its KV may use on this machine, which is `node`."""
    # Imported here, because MLX takes a second.
    from ..replica.memory.claims import unclaimed_bytes

    return unclaimed_bytes(default_home().memory_claims, node, scheduling)


class Divider:
    """Divides one model, in a process of its own: it reads the headers of the model's files while the model still waits
    for its nodes, and for what they say of their memory."""

    def __init__(self, model: Model, scheduling: Scheduling) -> None:
        self._model, self._chunk_tokens = model, scheduling.prefill_chunk_tokens
        self._headers: Headers | None = None

    def read(self) -> None:
        """Reads ahead what `stages` needs, which tries again if it cannot be read."""
        with suppress(Exception, SystemExit):
            self._read()

    def _read(self) -> Headers:
        without_torch()
        from ..replica.group.division.needs import read_headers

        if self._headers is None:
            with _headers(self._model.source) as folder:
                self._headers = read_headers(self._model, folder)
        return self._headers

    def stages(self, memory_bytes: Mapping[str, int]) -> list[Stage]:
        """Returns the model's stages; a single one if it is not divided.

        Args:
            memory_bytes: what it may use on each node, in the order of stages.

        Raises:
            NoRoom: it does not fit; the message has all sizes.
            ModelLoadError: it cannot be served, or not be divided.
        """
        from ..replica.group.tensor.needs import shares_of

        assert self._model.split is not None
        if self._model.split.tensor is None:
            return divided(self._read(), memory_bytes, self._model.split, self._chunk_tokens)
        with _headers(self._model.source) as folder:
            return shares_of(self._model, folder, memory_bytes, self._chunk_tokens)


def divided(headers: Headers, memory_bytes: Mapping[str, int], split: Split, chunk_tokens: int) -> list[Stage]:
    """As `Divider.stages`, from what the headers say."""
    if split.pipeline == "auto":
        for node in sorted(memory_bytes, key=lambda name: -memory_bytes[name]):
            alone = headers.needs(memory_bytes[node], chunk_tokens, whole=True)
            with suppress(NoRoom):
                return divide(alone, {node: memory_bytes[node]}, split)
    return divide(headers.needs(sum(memory_bytes.values()), chunk_tokens), memory_bytes, split)


@contextmanager
def _headers(source: str) -> Iterator[Path]:
    """Gives a model's folder on this machine, or one with the headers of its files in the Hub."""
    folder = found_here(source)
    if folder is not None and any(folder.glob("*.safetensors")):
        yield folder
        return
    with headers_of(source) as found:
        yield found
