"""Stages of a model compute together what the whole model computes, to the last bit in float32.

Every family is either divided, at any place, and equal, or refused with a reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import _get_classes

from satchel.actors.replica.group.division.stages import Stage, find_chain
from satchel.cluster.errors import ModelLoadError
from tests.worlds.models.families import (
    FAMILIES,
    PECULIAR,
    UNBATCHED,
    VOCABULARY,
    config_of,
    random_weights,
)
from tests.zoo.text_types import TYPES

CHUNKS = (5, 1, 210, 1)
"""Tokens of each call: chunks of a prompt, longer than some windows, and decode steps."""

_MORE = "its code needs more of a layer than hidden states"
_TOKENS = "gets more that depends on the tokens than hidden states"

REFUSED = {
    # Layers attend to other layers' KV, or get other things from them.
    **dict.fromkeys(("gemma4", "gemma4_text", "gemma4_text+moe", "hunyuan", "kimi_k3", "muse_spark", "rwkv7"), _MORE),
    "deepseek_v41": _MORE,
    "talkie": "layer 1 gets something else than what layer 0 returns",
    # Each layer has an embedding of the tokens.
    "gemma3n": _TOKENS,
    # Layers are called several times.
    **dict.fromkeys(("iquestloopcoder", "nanbeige+loops"), "its layers are not called once each, in order"),
    # There are more layers, with the KV of others.
    "afm7": "it has no list of layers",
    "longcat_flash_ngram": "some of its caches are of no layer",
    # Linear layers alone do not know positions, which their model takes from other layers' caches.
    **dict.fromkeys(("bailing_hybrid", "bailing_moe_linear"), "none of its layers counts tokens"),
}
"""Types that cannot be divided, or not at every place, and a part of the reason."""

NOT_HERE = ("bitnet", "gear", "olmo", "phi3small")
"""Types of which the library itself computes nothing here."""

USUAL = ("gpt_oss", "nemotron_h", "gemma3n")
"""Families that are tried every time: each has layers of another kind."""


def maker(config: dict[str, Any]) -> Callable[[], nn.Module]:
    """Returns a function that makes the model of a config, each time with the same weights."""
    model_class, arguments = _get_classes(config)

    def make() -> nn.Module:
        model = model_class(arguments.from_dict(json.loads(json.dumps(config))))
        model.update(weights)
        return model

    weights = {}
    weights = random_weights(make(), 7)
    return make


def texts() -> list[mx.array]:
    """The tokens of each call, for two sequences."""
    generator, vocabulary = np.random.default_rng(3), VOCABULARY - 10
    return [mx.array(generator.integers(0, vocabulary, (2, count)), mx.uint32) for count in CHUNKS]


def computed(call: Callable[[mx.array], mx.array]) -> list[np.ndarray]:
    found = []
    for tokens in texts():
        logits = call(tokens)
        mx.eval(logits)
        found.append(np.array(logits))
    return found


def whole(model: nn.Module) -> list[np.ndarray]:
    caches = make_prompt_cache(model)
    return computed(lambda tokens: model(tokens, cache=caches))


def in_stages(stages: Sequence[Stage]) -> list[np.ndarray]:
    caches = [stage.make_cache() for stage in stages]

    def call(tokens: mx.array) -> mx.array:
        states = None
        for number, (stage, own) in enumerate(zip(stages, caches, strict=True)):
            # Only the first stage sees the tokens.
            states = stage(tokens if number == 0 else mx.zeros_like(tokens), own, states)
            mx.eval(states)
        assert states is not None
        return states

    return computed(call)


def check(config: dict[str, Any]) -> str:
    """Compares the model of a config with its stages: two, and as many as it has layers. Returns why it cannot be
    divided, or empty."""
    make = maker(config)
    try:
        count = len(find_chain(make()).layers)
    except ModelLoadError as error:
        return error.message
    expected = whole(make())
    refusals = []
    for ends in ([0, 1, count], [0, count - 1, count], [*range(count + 1)])[: None if count > 2 else 1]:
        try:
            stages = [Stage(find_chain(make()), *span) for span in pairwise(ends)]
        except ModelLoadError as error:
            refusals.append(error.message)
            continue
        for number, (one, other) in enumerate(zip(expected, in_stages(stages), strict=True)):
            assert np.array_equal(one, other, equal_nan=True), f"call {number} in stages {ends}"
        assert sum(len(stage.make_cache()) for stage in stages) == len(make_prompt_cache(make()))
    return "; ".join(refusals)


def _types() -> Iterator[Any]:
    for name in FAMILIES | PECULIAR | UNBATCHED:
        marks = [] if name in USUAL else [pytest.mark.slow]
        yield pytest.param(name, config_of(name), marks=marks, id=f"family {name}")
    for name, config in TYPES.items():
        if name not in NOT_HERE:
            whole_config = {"model_type": name.partition("+")[0], **config}
            yield pytest.param(name, whole_config, marks=pytest.mark.slow, id=f"type {name}")


@pytest.mark.parametrize("name, config", list(_types()))
def test_a_family_is_divided_and_equal_or_refused(name: str, config: dict[str, Any]):
    why, expected = check(config), REFUSED.get(name, "")
    assert bool(why) == bool(expected) and expected in why
