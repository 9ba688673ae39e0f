"""The tokens that end an answer, read from the model's folder alone, so that replica and endpoint agree.

They are the tokens that config.json and generation_config.json name, the tokenizer's own, and the special token with
which the chat template ends an assistant's turn: a chat model writes that one even if its configs are still the base
model's.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from ..foreign_code import own_code_only
from .nulls import without_nulls

logger = logging.getLogger(__name__)

_CHANNEL = "<|channel|>"
"""The Harmony format's token between the parts of an answer. It does not end the answer."""

_SAID = "the answer's words"
_TURNS = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": _SAID}]


def read_end_tokens(folder: Path) -> frozenset[int]:
    """Returns the end-of-sequence tokens that the folder's files name; empty if there is none. A tokenizer may have one
    even if its files do not name it.

    Raises:
        ValueError: one of the model's configs is not JSON.
    """
    return _named(folder, _Numbers(folder))


def _named(folder: Path, numbers: _Numbers) -> frozenset[int]:
    tokens: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        data = _object(folder / name, needed=True)
        value = data.get("eos_token_id")
        if value is None and isinstance(text := data.get("text_config"), dict):
            value = text.get("eos_token_id")
        tokens.update(each for each in (value if isinstance(value, list) else [value]) if type(each) is int)
    for word in (_own_word(numbers.settings), _turn_end(folder, numbers)):
        if word and (token := numbers.token(word)) is not None:
            tokens.add(token)
    return frozenset(tokens)


def end_tokens(folder: Path, name: str, *, trusted: bool) -> frozenset[int]:
    """Returns every end-of-sequence token of the model `name`, that of its tokenizer's class included, for which the
    tokenizer is loaded if its files do not tell.

    Args:
        trusted: whether code in the folder may run.

    Raises:
        ValueError: one of the model's configs is not JSON.
        Exception: the tokenizer does not load, and no other file names an end token.
    """
    numbers = _Numbers(folder)
    tokens = _named(folder, numbers)
    if "eos_token" in numbers.settings:
        word = _own_word(numbers.settings)
        if not word or numbers.token(word) is not None:
            return tokens
    from transformers import AutoTokenizer

    with own_code_only(name, folder, trusted=trusted), without_nulls(folder) as read:
        try:
            own = AutoTokenizer.from_pretrained(read, trust_remote_code=trusted).eos_token_id
        except Exception as error:
            # Libraries raise any exception. The endpoint reports the problem, and a replica can continue without this
            # token.
            if not tokens:
                raise
            logger.warning("the tokenizer of %s does not load, so its own end token is not known: %s", name, error)
            return tokens
    return tokens if own is None else tokens | {own}


class _Numbers:
    """The numbers of a tokenizer's special words, and its `settings`: what tokenizer_config.json says. The tokenizer
    itself, which may be large, is read only if the settings are not enough."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.settings = _object(folder / "tokenizer_config.json")

    @cached_property
    def special(self) -> Mapping[str, int]:
        """The special tokens that were added to the vocabulary."""
        decoder = self.settings.get("added_tokens_decoder")
        said = {
            str(entry.get("content")): int(token)
            for token, entry in (decoder.items() if isinstance(decoder, dict) else ())
            if isinstance(entry, dict) and entry.get("special") and str(token).isdecimal()
        }
        return said or self._added

    @cached_property
    def _whole(self) -> dict[str, Any]:
        return _object(self._folder / "tokenizer.json")

    @cached_property
    def _added(self) -> dict[str, int]:
        return {
            str(entry.get("content")): token
            for entry in self._whole.get("added_tokens") or ()
            if isinstance(entry, dict) and entry.get("special") and type(token := entry.get("id")) is int
        }

    def token(self, word: str) -> int | None:
        """Returns the token that a word is, None if the files do not say."""
        if (token := self.special.get(word)) is not None:
            return token
        if (token := self._added.get(word)) is not None:
            return token
        model = self._whole.get("model")
        vocabulary = model.get("vocab") if isinstance(model, dict) else None
        return token if isinstance(vocabulary, dict) and type(token := vocabulary.get(word)) is int else None


def _own_word(settings: Mapping[str, Any]) -> str:
    """Returns the end-of-sequence token that a tokenizer's settings name, as text; "" for none."""
    word = settings.get("eos_token")
    word = word.get("content") if isinstance(word, dict) else word
    return word if isinstance(word, str) else ""


def _turn_end(folder: Path, numbers: _Numbers) -> str:
    """Returns the special token that the chat template puts after an assistant's text; "" for none."""
    if _CHANNEL in numbers.special or not (template := _template(folder, numbers.settings)):
        return ""
    from transformers.utils.chat_template_utils import render_jinja_template

    words: dict[str, Any] = {
        name: word if isinstance(word, str) else word.get("content", "")
        for name, word in numbers.settings.items()
        if name.endswith("_token") and isinstance(word, str | dict)
    }
    try:
        (rendered,), _ = render_jinja_template([_TURNS], chat_template=template, **words)
    except Exception as error:
        # A template is a program and may raise any error, for example that it needs tools.
        logger.debug("the chat template of %s does not show how a turn ends: %s", folder.name, error)
        return ""
    _, found, behind = rendered.rpartition(_SAID)
    behind = behind.lstrip()
    return max((word for word in numbers.special if found and word and behind.startswith(word)), key=len, default="")


def _template(folder: Path, settings: Mapping[str, Any]) -> str:
    """Returns the folder's chat template as transformers reads it; "" for none."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8", errors="replace")
    given = settings.get("chat_template") or _object(folder / "chat_template.json").get("chat_template")
    if isinstance(given, list):
        named = {each.get("name"): each.get("template") for each in given if isinstance(each, dict)}
        given = named.get("default")
    return given if isinstance(given, str) else ""


def _object(file: Path, *, needed: bool = False) -> dict[str, Any]:
    """Returns what a JSON file says; {} if there is none, or it is no object.

    Raises:
        ValueError: it is no JSON, and `needed`.
    """
    if not file.is_file():
        return {}
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        if needed:
            raise
        return {}
    return data if isinstance(data, dict) else {}
