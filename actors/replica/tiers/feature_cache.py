"""What is kept in memory of the pictures that were encoded. For the engine's thread."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from ...kv_store.disk.placement import Changes
from ..execution.vision import Features


class FeatureCache:
    """What encoders made of pictures, by `features_id`, least recently used first out.

    Attributes:
        hits, encodes: how often a picture was found, and how often encoded.
        changes: for the router.
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
        return list(self._features)

    def get(self, entry: bytes) -> Features | None:
        found = self._features.get(entry)
        if found is not None:
            self._features.move_to_end(entry)
        return found

    def put(self, entry: bytes, features: Features) -> None:
        if entry in self._features or features.nbytes > self.bytes_max:
            return
        self._features[entry] = features
        self.nbytes += features.nbytes
        self.changes.note([entry], [])
        self._shrink(self.bytes_max)

    def clear(self) -> int:
        """Let go of everything. Returns the bytes."""
        return self.drop(self.ids())

    def drop(self, entries: Iterable[bytes]) -> int:
        """Let go of these, as far as they are here. Returns the bytes."""
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
