"""A model's chat template as its author wrote it: renders a conversation, or says why it cannot."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from ....actors.patches import inner_tokenizer, renders_by_code
from ....cluster.errors import InvalidRequest
from ...tools.formats import harmony
from ...tools.formats.call_format import CallFormat
from ...tools.formats.harmony_calls import HarmonyCalls
from ..control_tokens import BREAK, ESCAPED_BREAK, unbroken
from .dates import dated, shows_date
from .thinking_variables import with_thinking


class BareTemplate:
    """The chat template of one model. Thread-safe.

    Args:
        wrapper: mlx-lm's `TokenizerWrapper`.
        name: the model's.
        writes: the format in which calls of earlier turns are written, if the template leaves them out.

    Attributes:
        think_start, think_end: the markers of reasoning; "" if the model has none.
        turn_ends: the texts of the tokens that end an answer.
        is_harmony: whether the model answers in OpenAI's Harmony format.
        writes: the format that writes the calls of earlier turns for the template; None if the template writes them.
    """

    def __init__(self, wrapper: Any, name: str = "", writes: CallFormat | None = None) -> None:
        self.name = name
        self._wrapper = wrapper
        self._tokenizer = inner_tokenizer(wrapper)
        self.think_start: str = wrapper.think_start or ""
        self.think_end: str = wrapper.think_end or ""
        self.turn_ends: list[str] = [
            self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            for token in wrapper.eos_token_ids
        ]
        self.is_harmony = harmony.is_harmony(self.source(), self._tokenizer.get_vocab())
        self.writes = HarmonyCalls() if self.is_harmony else writes
        self.shows_date = shows_date(self.source())

    @property
    def has_thinking(self) -> bool:
        return bool(self.think_start)

    def source(self, tools: list[dict[str, Any]] | None = None) -> str:
        """Returns the template itself; "" if there is none, or the conversation is rendered by Python code."""
        if (
            not self._wrapper.has_chat_template
            or renders_by_code(self._wrapper)
            or not _renders_templates(self._tokenizer)
        ):
            return ""
        try:
            return self._tokenizer.get_chat_template(tools=tools or None)
        except ValueError:
            # There are several templates, but none for conversations like this one.
            return ""

    @property
    def sources(self) -> str:
        """The templates for conversations without and with tools."""
        return "\n".join({self.source(), self.source([{}])})

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        generation_prompt: bool = True,
        at: datetime | None = None,
    ) -> str:
        """As `Template.render`, but only with what the template itself has a place for."""
        if not self._wrapper.has_chat_template:
            raise InvalidRequest(f"the model {self.name!r} has no chat template; use /v1/completions", param="model")
        if self.writes is not None:
            messages = self.writes.write(messages)
        extra = dict(template_kwargs or {})
        if extra and (taken := _taken_names() & extra.keys()):
            raise InvalidRequest(
                f"chat_template_kwargs: {min(taken)!r} cannot be set by a caller", param="chat_template_kwargs"
            )
        if extra:
            extra = with_thinking(self.source(tools), extra)
        if at is not None and (template := dated(self.source(tools))) is not None:
            extra |= {"chat_template": template.text} | template.variables(at)
        try:
            rendered = self._applied(messages, tools, {"add_generation_prompt": generation_prompt, **extra})
        except Exception as error:
            reason = str(error) or type(error).__name__
            raise InvalidRequest(f"the model's chat template refused: {unbroken(reason)}", param="messages") from error
        if ESCAPED_BREAK in rendered and ("ensure_ascii" in self.sources or not self.sources.strip()):
            # The template may have written breaks as ASCII JSON escapes; if Python code renders it, that is not known.
            return re.sub(r"(?<!\\)((?:\\\\)*)\\udbff", rf"\1{BREAK}", rendered)
        return rendered

    def _applied(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, extra: Any) -> str:
        """Renders the conversation. May raise anything, because a template is a program of the model's author."""
        apply = self._wrapper.apply_chat_template
        try:
            return apply(messages, tools=tools or None, tokenize=False, **extra)
        except Exception as error:
            if "'functions' is undefined" in str(error):
                # Old templates call the tools `functions`, and take them as text.
                listed = json.dumps([tool["function"] for tool in tools or ()], ensure_ascii=False)
                old = {"functions": listed, "datetime": f"{datetime.now():%b %d %Y}"}
                return apply(messages, tools=tools or None, tokenize=False, **old, **extra)
            if tools:
                raise
            # Some templates iterate over the tools without checking whether there are any.
            return apply(messages, tools=[], tokenize=False, **extra)


def _taken_names() -> set[str]:
    """Returns the template arguments that transformers and `render` set themselves."""
    from transformers import PreTrainedTokenizerBase

    return {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters, "messages", "conversations"}


def _renders_templates(tokenizer: Any) -> bool:
    from transformers import PreTrainedTokenizerBase

    return type(tokenizer).apply_chat_template is PreTrainedTokenizerBase.apply_chat_template
