"""A stage reads its own layers' weights, and no others."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from satchel.actors.replica.group.loading import load_stage
from satchel.cluster.errors import ModelLoadError
from tests.worlds.models.families import write_model

LAYERS = 4


def names(folder: Path, start: int, stop: int, weights: str = "stored") -> set[str]:
    """The weights that a stage has in memory."""
    loaded = load_stage(str(folder), start, stop, weights=weights)
    return {name for name, _ in tree_flatten(loaded.model.stage.model.parameters())}


def without(folder: Path, to: Path, kept: set[str]) -> Path:
    """A copy whose other weights are no numbers."""
    shutil.copytree(folder, to)
    path = to / "model.safetensors"
    data = bytearray(path.read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little")
    for name, tensor in json.loads(data[8:begin]).items():
        if name != "__metadata__" and name not in kept:
            first, end = (begin + offset for offset in tensor["data_offsets"])
            data[first:end] = b"\xff" * (end - first)
    path.write_bytes(data)
    return to


def states(folder: Path, start: int, stop: int) -> np.ndarray:
    stage = load_stage(str(folder), start, stop).model.stage
    hidden = None if start == 0 else mx.random.normal((1, 5, stage.width), key=mx.random.key(1))
    return np.array(stage(mx.array([[3, 1, 4, 1, 5]], mx.uint32), make_prompt_cache(stage), hidden))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("start, stop", [(0, 2), (1, 3), (3, 4)])
def test_weights_of_other_stages_are_not_read(tmp_path: Path, start: int, stop: int, tied: bool):
    folder = write_model(tmp_path / "model", "qwen3", num_hidden_layers=LAYERS, tie_word_embeddings=tied)
    kept = names(folder, start, stop)
    layers = {int(name.split(".")[2]) for name in kept if ".layers." in name}
    assert layers == {*range(start, stop)}
    ends = {name for name in kept if ".layers." not in name}
    head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    first, last = {"model.embed_tokens.weight"}, {"model.norm.weight", head}
    assert ends == (first if start == 0 else set()) | (last if stop == LAYERS else set())
    other = without(folder, tmp_path / "other", kept)
    found = states(other, start, stop)
    assert np.isfinite(found).all() and np.array_equal(found, states(folder, start, stop))


def test_a_stage_of_quantized_weights_computes_as_stored_and_dequantized(tmp_path: Path):
    folder = write_model(tmp_path / "model", "llama", bits=4, num_hidden_layers=LAYERS)
    assert any(name.endswith(".scales") for name in names(folder, 1, 3))
    assert not any(name.endswith(".scales") for name in names(folder, 1, 3, weights="dequantized"))


def test_what_is_no_stage_or_cannot_be_divided_is_refused_in_one_sentence(tmp_path: Path):
    shared = write_model(tmp_path / "shared", "gemma3n")
    with pytest.raises(ModelLoadError, match="cannot be divided among processes: "):
        load_stage(str(shared), 0, 2)
    folder = write_model(tmp_path / "model", "llama")
    with pytest.raises(ModelLoadError, match="layers 1 to 3 are no stage of 2 layers"):
        load_stage(str(folder), 1, 3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_made_up_hidden_states_are_drawn_once_in_the_models_dtype(tmp_path: Path, dtype: str):
    """So a recorded step has no operations that only tests need, for which a GPU would compile kernels."""
    folder = write_model(tmp_path / "model", "qwen3", num_hidden_layers=LAYERS)
    stage = load_stage(str(folder), 2, LAYERS, dtype=dtype).model.stage
    tokens = mx.array([[3, 1, 3]], mx.uint32)
    told = io.StringIO()
    mx.export_to_dot(told, stage(tokens, make_prompt_cache(stage)))
    assert "Gather" in told.getvalue()
    assert not re.search("Random|ErfInv", told.getvalue())
    made_up = stage._made_up(tokens)
    assert made_up.dtype == getattr(mx, dtype) and made_up.shape == (1, 3, stage.width)
    one, other, again = made_up[0]
    assert mx.array_equal(one, again) and not mx.allclose(one, other)
    assert 0.5 < made_up.astype(mx.float32).std().item() < 2.0
