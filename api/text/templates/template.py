"""A model's chat template as it is used here: what it has no place for is written as text."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from ...tools.formats import harmony
from ...tools.template_tools import TemplateTools
from .bare_template import BareTemplate
from .habits import TemplateHabits, habits_of

logger = logging.getLogger(__name__)

_HABITS_MAX = 64
"""For how many sets of variables a template's habits are cached."""


class Template:
    """Renders one model's conversations. Thread-safe.

    Args:
        tools: what it does with tools.
    """

    def __init__(self, bare: BareTemplate, tools: TemplateTools) -> None:
        self.bare, self.tools = bare, tools
        self.source = bare.source()
        self.think_start, self.think_end, self.has_thinking = bare.think_start, bare.think_end, bare.has_thinking
        self.is_harmony, self.shows_date = bare.is_harmony, bare.shows_date
        self._habits: dict[str, TemplateHabits] = {}

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        generation_prompt: bool = True,
        at: datetime | None = None,
    ) -> str:
        """Returns the prompt text of a conversation. It has the breaks that the given texts have (see
        `control_tokens`).

        Args:
            template_kwargs: variables for the template, such as `enable_thinking`.
            generation_prompt: whether the text ends with the beginning of the assistant's message.
            at: the time whose date the template shows, as far as that can be chosen; None for now.

        Raises:
            InvalidRequest: the model has no chat template, its template refuses these messages, or a variable has a
                reserved name.
        """
        if self.bare.writes is None:
            messages = self.tools.shown(messages)
        if tools and not self.tools.shows_tools:
            messages, tools = self.tools.with_tools(messages, tools), None
        return self.bare.render(messages, tools, template_kwargs, generation_prompt=generation_prompt, at=at)

    def habits(self, template_kwargs: Mapping[str, Any] | None = None) -> TemplateHabits:
        """Returns what the chat template drops in a growing conversation. The first call with these variables takes
        milliseconds. Never raises."""
        variables = template_kwargs or {}
        key = json.dumps(variables, sort_keys=True, default=str)
        if (known := self._habits.get(key)) is None:
            if len(self._habits) >= _HABITS_MAX:
                self._habits.clear()
            try:
                known = habits_of(self.render, self.source, variables, thinks=self.has_thinking)
            except Exception:
                # A template is a foreign program; its failure is no reason not to serve the model.
                logger.warning("the chat template of %r could not be tried", self.bare.name, exc_info=True)
                known = TemplateHabits()
            self._habits[key] = known
        return known

    def ends_in_thought(self, prompt: str) -> bool:
        """Returns whether `prompt` ends inside an open reasoning block, so that the answer begins with reasoning."""
        if not self.has_thinking:
            return False
        at = prompt.rfind(self.think_start)
        return at >= 0 and not prompt[at + len(self.think_start) :].strip()

    def may_think(self, prompt: str) -> bool:
        """Returns whether an answer to `prompt` may begin with reasoning, because `prompt` does not end with a closed
        block."""
        return self.is_harmony or (self.has_thinking and not prompt.rstrip().endswith(self.think_end))

    def prefilled(self, prompt: str, beginning: str) -> str:
        """Returns `prompt` with the `beginning` of the answer's content behind it; a block of reasoning that `prompt`
        has opened is closed first."""
        if self.is_harmony:
            prompt += harmony.FINAL
        elif self.ends_in_thought(prompt):
            prompt = f"{prompt.rstrip()}\n\n{self.think_end}\n\n"
        return prompt + beginning
