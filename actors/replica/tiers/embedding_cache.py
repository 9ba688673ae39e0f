"""The cache of image embeddings in memory. For the engine's thread."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from ...kv_store.disk.placement import Changes
from ..execution.vision import ImageEmbeddings


class EmbeddingCache:
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
        self._embeddings: OrderedDict[bytes, ImageEmbeddings] = OrderedDict()

    def __contains__(self, entry: bytes) -> bool:
        return entry in self._embeddings

    def ids(self) -> list[bytes]:
        """Returns all ids, the least recently used first."""
        return list(self._embeddings)

    def get(self, entry: bytes) -> ImageEmbeddings | None:
        """Returns image embeddings and marks them as used; None if they are not cached."""
        embeddings = self._embeddings.get(entry)
        if embeddings is not None:
            self._embeddings.move_to_end(entry)
        return embeddings

    def put(self, entry: bytes, embeddings: ImageEmbeddings) -> None:
        """Caches image embeddings, unless they are cached already or larger than the cache."""
        if entry in self._embeddings or embeddings.nbytes > self.bytes_max:
            return
        self._embeddings[entry] = embeddings
        self.nbytes += embeddings.nbytes
        self.changes.note([entry], [])
        self._shrink(self.bytes_max)

    def resize(self, bytes_max: int) -> None:
        """Changes how many bytes are kept."""
        self.bytes_max = bytes_max
        self._shrink(bytes_max)

    def clear(self) -> int:
        """Drops everything. Returns the freed bytes."""
        return self.drop(self.ids())

    def drop(self, entries: Iterable[bytes]) -> int:
        """Drops entries; unknown ones are ignored. Returns the freed bytes."""
        before = self.nbytes
        for entry in entries:
            if entry in self._embeddings:
                self._remove(entry)
        return before - self.nbytes

    def _shrink(self, bytes_max: int) -> None:
        while self.nbytes > bytes_max:
            self._remove(next(iter(self._embeddings)))

    def _remove(self, entry: bytes) -> None:
        self.nbytes -= self._embeddings.pop(entry).nbytes
        self.changes.note([], [entry])
