"""Text sides that are loaded before their replicas are there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from satchel.actors.model_files.source import EMBEDDED
from satchel.api.text import ahead
from satchel.api.text.ahead import TextsAhead
from satchel.api.text.model import load_text_model
from satchel.cluster.config.config import Model
from satchel.cluster.errors import ModelLoadError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EMBEDDED / "recall", tmp_path / "recall"))


def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns the folders that are loaded from now on."""
    loaded = list[str]()

    def load(folder: str | Path, *, name: str = "", trusted: bool = False) -> object:
        loaded.append(str(folder))
        return load_text_model(folder, name=name, trusted=trusted)

    monkeypatch.setattr(ahead, "load_text_model", load)
    return loaded


def test_a_text_side_is_loaded_once(folder: Path, monkeypatch: pytest.MonkeyPatch):
    loaded, texts = loads(monkeypatch), TextsAhead()
    texts.begin([Model(name="m", source=str(folder)), Model(name="later", source="embedded:recall", load="request")])
    text = texts.load(str(folder), name="m")
    assert loaded == [str(folder)] and text.name == "m"
    # It is not kept: the generator does that.
    assert texts.load(str(folder), name="m") is not text and len(loaded) == 2


def test_changed_files_are_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch):
    loaded, texts = loads(monkeypatch), TextsAhead()
    texts.begin([Model(name="m", source=str(folder))])
    os.utime(folder / "tokenizer.json", (1e9, 1e9))
    texts.load(str(folder), name="m")
    assert loaded == [str(folder)] * 2


def test_a_text_side_that_may_not_run_code_is_not_one_that_may(folder: Path, monkeypatch: pytest.MonkeyPatch):
    loaded, texts = loads(monkeypatch), TextsAhead()
    texts.begin([Model(name="m", source=str(folder), trust_remote_code=True)])
    texts.load(str(folder), name="m", trusted=False)
    assert loaded == [str(folder)] * 2


def test_errors_come_from_the_later_loading(folder: Path):
    texts = TextsAhead()
    (folder / "tokenizer.json").unlink()
    texts.begin([Model(name="m", source=str(folder)), Model(name="gone", source="embedded:gone")])
    with pytest.raises(ModelLoadError, match=r"no vocabulary|does not load"):
        texts.load(str(folder), name="m")
