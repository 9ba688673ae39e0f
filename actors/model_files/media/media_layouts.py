"""What processors write into a prompt for a picture, a video or audio: a text with spans of tokens. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

NOT_FOR_THE_MODEL = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
"""Outputs of processors that are no inputs of an encoder."""


@dataclass(frozen=True)
class SpanLayout:
    """A *span* of a prompt: the tokens of a picture, of some frames of a video, or of audio.

    Attributes:
        tokens: its ids, from the first added token to the last one, so that they do not depend on what surrounds it.
        places: the indices of those that the encoder's output replaces.
        grid: (frames, rows, columns) of patches if positions depend on it, else empty.
    """

    tokens: tuple[int, ...]
    places: frozenset[int]
    grid: tuple[int, ...] = ()


@dataclass(frozen=True)
class MediaLayout:
    """The replacement of a placeholder of a picture or of audio: a text with one span."""

    text: str
    span: SpanLayout


class Unfit(ValueError):
    """A processor that loads, but whose media have no place in a prompt; the message is the end of a sentence."""


def token_ids(made: Mapping[str, Any]) -> list[int]:
    """Returns the token ids in a processor's output for one text."""
    return np.array(made["input_ids"]).reshape(-1).tolist()
