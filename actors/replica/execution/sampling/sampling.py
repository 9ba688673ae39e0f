"""Samples the next tokens of all sequences of a batch at once, each sequence with its own parameters and random noise.

Noise is a pure function of (seed, choice, position), so a sequence's tokens never depend on its batch mates, on
preemption, or on the replica it runs on. Sampling uses the Gumbel-max trick: argmax(logits / temperature + noise) is a
draw from the softmax (Gumbel 1954; Maddison et al. 2014). Every operation works along the vocabulary, sequence by
sequence, and a sequence gets only the operations it asks for: its result is bit for bit the one it would have alone.

Sampling never waits for the device: a draw can be launched before the one before it has been read. (The masks of
sequences with a grammar need the token before; see `grammar.py`.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import mlx.core as mx
import numpy as np

from ....protocol.replica_messages import Sampling, TokenLogprobs
from ...device.device import as_numpy, on_cuda
from .grammar import SequenceMasks
from .thinking_limit import ThinkingLimit, thinking_limit_of
from .token_limits import TokenLimits, limits_of

_MASK = (1 << 64) - 1
_NO_LIMIT = 2**31 - 1

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by one would overflow float32."""

SUMMED = 256
"""How many exponentials of logits are added up at a time."""

WIDTHS = (32, 1024)
"""How many of a sequence's largest logits are sorted: the smallest of these numbers that is enough for it, else all."""


ROUNDS_MAX = 20
"""Up to this many of the likeliest tokens, CUDA finds one after another, because it takes milliseconds for a sort."""

STRETCH = 128
"""Tokens of a stretch. The `width` largest logits of a vocabulary are in the `width` stretches with the largest maxima,
so only these are sorted. To sort a whole vocabulary of 152,000 tokens Metal takes 15 steps; to sort stretches, 3."""


def noise_key(seed: int, position: int) -> int:
    """Returns a 64-bit hash of (seed, position), by two rounds of SplitMix64 (Steele et al. 2014)."""
    value = (seed & _MASK) ^ ((position * 0x9E3779B97F4A7C15) & _MASK)
    for _ in range(2):
        value = (value + 0x9E3779B97F4A7C15) & _MASK
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
        value ^= value >> 31
    return value


@dataclass(frozen=True)
class Draw:
    """One sampled token for every sequence; the arrays may not be evaluated yet.

    Attributes:
        tokens: `(sequences,) uint32`.
        sound: `(sequences,) bool`, False if any of the sequence's logits is NaN or +inf, or the token's is not a finite
            number: the model is broken for that sequence and the token is meaningless.
        chosen: logprobs of the tokens, `(asking,) float32`, of the sequences that ask for logprobs; None if none does.
        top_tokens: `(asking, widest) uint32`, candidates for the most likely tokens, unsorted, padded with zeros.
        top_logprobs: their logprobs, `(asking, widest) float32`.
        asking: of each asking sequence its index, how many candidates are its own, and how many it wants.
    """

    tokens: mx.array
    sound: mx.array
    chosen: mx.array | None = None
    top_tokens: mx.array | None = None
    top_logprobs: mx.array | None = None
    asking: tuple[tuple[int, int, int], ...] = ()

    def arrays(self) -> list[mx.array]:
        """Returns the arrays to evaluate."""
        every = (self.tokens, self.sound, self.chosen, self.top_tokens, self.top_logprobs)
        return [array for array in every if array is not None]

    def logprobs(self) -> list[TokenLogprobs | None]:
        """Returns the logprobs of every sequence, None if it did not ask for them; waits for the device. Equally likely
        tokens are in the order of their ids."""
        sequences: list[TokenLogprobs | None] = [None] * self.tokens.shape[0]
        if self.chosen is None:
            return sequences
        assert self.top_tokens is not None and self.top_logprobs is not None
        chosen, tokens, values = as_numpy(self.chosen), as_numpy(self.top_tokens), as_numpy(self.top_logprobs)
        for index, (sequence, width, wanted) in enumerate(self.asking):
            best = np.lexsort((tokens[index, :width], -values[index, :width]))[:wanted]
            pairs = zip(tokens[index, best].tolist(), values[index, best].tolist(), strict=True)
            sequences[sequence] = (float(chosen[index]), list(pairs))
        return sequences


@dataclass
class _SampledSequence:
    """A sequence's sampling state: the noise's `seed`, tokens that are `banned` until `min_tokens` are drawn, the
    number of draws so far (`position`), which tokens it may draw (`limits`, None for all), and how long it may reason
    (`thinking`, None without a limit)."""

    sampling: Sampling
    seed: int
    banned: Sequence[int]
    position: int
    limits: TokenLimits | None = None
    thinking: ThinkingLimit | None = None

    def after(self, token: int) -> _SampledSequence:
        """Returns a copy that has also drawn `token`."""
        position = self.position + 1
        if self.limits is None and self.thinking is None:
            return _SampledSequence(self.sampling, self.seed, self.banned, position)
        drawn, limits, thinking = mx.array([token]), copy(self.limits), copy(self.thinking)
        for limit in (limits, thinking):
            if limit is not None:
                limit.drawn(drawn)
        return replace(self, position=position, limits=limits, thinking=thinking)

    @property
    def counted(self) -> bool:
        """Whether earlier tokens are counted, because the sequence has penalties."""
        asked = self.sampling
        return (asked.repetition_penalty, asked.presence_penalty, asked.frequency_penalty) != (1, 0, 0)


def _column(values: list[float]) -> mx.array:
    """Returns the values as `(sequences, 1) float32`."""
    return mx.array(values, dtype=mx.float32)[:, None]


def _by_rounds(count: int) -> bool:
    """Whether this many of the likeliest tokens are found one after another."""
    return count <= ROUNDS_MAX and on_cuda()


def _width(count: int, vocabulary: int) -> int:
    """Returns how many of the largest logits to sort for a sequence that needs `count`. It depends on the sequence
    alone, so that a batch mate never changes the sequence's computation."""
    return next((width for width in WIDTHS if count <= width < vocabulary), vocabulary)


def _asked_width(count: int, vocabulary: int) -> int:
    """Returns how many of the likeliest tokens to find for a sequence that wants `count`."""
    return max(1, min(count, vocabulary)) if _by_rounds(count) else _width(count, vocabulary)


def _stretches(logits: mx.array, width: int) -> tuple[mx.array, mx.array] | None:
    """Returns the stretches that have the `width` largest of `(sequences, vocabulary)` logits: their numbers,
    `(sequences, width)`, and their logits, `(sequences, width * STRETCH)`; None if these are not far fewer than all."""
    sequences, vocabulary = logits.shape
    if 2 * width * STRETCH > vocabulary:
        return None
    if missing := -vocabulary % STRETCH:
        logits = mx.pad(logits, [(0, 0), (0, missing)], constant_values=-mx.inf)
    whole = logits.reshape(sequences, -1, STRETCH)
    numbers = mx.argpartition(-mx.max(whole, axis=-1), width - 1, axis=-1)[:, :width]
    return numbers, mx.take_along_axis(whole, numbers[:, :, None], axis=1).reshape(sequences, -1)


def _largest(logits: mx.array, width: int) -> mx.array:
    """Returns the `width` largest of `(sequences, vocabulary)` logits, `(sequences, width)`, unsorted."""
    found = _stretches(logits, width)
    return mx.topk(logits if found is None else found[1], width, axis=-1)


def likeliest(logits: mx.array, width: int) -> mx.array:
    """Returns the tokens with the `width` largest logits, `(sequences, width) uint32`."""
    if _by_rounds(width):
        return _one_by_one(logits, width)
    found = _stretches(logits, width)
    among = logits if found is None else found[1]
    places = mx.argpartition(-among, width - 1, axis=-1)[:, :width]
    if found is None:
        return places
    tokens = mx.take_along_axis(found[0], places // STRETCH, axis=-1) * STRETCH + places % STRETCH
    # The last stretch is padded with -inf. If its padding is among the largest, the other logits are all -inf too.
    return mx.minimum(tokens, logits.shape[1] - 1)


def _one_by_one(logits: mx.array, width: int) -> mx.array:
    """As `likeliest`, without a sort; equally likely tokens are in the order of their ids."""
    places, found = mx.arange(logits.shape[1], dtype=mx.uint32), []
    # So that tokens of -inf come last, and no token comes twice.
    logits = mx.maximum(logits, mx.finfo(logits.dtype).min)
    for _ in range(width):
        found.append(mx.argmax(logits, axis=-1, keepdims=True))
        logits = mx.where(places == found[-1], -mx.inf, logits)
    return mx.concatenate(found, axis=-1)


def _pick(array: mx.array, indices: list[int]) -> mx.array:
    """Returns the rows of `array` `(sequences, ...)` at ascending `indices`; `array` itself if these are all."""
    return array if len(indices) == array.shape[0] else array[mx.array(indices)]


def log_sum(logits: mx.array) -> mx.array:
    """Returns the logarithm of the sum of exponentials, `(sequences, 1)`. In parts, because a CPU adds up one number
    after the other: over 150,000 numbers the sum of float32 is off by up to a thousandth."""
    sequences, width = logits.shape
    padded = mx.pad(logits, [(0, 0), (0, -width % SUMMED)], constant_values=-mx.inf)
    parts = mx.logsumexp(padded.reshape(sequences, -1, SUMMED), axis=-1)
    return mx.logsumexp(parts, axis=-1, keepdims=True)


def _put(array: mx.array, indices: list[int], values: mx.array) -> mx.array:
    """Returns `array` `(sequences, ...)` with `values` `(indices, ...)` of its dtype at ascending `indices`."""
    if len(indices) == array.shape[0]:
        return values
    changed = mx.array(array)
    changed[mx.array(indices)] = values
    return changed


def _limited(logits: mx.array, limits: Sequence[tuple[int, Callable[[mx.array], mx.array]]]) -> mx.array:
    """Returns `logits`, `(sequences, vocabulary) float32`, with each of the `limits` applied to the logits at its
    index, `(vocabulary,)`."""
    if not limits:
        return logits
    return _put(logits, [index for index, _ in limits], mx.stack([limit(logits[index]) for index, limit in limits]))


class _Filter:
    """Top-k and top-p (nucleus, Holtzman et al. 2019) of the sequences with the same sorting width.

    Both use the distribution after temperature: top-p does not renormalize after top-k.
    """

    def __init__(self, width: int, sequences: Sequence[Sampling]) -> None:
        self._width = width
        self._nucleus = any(sequence.top_p < 1 for sequence in sequences)
        self._top_p = _column([sequence.top_p if sequence.top_p < 1 else math.inf for sequence in sequences])
        self._top_k = mx.array([min(sequence.top_k or _NO_LIMIT, _NO_LIMIT) for sequence in sequences], dtype=mx.int32)[
            :, None
        ]

    def threshold(self, scaled: mx.array) -> mx.array:
        """Returns the smallest logit that stays, `(sequences, 1) float32`.

        Args:
            scaled: logits over temperature, `(sequences, vocabulary) float32`.
        """
        largest = scaled if self._width == scaled.shape[-1] else _largest(scaled, self._width)
        descending = -mx.sort(-largest, axis=-1)
        rank = mx.arange(self._width)
        kept = rank < self._top_k
        if self._nucleus:
            probabilities = mx.exp(descending - mx.logsumexp(scaled, axis=-1, keepdims=True))
            kept = kept & (mx.cumsum(probabilities, axis=-1, inclusive=False) < self._top_p)
        return mx.min(mx.where(kept | (rank == 0), descending, mx.inf), axis=-1, keepdims=True)


class _Noisy:
    """The sequences that are not greedy: their temperature, filters and noise."""

    def __init__(self, sequences: Sequence[_SampledSequence], vocabulary: int) -> None:
        self._sequences = sequences
        self._vocabulary = vocabulary
        asked = [sequence.sampling for sequence in sequences]
        self._temperature = _column([sequence.temperature for sequence in asked])
        self._least = None
        if any(sequence.min_p > 0 for sequence in asked):
            self._least = _column(
                [math.log(min(sequence.min_p, 1)) if sequence.min_p > 0 else -math.inf for sequence in asked]
            )
        self._filters: list[tuple[list[int], _Filter]] = []
        widths = [
            _width(sequence.top_k or vocabulary, vocabulary) if sequence.top_k or sequence.top_p < 1 else 0
            for sequence in asked
        ]
        for width in sorted({*widths} - {0}):
            members = [index for index, of_sequence in enumerate(widths) if of_sequence == width]
            self._filters.append((members, _Filter(width, [asked[index] for index in members])))

    def __call__(self, logits: mx.array) -> mx.array:
        """Samples tokens, `(sequences,) uint32`, from logits, `(sequences, vocabulary) float32`."""
        scaled = logits / self._temperature
        kept = None
        if self._filters:
            kept = mx.full((len(self._sequences), 1), -mx.inf)
            for members, filtering in self._filters:
                kept = _put(kept, members, filtering.threshold(_pick(scaled, members)))
        if self._least is not None:
            # p >= min_p * max p (Nguyen et al. 2024), in logarithms.
            least = mx.max(scaled, axis=-1, keepdims=True) + self._least
            kept = least if kept is None else mx.maximum(kept, least)
        if kept is not None:
            scaled = mx.where(scaled >= kept, scaled, -mx.inf)
        return mx.argmax(scaled + self._noise(), axis=-1)

    def _noise(self) -> mx.array:
        """Returns Gumbel noise, `(sequences, vocabulary) float32`."""
        keys = [noise_key(sequence.seed, sequence.position) for sequence in self._sequences]
        pairs = mx.array(np.array([[key >> 32, key & _MASK >> 32] for key in keys], dtype=np.uint32))
        return mx.vmap(lambda key: mx.random.gumbel((self._vocabulary,), key=key))(pairs)


class _BatchLayout:
    """The sampling parameters of a batch's sequences as indices and arrays; valid until the batch changes."""

    def __init__(self, sequences: list[_SampledSequence], vocabulary: int) -> None:
        asked = [sequence.sampling for sequence in sequences]
        self.greedy = [index for index, sequence in enumerate(asked) if sequence.temperature < GREEDY_BELOW]
        self.noisy = [index for index, sequence in enumerate(asked) if sequence.temperature >= GREEDY_BELOW]
        self.noise = _Noisy([sequences[index] for index in self.noisy], vocabulary)
        self.counted = [index for index, sequence in enumerate(sequences) if sequence.counted]
        counted = [asked[index] for index in self.counted]
        self.repetition = _column([sequence.repetition_penalty for sequence in counted])
        self.presence = _column([sequence.presence_penalty for sequence in counted])
        self.frequency = _column([sequence.frequency_penalty for sequence in counted])
        # A device adds to one place in any order, so several biases of one token are summed on the host.
        sums: dict[tuple[int, int], float] = {}
        for index, sequence in enumerate(asked):
            for token, bias in sequence.logit_bias:
                if 0 <= token < vocabulary:
                    sums[index, token] = sums.get((index, token), 0.0) + bias
        self.bias = None
        if sums:
            places = mx.array([place[0] for place in sums]), mx.array([place[1] for place in sums])
            self.bias = places, mx.array(list(sums.values()), dtype=mx.float32)
        self.asking = tuple(
            (index, _asked_width(sequence.logprobs, vocabulary), sequence.logprobs)
            for index, sequence in enumerate(asked)
            if sequence.logprobs is not None
        )
        self.limited = [
            (index, sequence.limits) for index, sequence in enumerate(sequences) if sequence.limits is not None
        ]
        self.thinking = [
            (index, sequence.thinking) for index, sequence in enumerate(sequences) if sequence.thinking is not None
        ]
        limited = self.limited or self.thinking
        # Every sequence takes the argmax of the model's own logits and wants no logprobs.
        self.untouched = not (self.noisy or self.counted or self.bias or self.asking or limited)


class BatchSampler:
    """Samples for the sequences of a batch, in their order. Token counts for penalties stay on the device.

    Args:
        vocabulary_size: length of the logits' last axis.
        end_tokens: the model's end-of-sequence tokens, all inside the vocabulary.
        sequences, counts: the sequences that it begins with, and their token counts.
    """

    def __init__(
        self,
        vocabulary_size: int,
        end_tokens: frozenset[int],
        sequences: Sequence[_SampledSequence] = (),
        counts: mx.array | None = None,
    ) -> None:
        self._vocabulary = vocabulary_size
        self._end_tokens = end_tokens
        self._sequences = list(sequences)
        self._layout: _BatchLayout | None = None
        self._counts = counts
        """`(counted sequences, vocabulary) int32`: twice the token's count in the answer, plus one if the prompt has
        it."""

    def __len__(self) -> int:
        return len(self._sequences)

    def add(self, sampling: Sampling, prompt: Sequence[int], generated: Sequence[int]) -> None:
        """Appends a sequence. Parameters for tokens outside the vocabulary are ignored: these cannot be drawn.

        Args:
            prompt: token ids without the generated ones.
            generated: token ids drawn before, here or elsewhere; their number is the next draw's position.
        """
        banned = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._end_tokens)}
        held = sorted(token for token in banned if 0 <= token < self._vocabulary)
        limits = limits_of(sampling, generated, self._vocabulary)
        sequence = _SampledSequence(
            sampling,
            noise_key(sampling.seed, sampling.choice) if sampling.choice else sampling.seed,
            held if limits is None else limits.held_back(held),
            len(generated),
            limits,
            thinking_limit_of(sampling.thinking, generated, self._vocabulary),
        )
        if sequence.counted:
            counts = mx.array(self._count(prompt, generated))[None]
            self._counts = counts if self._counts is None else mx.concatenate([self._counts, counts])
        self._sequences.append(sequence)
        self._layout = None

    def state_of(self, index: int) -> tuple[Any, mx.array | None]:
        """Returns a sequence's state, with which another sampler continues it."""
        sequence = self._sequences[index]
        if not sequence.counted or self._counts is None:
            return sequence, None
        return sequence, self._counts[sum(each.counted for each in self._sequences[:index])][None]

    def add_state(self, state: tuple[Any, mx.array | None]) -> None:
        """Appends a sequence of another sampler, by its `state_of`."""
        sequence, counts = state
        if counts is not None:
            self._counts = counts if self._counts is None else mx.concatenate([self._counts, counts])
        self._sequences.append(sequence)
        self._layout = None

    def keep(self, indices: Sequence[int]) -> None:
        """Keeps only the sequences at `indices`, in that order."""
        if self._counts is not None:
            places = {
                index: place
                for place, index in enumerate(i for i, sequence in enumerate(self._sequences) if sequence.counted)
            }
            stay = [places[index] for index in indices if index in places]
            self._counts = self._counts[mx.array(stay)] if stay else None
        self._sequences = [self._sequences[index] for index in indices]
        self._layout = None

    def __call__(self, logits: mx.array, masks: SequenceMasks | None = None) -> Draw:
        """Samples lazily from logits, `(sequences, vocabulary)` in the model's dtype, and advances every sequence's
        position.

        Args:
            masks: which tokens the sequences with a grammar may draw.

        Raises:
            ValueError: the logits have another shape.
        """
        if logits.shape != (len(self._sequences), self._vocabulary):
            raise ValueError(
                f"{len(self._sequences)} sequences of {self._vocabulary} logits expected, got {logits.shape}"
            )
        if self._layout is None:
            self._layout = _BatchLayout(self._sequences, self._vocabulary)
        layout = self._layout
        constrained = [] if masks is None else masks.sequences
        held = [
            (index, token)
            for index, sequence in enumerate(self._sequences)
            if index not in constrained
            for token in self._held_back(sequence)
        ]
        if layout.untouched and not held and masks is None:
            tokens = mx.argmax(logits, axis=-1)
            # The token's logit is the largest one.
            draw = Draw(tokens, self._sound(logits))
        else:
            own = logits.astype(mx.float32)
            changed = self._changed(own, layout, held)
            if masks is not None:
                changed = self._masked(changed, masks)
            changed = _limited(changed, layout.thinking)
            tokens = self._choose(changed, layout)
            mine = mx.take_along_axis(own, tokens[:, None], axis=-1)[:, 0]
            draw = self._with_logprobs(Draw(tokens, self._sound(own) & mx.isfinite(mine), asking=layout.asking), own)
        if self._counts is not None:
            drawn = _pick(draw.tokens, layout.counted)
            self._counts = self._counts.at[mx.arange(len(layout.counted)), drawn].add(2)
        for index, limit in (*layout.limited, *layout.thinking):
            limit.drawn(draw.tokens[index : index + 1])
        for sequence in self._sequences:
            sequence.position += 1
        return draw

    def ahead(self, drafts: Sequence[Sequence[int]]) -> BatchSampler:
        """Returns a sampler of each sequence as it is now, followed by what it will be after each token of its draft.
        This sampler stays as it is.

        Args:
            drafts: for every sequence, tokens inside the vocabulary that it may draw next; empty for none.
        """
        ahead, counts = list[_SampledSequence](), list[mx.array]()
        counted = iter(() if self._counts is None else self._counts)
        for sequence, draft in zip(self._sequences, drafts, strict=True):
            each = replace(sequence, limits=copy(sequence.limits), thinking=copy(sequence.thinking))
            ahead += accumulate(draft, _SampledSequence.after, initial=each)
            if sequence.counted:
                counts += accumulate(draft, lambda count, token: count.at[token].add(2), initial=next(counted))
        return BatchSampler(self._vocabulary, self._end_tokens, ahead, mx.stack(counts) if counts else None)

    def guessing(self, indices: Sequence[int]) -> BatchSampler:
        """Returns a sampler of some sequences as they are now, in this order, which draws as this one will, without
        logprobs. This sampler stays as it is."""
        guessing = BatchSampler(self._vocabulary, self._end_tokens)
        for index in indices:
            sequence, counts = self.state_of(index)
            asked, limits, thinking = replace(sequence.sampling, logprobs=None), sequence.limits, sequence.thinking
            guess = replace(sequence, sampling=asked, limits=copy(limits), thinking=copy(thinking))
            guessing.add_state((guess, counts))
        return guessing

    def can_pass(self) -> bool:
        """Whether the batch's only sequence may be given tokens instead of drawing them."""
        (sequence,) = self._sequences
        return sequence.sampling.logprobs is None and sequence.limits is None and sequence.thinking is None

    def passed(self, tokens: Sequence[int]) -> None:
        """Counts tokens that the batch's only sequence was given."""
        (sequence,) = self._sequences
        sequence.position += len(tokens)
        if self._counts is not None:
            for token in tokens:
                self._counts = self._counts.at[0, token].add(2)

    def _held_back(self, sequence: _SampledSequence) -> Sequence[int]:
        return sequence.banned if sequence.position < sequence.sampling.min_tokens else ()

    def _count(self, prompt: Sequence[int], generated: Sequence[int]) -> np.ndarray:
        """Returns a row of `_counts`, `(vocabulary,) int32`."""
        size = self._vocabulary
        both = np.asarray(prompt, dtype=np.int64), np.asarray(generated, dtype=np.int64)
        inside = [tokens[(tokens >= 0) & (tokens < size)] for tokens in both]
        counts = 2 * np.bincount(inside[1], minlength=size).astype(np.int32)
        counts[inside[0]] += 1  # Once for a token, however often the prompt has it.
        return counts

    def _changed(self, logits: mx.array, layout: _BatchLayout, held: list[tuple[int, int]]) -> mx.array:
        """Returns the logits, `(sequences, vocabulary) float32`, after bias, penalties, the sequences' limits and
        `min_tokens`: the tokens of `held`, (sequence, token), become -inf."""
        if layout.bias is not None:
            places, values = layout.bias
            logits = logits.at[places].add(values)
        if self._counts is not None:
            mine = _pick(logits, layout.counted)
            # CTRL's penalty (Keskar et al. 2019), extended to negative logits as usual; then OpenAI's two.
            repeated = mx.where(mine > 0, mine / layout.repetition, mine * layout.repetition)
            mine = mx.where(self._counts > 0, repeated, mine)
            answered = self._counts >> 1
            mine = mine - layout.presence * (answered > 0) - layout.frequency * answered
            logits = _put(logits, layout.counted, mine)
        if held:
            logits = mx.array(logits)
            logits[mx.array([index for index, _ in held]), mx.array([token for _, token in held])] = -mx.inf
        return _limited(logits, layout.limited)

    def _masked(self, logits: mx.array, masks: SequenceMasks) -> mx.array:
        """Returns the logits, `(sequences, vocabulary) float32`, with -inf for what the sequences of `masks` may not
        draw. Tokens that are held back can be drawn if the grammar allows nothing else."""
        words = masks.words.copy()
        for place, index in enumerate(masks.sequences):
            held = np.zeros_like(words[place])
            sequence = self._sequences[index]
            ends = self._end_tokens if sequence.sampling.ignore_eos else ()
            for token in (*self._held_back(sequence), *ends):
                held[token >> 5] |= np.uint32(1 << (token & 31))
            if (rest := words[place] & ~held).any():
                words[place] = rest
        bits = (mx.array(words)[:, :, None] >> mx.arange(32, dtype=mx.uint32)) & 1
        allowed = bits.reshape(len(masks.sequences), -1)[:, : self._vocabulary] != 0
        return _put(logits, masks.sequences, mx.where(allowed, _pick(logits, masks.sequences), -mx.inf))

    def _choose(self, logits: mx.array, layout: _BatchLayout) -> mx.array:
        """Returns tokens, `(sequences,) uint32`, of logits, `(sequences, vocabulary) float32`."""
        if not layout.noisy:
            return mx.argmax(logits, axis=-1)
        drawn = layout.noise(_pick(logits, layout.noisy))
        if not layout.greedy:
            return drawn
        return _put(mx.argmax(logits, axis=-1), layout.noisy, drawn)

    @staticmethod
    def _sound(logits: mx.array) -> mx.array:
        """Returns whether no logit of a sequence is NaN or +inf and at least one is finite, `(sequences,) bool`. MLX's
        maximum is NaN if any number is, on every device; on Metal `argmax` and sorts ignore NaN."""
        return mx.isfinite(mx.max(logits, axis=-1))

    def _with_logprobs(self, draw: Draw, own: mx.array) -> Draw:
        """Adds logprobs of the model's `own` logits, `(sequences, vocabulary) float32`, for sequences that ask for
        them."""
        if not draw.asking:
            return draw
        mine = _pick(own, [sequence for sequence, _, _ in draw.asking])
        total = log_sum(mine)
        chosen = mx.take_along_axis(
            mine, _pick(draw.tokens, [sequence for sequence, _, _ in draw.asking])[:, None], axis=-1
        )
        widths = [width for _, width, _ in draw.asking]
        top_tokens = mx.zeros((len(widths), max(widths)), dtype=mx.uint32)
        top_values = mx.zeros(top_tokens.shape)
        for width in sorted({*widths}):
            members = [index for index, of_sequence in enumerate(widths) if of_sequence == width]
            logits = _pick(mine, members)
            largest = likeliest(logits, width)
            padding = [(0, 0), (0, max(widths) - width)]
            top_tokens = _put(top_tokens, members, mx.pad(largest, padding))
            top_values = _put(top_values, members, mx.pad(mx.take_along_axis(logits, largest, axis=-1), padding))
        return replace(draw, chosen=(chosen - total)[:, 0], top_tokens=top_tokens, top_logprobs=top_values - total)
