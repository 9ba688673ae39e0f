"""Reads from a model's files how it embeds a text or scores a pair of texts.

The files are those of sentence-transformers: `modules.json` lists what follows the model, each step with a folder of
its own, and `config_sentence_transformers.json` has the prompts that go before texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from ...cluster.errors import ModelLoadError
from .source import read_json, read_json_list

MODULES = "modules.json"
PROMPTS = "config_sentence_transformers.json"
PROCESSING = "sentence_bert_config.json"

_POOLINGS = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
_OLDER_NAMES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_BIDIRECTIONAL = "its attention is bidirectional ({}), and only causal models are supported"


@dataclass(frozen=True)
class SentenceModules:
    """The steps after a model that embeds or scores texts. The defaults are for models whose files do not say.

    Attributes:
        pooling: how the hidden states make the embedding: `last`, `mean` or `cls` (the first).
        normalizes: whether embeddings have length 1.
        include_prompt: whether a prompt's tokens count for the mean and for the first token.
        stated: whether the files name the pooling.
        score: ids of the tokens whose logits make a score, one or two as in `PoolingRequest`; empty for none.
        prompts: texts that precede the input, by name; `default_prompt` is used if a request names none.
        generation_prompt: whether a pair's template ends where the answer begins.
        refusal: why the model embeds no texts, "" if it does.
    """

    pooling: str = "last"
    normalizes: bool = True
    include_prompt: bool = True
    stated: bool = False
    score: tuple[int, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    generation_prompt: bool = True
    refusal: str = ""


def read_sentence_modules(folder: Path) -> SentenceModules:
    """Reads the files in a model's folder. A problem with them becomes the `refusal`."""
    try:
        prompts, default = _prompts(folder)
        found = _modules(folder) | _processing(folder)
        refusal = _is_bidirectional(read_json(folder / "config.json"))
        return SentenceModules(**found, prompts=prompts, default_prompt=default, refusal=refusal)
    except ModelLoadError as error:
        return SentenceModules(refusal=error.message)


def _modules(folder: Path) -> dict[str, Any]:
    if not (folder / MODULES).is_file():
        return {}
    found: dict[str, Any] = {}
    normalizes = False
    for module in read_json_list(folder / MODULES):
        kind = str(module.get("type", "")).rpartition(".")[2] if isinstance(module, dict) else ""
        if kind == "Transformer":
            continue
        if kind == "Normalize":
            normalizes = True
        elif kind == "Pooling":
            found |= _pooling(_config_of(folder, module))
        elif kind == "LogitScore":
            found["score"] = _score(_config_of(folder, module))
        else:
            raise ModelLoadError(f"its embeddings go through a module that is not supported here: {kind or module}")
    return {**found, "normalizes": normalizes} if found.get("stated") else found


def _config_of(folder: Path, module: Mapping[str, Any]) -> dict[str, Any]:
    path = PurePosixPath(str(module.get("path", "")))
    if len(path.parts) != 1 or path.parts[0] in ("..", "/"):
        raise ModelLoadError(f"{MODULES} names a folder that is none of the model's: {path}")
    return read_json(folder / path / "config.json")


def _pooling(config: Mapping[str, Any]) -> dict[str, Any]:
    given = config.get("pooling_mode")
    modes = given if isinstance(given, list) else [given] if given else []
    modes = modes or [mode for name, mode in _OLDER_NAMES.items() if config.get(name)] or ["mean"]
    if len(modes) > 1 or modes[0] not in _POOLINGS:
        raise ModelLoadError(f"its pooling is not supported here: {', '.join(map(str, modes))}")
    include_prompt = config.get("include_prompt") is not False
    return {"pooling": _POOLINGS[modes[0]], "include_prompt": include_prompt, "stated": True}


def _score(config: Mapping[str, Any]) -> tuple[int, ...]:
    ids = [config.get("true_token_id"), config.get("false_token_id")]
    if type(ids[0]) is not int or type(ids[1]) not in (int, type(None)):
        raise ModelLoadError("its LogitScore names no tokens")
    return tuple(token for token in ids if token is not None)


def _prompts(folder: Path) -> tuple[dict[str, str], str]:
    if not (folder / PROMPTS).is_file():
        return {}, ""
    config = read_json(folder / PROMPTS)
    given = config.get("prompts")
    prompts = {name: text for name, text in given.items() if isinstance(text, str)} if isinstance(given, dict) else {}
    return prompts, prompts.get(str(config.get("default_prompt_name")), "")


def _processing(folder: Path) -> dict[str, Any]:
    if not (folder / PROCESSING).is_file():
        return {}
    given: Any = read_json(folder / PROCESSING)
    for name in ("processing_kwargs", "chat_template"):
        given = given.get(name) if isinstance(given, dict) else None
    return {"generation_prompt": isinstance(given, dict) and given.get("add_generation_prompt") is True}


def _is_bidirectional(config: Mapping[str, Any]) -> str:
    """Returns the refusal if a config says that tokens see later ones, else ""."""
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, dict) else {}):
        if part.get("is_causal") is False:
            return _BIDIRECTIONAL.format("is_causal: false")
        if part.get("use_bidirectional_attention"):
            return _BIDIRECTIONAL.format("use_bidirectional_attention")
    return ""
