"""What a model does with queries and keys is left to the kernel only if the kernel can do all of it, in that order."""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from satchel.actors.replica.execution.recorded.deferral import CannotDefer, Deferral

DIM = 64


class Attention(nn.Module):
    """A layer that does these steps in this order, each `q` or `k` with `norm` or `rope`."""

    def __init__(self, steps: str, rotated: int = DIM, width: int = DIM) -> None:
        super().__init__()
        self.q_norm, self.k_norm = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.rope, self.other_rope = nn.RoPE(rotated), nn.RoPE(rotated)
        self.steps = steps.split()

    def __call__(self, x: mx.array, offset: mx.array) -> mx.array:
        calls: dict[str, Any] = {
            "qn": self.q_norm,
            "kn": self.k_norm,
            "r": partial(self.rope, offset=offset),  # type: ignore[arg-type]
            "o": partial(self.other_rope, offset=offset),  # type: ignore[arg-type]
            "elsewhere": partial(self.rope, offset=offset + 1),  # type: ignore[arg-type]
        }
        for step in self.steps:
            x = calls[step](x)
        return x


@pytest.mark.parametrize("steps", ["r r", "qn kn r r", "qn r", "qn kn", ""])
def test_norms_and_then_rotations_are_left(steps: str):
    layer, offset = Attention(steps), mx.array([5, 6])
    x, deferral = mx.random.normal((2, 4, 1, DIM)), Deferral(layer)
    with deferral.active(offset):
        if steps == "qn r":
            layer(x, offset)
            with pytest.raises(CannotDefer):
                deferral.take(DIM)
            return
        assert layer(x, offset) is x
        left = deferral.take(DIM)
    assert (left.query_norm is not None, left.key_norm is not None) == ("qn" in steps, "kn" in steps)
    assert (left.rotation is not None) == ("r" in steps)
    # Afterwards the layer does it itself.
    if "qn" not in steps and "r" in steps:
        assert bool(mx.array_equal(left.of_keys(left.of_keys(x, offset), offset), layer(x, offset)))


@pytest.mark.parametrize("steps", ["r qn r", "qn qn", "r r r", "r o", "elsewhere r"])
def test_another_order_cannot_be_left(steps: str):
    layer, offset = Attention(steps), mx.array([5])
    deferral = Deferral(layer)
    with deferral.active(offset), pytest.raises(CannotDefer):
        layer(mx.zeros((1, 4, 1, DIM)), offset)
    assert layer.q_norm.weight.size == DIM


def test_a_norm_of_all_heads_together_stays_with_the_model():
    layer = Attention("qn", width=4 * DIM)
    deferral, x = Deferral(layer), 3 * mx.ones((1, 1, 4 * DIM))
    with deferral.active(mx.array([0])):
        assert bool(mx.allclose(layer(x, mx.array([0])), mx.ones_like(x), atol=1e-3))
        assert deferral.take(DIM).query_norm is None


def test_a_part_of_a_head_cannot_be_rotated_apart():
    layer, offset = Attention("r r", rotated=16), mx.array([0])
    deferral = Deferral(layer)
    with deferral.active(offset):
        layer(mx.zeros((1, 4, 1, 16)), offset)
        with pytest.raises(CannotDefer):
            deferral.take(DIM)


def test_a_model_without_such_modules_has_nothing_to_leave():
    assert Deferral(nn.Sequential(nn.Linear(4, 4), nn.RMSNorm(4))).is_empty
