"""`satchel list` and `satchel rm`: models on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from satchel.actors.model_files.source import EMBEDDED
from satchel.api.cli.main import app
from satchel.api.cli.models.disk import complete_source, precision_of
from satchel.api.requests.backend import ReplicaStats
from satchel.cluster.errors import SatchelError

from ..conftest import Served


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
    return folder


def downloaded(cache: Path, name: str = "small", *, complete: bool = True) -> Path:
    """Lays a model out as the Hub's client does, and returns the folder of its snapshot."""
    root = cache / f"models--owner--{name}"
    snapshot = root / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (root / "blobs").mkdir()
    contents = {
        "config.json": b'{"quantization": {"bits": 4, "group_size": 64}}',
        "model.safetensors": b"x" * 1000,
    }
    for name, content in contents.items():
        whole = complete or name == "config.json"
        blob = root / "blobs" / (f"{name}-blob" if whole else "etag.incomplete")
        blob.write_bytes(content)
        if whole:
            (snapshot / name).symlink_to(blob)
    return snapshot


def satchel(*arguments: str, home: Path) -> Result:
    return CliRunner().invoke(app, [*arguments, "--home", str(home)], env={"COLUMNS": "80"})


def listed(home: Path) -> dict[str, dict[str, Any]]:
    result = satchel("list", "--json", home=home)
    assert result.exit_code == 0, result.output
    return {each["source"]: each for each in json.loads(result.output)}


def refusal(result: Result) -> str:
    assert isinstance(result.exception, SatchelError), result.output
    return result.exception.message


def test_models_that_ship_and_downloaded_ones_are_listed(cache: Path, tmp_path: Path) -> None:
    snapshot = downloaded(cache)
    downloaded(cache, "begun", complete=False)
    (cache / "models--owner--tokenizer" / "snapshots" / ("b" * 40)).mkdir(parents=True)
    found = listed(tmp_path / "home")
    assert [name for name in found if name.startswith("embedded:")] == [
        "embedded:recall",
        "embedded:script",
        "embedded:shapes",
    ]
    assert found["owner/small"] == {
        "source": "owner/small",
        "place": "hub",
        "folder": str(snapshot),
        "bytes": 1047,
        "weights": "4 bits",
        "complete": True,
        "served_as": None,
        "aliases": [],
        "state": None,
        "progress": None,
    }
    assert not found["owner/begun"]["complete"] and "owner/tokenizer" not in found
    text = satchel("list", home=tmp_path / "home").output
    assert "owner/small" in text and "downloaded in part" in text


async def test_what_is_served_is_listed_with_its_name_and_stays(served: Served, backend: Any, cache: Path) -> None:
    snapshot = downloaded(cache)
    mine = cache.parent / "mine"
    mine.mkdir()
    (mine / "config.json").write_text("{}")
    backend.replicas = [
        ReplicaStats("m-0", "m", True, node="local", folder=str(snapshot)),
        ReplicaStats("n-0", "n", True, node="local", folder=str(EMBEDDED / "recall")),
        ReplicaStats("o-0", "o", True, node="local", folder=str(mine)),
        ReplicaStats("p-0", "p", True, node="mac1", folder="/elsewhere"),
    ]
    found = {each["source"]: each["served_as"] for each in json.loads(await served.says("list", "--json"))}
    assert found == {
        "embedded:recall": "n",
        "embedded:script": None,
        "embedded:shapes": None,
        "owner/small": "m",
        str(mine): "o",
    }
    said = await served.refuses("rm", "owner/small", "--yes")
    assert said == "owner/small is served as m: `satchel models unload m` first" and snapshot.is_dir()


async def test_nothing_is_removed_while_a_model_still_loads(served: Served, backend: Any, cache: Path) -> None:
    snapshot = downloaded(cache)
    backend.replicas = [ReplicaStats("m-0", "m", False, node="local")]
    assert "is still loading" in await served.refuses("rm", "owner/small", "--yes")
    assert snapshot.is_dir()


def test_removing_asks_first(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot, home = downloaded(cache), tmp_path / "home"
    assert refusal(satchel("rm", "owner/small", home=home)) == "--yes removes owner/small (1.0 kB) without a question"
    assert snapshot.is_dir()
    result = satchel("rm", "owner/small@main", "--yes", home=home)
    assert result.output == "Removed owner/small: 1.0 kB are free again\n"
    assert not (cache / "models--owner--small").exists()


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("owner/smal", "the Hub's cache has no owner/smal; did you mean owner/small?"),
        ("other/thing", "the Hub's cache has no other/thing; there are: owner/small"),
        ("embedded:recall", "embedded:recall ships with Satchel and stays"),
    ],
)
def test_only_what_is_in_the_cache_can_be_removed(cache: Path, tmp_path: Path, model: str, says: str) -> None:
    downloaded(cache)
    assert refusal(satchel("rm", model, "--yes", home=tmp_path / "home")) == says


def test_sources_complete(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    downloaded(cache)
    (tmp_path / "owned").mkdir()
    (tmp_path / "own.yaml").touch()
    (tmp_path / "own.txt").touch()
    monkeypatch.chdir(tmp_path)
    assert list(complete_source("ow")) == ["owner/small", "own.yaml", "owned"]
    assert list(complete_source("embedded:re")) == ["embedded:recall"]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"quantization": {"bits": 4, "model.layers.0": {"bits": 8}}}, "4 and 8 bits"),
        ({"quantization": {"bits": 2, "a": {"bits": 4}, "b": {"bits": 6}}}, "2 to 6 bits"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"text_config": {"dtype": "bfloat16"}}, "bfloat16"),
        ({}, ""),
    ],
)
def test_the_precision_of_weights_is_read_from_the_config(config: dict[str, Any], says: str) -> None:
    assert precision_of(config) == says
