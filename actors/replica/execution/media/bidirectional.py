"""Finds out which tokens of a prompt attend to later ones, by running a model as mlx-vlm does.

In some models the tokens of a picture attend to each other in both directions, in others all tokens of a prompt do.
Then a token's KV depends on later tokens, so all tokens of a picture must be computed in one chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
from PIL import Image

from ....model_files.media.processors import PictureProcessor
from ...proving.agreement import MODEL_ERRORS, agree
from ...proving.findings import Findings
from ...proving.pieces import IN_ONE_PIECE, Pieces

SIDE = 224
"""Width and height of the pictures with which a model is tested, in pixels."""

_WHAT, _VERSION = "both_ways", 1
"""Increased whenever the search changes."""

_BEHIND = (5, 6, 7)
"""Tokens of text after the picture."""


Compute = Callable[[mx.array, mx.array, dict[str, Any]], mx.array]
"""Given tokens `(1, tokens)`, embeddings `(1, tokens, dim)` and a model's other inputs: `(tokens, ...)`, the logits or
hidden states of each."""


class Bidirectional(Enum):
    """Which tokens attend to later ones. `PICTURES`: a picture's tokens, to tokens of the same picture. `PROMPTS`:
    other tokens too, if there is a picture. `TEXTS`: other tokens even without a picture."""

    NONE = "none"
    PICTURES = "pictures"
    PROMPTS = "prompts"
    TEXTS = "texts"


def runs_of(tokens: Sequence[int], wanted: Sequence[int]) -> list[tuple[int, int]]:
    """Returns [start, stop) of every run of tokens that are among the `wanted`."""
    inside = [False, *(token in wanted for token in tokens), False]
    edges = [at for at, (before, here) in enumerate(pairwise(inside)) if before != here]
    return list(zip(edges[::2], edges[1::2], strict=True))


def find_bidirectional(
    model: Any, processor: PictureProcessor, compute: Compute, findings: Findings, pieces: Pieces = IN_ONE_PIECE
) -> Bidirectional:
    """Looks for tokens whose logits change with a later token's embedding, or takes what an earlier load found.

    Args:
        model: as mlx-vlm loads it.
        compute: the language part, or some of its layers.
        findings: where the result is stored.
        pieces: a piece ends after each call of the language part.
    """
    with suppress(ValueError):
        return Bidirectional(findings.read(_WHAT, _VERSION))
    try:
        found = _find(model, processor, compute, pieces)
    except MODEL_ERRORS:
        # The model may need something that only its own loop gives it. Not stored: memory may have been short.
        return Bidirectional.NONE
    findings.note(_WHAT, _VERSION, found.value)
    return found


def _find(model: Any, processor: PictureProcessor, compute: Compute, pieces: Pieces) -> Bidirectional:
    text = _Prompt(model, compute, [*_BEHIND], [*_BEHIND], {}, pieces)
    if text.sees(0, len(_BEHIND) - 1):
        return Bidirectional.TEXTS
    made = processor.read(processor.placeholder, [Image.new("RGB", (SIDE, SIDE))])
    own = np.array(made.pop("input_ids")).reshape(-1).tolist()
    given = {name: _as_long(value, len(own)) for name, value in made.items() if name != "attention_mask"}
    prompt = _Prompt(model, compute, [*own, *_BEHIND], [*processor.marked(own), *_BEHIND], given, pieces)
    first, stop = runs_of(own, [processor.token])[0]
    others = [(0, len(own) + len(_BEHIND) - 1), (stop - 1, stop), (max(0, first - 1), stop - 1)]
    if any(prompt.sees(place, later) for place, later in others[: 3 if first else 2]):
        return Bidirectional.PROMPTS
    return Bidirectional.PICTURES if stop - first > 1 and prompt.sees(first, stop - 1) else Bidirectional.NONE


class _Prompt:
    """A prompt that a model computes as in mlx-vlm's own loop, with one embedding changed.

    Args:
        marked: the tokens as its encoder needs them.
    """

    def __init__(
        self,
        model: Any,
        compute: Compute,
        tokens: Sequence[int],
        marked: Sequence[int],
        given: dict[str, Any],
        pieces: Pieces,
    ) -> None:
        self._compute, self._pieces = compute, pieces
        self._ids, ids = mx.array([[*tokens]]), mx.array([[*marked]])
        pixels, mask = given.pop("pixel_values", None), mx.ones(ids.shape, mx.int32)
        features = model.get_input_embeddings(ids, pixels, mask=mask, **given).to_dict()
        self._embeds = features.pop("inputs_embeds")
        self._given = given | {name: value for name, value in features.items() if value is not None}
        self._plain = self._logits(self._embeds)
        if not agree([self._plain], [self._logits(self._embeds)]):
            raise ValueError("the model gives different logits for the same input")

    def _logits(self, embeds: mx.array) -> mx.array:
        # A new array: some models scale their input in place.
        logits = self._compute(self._ids, embeds + 0, self._given)
        mx.eval(logits)
        self._pieces.pause()
        return logits

    def sees(self, place: int, later: int) -> bool:
        """Whether the logits of the token at `place` depend on the embedding of the token at `later`."""
        turned = mx.where(mx.arange(self._embeds.shape[1]) == later, -1, 1)[None, :, None].astype(self._embeds.dtype)
        return not agree([self._plain[place]], [self._logits(self._embeds * turned)[place]])


def _as_long(value: Any, tokens: int) -> Any:
    """Returns a processor's output padded to all tokens, if it has an entry for each token that the processor made."""
    array = mx.array(np.array(value)) if isinstance(value, list | np.ndarray) else value
    if isinstance(array, mx.array) and array.shape == (1, tokens):
        return mx.pad(array, [(0, 0), (0, len(_BEHIND))])
    return array
