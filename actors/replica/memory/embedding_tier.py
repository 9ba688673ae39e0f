"""Image embeddings on disk, stored like the open tails of conversations, but after a parent id of their own.

So everything that exists for KV on disk exists for them too: digests, owners, limits, and pulls between nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ...protocol.media_ids import embeddings_id, embeddings_parent, name_at
from ...protocol.replica_messages import GenerateRequest, MediaSpan
from ..execution.media.language_inputs import ImageEmbeddings
from .disk_tier import DiskTier, WriteJob, Written


class EmbeddingTier:
    """Stores and loads agents' image embeddings. `offer` is for the engine's thread, `load` for any but an event
    loop's."""

    def __init__(self, disk: DiskTier) -> None:
        self._disk = disk

    def offer(self, request: GenerateRequest, media: MediaSpan, embeddings: ImageEmbeddings) -> None:
        """Queues an agent's image embeddings to be written. If they are on disk already, this only notes that the agent
        uses them."""
        if not request.agent or not request.reusable:
            return
        name = name_at(request.prompt, media.start, len(media.tokens))
        known = embeddings_id(request.root_id, name)
        parent = embeddings_parent(request.root_id, name)
        new = [] if known in self._disk.saved else [Written(parent, name, _named(embeddings))]
        job = WriteJob(request.agent, [known], [], new, limits=request.disk_limits)
        if self._disk.accepts(job):
            self._disk.write(job)

    def load(self, request: GenerateRequest, indexes: Sequence[int]) -> dict[int, ImageEmbeddings]:
        """Reads the image embeddings of a request's pictures; those not on disk are missing in the result. Blocks."""
        embeddings: dict[int, ImageEmbeddings] = {}
        for index in indexes:
            media = request.media[index]
            name = name_at(request.prompt, media.start, len(media.tokens))
            arrays = self._disk.read(embeddings_parent(request.root_id, name), name, request.agent)
            if arrays is not None and "embeddings" in arrays:
                levels = (arrays[key] for level in range(len(arrays)) if (key := f"level.{level}") in arrays)
                embeddings[index] = ImageEmbeddings(arrays["embeddings"], tuple(levels), arrays.get("positions"))
        return embeddings


def _named(embeddings: ImageEmbeddings) -> dict[str, mx.array]:
    named = {f"level.{level}": array for level, array in enumerate(embeddings.levels)}
    if embeddings.positions is not None:
        named["positions"] = embeddings.positions
    return {"embeddings": embeddings.inputs, **named}
