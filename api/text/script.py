"""Scripted replies: a model with a `script.json` beside its weights answers with the texts in that file.

It is for trying agent programs, and for tests of the system below them. The model runs like any other, token by token,
with its KV cached, moved and reused; only its answers are constrained to the script by a grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...cluster.errors import InvalidRequest, ModelLoadError
from .tokenizer import Tokenizer

FILE = "script.json"
_GROUP = re.compile(r"\\(\d)")


@dataclass(frozen=True)
class ScriptedReply:
    """A reply: a text, and tool calls as (name, arguments). `otherwise` is whether no rule fits."""

    text: str
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    otherwise: bool = False


@dataclass(frozen=True)
class _Rule:
    """A rule. `after` is the role that is answered, `user` or `tool`; `pattern` is searched in its text. `calls` are
    arguments by the name of a tool: the first of these tools that the request has is called, or with `together` all of
    them, with the arguments that the tool has. `\\1` in a text is the pattern's first group."""

    after: str
    pattern: re.Pattern[str]
    text: str
    calls: Mapping[str, Any]
    together: bool = False


class Script:
    """A script's rules, of which the first that fits counts, and the reply if none fits."""

    def __init__(self, rules: Sequence[_Rule], otherwise: str) -> None:
        self._rules, self._otherwise = rules, otherwise

    @classmethod
    def read(cls, folder: Path) -> Script | None:
        """Reads a model's script; None if it has none.

        Raises:
            ModelLoadError: it is malformed.
        """
        try:
            given = json.loads((folder / FILE).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{folder / FILE} cannot be read: {error}") from error
        try:
            rules = [
                _Rule(
                    rule["after"],
                    re.compile(rule["pattern"], re.S),
                    rule.get("text", ""),
                    rule.get("calls", {}),
                    rule.get("together", False),
                )
                for rule in given["rules"]
            ]
            return cls(rules, str(given["otherwise"]))
        except (KeyError, TypeError, AttributeError, re.error) as error:
            raise ModelLoadError(f"{folder / FILE} is no script: {type(error).__name__} {error}") from error

    def reply(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> ScriptedReply:
        """Returns the next reply.

        Args:
            messages, tools: as chat templates take them.
        """
        offered = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
        after, said = _last_turn(messages)
        for rule in self._rules:
            found = rule.pattern.search(said) if rule.after == after else None
            if found is None:
                continue
            names = [name for name in rule.calls if name in offered]
            if not names and rule.calls:
                continue
            calls: list[tuple[str, dict[str, Any]]] = []
            for name in names if rule.together else names[:1]:
                has = offered[name].get("properties") or rule.calls[name]
                arguments = {key: value for key, value in rule.calls[name].items() if key in has}
                calls.append((name, _filled(arguments, found)))
            return ScriptedReply(_filled(rule.text, found), tuple(calls))
        return ScriptedReply(self._otherwise, otherwise=True)


def _last_turn(messages: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Returns the role and text since the last answer: the results of tools, or if there are none, the user's text."""
    turn: list[Mapping[str, Any]] = []
    for message in reversed(messages):
        if message["role"] == "assistant":
            break
        turn.insert(0, message)
    results = [message for message in turn if message["role"] == "tool"]
    spoken = results or [message for message in turn if message["role"] == "user"]
    return ("tool" if results else "user"), "\n".join(text for message in spoken for text in _texts(message))


def _texts(message: Mapping[str, Any]) -> Iterator[str]:
    content = message["content"]
    if isinstance(content, str):
        yield content
        return
    for part in content or ():
        if isinstance(part, Mapping) and isinstance(part.get("text"), str):
            yield part["text"]


def _filled(value: Any, found: re.Match[str]) -> Any:
    """Returns a JSON value with the groups of a match put into its texts."""
    if isinstance(value, str):
        return _GROUP.sub(lambda group: found[int(group[1])] or "", value)
    if isinstance(value, list):
        return [_filled(each, found) for each in value]
    if isinstance(value, dict):
        return {key: _filled(each, found) for key, each in value.items()}
    return value


def token_grammar(tokens: Sequence[int]) -> str:
    """Returns the grammar, in llguidance's Lark, that allows exactly these tokens."""
    return f"start: {' '.join(f'<[{token}]>' for token in tokens)}" if tokens else 'start: ""'


def answer_tokens(tokenizer: Tokenizer, prompt: str, conversation: str) -> list[int]:
    """Returns the tokens of an answer, without the one that ends it.

    Args:
        prompt: the rendered conversation, up to where the answer begins.
        conversation: the same with the answer.

    Raises:
        InvalidRequest: the template does not write answers where its prompts end.
    """
    if not conversation.startswith(prompt):
        raise InvalidRequest(f"the chat template of {tokenizer.name!r} cannot be scripted", param="model")
    tokens = tokenizer.encode(conversation[len(prompt) :])
    ends = [place for place, token in enumerate(tokens) if token in tokenizer.end_tokens]
    return tokens[: ends[0]] if ends else tokens
