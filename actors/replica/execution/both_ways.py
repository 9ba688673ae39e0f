"""Which tokens of a prompt attend to later ones, found by running a model as mlx-vlm does.

Some models let the tokens of a picture attend to each other both ways, others all tokens of a prompt. What a token's KV
is depends on later tokens then, so it is known only if a picture's tokens are computed together.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
from PIL import Image

from ...model_files.processors import PictureProcessor
from .agreement import MODEL_ERRORS, agree

_SIDE = 224
_BEHIND = (5, 6, 7)
"""Tokens of text behind the picture."""


class BothWays(Enum):
    """Which tokens attend to later ones: `PICTURES` to those of the same picture, `PROMPTS` to all of the prompt."""

    NONE = "none"
    PICTURES = "pictures"
    PROMPTS = "prompts"


def runs_of(tokens: Sequence[int], wanted: Sequence[int]) -> list[tuple[int, int]]:
    """Returns [start, stop) of every run of tokens that are among the `wanted`."""
    inside = [False, *(token in wanted for token in tokens), False]
    edges = [at for at, (before, here) in enumerate(pairwise(inside)) if before != here]
    return list(zip(edges[::2], edges[1::2], strict=True))


def find_both_ways(model: Any, processor: PictureProcessor, language: Any) -> BothWays:
    """Looks for tokens whose logits change with a later token's embedding.

    Args:
        model: as mlx-vlm loads it.
        language: makes the language part's caches.
    """
    try:
        return _find(model, processor, language)
    except MODEL_ERRORS:
        # It may want something that only its own loop gives it.
        return BothWays.NONE


def _find(model: Any, processor: PictureProcessor, language: Any) -> BothWays:
    made = processor.whole(Image.new("RGB", (_SIDE, _SIDE)))
    own = np.array(made.pop("input_ids")).reshape(-1).tolist()
    ids = mx.array([[*own, *_BEHIND]])
    named = {name: _as_long(value, len(own)) for name, value in made.items() if name != "attention_mask"}
    pixels, mask = named.pop("pixel_values", None), mx.ones(ids.shape, mx.int32)
    features = model.get_input_embeddings(ids, pixels, mask=mask, **named).to_dict()
    embeds = features.pop("inputs_embeds")
    named |= {name: value for name, value in features.items() if value is not None}

    def seen_from(place: int, changed: int) -> bool:
        """Whether the logits of the token at a place depend on the embedding of one."""
        signs = mx.where(mx.arange(embeds.shape[1]) == changed, -1, 1)[None, :, None].astype(embeds.dtype)
        one, other = (
            model.language_model(ids, inputs_embeds=each, cache=language.make_cache(), **named).logits[0, place]
            for each in (embeds, embeds * signs)
        )
        return not agree([one], [other])

    if seen_from(0, ids.shape[1] - 1):
        return BothWays.PROMPTS
    first, stop = runs_of(own, [processor.token])[0]
    return BothWays.PICTURES if stop - first > 1 and seen_from(first, stop - 1) else BothWays.NONE


def _as_long(value: Any, tokens: int) -> Any:
    """Returns a processor's output for all tokens, if it has something for each of those that it made."""
    array = mx.array(np.array(value)) if isinstance(value, list | np.ndarray) else value
    if isinstance(array, mx.array) and array.shape == (1, tokens):
        return mx.pad(array, [(0, 0), (0, len(_BEHIND))])
    return array
