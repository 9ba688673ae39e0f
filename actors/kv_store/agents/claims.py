"""Which KV entries and image embeddings an agent's branches use, derived from their token ids. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ...protocol.block_ids import BLOCK_TOKENS, block_ids
from ...protocol.entries import TOKEN_BYTES, EntryRecord, owner_tag, pack_tokens
from ...protocol.media_ids import Name, embeddings_id, embeddings_parent, names_in

_BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES


class Branch(NamedTuple):
    """A branch's model id, the root id of its blocks (empty if they are not shared), and its token ids as in
    `Content.tokens`."""

    model: bytes
    root: bytes
    tokens: bytes


class Claims:
    """The entries that an agent's branches use. A branch claims an entry if it has all of the entry's tokens after the
    same prefix.

    A tail that goes on after the branch's end is not claimed: its last tokens are not this agent's.

    Attributes:
        blocks: the ids of all whole blocks.
    """

    def __init__(self, branches: Iterable[Branch]) -> None:
        self.blocks: dict[bytes, None] = {}
        self._pictures: list[tuple[bytes, Name]] = []
        # For each branch: where in its packed tokens (bytes) the entries after each parent begin.
        self._places: list[tuple[dict[bytes, int], bytes]] = []
        for _, root, tokens in branches:
            # Without a root the KV is not shared, so no prefix lookup finds it.
            if root:
                numbers = array("I", tokens)
                ids = block_ids(root, numbers)
                self.blocks.update(dict.fromkeys(ids))
                places = {parent: number * _BLOCK_BYTES for number, parent in enumerate([root, *ids])}
                self._places.append((places, tokens))
                for name in dict.fromkeys(names_in(numbers)):
                    self._places.append(({embeddings_parent(root, name): 0}, pack_tokens(name)))
                    self._pictures.append((root, name))

    @property
    def embeddings(self) -> list[bytes]:
        """The ids of its image embeddings."""
        return [embeddings_id(root, name) for root, name in self._pictures]

    def holds(self, entry: EntryRecord) -> bool:
        """Returns whether the agent claims the entry."""
        return self.continues(entry.parent, entry.tokens) if entry.tail else entry.id in self.blocks

    def continues(self, parent: bytes, packed: bytes) -> bool:
        """Returns whether a branch has all of these packed tokens after `parent`."""
        return any(
            (start := places.get(parent)) is not None and tokens.startswith(packed, start)
            for places, tokens in self._places
        )

    def parents(self) -> set[bytes]:
        """Returns the ids that a claimed entry may have as its parent."""
        return {parent for places, _ in self._places for parent in places}

    def rests(self) -> list[tuple[bytes, bytes]]:
        """Returns (parent, packed tokens) of every open tail and of the image embeddings."""
        rests = []
        for places, tokens in self._places:
            parent, start = next(reversed(places.items()))
            if start < len(tokens):
                rests.append((parent, tokens[start:]))
        return rests


class Census:
    """The owners of entries, collected agent by agent.

    Args:
        entries: those whose owners are unknown.
        key: the home folder's key, for owner tags.

    Attributes:
        entries: how many there are.
    """

    def __init__(self, entries: Iterable[EntryRecord], key: bytes) -> None:
        self._key = key
        self._blocks: set[bytes] = set()
        self._tails: dict[bytes, list[EntryRecord]] = {}
        self._owners: dict[bytes, list[bytes]] = {}
        self.entries = 0
        for entry in entries:
            self.entries += 1
            # Ids are enough for blocks, of which there may be many.
            if entry.tail:
                self._tails.setdefault(entry.parent, []).append(entry)
            else:
                self._blocks.add(entry.id)

    @property
    def owners(self) -> Mapping[bytes, list[bytes]]:
        """Owner tags by entry id; entries without a claim are absent."""
        return self._owners

    def count(self, agent: str, claims: Claims) -> None:
        """Adds the claims of `agent` (its key)."""
        tag = owner_tag(self._key, agent)
        claimed = [block for block in claims.blocks if block in self._blocks]
        for tails in (self._tails.get(parent, ()) for parent in claims.parents()):
            claimed += [tail.id for tail in tails if claims.holds(tail)]
        for entry in dict.fromkeys(claimed):
            self._owners.setdefault(entry, []).append(tag)
