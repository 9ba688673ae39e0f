"""What the language part of a vision model gets besides token ids: embeddings of pictures among those of tokens,
positions, and levels that are added after the first layers (`levels.py`).

A process that has only some of the layers gives them only what they need.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from ...device.device import as_numpy
from ...proving.agreement import MODEL_ERRORS
from .levels import has_dense_levels, spread_levels


@dataclass(frozen=True)
class ImageEmbeddings:
    """A picture's image embeddings: the language part's inputs for the picture's span.

    Attributes:
        embeddings: `(tokens, dim)` in the model's dtype.
        levels: arrays added after the first layers, each `(tokens, dim)`, zero for tokens that do not stand for the
            picture; empty for most models.
        positions: `(2, axes, tokens) int32`: the tokens' positions, and 1 for those that are relative to the picture's
            first token. None if positions do not depend on the picture, or if the model computes them.
        first: the index of the first token that these arrays have, if they are a part of a picture's.
    """

    inputs: mx.array
    levels: tuple[mx.array, ...] = ()
    positions: mx.array | None = None
    first: int = 0

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())

    def arrays(self) -> list[mx.array]:
        """Returns the embeddings and all levels, each `(tokens, dim)`, and the positions, if there are any."""
        return [self.inputs, *self.levels, *([] if self.positions is None else [self.positions])]

    def part(self, start: int, stop: int) -> ImageEmbeddings:
        """Returns those of the picture's tokens [start, stop)."""
        cut = slice(start - self.first, stop - self.first)
        return ImageEmbeddings(
            self.inputs[cut],
            tuple(level[cut] for level in self.levels),
            None if self.positions is None else self.positions[:, :, cut],
            start,
        )


@dataclass
class SequencePictures:
    """A sequence's pictures.

    Attributes:
        spans: (first token, number of tokens) of each.
        embeddings: the embeddings that are known, by the index of the span.
        positions: `(axes, tokens)` integers of the prompt up to the last picture's end; None if the model just counts.
        shift: what to add to a later token's index in the sequence to get its position.
        bidirectional: [start, stop) of tokens that attend to each other, earlier and later ones.
        unbroken: [start, stop) of tokens that must be computed in one chunk.
    """

    spans: list[tuple[int, int]] = field(default_factory=list)
    embeddings: dict[int, ImageEmbeddings] = field(default_factory=dict)
    positions: np.ndarray | None = None
    shift: int = 0
    bidirectional: list[tuple[int, int]] = field(default_factory=list)
    unbroken: list[tuple[int, int]] = field(default_factory=list)

    def usable(self, known: int) -> int:
        """Returns how many of the first `known` tokens, which have cached KV, may be reused."""
        return next((first for first, end in self.unbroken if first < known < end), known)

    def touched(self, start: int, stop: int) -> list[int]:
        """Returns the indexes of the spans that have tokens in [start, stop)."""
        return [index for index, (first, count) in enumerate(self.spans) if first < stop and start < first + count]


@dataclass(frozen=True)
class SequencePart:
    """Consecutive tokens of a sequence, from `start` on."""

    tokens: Sequence[int]
    start: int
    pictures: SequencePictures | None = None

    @property
    def bidirectional(self) -> list[tuple[int, int]]:
        """[start, stop) in the sequence of the part's tokens that attend to each other."""
        stop, runs = self.start + len(self.tokens), self.pictures.bidirectional if self.pictures is not None else []
        return [(first, end) for first, end in runs if first < stop and self.start < end]


_Touched = tuple[int, int, ImageEmbeddings, int]
"""A picture in a part: its begin and end there, its embeddings, and the index in these arrays of the token at the
begin."""


def axes_of(language: Any) -> int:
    """Returns how many numbers a position has; 0 if the model counts positions itself."""
    return 3 if hasattr(language, "get_rope_index") else 0


def has_axes_last(language: Any) -> bool:
    """Returns whether positions are `(sequences, tokens, axes)` for the model, not `(axes, sequences, tokens)`."""
    if not hasattr(language, "get_rope_index"):
        return False
    tokens = mx.zeros((1, 2), mx.int32)
    try:
        places, _ = language.get_rope_index(tokens, None, None, mx.ones_like(tokens))
    except MODEL_ERRORS:
        return False
    return places.shape == (*tokens.shape, axes_of(language))


def separate(model: Any) -> Any:
    """Returns a copy of a model of mlx-vlm with the same weights. Its `get_input_embeddings` stores state for the
    language part's next call in the copy: that call may be for another sequence."""
    alike = copy.copy(model)
    if not isinstance(getattr(type(model), "language_model", None), property):
        alike.language_model = copy.copy(model.language_model)
    return alike


class LanguageInputs:
    """The extra inputs of a vision model's language part.

    Args:
        model: as mlx-vlm loads it, `separate`. It needs no encoder.
        embeds: whether the layers get embeddings; False if hidden states come from another process.
        levels_from: levels with a lower number are added before these layers.
    """

    def __init__(self, model: Any, *, embeds: bool = True, levels_from: int = 0) -> None:
        self._model, language = model, model.language_model
        self.embeds, self.levels_from = embeds, levels_from
        self._axes = axes_of(language)
        self._dense_levels = has_dense_levels(model)

    def of_parts(self, parts: Sequence[SequencePart], width: int) -> dict[str, Any]:
        """Returns the language part's inputs besides token ids for a batch, with sequences padded to `width` tokens.

        Returns:
            Empty for text of a model that counts positions itself. Else some of `position_ids` `(axes, sequences,
            width)` or, if they are the processor's, `(sequences, axes, width) int32`, `inputs_embeds` `(sequences,
            width, dim)` and `per_layer_inputs` `(sequences, width, layers, dim)` in the model's dtype,
            `visual_pos_masks` `(sequences, width) bool`, and `deepstack_visual_embeds`, one array per level, `(masked
            tokens, dim)`, or one for all, `(sequences, width, levels, dim)`.
        """
        given: dict[str, Any] = {}
        if self._axes:
            given["position_ids"] = mx.array(np.stack([self._positions(part, width) for part in parts], axis=1))
        touched = [[] if part.pictures is None else self._touched(part) for part in parts]
        if not any(touched):
            return given
        own = [each.positions for spans in touched for _, _, each, _ in spans if each.positions is not None]
        if own:
            axes = own[0].shape[1]
            placed = [_with_own_positions(*each, axes, width) for each in zip(parts, touched, strict=True)]
            given["position_ids"] = mx.array(np.stack(placed))
        if self.embeds:
            given |= self._embedded(parts, touched, width)
        return given | self._levels(touched, len(parts), width)

    def _embedded(self, parts: Sequence[SequencePart], touched: Sequence[list[_Touched]], width: int) -> dict[str, Any]:
        """Returns `inputs_embeds`, and `per_layer_inputs` if there are any."""
        given: dict[str, Any] = {}
        plain = [self._plain(part, width) for part in parts]
        if plain[0].per_layer_inputs is not None:
            given["per_layer_inputs"] = mx.concatenate([each.per_layer_inputs for each in plain])
        embedded = zip((each.inputs_embeds[0] for each in plain), touched, strict=True)
        given["inputs_embeds"] = mx.stack([_with_pictures(*sequence) for sequence in embedded])
        return given

    def _levels(self, touched: Sequence[list[_Touched]], sequences: int, width: int) -> dict[str, Any]:
        """Returns `visual_pos_masks` and `deepstack_visual_embeds`, if a level is added within these layers."""
        seen = np.zeros((sequences, width), bool)
        levels: list[list[mx.array]] = []
        for sequence, spans in enumerate(touched):
            for begin, end, embeddings, first in spans:
                # Audio has no levels, also if the batch has pictures with some.
                seen[sequence, begin:end] = bool(embeddings.levels)
                for level, array in enumerate(embeddings.levels):
                    if level == len(levels):
                        levels.append([])
                    levels[level].append(array[first : first + end - begin])
        if len(levels) <= self.levels_from:
            return {}
        joined = [mx.concatenate(level) for level in levels]
        # Those that earlier layers have added are in the hidden states.
        joined[: self.levels_from] = [mx.zeros_like(joined[-1])] * self.levels_from
        spread = spread_levels(joined, seen) if self._dense_levels else joined
        return {"visual_pos_masks": mx.array(seen), "deepstack_visual_embeds": spread}

    def of_steps(self, lengths: Sequence[int], sequences: Sequence[SequencePictures | None]) -> dict[str, Any]:
        """Returns the same for a decode step of sequences with `lengths` tokens: at most `position_ids`, `(axes,
        sequences, 1) int32`."""
        if not self._axes:
            return {}
        places = [
            length + (sequence.shift if sequence else 0) for length, sequence in zip(lengths, sequences, strict=True)
        ]
        return {"position_ids": mx.array(np.tile(np.array(places, np.int32)[None, :, None], (self._axes, 1, 1)))}

    def _touched(self, part: SequencePart) -> list[_Touched]:
        """Returns for every picture in the part: its begin and end in the part, its embeddings, and the index in the
        embeddings of the token at the begin."""
        assert part.pictures is not None
        stop, spans = part.start + len(part.tokens), []
        for index in part.pictures.touched(part.start, stop):
            first, count = part.pictures.spans[index]
            embeddings = part.pictures.embeddings[index]
            begin, end = max(first, part.start), min(first + count, stop)
            spans.append((begin - part.start, end - part.start, embeddings, begin - first - embeddings.first))
        return spans

    def _plain(self, part: SequencePart, width: int) -> Any:
        """Returns mlx-vlm's inputs for a sequence's tokens and padding, as if all were text."""
        return self._model.get_input_embeddings(mx.array([[*part.tokens, *[0] * (width - len(part.tokens))]]), None)

    def _positions(self, part: SequencePart, width: int) -> np.ndarray:
        """Returns a sequence's positions, `(axes, width) int32`."""
        pictures, places = part.pictures, np.arange(part.start, part.start + width, dtype=np.int32)
        if pictures is None or pictures.positions is None:
            return np.tile(places, (self._axes, 1))
        known = pictures.positions[:, part.start : part.start + len(part.tokens)].astype(np.int32)
        rest = np.tile(places[known.shape[1] :] + pictures.shift, (self._axes, 1))
        return np.concatenate([known, rest], axis=1)


def _with_pictures(plain: mx.array, spans: list[_Touched]) -> mx.array:
    """Returns a sequence's input embeddings, `(width, dim)` in the model's dtype, from those of its tokens as text."""
    pieces, done = [], 0
    for begin, end, embeddings, first in spans:
        pieces += [plain[done:begin], embeddings.inputs[first : first + end - begin].astype(plain.dtype)]
        done = end
    return mx.concatenate([*pieces, plain[done:]])


def _with_own_positions(part: SequencePart, spans: list[_Touched], axes: int, width: int) -> np.ndarray:
    """Returns a sequence's positions, `(axes, width) int32`, with those of its pictures."""
    places = np.arange(part.start, part.start + width, dtype=np.int32)
    places = np.tile(places, (axes, 1))
    for begin, end, embeddings, first in spans:
        assert embeddings.positions is not None
        numbers, counts = as_numpy(embeddings.positions[:, :, first : first + end - begin])
        places[:, begin:end] = numbers + counts * (part.start + begin - first - embeddings.first)
    return places
