"""A row on its way through the executor: in prefill, alone or in a batch, about to join, and decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...protocol.messages import Sampling
from ..kv import caches as kv_cache
from ..kv.row_view import Stacks
from .grammar import RowGrammar
from .vision import RowPart, RowPictures


@dataclass
class Together:
    """Caches of rows that were prefilled in one batch; never changed afterwards. `rows` maps row ids to batch rows,
    without rows that left or have own caches. `size` is the number of batch rows."""

    caches: list[Any]
    rows: dict[str, int]
    size: int
    stacks: Stacks = field(default_factory=Stacks)


@dataclass
class Prefilling:
    """A row in prefill, with `length` tokens of KV in its own `caches`, or if `together` is set, in a row of that batch
    until own ones are needed. `failure` is what the model raised while it changed the caches, which are useless then.
    """

    row_id: str
    length: int
    caches: list[Any] = field(default_factory=list)
    together: Together | None = None
    failure: Exception | None = None
    pictures: RowPictures | None = None

    def part(self, tokens: Sequence[int]) -> RowPart:
        """Returns the row's next tokens with its pictures."""
        return RowPart(tokens, self.length, self.pictures)

    def own(self) -> list[Any]:
        """Returns the row's own caches; extracts them (lazily) if its KV is in a batch."""
        if self.together is not None:
            self.caches = kv_cache.extract(self.together.caches, self.together.rows.pop(self.row_id))
            self.together = None
        return self.caches

    def leave(self) -> None:
        """Removes the row from the batch that it was prefilled in."""
        if self.together is not None:
            del self.together.rows[self.row_id]


@dataclass
class DecodingRow:
    """A decoding row. `length` tokens have KV once the step in flight is done. `fed` after its first step, `begun`
    after the step that returned its first token. It ends with one of `ends`, or when it has `tokens_max` tokens."""

    row_id: str
    length: int
    tokens_max: int = 0
    ends: frozenset[int] = frozenset()
    fed: bool = False
    begun: bool = False
    pictures: RowPictures | None = None
    grammar: RowGrammar | None = None

    @property
    def grammar_error(self) -> str:
        """What is wrong about the last token drawn, which has not been returned yet."""
        return "" if self.grammar is None else self.grammar.error


@dataclass(frozen=True)
class Joining:
    """A row that joins at the next step. The last `drawn` of its `tokens` were generated; the very last is its first
    input."""

    row: DecodingRow
    prefilled: Prefilling
    tokens: Sequence[int]
    sampling: Sampling
    drawn: int
