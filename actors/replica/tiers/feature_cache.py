"""The cache of image embeddings in memory. For the engine's thread."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from ...kv_store.disk.placement import Changes
from ..execution.vision import Features


class FeatureCache:
    """An LRU cache of image embeddings by `features_id`.

    Attributes:
        hits, encodes: how often a picture was found, and how often encoded.
        changes: added and removed ids, for the router.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.nbytes = 0
        self.hits = self.encodes = 0
        self.changes = Changes()
        self._features: OrderedDict[bytes, Features] = OrderedDict()

    def __contains__(self, entry: bytes) -> bool:
        return entry in self._features

    def ids(self) -> list[bytes]:
        """Returns all ids, the least recently used first."""
        return list(self._features)

    def get(self, entry: bytes) -> Features | None:
        """Returns image embeddings and marks them as used; None if they are not cached."""
        features = self._features.get(entry)
        if features is not None:
            self._features.move_to_end(entry)
        return features

    def put(self, entry: bytes, features: Features) -> None:
        """Caches image embeddings, unless they are cached already or larger than the cache."""
        if entry in self._features or features.nbytes > self.bytes_max:
            return
        self._features[entry] = features
        self.nbytes += features.nbytes
        self.changes.note([entry], [])
        self._shrink(self.bytes_max)

    def clear(self) -> int:
        """Drops everything. Returns the freed bytes."""
        return self.drop(self.ids())

    def drop(self, entries: Iterable[bytes]) -> int:
        """Drops entries; unknown ones are ignored. Returns the freed bytes."""
        before = self.nbytes
        for entry in entries:
            if entry in self._features:
                self._remove(entry)
        return before - self.nbytes

    def _shrink(self, bytes_max: int) -> None:
        while self.nbytes > bytes_max:
            self._remove(next(iter(self._features)))

    def _remove(self, entry: bytes) -> None:
        self.nbytes -= self._features.pop(entry).nbytes
        self.changes.note([], [entry])
