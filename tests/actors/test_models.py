"""Where models come from and what names them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from satchel.actors.replica import models
from satchel.cluster.errors import ModelLoadError


def quiet(what: str, fraction: float | None) -> None:
    return None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the embedded model."""
    return Path(shutil.copytree(models.EMBEDDED / "recall", tmp_path / "model"))


def test_the_embedded_model_is_small_and_loads_like_any_folder(folder: Path):
    size = sum(path.stat().st_size for path in (models.EMBEDDED / "recall").rglob("*"))
    assert size <= 12_000_000
    fractions: list[float | None] = []
    loaded = models.load(
        str(folder), context_tokens_max=2048, progress=lambda what, fraction: fractions.append(fraction)
    )
    assert fractions[0] is None
    known = [fraction for fraction in fractions if fraction is not None]
    assert known == sorted(known) and known[-1] == 1.0
    assert loaded.context_tokens == 2048
    assert loaded.dtype == "float32"
    assert loaded.model_id == models.model_id(models.EMBEDDED / "recall", "float32"), "the path is not the identity"


def test_whatever_changes_the_answer_changes_the_model_id(folder: Path):
    ids = {models.model_id(folder, "float32"), models.model_id(folder, "float16")}
    for name in ("config.json", "tokenizer_config.json"):
        data = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**data, "changed": True}))
        ids.add(models.model_id(folder, "float32"))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    ids.add(models.model_id(folder, "float32"))
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    ids.add(models.model_id(folder, "float32"))
    assert len(ids) == 6


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("embedded:nothing", "no embedded model 'nothing'; there are: recall"),
        ("/no/such/folder", "neither a folder nor a Hub id"),
        ("just-a-word", "neither a folder nor a Hub id"),
    ],
)
def test_a_source_that_is_nowhere_is_named(source: str, says: str):
    with pytest.raises(ModelLoadError, match=says):
        models.resolve(source, quiet)


def test_a_folder_without_a_model_is_named(tmp_path: Path):
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        models.resolve(str(tmp_path), quiet)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    with pytest.raises(ModelLoadError, match="cannot be loaded"):
        models.load(str(tmp_path), context_tokens_max=None, progress=quiet)


def test_a_hub_model_that_cannot_be_downloaded_says_what_to_do(monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError, match="connect once to download it"):
        models.resolve("mlx-community/Qwen3-0.6B-4bit", quiet)
