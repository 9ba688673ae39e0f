"""The cache of image embeddings in memory. For the engine's thread."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from cachetools import LRUCache

from ...kv_store.disk.changes import Changes
from ..execution.media.language_inputs import ImageEmbeddings


class EmbeddingCache:
    """An LRU cache of image embeddings by `features_id`.

    Attributes:
        bytes_max: how many bytes are kept.
        hits, encodes: how often a picture was found, and how often encoded.
        changes: added and removed ids, for the router.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.hits = self.encodes = 0
        self.changes = Changes()
        # With a size it would evict by itself, but it would not say what, and its size cannot be changed.
        self._embeddings: LRUCache[bytes, ImageEmbeddings] = LRUCache(sys.maxsize, getsizeof=lambda one: one.nbytes)

    def __contains__(self, entry: bytes) -> bool:
        return entry in self._embeddings

    @property
    def nbytes(self) -> int:
        return int(self._embeddings.currsize)

    def ids(self) -> list[bytes]:
        """Returns all ids."""
        return list(self._embeddings)

    def get(self, entry: bytes) -> ImageEmbeddings | None:
        """Returns image embeddings and marks them as used; None if they are not cached."""
        return self._embeddings.get(entry)

    def put(self, entry: bytes, embeddings: ImageEmbeddings) -> None:
        """Caches image embeddings, unless they are cached already or larger than the cache."""
        if entry in self._embeddings or embeddings.nbytes > self.bytes_max:
            return
        self._shrink(self.bytes_max - embeddings.nbytes)
        self._embeddings[entry] = embeddings
        self.changes.note([entry], [])

    def resize(self, bytes_max: int) -> None:
        """Changes how many bytes are kept."""
        self.bytes_max = bytes_max
        self._shrink(bytes_max)

    def _shrink(self, bytes_max: int) -> None:
        while self.nbytes > bytes_max:
            self.changes.note([], [self._embeddings.popitem()[0]])

    def clear(self) -> int:
        """Drops everything. Returns the freed bytes."""
        return self.drop(self.ids())

    def drop(self, entries: Iterable[bytes]) -> int:
        """Drops entries; unknown ones are ignored. Returns the freed bytes."""
        before = self.nbytes
        self.changes.note([], [entry for entry in entries if self._embeddings.pop(entry, None) is not None])
        return before - self.nbytes
