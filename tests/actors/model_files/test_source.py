"""Downloading from the Hub, against a stand-in for it on loopback: the same client, the same cache, the same model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from tests.worlds.hub import COMMIT, RECALL, Hub, running_hub

NOWHERE = "http://127.0.0.1:9"
OFFLINE = {"HF_HUB_OFFLINE": "1"}
SCRIPT = """
import json, os, shutil, sys
from satchel.actors.model_files import source
from satchel.cluster.errors import ModelLoadError
if "FREE_BYTES" in os.environ:
    shutil.disk_usage = lambda path: shutil._ntuple_diskusage(10**9, 0, int(os.environ["FREE_BYTES"]))
seen = []
progress = lambda what, fraction: seen.append(fraction)
try:
    if sys.argv[2:]:
        folder = source.resolve_adapter(sys.argv[1], progress)
    else:
        folder = source.resolve(sys.argv[1], progress, code="CODE" in os.environ, speech="SPEECH" in os.environ)
    print(json.dumps({"folder": str(folder), "seen": seen}))
except ModelLoadError as error:
    print(json.dumps({"error": error.message}))
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub() as server:
        yield server


def resolve(
    url: str,
    cache: Path,
    source: str = "owner/model",
    *,
    adapter: bool = False,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    # The Hub's client reads the environment while it is imported.
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, source, *(["adapter"] if adapter else [])],
        env={**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(cache), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_a_model_is_downloaded_once_with_progress_and_found_offline(hub: Hub, tmp_path: Path):
    """The progress is of all bytes: it never falls and ends at 1. What is there is not fetched again."""
    first = resolve(hub.url, tmp_path)
    fractions = [fraction for fraction in first["seen"] if fraction is not None]
    assert fractions == sorted(fractions) and fractions[-1] == 1.0
    assert len(hub.bodies) == len(hub.fetched)
    assert (Path(first["folder"]) / "model.safetensors").read_bytes() == RECALL["model.safetensors"]
    fetched = len(hub.bodies)
    assert resolve(hub.url, tmp_path)["folder"] == first["folder"]
    assert len(hub.bodies) == fetched
    for environment in (OFFLINE, {}):
        assert resolve(NOWHERE, tmp_path, environment=environment)["folder"] == first["folder"]


def test_an_interrupted_download_goes_on_where_it_broke(hub: Hub, tmp_path: Path):
    """The client writes pieces of 10 MiB, so what came before the last whole one is not asked for again."""
    whole = len(RECALL["model.safetensors"])
    hub.cut_after = whole - 1000
    answer = resolve(hub.url, tmp_path)
    ranges = [asked for name, asked in hub.bodies if name == "model.safetensors"]
    assert ranges == [None, f"bytes={10 * 2**20}-"]
    assert (Path(answer["folder"]) / "model.safetensors").read_bytes() == RECALL["model.safetensors"]
    assert [fraction for fraction in answer["seen"] if fraction is not None][-1] == 1.0


def test_a_second_try_fetches_only_what_the_first_one_lacked(hub: Hub, tmp_path: Path):
    hub.refuses["model.safetensors"] = ("GET", 500, "")
    hub.refuses_after = hub.files.keys() - {"model.safetensors", "README.md"}
    failed = resolve(hub.url, tmp_path)
    assert failed["error"].startswith("owner/model cannot be downloaded: ") and "500" in failed["error"]
    before = hub.fetched
    assert "tokenizer.json" in before
    hub.refuses.clear()
    hub.bodies.clear()
    assert resolve(hub.url, tmp_path)["folder"]
    assert hub.fetched == {"model.safetensors"}


def test_offline_without_the_model_says_what_to_do(hub: Hub, tmp_path: Path):
    for environment, says in [
        (OFFLINE, "HF_HUB_OFFLINE keeps it from being downloaded"),
        ({}, "the Hub cannot be reached: connect once to download it"),
    ]:
        answer = resolve(NOWHERE, tmp_path, environment=environment)
        assert answer["error"].startswith("owner/model is not in the local Hub cache, and ") and says in answer["error"]
    hub.refuses["model.safetensors"] = ("GET", 500, "")
    resolve(hub.url, tmp_path)
    answer = resolve(hub.url, tmp_path, environment=OFFLINE)
    assert answer["error"].startswith("owner/model is only in part in the local Hub cache, and HF_HUB_OFFLINE")


@pytest.mark.parametrize(
    ("source", "refuses", "says"),
    [
        ("owner/nothing", {}, "the Hub has no owner/nothing, or it is private: check the name"),
        ("owner/model@v9", {}, "owner/model has no revision 'v9' on the Hub"),
        ("owner/model", {"": ("HEAD", 403, "GatedRepo")}, "owner/model is gated: accept its terms at http://"),
        ("owner/model", {"": ("GET", 503, "")}, "owner/model cannot be downloaded: "),
        ("owner/mo--del", {}, "'owner/mo--del' is neither a folder nor a Hub id"),
        ("owner/model@", {}, "'owner/model@' is neither a folder nor a Hub id"),
        ("owner/model/more", {}, "'owner/model/more' is neither a folder nor a Hub id"),
    ],
)
def test_every_refusal_is_one_clear_sentence(
    hub: Hub, tmp_path: Path, source: str, refuses: dict[str, tuple[str, int, str]], says: str
):
    hub.refuses = refuses
    answer = resolve(hub.url, tmp_path, source)
    assert answer["error"].startswith(says) and "\n" not in answer["error"]


def test_code_is_downloaded_where_it_is_trusted(hub: Hub, tmp_path: Path):
    hub.files["own.py"] = b""
    for environment in ({}, {"CODE": "1"}):
        folder = Path(resolve(hub.url, tmp_path, environment=environment)["folder"])
        assert (folder / "own.py").exists() is bool(environment)


@pytest.mark.slow
def test_a_revision_is_another_snapshot(hub: Hub, tmp_path: Path):
    folders = {resolve(hub.url, tmp_path, source)["folder"] for source in ("owner/model", "owner/model@v2")}
    assert {Path(folder).name for folder in folders} == {COMMIT, "b" * 40}
    offline = resolve(hub.url, tmp_path, "owner/model@v2", environment=OFFLINE)
    assert Path(offline["folder"]).name == "b" * 40


def test_too_little_room_on_the_disk_is_found_before_the_first_byte(hub: Hub, tmp_path: Path):
    answer = resolve(hub.url, tmp_path, environment={"FREE_BYTES": "5000000"})
    assert re.match(r"owner/model takes 0\.01 GB more on the disk, of which 0\.01 GB are free at ", answer["error"])
    assert not hub.bodies


def test_a_repository_that_is_no_model_is_found_before_the_first_byte(hub: Hub, tmp_path: Path):
    del hub.files["config.json"]
    assert resolve(hub.url, tmp_path)["error"] == "owner/model on the Hub has no config.json"
    assert not hub.bodies


def test_only_what_the_model_needs_is_fetched(hub: Hub, tmp_path: Path):
    """Not the same weights in another format or layout, and of folders only what says how sentences are embedded;
    offline the choice is the same."""
    weights = hub.files.pop("model.safetensors")
    hub.files |= {
        "model-00001-of-00001.safetensors": weights,
        "model.safetensors": b"the same weights once more",
        "consolidated.safetensors": b"and once more",
        "pytorch_model.bin": b"and once more",
        "README.md": b"words",
        "onnx/config.json": b"{}",
        "modules.json": b"[]",
        "1_Pooling/config.json": b"{}",
        "2_Dense/model.safetensors": b"weights of something else",
        "model.safetensors.index.json": json.dumps(
            {"weight_map": {"a": "model-00001-of-00001.safetensors", "b": "model-00001-of-00001.safetensors"}}
        ).encode(),
    }
    answer = resolve(hub.url, tmp_path)
    unwanted = {"model.safetensors", "consolidated.safetensors", "pytorch_model.bin", "README.md", "onnx/config.json"}
    unwanted.add("2_Dense/model.safetensors")
    assert hub.fetched == hub.files.keys() - unwanted
    # As where an earlier version, which did not want this file, has fetched the model.
    (Path(answer["folder"]) / "1_Pooling" / "config.json").unlink()
    assert resolve(hub.url, tmp_path, environment=OFFLINE)["folder"] == answer["folder"]


def test_an_index_left_over_from_another_layout_hides_no_weights(hub: Hub, tmp_path: Path):
    hub.files["model.safetensors.index.json"] = json.dumps(
        {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    ).encode()
    folder = resolve(hub.url, tmp_path)["folder"]
    assert (Path(folder) / "model.safetensors").is_file()
    assert resolve(hub.url, tmp_path, environment=OFFLINE)["folder"] == folder


def test_of_a_model_that_makes_images_all_components_are_fetched(hub: Hub, tmp_path: Path):
    wanted = {
        "model_index.json": b"{}",
        "scheduler/scheduler_config.json": b"{}",
        "tokenizer/tokenizer.json": b"{}",
        "transformer/config.json": b"{}",
        "transformer/diffusion_pytorch_model.safetensors": b"w" * (9 * 2**20),
        "vae/config.json": b"{}",
        "vae/model.safetensors": b"weights",
    }
    hub.files = {**wanted, "README.md": b"words", "vae/pytorch_model.bin": b"other", "preview/cube.png": b"picture"}
    answer = resolve(hub.url, tmp_path)
    folder = Path(answer["folder"])
    assert hub.fetched <= wanted.keys()
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} == wanted.keys()
    assert resolve(hub.url, tmp_path, environment=OFFLINE)["folder"] == answer["folder"]


def test_of_a_model_of_speech_folders_and_weights_of_any_name_are_fetched(hub: Hub, tmp_path: Path):
    wanted = {
        "config.json": b"{}",
        "weights.safetensors": b"weights",
        "tokenizer.model": b"pieces",
        "voices/af_heart.safetensors": b"a voice",
        "speech_tokenizer/config.json": b"{}",
        "speech_tokenizer/model.safetensors": b"a codec",
    }
    hub.files = {**wanted, "README.md": b"words", "own.py": b"code", "model.pth": b"other"}
    speech = {"SPEECH": "1"}
    # As the actor does it: it finds out from the config that it is one.
    resolve(hub.url, tmp_path)
    answer = resolve(hub.url, tmp_path, environment=speech)
    folder = Path(answer["folder"])
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} == wanted.keys()
    assert resolve(hub.url, tmp_path, environment=speech | OFFLINE)["folder"] == answer["folder"]


@pytest.mark.slow
def test_an_adapter_is_two_files(hub: Hub, tmp_path: Path):
    hub.files |= {"adapters.safetensors": b"a", "adapter_config.json": b"{}", "0000100_adapters.safetensors": b"old"}
    answer = resolve(hub.url, tmp_path, adapter=True)
    assert (
        {path.name for path in Path(answer["folder"]).iterdir()}
        == hub.fetched
        == {"adapters.safetensors", "adapter_config.json"}
    )
    del hub.files["adapters.safetensors"]
    answer = resolve(hub.url, tmp_path / "other", adapter=True)
    assert answer["error"] == "owner/model on the Hub has no adapters.safetensors"
