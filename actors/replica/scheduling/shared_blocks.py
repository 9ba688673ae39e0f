"""Counts the blocks that several sequences share only once. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence


class SharedBlocks:
    """The blocks of sequences that have a place, by their keys. If sequences have a key in common, they have all blocks
    before it in common too."""

    def __init__(self) -> None:
        self._of: dict[str, Sequence[bytes]] = {}
        self._holders: Counter[bytes] = Counter()

    def hold(self, name: str, keys: Sequence[bytes]) -> None:
        """Notes that a sequence now holds these blocks, from its first block on."""
        had = self._of.get(name, ())
        self._of[name] = keys
        self._holders.update(keys[len(had) :])

    def leave(self, name: str) -> None:
        """Forgets a sequence; unknown names are ignored."""
        for key in self._of.pop(name, ()):
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key]

    def common(self, names: Collection[str], coming: Sequence[bytes] = ()) -> int:
        """Returns how many more blocks these sequences would need if nothing were shared.

        Args:
            coming: keys of one more sequence, which shares those of its first blocks that the others hold.
        """
        sequences = [self._of[name] for name in names if name in self._of]
        held: Collection[bytes] = self._holders
        if len(sequences) < len(self._of):
            held = {key for keys in sequences for key in keys}
        known = next((index for index, key in enumerate(coming) if key not in held), len(coming))
        return sum(map(len, sequences)) - len(held) + known

    def check(self, names: Collection[str]) -> None:
        """Checks that only these sequences hold blocks, and that the counts are right.

        Raises:
            AssertionError: they disagree.
        """
        assert self._of.keys() <= set(names)
        assert self._holders == Counter(key for keys in self._of.values() for key in keys)
