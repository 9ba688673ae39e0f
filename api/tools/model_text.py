"""The parts of a model's text side that this package needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

Render = Callable[..., str]
"""Renders a conversation, as `text.templates.template.Template.render`. Raises InvalidRequest if it refuses it."""


class Encoder(Protocol):
    """A model's tokenizer; see `text.tokenizer`."""

    name: str
    hidden_tokens: frozenset[int]
    end_tokens: frozenset[int]

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


class ChatTemplate(Protocol):
    """A model's chat template as its author wrote it; see `text.templates.bare_template`."""

    name: str
    turn_ends: list[str]
    is_harmony: bool

    def source(self) -> str: ...

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
        *,
        generation_prompt: bool = True,
    ) -> str: ...
