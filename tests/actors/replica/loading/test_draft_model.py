"""Which models may draft for another one."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from satchel.actors.model_files.text.vocabularies import difference
from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.loading import draft_model, models
from satchel.actors.replica.loading.draft_model import load_draft_model
from satchel.actors.replica.proving.pieces import Pieces
from satchel.cluster.errors import ModelLoadError, NoRoom
from tests.worlds.models.families import write_model


def refusal(folder: Path, loaded: LoadedModel) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load_draft_model(str(folder), loaded, progress=lambda what, fraction: None)
    return caught.value.message


def write_tokenizer(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    data = json.loads((folder / "tokenizer.json").read_text())
    change(data)
    (folder / "tokenizer.json").write_text(json.dumps(data))
    return folder


def test_a_model_with_another_token_does_not_draft(loaded: LoadedModel, tmp_path: Path):
    def swap(data: dict[str, Any]) -> None:
        vocabulary = data["model"]["vocab"]
        first, second = list(vocabulary)[300:302]
        vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]

    folder = write_tokenizer(write_model(tmp_path, "llama"), swap)
    assert "its tokenizer is another one (token " in refusal(folder, loaded)


def test_added_tokens_count_and_further_ones_do_not(loaded: LoadedModel, tmp_path: Path):
    folder = write_model(tmp_path, "llama")
    further = {"id": 5000, "content": "<further>"}
    assert difference(write_tokenizer(folder, lambda data: data["added_tokens"].append(further)), loaded.folder) == ""
    write_tokenizer(folder, lambda data: data["added_tokens"][0].update(content="<other>"))
    assert "<other>" in difference(folder, loaded.folder)
    write_tokenizer(folder, lambda data: [data["added_tokens"].clear(), data["model"].update(vocab={})])
    assert "no tokenizer.json with a vocabulary" in difference(folder, loaded.folder)


def test_what_does_not_attend_to_all_tokens_does_not_draft(loaded: LoadedModel, tmp_path: Path):
    assert "not plain attention" in refusal(write_model(tmp_path, "qwen3_next"), loaded)


def test_code_in_its_folder_is_not_run(loaded: LoadedModel, tmp_path: Path):
    folder = write_model(tmp_path, "llama", model_file="own.py")
    (folder / "own.py").write_text("raise SystemExit('it ran')")
    assert "own.py" in refusal(folder, loaded)


def test_a_damaged_folder_is_refused_in_words(loaded: LoadedModel, tmp_path: Path):
    folder = write_model(tmp_path, "llama")
    (folder / "model.safetensors").write_bytes(b"")
    assert str(folder) in refusal(folder, loaded) or "model.safetensors" in refusal(folder, loaded)


def test_a_model_that_is_not_drafted_has_no_drafting_model(loaded: LoadedModel):
    undrafted = replace(loaded, unbatched=True)
    assert undrafted.undrafted in refusal(loaded.folder, undrafted)


def test_it_is_claimed_before_it_is_read(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch):
    def refuse(nbytes: int) -> None:
        assert nbytes > 100_000
        raise NoRoom("no room")

    monkeypatch.setattr(draft_model, "load_checkpoint", lambda *_, **__: pytest.fail("it was read"))
    with pytest.raises(NoRoom):
        load_draft_model(str(loaded.folder), loaded, progress=lambda *_: None, claim=refuse)
    monkeypatch.setattr(models, "device_bytes", lambda **_: 1000)
    with pytest.raises(NoRoom, match="end other programs"):
        load_draft_model(str(loaded.folder), loaded, progress=lambda *_: None)


def test_a_smaller_vocabulary_is_all_that_it_drafts(loaded: LoadedModel, tmp_path: Path):
    made = load_draft_model(
        str(write_model(tmp_path, "llama", vocab_size=2000)), loaded, progress=lambda what, fraction: None
    )
    assert made.known == 2000 < loaded.vocabulary_size
    assert made.kv_bytes == 2 * 2 * 2 * 32 * 4 * 1024 * 17


def test_where_it_could_change_bits_it_does_not_draft_if_it_must_be_exact(loaded: LoadedModel, tmp_path: Path):
    """Nor does a head: no load tests what it changes."""

    def refused(folder: Path, alike: int) -> str:
        way = replace(loaded.way, alike=alike)
        with pytest.raises(ModelLoadError, match="drafts must be exact") as caught:
            load_draft_model(str(folder), replace(loaded, way=way), progress=lambda *_: None, exact=True)
        return caught.value.message

    assert "could change bits" in refused(loaded.folder, 0)
    folder = write_model(tmp_path, "llama")
    (folder / "config.json").write_text('{"model_type": "eagle3"}')
    assert "heads" in refused(folder, 32)


def test_requests_are_served_while_it_is_downloaded(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch):
    served = threading.Event()

    def download(source: str, progress: object) -> Path:
        assert served.wait(10)
        return loaded.folder

    monkeypatch.setattr(draft_model, "resolve", download)
    load_draft_model("owner/small", loaded, progress=lambda *_: None, pieces=Pieces(served.set))
