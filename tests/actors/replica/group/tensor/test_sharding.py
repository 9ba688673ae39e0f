"""A share of a model is an equal part of it, or the model is refused with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models
import numpy as np
import pytest
from mlx.utils import tree_flatten

from satchel.actors.model_files.checkpoints import load_checkpoint
from satchel.actors.planner.planning import Divider
from satchel.actors.replica.group.loading import load_part
from satchel.actors.replica.group.tensor.model import SharePart
from satchel.actors.replica.group.tensor.ranks import Ranks
from satchel.actors.replica.group.tensor.sharding import SHARDED_TYPES, shard
from satchel.cluster.config.config import Model, Scheduling, parse_model
from satchel.cluster.errors import ModelLoadError, NoRoom
from tests.worlds.models.families import write_model
from tests.worlds.models.vision_families import write
from tests.worlds.models.vision_families import write_model as write_vision_model
from tests.zoo.vision_patches import PATCHES

MIB = 2**20
SCHEDULING = Scheduling(prefill_chunk_tokens=256)
SPLIT = {"tensor": 2, "backend": "ring", "trusted_wires": True}


def weights(model: Any) -> dict[str, np.ndarray]:
    return {name: np.array(value) for name, value in dict(tree_flatten(model.parameters())).items()}


def test_all_types_that_mlx_lm_can_cut_are_named():
    folder = Path(mlx_lm.models.__path__[0])
    found = {path.stem for path in folder.glob("*.py") if "\n    def shard(" in path.read_text(encoding="utf-8")}
    assert found == {*SHARDED_TYPES}


@pytest.mark.parametrize("family, count", [("llama", 2), ("qwen3_moe", 2), ("gpt_oss", 2), ("deepseek_v2", 2)])
def test_shares_put_together_are_the_model(tmp_path: Path, family: str, count: int):
    """Of every weight, each share has all of it or its part."""
    folder = write_model(tmp_path / family, family)
    whole, _ = load_checkpoint(folder, trusted=False)
    shares = []
    for rank in range(count):
        model, _ = load_checkpoint(folder, trusted=False)
        shard(model, Ranks(rank, count))
        shares.append({name.replace(".part.", "."): value for name, value in weights(model).items()})
    divided = 0
    for name, value in weights(whole).items():
        parts = [share[name] for share in shares]
        if parts[0].shape == value.shape:
            assert all(np.array_equal(part, value / (count if "down_proj.bias" in name else 1)) for part in parts)
            continue
        (axis,) = [axis for axis, size in enumerate(value.shape) if parts[0].shape[axis] != size]
        assert np.array_equal(np.concatenate(parts, axis), value), name
        divided += value.size
    assert divided > 0.4 * sum(value.size for name, value in weights(whole).items() if "layers" in name)


@pytest.mark.parametrize(
    "family, count, more, why",
    [
        ("gemma3_text", 2, {}, "models of its type have no shares; these have: deepseek_v2, .*, qwen3_moe, step3p5"),
        ("llama", 3, {}, "its num_attention_heads is 4"),
        ("llama", 4, {}, "its num_key_value_heads is 2"),
        ("llama", 2, {"intermediate_size": 129}, "a size of its weights is no multiple of that"),
        (
            "llama",
            2,
            {"intermediate_size": 96, "bits": 4},
            "a size of its weights or of its quantization groups of 32 is no multiple of that",
        ),
    ],
)
def test_a_model_that_has_no_equal_shares_is_refused(
    tmp_path: Path, family: str, count: int, more: dict[str, Any], why: str
):
    folder = write_model(tmp_path / "m", family, **more)
    with pytest.raises(ModelLoadError, match=f"divided into {count} equal shares: {why}"):
        Divider(model_of(folder, tensor=count), SCHEDULING).stages({"a": 60 * MIB, "b": 60 * MIB})


def test_a_vision_model_has_shares_if_mlx_vlm_can_cut_it(tmp_path: Path):
    memory = {"a": 60 * MIB, "b": 60 * MIB}
    folder = write_vision_model(tmp_path / "llava", "llava")
    with pytest.raises(ModelLoadError, match="mlx-vlm has no shares for models with pictures of its type"):
        Divider(model_of(folder), SCHEDULING).stages(memory)
    folder = write(tmp_path / "moe", "qwen3_vl_moe", PATCHES["qwen3_vl_moe"])
    assert [stage[:3] for stage in Divider(model_of(folder), SCHEDULING).stages(memory)] == [("a", 0, 4), ("b", 0, 4)]


def model_of(folder: Path, **more: Any) -> Model:
    return parse_model(name="m", source=str(folder), split={**SPLIT, **more})


def test_shares_go_to_the_nodes_with_the_most_memory_in_their_order(tmp_path: Path):
    folder = write_model(tmp_path / "m", "llama")
    memory = {"first": 60 * MIB, "small": 1 * MIB, "last": 80 * MIB}
    first, last = Divider(model_of(folder), SCHEDULING).stages(memory)
    assert first[:3] == ("first", 0, 2) and last[:3] == ("last", 0, 2)
    assert 2048 < first.tokens < last.tokens
    with pytest.raises(NoRoom, match=r"each of 2 nodes needs a share: the model needs .* MiB and .* a 2\.0 MiB"):
        Divider(model_of(folder), SCHEDULING).stages({"a": 2 * MIB, "b": 60 * MIB})
    with pytest.raises(NoRoom, match="tensor: 2 needs 2 nodes, and there are 1"):
        Divider(model_of(folder), SCHEDULING).stages({"a": 60 * MIB})


def test_a_share_reads_its_part_and_has_kv_of_its_own(tmp_path: Path):
    """Half of the heads' KV, under another model id than the other share's. What it computes alone has the shapes of
    the whole model's logits."""
    folder = write_model(tmp_path / "m", "llama")
    whole = load_part(str(folder), SharePart(Ranks(0, 1)))
    first, second = (load_part(str(folder), SharePart(Ranks(rank, 2))) for rank in range(2))
    assert first.spec.bytes_per_token * 2 == whole.spec.bytes_per_token
    assert len({whole.model_id, first.model_id, second.model_id}) == 3
    assert first.identity.files == second.identity.files
    logits = first.model(mx.array([[1, 2, 3]]), cache=first.model.make_cache())
    assert logits.shape == (1, 3, whole.vocabulary_size)
    assert second.vocabulary_size == whole.vocabulary_size
