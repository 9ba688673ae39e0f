"""What a model's files say of how its texts become embeddings or scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from satchel.actors.model_files.sentence_modules import SentenceModules, read_sentence_modules

TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
SCORE = {"idx": 1, "path": "1_LogitScore", "type": "sentence_transformers.cross_encoder.modules.LogitScore"}
DENSE = {"idx": 2, "path": "2_Dense", "type": "sentence_transformers.models.Dense"}


def read(folder: Path, modules: Any = None, **files: Any) -> SentenceModules:
    contents = {"config.json": {}, **{name.replace("__", "/") + ".json": content for name, content in files.items()}}
    if modules is not None:
        contents["modules.json"] = modules
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return read_sentence_modules(folder)


def test_files_that_say_nothing_leave_the_last_token_and_length_1(tmp_path: Path):
    found = read(tmp_path)
    assert (found.pooling, found.normalizes, found.stated, found.score, found.refusal) == ("last", True, False, (), "")


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        # As Qwen3-Embedding has it, and older and newer files.
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False, "word_embedding_dimension": 64}, "last"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode": "lasttoken", "embedding_dimension": 64}, "last"),
        ({"pooling_mode": ["mean"]}, "mean"),
        ({}, "mean"),
    ],
)
def test_the_pooling_is_the_files(tmp_path: Path, config: dict[str, Any], pooling: str):
    for modules, normalizes in (([TRANSFORMER, POOLING, NORMALIZE], True), ([TRANSFORMER, POOLING], False)):
        found = read(tmp_path, modules, **{"1_Pooling__config": config})
        assert (found.pooling, found.normalizes, found.stated, found.refusal) == (pooling, normalizes, True, "")
        assert found.include_prompt
    assert not read(tmp_path, modules, **{"1_Pooling__config": {**config, "include_prompt": False}}).include_prompt


def test_prompts_and_the_one_that_is_used_where_nobody_names_one(tmp_path: Path):
    prompts = {"query": "Instruct: find\nQuery:", "document": "", "odd": 5}
    config = {"prompts": prompts, "default_prompt_name": "query"}
    found = read(tmp_path, [TRANSFORMER, POOLING], **{"1_Pooling__config": {}, "config_sentence_transformers": config})
    assert found.prompts == {"query": "Instruct: find\nQuery:", "document": ""}
    assert found.default_prompt == "Instruct: find\nQuery:"
    assert not read(tmp_path, None, config_sentence_transformers={**config, "default_prompt_name": None}).default_prompt


def test_a_score_of_two_tokens_or_of_one(tmp_path: Path):
    for config, score in (({"true_token_id": 5, "false_token_id": 6}, (5, 6)), ({"true_token_id": 5}, (5,))):
        found = read(tmp_path, [TRANSFORMER, SCORE], **{"1_LogitScore__config": config})
        assert (found.score, found.pooling, found.normalizes, found.stated) == (score, "last", True, False)
    given = {"processing_kwargs": {"chat_template": {"add_generation_prompt": True}}}
    assert read(tmp_path, sentence_bert_config=given).generation_prompt
    assert not read(tmp_path, sentence_bert_config={"max_seq_length": 5}).generation_prompt


@pytest.mark.parametrize(
    ("files", "why"),
    [
        (
            {"modules": [TRANSFORMER, POOLING, DENSE], "1_Pooling__config": {}},
            "a module that is not supported here: Dense",
        ),
        ({"modules": [TRANSFORMER, POOLING], "1_Pooling__config": {"pooling_mode": "max"}}, "not supported here: max"),
        ({"modules": [TRANSFORMER, POOLING], "1_Pooling__config": {"pooling_mode": ["cls", "mean"]}}, "cls, mean"),
        ({"modules": [TRANSFORMER, POOLING]}, "1_Pooling/config.json cannot be read"),
        ({"modules": [{**POOLING, "path": "../other"}]}, "a folder that is none of the model's"),
        ({"modules": [{**POOLING, "path": ".."}]}, "a folder that is none of the model's"),
        ({"modules": {}}, "holds no JSON list"),
        ({"modules": ["x"]}, "a module that is not supported here: x"),
        ({"modules": "{"}, "cannot be read"),
        ({"modules": [SCORE], "1_LogitScore__config": {"true_token_id": "yes"}}, "names no tokens"),
        ({"config": {"is_causal": False}}, "attention is bidirectional (is_causal: false)"),
        ({"config": {"text_config": {"use_bidirectional_attention": True}}}, "(use_bidirectional_attention)"),
    ],
)
def test_what_is_not_done_is_said(tmp_path: Path, files: dict[str, Any], why: str):
    assert why in read(tmp_path, **files).refusal
