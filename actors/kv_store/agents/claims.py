"""Which KV an agent's branches stand on, and which features of pictures, as far as their token ids tell. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ...protocol.block_ids import BLOCK_TOKENS, block_ids
from ...protocol.entries import TOKEN_BYTES, EntryRecord, owner_tag, pack_tokens
from ...protocol.media_ids import Name, features_id, features_parent, names_in

_BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES


class Branch(NamedTuple):
    """What a branch's KV follows from: its model's id, the root id of its blocks (empty where they are shared with
    nobody), and its token ids as `Content.tokens` has them."""

    model: bytes
    root: bytes
    tokens: bytes


class Claims:
    """What an agent has in memory now. An entry is claimed where a branch has all of its tokens, after the same ones.

    A tail that goes on where the branch ends is not claimed: who has its beginning need not have the rest.

    Attributes:
        blocks: the ids of all whole blocks.
    """

    def __init__(self, branches: Iterable[Branch]) -> None:
        self.blocks: dict[bytes, None] = {}
        self._pictures: list[tuple[bytes, Name]] = []
        # For each branch where in its tokens the entries after a parent begin.
        self._places: list[tuple[dict[bytes, int], bytes]] = []
        for _, root, tokens in branches:
            # Without a root they are shared with nobody, so nobody finds them again.
            if root:
                numbers = array("I", tokens)
                ids = block_ids(root, numbers)
                self.blocks.update(dict.fromkeys(ids))
                places = {parent: number * _BLOCK_BYTES for number, parent in enumerate([root, *ids])}
                self._places.append((places, tokens))
                for name in dict.fromkeys(names_in(numbers)):
                    self._places.append(({features_parent(root, name): 0}, pack_tokens(name)))
                    self._pictures.append((root, name))

    @property
    def features(self) -> list[bytes]:
        """The ids of its pictures' features."""
        return [features_id(root, name) for root, name in self._pictures]

    def holds(self, entry: EntryRecord) -> bool:
        """Whether the entry is one of them."""
        return self.continues(entry.parent, entry.tokens) if entry.tail else entry.id in self.blocks

    def continues(self, parent: bytes, packed: bytes) -> bool:
        """Whether some branch goes on with all of these tokens after `parent`."""
        return any(
            (start := places.get(parent)) is not None and tokens.startswith(packed, start)
            for places, tokens in self._places
        )

    def parents(self) -> set[bytes]:
        """What an entry may follow."""
        return {parent for places, _ in self._places for parent in places}

    def rests(self) -> list[tuple[bytes, bytes]]:
        """(parent, packed tokens) of what each branch has after its last whole block, where there is something, and of
        its pictures' features."""
        found = []
        for places, tokens in self._places:
            parent, start = next(reversed(places.items()))
            if start < len(tokens):
                found.append((parent, tokens[start:]))
        return found


class Census:
    """Finds out whose entries are whose, one agent after the other.

    Args:
        entries: those whose owners are not known.
        key: the home's key, for owners' tags.

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
            # Of blocks the ids are enough, and there may be many.
            if entry.tail:
                self._tails.setdefault(entry.parent, []).append(entry)
            else:
                self._blocks.add(entry.id)

    @property
    def owners(self) -> Mapping[bytes, list[bytes]]:
        """The tags of those who claim an entry, by its id; those that nobody claims are not in it."""
        return self._owners

    def count(self, agent: str, claims: Claims) -> None:
        """Note what the agent (its key) claims."""
        tag = owner_tag(self._key, agent)
        found = [block for block in claims.blocks if block in self._blocks]
        for tails in (self._tails.get(parent, ()) for parent in claims.parents()):
            found += [tail.id for tail in tails if claims.holds(tail)]
        for entry in dict.fromkeys(found):
            self._owners.setdefault(entry, []).append(tag)
