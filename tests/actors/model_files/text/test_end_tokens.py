"""Endpoint and replica end answers at the same tokens: the configs', the tokenizer's own, and the template's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from satchel.actors.model_files.source import EMBEDDED
from satchel.actors.model_files.text.end_tokens import end_tokens, read_end_tokens
from satchel.api.text.model import load_text_model

START, OWN = 3066, 3067
"""<|im_start|> and <|im_end|> of the embedded models' tokenizer; the latter ends its turns."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(EMBEDDED / "script", tmp_path / "m")
    say(tmp_path / "m", "generation_config.json", eos_token_id=None)
    return tmp_path / "m"


def say(folder: Path, file: str, **more: Any) -> None:
    known = json.loads((folder / file).read_text(encoding="utf-8"))
    (folder / file).write_text(json.dumps(known | more), encoding="utf-8")


def both(folder: Path) -> frozenset[int]:
    """What the replica ends at, which is what the endpoint hides."""
    ends = end_tokens(folder, "m", trusted=False)
    assert load_text_model(folder).tokenizer.end_tokens == ends
    return ends


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        ({"eos_token_id": 3065}, {"eos_token_id": 3065}, {3065, OWN}),
        ({"eos_token_id": 3065}, {"eos_token_id": [3064, None]}, {3064, 3065, OWN}),
        ({"eos_token_id": [3065, 3066, None]}, {}, {3065, 3066, OWN}),
        ({"eos_token_id": None, "text_config": {"eos_token_id": 3065}}, {}, {3065, OWN}),
        ({"eos_token_id": None, "text_config": None}, {}, {OWN}),
    ],
)
def test_the_tokenizers_own_counts_beside_what_configs_name(folder: Path, config: Any, generation: Any, ends: set[int]):
    say(folder, "config.json", **config)
    say(folder, "generation_config.json", **generation)
    assert both(folder) == ends


@pytest.mark.parametrize("own", ["<|im_start|>", {"__type": "AddedToken", "content": "<|im_start|>", "special": True}])
def test_the_token_with_which_the_template_ends_a_turn_counts(folder: Path, own: Any):
    say(folder, "config.json", eos_token_id=START)
    say(folder, "tokenizer_config.json", eos_token=own)
    assert both(folder) == {START, OWN}


def test_a_template_that_ends_turns_with_text_adds_nothing(folder: Path):
    say(folder, "config.json", eos_token_id=START)
    say(folder, "tokenizer_config.json", eos_token="<|im_start|>")
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    for file in ("chat_template.jinja", "chat_template.json"):
        (folder / file).unlink(missing_ok=True)
    say(folder, "tokenizer_config.json", chat_template=template)
    assert both(folder) == {START}


def test_a_token_between_the_parts_of_an_answer_does_not_end_it(folder: Path):
    whole = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    entry = {"id": 3068, "content": "<|channel|>", "special": True, "single_word": False, "lstrip": False}
    whole["added_tokens"].append({**entry, "rstrip": False, "normalized": False})
    (folder / "tokenizer.json").write_text(json.dumps(whole), encoding="utf-8")
    say(folder, "config.json", eos_token_id=START)
    say(folder, "tokenizer_config.json", eos_token="<|im_start|>")
    assert read_end_tokens(folder) == {START}


def test_a_template_that_fails_and_a_tokenizer_that_is_damaged_leave_what_configs_name(folder: Path):
    say(folder, "config.json", eos_token_id=3065)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    assert read_end_tokens(folder) == {3065, OWN}
    (folder / "tokenizer.json").write_text("{")
    assert end_tokens(folder, "m", trusted=False) == {3065}


@pytest.mark.parametrize("name", ["auto_map", "added_tokens_decoder", "eos_token", "chat_template", "model_type"])
@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_a_null_is_as_good_as_nothing(folder: Path, file: str, name: str):
    known = json.loads((folder / file).read_text(encoding="utf-8"))
    (folder / file).write_text(json.dumps({key: value for key, value in known.items() if key != name}))
    absent = read_end_tokens(folder), load_text_model(folder).tokenizer.end_tokens
    say(folder, file, **{name: None})
    assert (read_end_tokens(folder), load_text_model(folder).tokenizer.end_tokens) == absent
