"""A model's context length in tokens, from any of the places where configs keep it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

GUESS = 4096
"""The context of a model whose config has none."""

_FIELDS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "max_context_length",
    "context_length",
    "model_max_length",
    "seq_length",
    "max_seq_length",
    "n_ctx",
)
_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Keys under which configs of models with several parts keep the language part, which may have parts itself."""

_SCALINGS = ("rope_scaling", "rope_parameters")
_MOST = 2**31
"""Larger numbers stand for no limit."""


@dataclass(frozen=True)
class ContextLength:
    """`tokens` of prompt and answer together; `guessed` if the model does not say."""

    tokens: int
    guessed: bool = False


def context_length(config: Mapping[str, Any], arguments: object = None) -> ContextLength:
    """Returns the context of a model.

    Args:
        config: of config.json.
        arguments: the library's own object for the model's settings; its default counts if the config has no value.
    """
    for part in language_parts(config):
        stated = _stated(part)
        if stated:
            return ContextLength(max(stated, _scaled(part)))
    default = _stated({name: getattr(arguments, name, None) for name in _FIELDS})
    return ContextLength(default or GUESS, guessed=True)


def language_parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields the parts of a config that are about language, and the whole of it. The inner parts come first: an
    outer value may belong to another part."""
    for name in _PARTS:
        if isinstance(inner := config.get(name), Mapping):
            yield from language_parts(inner)
    yield config


def _stated(part: Mapping[str, Any]) -> int:
    return next((length for name in _FIELDS if (length := _length(part.get(name)))), 0)


def _scaled(part: Mapping[str, Any]) -> int:
    """Returns the length that scaled rotations reach, 0 if they are not scaled or the original length is missing."""
    for scaling in (part.get(name) for name in _SCALINGS):
        if not isinstance(scaling, Mapping):
            continue
        # There may be one for every kind of layer.
        for one in itertools.chain([scaling], scaling.values()):
            if isinstance(one, Mapping) and isinstance(factor := one.get("factor"), int | float):
                return _length(factor * _length(one.get("original_max_position_embeddings")))
    return 0


def _length(number: Any) -> int:
    """The number if it is a length in tokens, else 0."""
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    return int(number) if is_number and 1 <= number < _MOST else 0
