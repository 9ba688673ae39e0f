"""A model is divided by what its files' headers say and by what nodes may use."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from satchel.actors.model_files.source import EMBEDDED
from satchel.actors.planner.planning import Divider, divided
from satchel.actors.replica.group.division import needs
from satchel.actors.replica.group.division.needs import Headers, read_headers
from satchel.actors.replica.memory.claims import unclaimed_bytes
from satchel.cluster.config.config import Model, Scheduling, parse_model
from satchel.cluster.config.nodes import Node
from satchel.cluster.config.stages import Split
from satchel.cluster.errors import ModelLoadError, NoRoom
from tests.worlds.models.families import write_model
from tests.worlds.models.vision_families import write
from tests.worlds.models.vision_families import write_model as write_vision_model
from tests.zoo.vision_patches import PATCHES
from tests.zoo.vision_squares import SQUARES

MIB = 2**20
AUTO = Split("auto")
CHUNK = 256


def model_of(source: str, **fields: object) -> Model:
    return parse_model(name="m", source=source, split={"pipeline": "auto"}, **fields)


@pytest.fixture(scope="module")
def headers() -> Headers:
    return read_headers(model_of("embedded:recall", context_tokens_max=2048), EMBEDDED / "recall")


def test_layers_and_ends_add_up_to_the_model(tmp_path: Path):
    """A tied embedding is in both ends, and counts twice only if it is on two nodes."""
    for tied in (False, True):
        folder = write_model(tmp_path / str(tied), "qwen3", num_hidden_layers=3, tie_word_embeddings=tied)
        found = read_headers(model_of(str(folder)), folder)
        stored = sum(each.stat().st_size for each in folder.glob("*.safetensors"))
        assert 0.9 * stored < found.weights_bytes < stored + 1000
        assert len(found.layers) == 3 and len(set(found.layers)) == 1
        assert found.shared_bytes == (found.first_bytes if tied else 0)
        whole, apart = (found.needs(2**30, CHUNK, whole=whole) for whole in (True, False))
        assert apart.last_bytes - whole.last_bytes == found.shared_bytes


def test_a_model_that_one_node_has_room_for_is_not_divided(headers: Headers):
    """Though another node comes first, and both together would have more room."""
    (alone,) = divided(headers, {"small": 24 * MIB, "large": 60 * MIB}, AUTO, CHUNK)
    assert (alone.node, alone.start, alone.stop) == ("large", 0, 6)


def test_a_model_that_no_node_has_room_for_is_divided_and_more_memory_gets_more_layers(headers: Headers):
    equal = divided(headers, {"mac0": 32 * MIB, "mac1": 32 * MIB}, AUTO, CHUNK)
    assert [(stage.node, stage.start, stage.stop) for stage in equal] == [("mac0", 0, 3), ("mac1", 3, 6)]
    other = divided(headers, {"mac0": 28 * MIB, "mac1": 33 * MIB}, AUTO, CHUNK)
    assert other[0].stop < 3 and all(stage.tokens >= 2048 for stage in other)


def test_layers_may_be_given(headers: Headers):
    stages = divided(headers, {"mac0": 60 * MIB, "mac1": 60 * MIB}, Split((1, 5)), CHUNK)
    assert [(stage.node, stage.start, stage.stop) for stage in stages] == [("mac0", 0, 1), ("mac1", 1, 6)]


def test_too_little_room_is_told_with_all_sizes(headers: Headers):
    with pytest.raises(NoRoom, match=r"the model needs .* of KV for 2048 tokens, .*: mac0 20\.0 MiB, mac1 22\.0 MiB"):
        divided(headers, {"mac0": 20 * MIB, "mac1": 22 * MIB}, AUTO, CHUNK)


def test_the_last_node_has_a_vision_models_encoder_and_the_embedding_that_it_needs(tmp_path: Path):
    folder = write_vision_model(tmp_path / "llava", "llava")
    found = read_headers(model_of(str(folder), dtype="bfloat16"), folder)
    stored: Any = mx.load(str(folder / "model.safetensors"))
    weights = {name: array.size * 2 for name, array in stored.items()}
    assert found.weights_bytes == sum(weights.values())
    embedding = sum(nbytes for name, nbytes in weights.items() if "embed_tokens" in name)
    encoder = sum(nbytes for name, nbytes in weights.items() if not name.startswith("language_model"))
    assert found.first_bytes == found.shared_bytes == embedding and encoder > 10_000
    norm = sum(nbytes for name, nbytes in weights.items() if name.endswith("model.norm.weight"))
    assert found.last_bytes == embedding + encoder + norm


@pytest.mark.parametrize(
    "family, why",
    [
        ("granite4_vision", r"granite4_vision: .* it adds pictures to hidden states \(DeepStack\) in a way of its own"),
        ("gemma4", r"gemma4: .* its code needs more of a layer than hidden states"),
    ],
)
def test_vision_models_that_cannot_be_divided_are_refused_by_name(tmp_path: Path, family: str, why: str):
    folder = write(tmp_path / family, family, {**PATCHES, **SQUARES}[family])
    with pytest.raises(ModelLoadError, match=why):
        Divider(model_of(str(folder)), Scheduling()).stages({"mac0": 2**30})


def test_what_other_replicas_claim_is_not_free(tmp_path: Path):
    """Their KV is: it gives way."""
    node, scheduling = Node(name="mac0", memory_bytes_max=100), Scheduling(memory_bytes_max=70)
    path = tmp_path / "other.claim"
    path.write_text(json.dumps({"weights": 30, "workspace": 5, "device": 0}).ljust(256))
    held = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert unclaimed_bytes(tmp_path, node, scheduling) == 65
        assert unclaimed_bytes(tmp_path, Node(name="mac0"), scheduling) == 35
    finally:
        os.close(held)
    # Its process has ended.
    assert unclaimed_bytes(tmp_path, node, scheduling) == 100


def test_headers_are_read_before_the_nodes_are_known_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder, read = write_model(tmp_path / "model", "qwen3", num_hidden_layers=4), list[Path]()
    monkeypatch.setattr(needs, "read_headers", lambda model, path: read.append(path) or read_headers(model, path))
    divider = Divider(model_of(str(folder)), Scheduling())
    divider.read()
    assert read == [folder]
    memory = {"one": 2**30, "two": 2**30}
    another = Divider(model_of(str(folder)), Scheduling())
    assert divider.stages(memory) == divider.stages(memory) == another.stages(memory)
    # The last one is of the other.
    assert len(read) == 2


def test_headers_that_cannot_be_read_ahead_are_read_when_they_are_needed(tmp_path: Path):
    divider = Divider(model_of(str(tmp_path / "model")), Scheduling())
    divider.read()
    with pytest.raises(ModelLoadError):
        divider.stages({"one": 2**30})
    write_model(tmp_path / "model", "qwen3", num_hidden_layers=4)
    assert [stage.stop for stage in divider.stages({"one": 2**30})] == [4]


def test_a_node_is_asked_for_its_memory_without_the_libraries_of_models():
    """Each node does that in a new process, and the model waits for it."""
    code = "import sys; import satchel.actors.replica.memory.claims; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert "mlx.core" in loaded
    assert not {"mlx_lm", "mlx_vlm", "transformers"}.intersection(loaded)
