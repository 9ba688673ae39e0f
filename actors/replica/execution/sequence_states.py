"""A sequence's stages in the executor: in prefill (alone or in a batch), about to join, and decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from ...protocol.replica_messages import Sampling
from ..drafting.drafter import Drafter
from ..kv import caches as kv_cache
from ..kv.sequence_view import Stacks
from ..kv.unbatched import UnbatchedSequences
from .media.language_inputs import SequencePart, SequencePictures
from .sampling.grammar import SequenceGrammar
from .sampling.ready import Ready


@dataclass
class Together:
    """Caches of sequences that were prefilled in one batch; never changed afterwards. `sequences` maps a sequence's id
    to its number in the batch; sequences that left or have their own caches are missing. `size` is how many the batch
    has."""

    caches: list[Any]
    sequences: dict[str, int]
    size: int
    stacks: Stacks = field(default_factory=Stacks)


class Stage(Enum):
    """The stage of a sequence in the executor."""

    PREFILL = auto()
    JOINING = auto()
    DECODE = auto()


@dataclass
class ExecutorSequence:
    """A sequence in the executor.

    Attributes:
        length: tokens that have KV, once the step in flight is done.
        caches: its own caches before it decodes. If `together` is set, its KV stays in that batch until own caches are
            needed.
        failure: what the model raised while it changed the caches; then these cannot be used.
        tokens: all its tokens when it joins. The last `drawn` of them were generated, and the very last is its first
            input.
        tokens_max: it ends with this many tokens, or with one of the tokens `ends`.
        fed: whether it has had its first decode step.
        begun: whether a step has returned its first token.
        drafter: drafts its next tokens; None if it is not drafted.
        forced: the only tokens that its grammar allows after its next one; empty if that is not known.
        micro_batch: the number of the one that it joins.
        adapter: the number of its adapter, 0 for none.
        moved: if it comes from another one, its token that the next step returns, and its state in the sampler.
    """

    sequence_id: str
    length: int
    caches: list[Any] = field(default_factory=list)
    pictures: SequencePictures | None = None
    stage: Stage = Stage.PREFILL
    together: Together | None = None
    failure: Exception | None = None
    tokens: Sequence[int] = ()
    drawn: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    grammar: SequenceGrammar | None = None
    tokens_max: int = 0
    ends: frozenset[int] = frozenset()
    fed: bool = False
    begun: bool = False
    drafter: Drafter | None = None
    forced: Sequence[int] = ()
    micro_batch: int = 0
    adapter: int = 0
    moved: tuple[Ready, Any] | None = None

    @property
    def grammar_error(self) -> str:
        """What is wrong with the last drawn token, which has not been returned yet."""
        return "" if self.grammar is None else self.grammar.error

    def part(self, tokens: Sequence[int]) -> SequencePart:
        """Returns the sequence's next tokens with its pictures."""
        return SequencePart(tokens, self.length, self.pictures)

    def own(self) -> list[Any]:
        """Returns the sequence's own caches; extracts them (lazily) if its KV is in a batch."""
        if self.together is not None:
            self.caches = kv_cache.extract(self.together.caches, self.together.sequences.pop(self.sequence_id))
            self.together = None
        return self.caches

    def join(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        drawn: int,
        grammar: SequenceGrammar | None,
        ends: frozenset[int],
    ) -> None:
        """Notes with what the sequence will join the batch."""
        if grammar is not None:
            grammar.resume(tokens[len(tokens) - drawn :])
        self.tokens, self.sampling, self.drawn = tokens, sampling, drawn
        self.grammar, self.ends = grammar, ends
        self.tokens_max = self.length + 1 + sampling.max_tokens - drawn

    def decode(self) -> None:
        """Moves its KV to the batch that it has joined."""
        self.stage, self.caches, self.together = Stage.DECODE, [], None

    def leave(self) -> None:
        """Removes the sequence from the batch that it was prefilled in."""
        if self.together is not None:
            del self.together.sequences[self.sequence_id]


@dataclass
class MicroBatch:
    """Decoding sequences that are computed together: all, or a part of them, so that several processes with layers of
    the model compute at the same time.

    Attributes:
        caches: of all its sequences, one a layer.
        leaving: ids of the sequences that have left, whose KV stays until the next step.
        stacks: valid until the next step.
    """

    sequences: list[ExecutorSequence] = field(default_factory=list)
    caches: list[Any] | UnbatchedSequences = field(default_factory=list)
    leaving: set[str] = field(default_factory=set)
    stacks: Stacks = field(default_factory=Stacks)


def arriving(joining: Mapping[str, ExecutorSequence], *, unbatched: bool) -> list[tuple[Any, list[ExecutorSequence]]]:
    """Returns sequences that join now as the caches of batches: sequences prefilled together stay one batch, the others
    are merged, or stay apart if they are `unbatched`."""
    found: list[tuple[Any, list[ExecutorSequence]]] = []
    left = dict(joining)
    for sequence in joining.values():
        together = sequence.together
        if together is None or not together.sequences.keys() <= left.keys():
            continue
        if len(together.sequences) < together.size:
            kv_cache.keep(together.caches, list(together.sequences.values()))
        members = [left.pop(sequence_id) for sequence_id in together.sequences]
        found.append((together.caches, members))
        for member in members:
            member.together = None
    if left:
        single = list(left.values())
        own = [sequence.own() for sequence in single]
        found.append((UnbatchedSequences(own) if unbatched else kv_cache.merge(own), single))
    return found
