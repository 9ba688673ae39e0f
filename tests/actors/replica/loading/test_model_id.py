"""The model id includes everything that decides what KV holds, and nothing else."""

from __future__ import annotations

import json
import platform
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from satchel.actors.model_files.identity.digests import digest_files
from satchel.actors.model_files.identity.model_identity import ModelIdentity
from satchel.actors.model_files.weights import read_weight_file
from satchel.actors.replica.device import device
from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.loading import model_id, models
from satchel.actors.replica.loading.model_id import computing, files_of, order_of_weights
from satchel.cluster.errors import ModelLoadError
from tests.worlds.models.families import write_model

HOW: dict[str, Any] = {"dtype": "float32", "weights": "stored", "kv": "q4", "numerics": "fast", "seeing": False}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the embedded model."""
    return Path(shutil.copytree(models.EMBEDDED / "recall", tmp_path / "model"))


def identity_of(folder: Path, adapter: Path | None = None, **how: Any) -> ModelIdentity:
    """As `models.load` makes it."""
    found = digest_files(files_of(folder, adapter), None, lambda fraction: None)
    files = {name: each.digest.hex() for name, each in found.items()}
    order = order_of_weights(folder, [read_weight_file(path) for path in sorted(folder.glob("model*.safetensors"))])
    return ModelIdentity(files | order, computing(**{**HOW, **how}))


def load(folder: Path, **how: Any) -> LoadedModel:
    return models.load(str(folder), context_tokens_max=None, progress=lambda *_: None, **how)


def write_sorted(path: Path, tensors: dict[str, mx.array]) -> None:
    """Tensors in the order of their names, as transformers writes them."""
    header, data = {}, b""
    for name in sorted(tensors):
        raw = np.array(tensors[name].astype(mx.float32)).tobytes()
        shape = list(tensors[name].shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    packed = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(packed)) + packed + data)


def test_a_fine_tune_with_the_ends_of_its_base_is_another_model(tmp_path: Path):
    """As one with a fused adapter is: header, size, config, tokenizer and both ends of the data are the same."""
    base, tuned = write_model(tmp_path / "base", "llama"), tmp_path / "tuned"
    weights: dict[str, mx.array] = dict(mx.load(str(base / "model.safetensors")))  # type: ignore[arg-type]
    write_sorted(base / "model.safetensors", weights)
    shutil.copytree(base, tuned)
    name = "model.layers.0.mlp.down_proj.weight"
    weights[name] = weights[name] * 1.25
    write_sorted(tuned / "model.safetensors", weights)
    one, two = ((each / "model.safetensors").read_bytes() for each in (base, tuned))
    assert len(one) == len(two) and one[:65536] == two[:65536] and one[-65536:] == two[-65536:] and one != two
    found = load(base), load(tuned)
    assert found[0].model_id != found[1].model_id
    assert found[0].identity.files_id != found[1].identity.files_id


def _edited(name: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / name
        path.write_bytes((path.read_bytes() if path.exists() else b"") + b"\n")

    return edit


def _flip(folder: Path, place: float = 0.5) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[int(place * len(data))] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "change",
    [
        *map(_edited, ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")),
        *map(_edited, ("preprocessor_config.json", "video_preprocessor_config.json", "vocab.json", "merges.txt")),
        *map(_edited, ("tokenizer.model", "qwen.tiktoken", "modeling_own.py", "hf_quant_config.json")),
        *map(_edited, ("weights.npz", "model.safetensors.index.json", "what-a-later-version-reads.yaml", "own.bin")),
        _flip,
        lambda folder: _flip(folder, 0.97),
        lambda folder: shutil.copy(folder / "model.safetensors", folder / "model-2.safetensors"),
        lambda folder: (folder / "model.safetensors").rename(folder / "model-1.safetensors"),
    ],
)
def test_every_file_that_is_read_counts(folder: Path, change: Callable[[Path], Any]):
    """Also unknown files: a library may read them."""
    before = identity_of(folder)
    change(folder)
    after = identity_of(folder)
    assert after.files_id != before.files_id and after.model_id != before.model_id


def test_shards_in_other_folders_count_too(folder: Path):
    """mlx-vlm reads what the index names, wherever that is."""
    shard = folder / "shards" / "one.safetensors"
    shard.parent.mkdir()
    shard.write_bytes(b"1")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "shards/one.safetensors"}}))
    before = identity_of(folder)
    shard.write_bytes(b"2")
    assert identity_of(folder).files_id != before.files_id


def test_no_file_of_a_model_takes_the_place_of_an_adapters(folder: Path, tmp_path: Path):
    """Whatever name an index gives it."""
    adapter, shard = tmp_path / "adapter", folder / "adapter" / "adapters.safetensors"
    for path in (adapter / "adapters.safetensors", adapter / "adapter_config.json", shard):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"1")
    index = {"weight_map": {"w": "adapter/adapters.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    ids = {identity_of(folder, adapter).files_id}
    for path in (shard, adapter / "adapters.safetensors", adapter / "adapter_config.json"):
        path.write_bytes(b"2")
        ids.add(identity_of(folder, adapter).files_id)
    assert len({*ids, identity_of(folder).files_id}) == 5


@pytest.mark.parametrize("name", ["README.md", "LICENSE", "generation_config.json", ".gitattributes", "model.gguf"])
def test_files_that_nothing_computes_with_do_not_count(folder: Path, name: str):
    before = identity_of(folder)
    _edited(name)(folder)
    assert identity_of(folder) == before


def test_tensors_that_lie_in_two_files_count_by_the_order_of_loading(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """mlx-lm lets the file that comes last have its way, and folders list their files in any order."""
    shutil.copy(folder / "model.safetensors", folder / "model-again.safetensors")
    names = [str(folder / "model.safetensors"), str(folder / "model-again.safetensors")]
    monkeypatch.setattr(model_id, "glob", lambda pattern: names)
    one = identity_of(folder)
    monkeypatch.setattr(model_id, "glob", lambda pattern: names[::-1])
    assert identity_of(folder).files_id != one.files_id
    (folder / "model-again.safetensors").unlink()
    assert "order of weights" not in identity_of(folder).files, "which of one file makes no difference"


def test_the_path_does_not_count(folder: Path, tmp_path: Path):
    """Nor how it is reached: nodes have their models in different places, and the Hub's cache consists of links."""
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in folder.iterdir():
        (snapshot / path.name).symlink_to(path)
    assert identity_of(snapshot) == identity_of(folder)
    assert load(folder).model_id == load(models.EMBEDDED / "recall").model_id


@pytest.mark.parametrize(
    "setting", [{"dtype": "float16"}, {"dtype": "float32, own"}, {"weights": "both"}, {"kv": "fp16"}, {"seeing": True}]
)
def test_whatever_changes_what_is_computed_is_another_model_of_the_same_files(folder: Path, setting: dict[str, Any]):
    """So its KV is not valid for the other, but transcripts are."""
    one, other = identity_of(folder), identity_of(folder, **setting)
    assert one.files_id == other.files_id and one.model_id != other.model_id


@pytest.mark.slow
def test_settings_that_change_rounding_make_another_model_as_it_is_loaded(folder: Path):
    """A model with one setting reuses no KV of the other; settings that change no number in a block do not change the
    id."""
    plain = load(folder)
    others = [load(folder, **how) for how in ({"numerics": "reproducible"}, {"kv": "fp16"}, {"dtype": "bfloat16"})]
    assert len({plain.model_id, *(other.model_id for other in others)}) == 4
    assert {plain.identity.files_id} == {other.identity.files_id for other in others}
    shorter = models.load(str(folder), context_tokens_max=512, progress=lambda *_: None)
    assert shorter.model_id == plain.model_id


def test_a_device_of_another_kind_is_another_model(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """And with `reproducible` another chip of the same kind; with `fast` chips of one kind exchange KV."""
    found: dict[str, list[bytes]] = {"fast": [], "reproducible": []}
    for kind, name in (("cpu", "a"), ("metal", "M1"), ("metal", "M4"), ("cuda", "H200")):
        monkeypatch.setattr(model_id, "device_kind", lambda kind=kind: kind)
        monkeypatch.setattr(model_id, "device_name", lambda name=name: name)
        for numerics, ids in found.items():
            ids.append(identity_of(folder, numerics=numerics).model_id)
    assert len(set(found["fast"])) == 3 and found["fast"][1] == found["fast"][2]
    assert len(set(found["reproducible"])) == 4
    assert not set(found["fast"]) & set(found["reproducible"])
    before = identity_of(folder)
    monkeypatch.setenv("MLX_ENABLE_TF32", "0")
    assert identity_of(folder).model_id != before.model_id, "by which a GPU rounds otherwise"


def test_macs_that_multiply_float32_otherwise_share_none(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """An M5 has TF32 for it where the system lets MLX use its tensor units; 16 bits it multiplies as an M1 does, so
    these exchange KV. If TF32 is forbidden, float32 is as on an M1."""
    monkeypatch.setattr(model_id, "device_kind", lambda: "metal")
    monkeypatch.setattr(device, "device_kind", lambda: "metal")
    monkeypatch.setattr(device, "on_cuda", lambda: False)

    def ids(architecture: str, macos: str, numerics: str = "fast") -> tuple[bytes, bytes]:
        monkeypatch.setattr(mx, "device_info", lambda: {"architecture": architecture})
        monkeypatch.setattr(platform, "mac_ver", lambda: (macos, ("", "", ""), "arm64"))
        wide, short = (identity_of(folder, dtype=dtype, numerics=numerics) for dtype in ("float32, own", "bfloat16"))
        return wide.model_id, short.model_id

    one, five, older = ids("applegpu_g13s", "26.2"), ids("applegpu_g17s", "26.2"), ids("applegpu_g17s", "26.1")
    assert one == older and one[0] != five[0] and one[1] == five[1]
    reproducible = [ids("applegpu_g17s", macos, "reproducible") for macos in ("26.1", "26.2")]
    assert not set(reproducible[0]) & set(reproducible[1]), "which promises bits"
    monkeypatch.setenv("MLX_ENABLE_TF32", "0")
    assert ids("applegpu_g17s", "26.2") == ids("applegpu_g13s", "26.2") == one


def test_a_library_of_another_version_makes_another_model(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Transcripts stay valid: an update of MLX costs KV but no conversation."""
    before = identity_of(folder)
    monkeypatch.setattr(model_id, "version", lambda library: "99")
    after = identity_of(folder)
    assert after.model_id != before.model_id and after.files_id == before.files_id


def test_no_two_identities_are_hashed_as_the_same_bytes():
    one = ModelIdentity({"a": "b", "c": "d"}, {"e": "f"})
    others = [
        ModelIdentity({"a": "bcd"}, {"e": "f"}),
        ModelIdentity({"ab": "", "c": "d"}, {"e": "f"}),
        ModelIdentity({"a": "b"}, {"c": "d", "e": "f"}),
        replace(one, computing={"e": "", "f": ""}),
    ]
    assert len({one.model_id, *(other.model_id for other in others)}) == 5
    assert ModelIdentity({"c": "d", "a": "b"}, {"e": "f"}).model_id == one.model_id, "their order is none"


def test_a_file_that_changes_while_the_model_is_loaded_refuses_it(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """What was loaded is perhaps not what was hashed."""
    prepare = models.prepare_weights

    def meanwhile(*arguments: Any) -> str:
        kept = prepare(*arguments)
        _flip(folder)
        return kept

    monkeypatch.setattr(models, "prepare_weights", meanwhile)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is being changed"):
        load(folder)


@pytest.mark.parametrize(
    "config",
    [
        {"model_file": "own.py"},
        {"model_file": "own.py", "vision_config": {"a": 1}},
        {"text_config": {"ple_storage": {"manifest": "/m"}}},
    ],
)
def test_code_and_weights_from_elsewhere_are_refused_before_they_are_read(folder: Path, config: dict[str, Any]):
    """mlx-vlm would run the code."""
    (folder / "own.py").write_text("raise SystemExit('it ran')")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    with pytest.raises(ModelLoadError, match=r"not run|not supported"):
        load(folder)


@pytest.mark.parametrize(("kind", "changes"), [("cuda", True), ("metal", False), ("cpu", False)])
def test_stored_weights_are_named_as_they_are_multiplied(kind: str, changes: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(model_id, "device_kind", lambda: kind)
    named = {
        weights: model_id.computing(dtype="bfloat16", weights=weights, kv="q4.1", numerics="fast", seeing=False)
        for weights in ("stored", "stored, joined", "both")
    }
    for weights, how in named.items():
        assert (how["weights"] != weights) == (changes and weights != "both")
