"""Norms and rotations of models are known by what they do, whatever class they are of."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.gemma3_text import RMSNorm as GemmaNorm
from mlx_lm.models.rope_utils import initialize_rope

from satchel.actors.replica.kernels.head_transform import HeadTransform, Norm, Rotation

DIM = 64
LLAMA3 = {"rope_type": "llama3", "factor": 8.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "mscale": 1, "mscale_all_dim": 1}
PARTLY = {"rope_type": "proportional", "factor": 1.0, "partial_rotary_factor": 0.5}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize(
    "module",
    [
        nn.RoPE(DIM),
        nn.RoPE(DIM // 2, traditional=True, base=1e6),
        nn.RoPE(DIM, scale=0.25),
        initialize_rope(DIM, 1e4, False, LLAMA3),
        initialize_rope(DIM, 1e4, False, YARN),
        initialize_rope(DIM, 1e4, False, PARTLY),
    ],
)
def test_rotations_are_known(module: nn.Module, dtype: mx.Dtype):
    known = Rotation.of(module, DIM, dtype)
    assert known is not None
    # Two eps, a scale, and the frequencies.
    assert len(HeadTransform(rotation=known).constants) == 3 + known.dims // 2


class FarOtherwise(nn.RoPE):
    """A rotation that has other frequencies beyond what the model was trained on."""

    def __call__(self, x: mx.array, offset: Any) -> mx.array:  # type: ignore[override]
        near = super().__call__(x, offset)
        return near if int(offset.max()) < 65_536 else nn.RoPE(self.dims, base=self.base * 8)(x, offset)


@pytest.mark.parametrize(
    "module", [initialize_rope(DIM, 1e4, False, DYNAMIC, 4096), FarOtherwise(DIM), nn.Linear(DIM, DIM), None]
)
def test_what_rotates_otherwise_is_left_alone(module: object):
    assert Rotation.of(module, DIM, mx.float32) is None


def test_a_rotation_of_more_channels_than_a_head_has_is_none():
    assert Rotation.of(nn.RoPE(2 * DIM), DIM, mx.float32) is None


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("kind", [nn.RMSNorm, GemmaNorm])
def test_rms_norms_are_known_with_what_they_add_to_their_weight(kind: type, dtype: mx.Dtype):
    norm = kind(DIM, eps=1e-5)
    norm.weight = (0.3 * mx.random.normal((DIM,))).astype(dtype)
    known = Norm.of(norm)
    assert known is not None
    added = 1 if kind is GemmaNorm else 0
    assert bool(mx.abs(known.weight - (added + norm.weight).astype(mx.float32)).max() <= 1e-2)


@pytest.mark.parametrize("module", [nn.LayerNorm(DIM), nn.Linear(DIM, DIM), nn.Embedding(8, DIM), None])
def test_other_norms_are_left_alone(module: object):
    assert Norm.of(module) is None
