"""OpenAI's Harmony format, which GPT-OSS writes: an answer is messages on channels. Computation only.

::

    <|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>final<|message|>content<|return|>
    <|channel|>commentary to=functions.name <|constrain|>json<|message|>{"key": "value"}<|call|>

The prompt ends with ``<|start|>assistant``. Templates write a call of an earlier turn with its tool before the channel:
``<|start|>assistant to=functions.name<|channel|>commentary json<|message|>…``. See
https://cookbook.openai.com/articles/openai-harmony.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

START, CHANNEL, MESSAGE, END, CALL = "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"
CONSTRAIN = "<|constrain|>"
MARKERS = (START, CHANNEL, MESSAGE, END, CALL, CONSTRAIN)

THOUGHT = f"{CHANNEL}analysis{MESSAGE}"
NEXT = f"{END}{START}assistant"
FINAL = f"{CHANNEL}final{MESSAGE}"
CALL_FORMS = (
    (" to=functions.", f"{CHANNEL}commentary json{MESSAGE}"),
    (f"{CHANNEL}commentary to=functions.", f" {CONSTRAIN}json{MESSAGE}"),
)
"""What stands before and after a call's name: as templates write calls of earlier turns, and as models do."""


def is_harmony(template: str, vocabulary: Mapping[str, int]) -> bool:
    """Whether a model with this chat template and these tokens answers in the format."""
    return CHANNEL in template and MESSAGE in template and all(marker in vocabulary for marker in MARKERS)


def has_calls(template: str) -> bool:
    """Whether its template shows tools."""
    return "tools" in template and "functions." in template


def for_template(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages as templates of the format take them: reasoning is `thinking`, and a message has one call, with
    its result after it."""
    told: list[dict[str, Any]] = []
    moved: set[int] = set()
    for place, message in enumerate(messages):
        if place in moved:
            continue
        said = dict(message)
        if reasoning := said.pop("reasoning_content", None):
            said["thinking"] = reasoning
        calls = said.get("tool_calls") or ()
        if calls and said.get("thinking") and said.get("content"):
            # Templates refuse both beside a call.
            said["thinking"], said["content"] = f"{said['thinking']}\n\n{said['content']}", ""
        if len(calls) < 2:
            told.append(said)
            continue
        results = _results(messages, place)
        for index, call in enumerate(calls):
            rest = {"role": said["role"], "content": ""} if index else said
            told.append({**rest, "tool_calls": [call]})
            if (at := results.get(call.get("id"))) is not None:
                moved.add(at)
                told.append(dict(messages[at]))
    return told


def _results(messages: Sequence[Mapping[str, Any]], place: int) -> dict[str | None, int]:
    """Returns the places of the tools' messages that follow a message, by their calls' ids."""
    following = takewhile(lambda at: messages[at]["role"] == "tool", range(place + 1, len(messages)))
    return {messages[at].get("tool_call_id"): at for at in following}
