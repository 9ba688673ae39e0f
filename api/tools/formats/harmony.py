"""OpenAI's Harmony format, which GPT-OSS writes: an answer is messages on channels. Computation only.

::

    <|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>final<|message|>content<|return|>
    <|channel|>commentary to=functions.name <|constrain|>json<|message|>{"key": "value"}<|call|>

The prompt ends with ``<|start|>assistant``. Templates write a call of an earlier turn with its tool before the channel:
``<|start|>assistant to=functions.name<|channel|>commentary json<|message|>…``. See
https://cookbook.openai.com/articles/openai-harmony.
"""

from __future__ import annotations

from collections.abc import Mapping

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
"""The texts before and after a call's name: as templates write calls of earlier turns, and as models write them."""


def is_harmony(template: str, vocabulary: Mapping[str, int]) -> bool:
    """Returns whether a model with this chat template and these tokens answers in the format."""
    return CHANNEL in template and MESSAGE in template and all(marker in vocabulary for marker in MARKERS)
