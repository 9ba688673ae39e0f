"""Code that a model's folder brings runs only where the config trusts it, and code of another repository never."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from satchel.actors.model_files.media.processors import PictureProcessor
from satchel.actors.model_files.source import EMBEDDED
from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.loading import models
from satchel.api.text.model import load_text_model
from satchel.cluster.errors import ModelLoadError

TOKENIZER = "from transformers import PreTrainedTokenizerFast\nclass Own(PreTrainedTokenizerFast):\n    pass\n"


class Foreign:
    """A copy of an embedded model that brings code. What runs is written down by the code itself."""

    def __init__(self, folder: Path, model: str) -> None:
        self.folder = shutil.copytree(EMBEDDED / model, folder / model)
        self._ran = folder / "ran"

    @property
    def ran(self) -> list[str]:
        return self._ran.read_text().split() if self._ran.exists() else []

    def write(self, path: Path, code: str = "") -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"open({str(self._ran)!r}, 'a').write({path.name!r} + '\\n')\n{code}")

    def say(self, file: str, **entries: Any) -> None:
        path = self.folder / file
        path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | entries))

    def with_tokenizer(self, reference: str) -> None:
        """`reference` as an `auto_map` has it, for the tokenizer and so for the processor."""
        self.say("tokenizer_config.json", auto_map={"AutoTokenizer": [None, reference]}, tokenizer_class="Own")

    def load(self, *, trusted: bool = False) -> LoadedModel:
        return models.load(
            str(self.folder),
            context_tokens_max=None,
            progress=lambda what, fraction: None,
            warm=False,
            trust_remote_code=trusted,
        )


@pytest.fixture(autouse=True)
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where transformers copies code to, and looks for other repositories."""
    from transformers import dynamic_module_utils

    cache = tmp_path / "cache"
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(cache / "modules"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return cache


@pytest.fixture(params=["recall", "shapes"])
def foreign(request: pytest.FixtureRequest, tmp_path: Path) -> Foreign:
    return Foreign(tmp_path, request.param)


def test_a_models_own_architecture_is_refused_by_name(foreign: Foreign):
    foreign.say("config.json", model_file="own_model.py")
    foreign.write(foreign.folder / "own_model.py")
    with pytest.raises(ModelLoadError, match=r"own_model\.py.*trust_remote_code: true"):
        foreign.load()
    assert foreign.ran == []


def test_a_trusted_architecture_lies_in_the_models_folder(foreign: Foreign):
    foreign.say("config.json", model_file="../own_model.py")
    foreign.write(foreign.folder.parent / "own_model.py")
    with pytest.raises(ModelLoadError, match="not in its own folder"):
        foreign.load(trusted=True)
    assert foreign.ran == []


def test_a_trusted_architecture_runs(foreign: Foreign):
    foreign.say("config.json", model_file="own_model.py")
    foreign.write(foreign.folder / "own_model.py", "raise ValueError('it ran')")
    with pytest.raises(ModelLoadError, match="it ran"):
        foreign.load(trusted=True)
    assert set(foreign.ran) == {"own_model.py"}


@pytest.mark.parametrize("file", ["tokenizer_config.json", "processor_config.json", "preprocessor_config.json"])
def test_a_processors_code_is_refused_by_name(tmp_path: Path, file: str):
    """Some of mlx-vlm's tell transformers to trust it."""
    foreign = Foreign(tmp_path, "shapes")
    foreign.say(file, auto_map={"AutoProcessor": "own.Own", "AutoTokenizer": [None, "own.Own"]}, tokenizer_class="Own")
    foreign.write(foreign.folder / "own.py", TOKENIZER)
    with pytest.raises(ModelLoadError, match=r"brings code of its own \(own\.py\)"):
        foreign.load()
    with pytest.raises(ModelLoadError, match=r"brings code of its own \(own\.py\)"):
        load_text_model(foreign.folder)
    assert foreign.ran == []


def test_a_trusted_processor_is_loaded_with_its_code(tmp_path: Path):
    foreign = Foreign(tmp_path, "shapes")
    foreign.with_tokenizer("own.Own")
    foreign.write(foreign.folder / "own.py", TOKENIZER)
    assert foreign.load(trusted=True).vision is not None
    assert load_text_model(foreign.folder, trusted=True).pictures is not None
    assert foreign.ran == ["own.py"]


@pytest.mark.parametrize("trusted", [False, True])
def test_code_of_another_repository_never_runs(tmp_path: Path, hub_cache: Path, trusted: bool):
    foreign = Foreign(tmp_path, "shapes")
    commit = "0" * 40
    other = hub_cache / "hub" / "models--else--code"
    foreign.write(other / "snapshots" / commit / "own.py", TOKENIZER)
    (other / "refs").mkdir()
    (other / "refs" / "main").write_text(commit)
    foreign.with_tokenizer("else/code--own.Own")
    with pytest.raises(ModelLoadError, match=r"not in its own folder \(else/code, own\.py\)"):
        foreign.load(trusted=trusted)
    with pytest.raises(ModelLoadError, match=r"not in its own folder \(else/code, own\.py\)"):
        load_text_model(foreign.folder, trusted=trusted)
    assert foreign.ran == []


def test_what_is_not_imported_is_not_refused(foreign: Foreign):
    """Many repositories still name the code of a family that the libraries have known for long."""
    foreign.say("config.json", auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"})
    foreign.write(foreign.folder / "own.py")
    assert foreign.load().vocabulary_size > 0
    load_text_model(foreign.folder)
    assert foreign.ran == []


def test_trust_ends_with_the_model_it_was_for(tmp_path: Path):
    trusted, other = Foreign(tmp_path / "a", "shapes"), Foreign(tmp_path / "b", "shapes")
    for each in (trusted, other):
        each.with_tokenizer("own.Own")
        each.write(each.folder / "own.py", TOKENIZER)
    PictureProcessor.load(trusted.folder, trusted=True)
    for each in (other, trusted):
        with pytest.raises(ModelLoadError, match=r"own\.py"):
            PictureProcessor.load(each.folder)
    assert (trusted.ran, other.ran) == (["own.py"], [])


def test_a_processor_that_trusts_every_folder_is_refused_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    foreign = Foreign(tmp_path, "shapes")
    foreign.with_tokenizer("own.Own")
    foreign.write(foreign.folder / "own.py", TOKENIZER)
    monkeypatch.setattr("satchel.actors.model_files.foreign_code._PROCESSOR_FILES", ())
    monkeypatch.setattr("mlx_vlm.utils.load_processor", lambda folder, *_, **__: load_trusting(folder))
    with pytest.raises(ModelLoadError, match=r"own\.py"):
        PictureProcessor.load(foreign.folder)
    assert foreign.ran == []


def load_trusting(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
