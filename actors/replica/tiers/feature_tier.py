"""Image embeddings on disk, stored like the open tails of conversations, after a parent of their own.

So everything that holds for KV on disk holds for them too: digests, owners, limits, and pulls between nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ...protocol.media_ids import features_id, features_parent, name_at
from ...protocol.messages import GenerateRequest, MediaSpan
from ..execution.vision import Features
from .disk_tier import DiskTier, WriteJob, Written


class FeatureTier:
    """Stores and loads agents' image embeddings. `offer` is for the engine's thread, `load` for any but an event
    loop's."""

    def __init__(self, disk: DiskTier) -> None:
        self._disk = disk

    def offer(self, request: GenerateRequest, media: MediaSpan, features: Features) -> None:
        """Queues an agent's image embeddings to be written; if they are on disk already, only notes that the agent uses
        them."""
        if not request.agent or not request.reusable:
            return
        name = name_at(request.prompt, media.start, len(media.tokens))
        known = features_id(request.root_id, name)
        parent = features_parent(request.root_id, name)
        new = [] if known in self._disk.saved else [Written(parent, name, _named(features))]
        job = WriteJob(request.agent, [known], [], new, limits=request.disk_limits)
        if self._disk.accepts(job):
            self._disk.write(job)

    def load(self, request: GenerateRequest, indexes: Sequence[int]) -> dict[int, Features]:
        """Reads the image embeddings of a request's pictures; those not on disk are missing in the result. Blocks."""
        features: dict[int, Features] = {}
        for index in indexes:
            media = request.media[index]
            name = name_at(request.prompt, media.start, len(media.tokens))
            arrays = self._disk.read(features_parent(request.root_id, name), name, request.agent)
            if arrays is not None and "embeddings" in arrays:
                levels = (arrays[f"level.{level}"] for level in range(len(arrays) - 1))
                features[index] = Features(arrays["embeddings"], tuple(levels))
        return features


def _named(features: Features) -> dict[str, mx.array]:
    return {"embeddings": features.embeddings} | {
        f"level.{level}": array for level, array in enumerate(features.levels)
    }
