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

if TYPE_CHECKING:
    from ..replica.group.division.needs import Headers


def memory_of(node: Node, scheduling: Scheduling) -> int:
    """Returns the bytes that a further model and its KV may use on this machine, which is `node`."""
    # Imported here, because MLX takes a second.
    from ..replica.memory.replica_memory import unclaimed_bytes

    return unclaimed_bytes(default_home().memory_claims, node, scheduling)


def stages_of(model: Model, memory_bytes: Mapping[str, int], scheduling: Scheduling) -> list[Stage]:
    """Returns the stages of a model; a single one if it is not divided.

    Args:
        memory_bytes: what it may use on each node, in the order of stages.

    Raises:
        NoRoom: it does not fit; the message has all sizes.
        ModelLoadError: it cannot be served, or not be divided.
    """
    from ..replica.group.division.needs import read_headers
    from ..replica.group.tensor.needs import shares_of

    assert model.split is not None
    with _headers(model.source) as folder:
        if model.split.tensor is not None:
            return shares_of(model, folder, memory_bytes, scheduling.prefill_chunk_tokens)
        headers = read_headers(model, folder)
        return divided(headers, memory_bytes, model.split, scheduling.prefill_chunk_tokens)


def divided(headers: Headers, memory_bytes: Mapping[str, int], split: Split, chunk_tokens: int) -> list[Stage]:
    """As `stages_of`, from what the headers say."""
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
