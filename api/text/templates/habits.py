"""What a chat template drops or changes in a growing conversation, found by rendering a short one. Takes milliseconds
when a model is loaded.

An agent's KV is reused as far as its next prompt begins with the same tokens as the last one. But a template may render
the same messages in another way once others follow: without reasoning, with the system message elsewhere, with a new
date.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from ....cluster.errors import InvalidRequest
from .dates import shows_date

Messages = list[dict[str, Any]]

_DAY = datetime(2024, 3, 8, 9, 30)

# Texts that no template contains.
_SYSTEM, _ASKED, _THOUGHT, _RESULT, _SAID = "Salmagundi.", "Quixotry?", "Zyzzyva.", "Lagniappe.", "Brouhaha."
_ASKED_NEXT, _ASKED_LAST = "Vellichor?", "Sonder?"

_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "gongoozle",
        "description": "Pettifogs.",
        "parameters": {"type": "object", "properties": {"what": {"type": "string"}}},
    },
}
# Some templates want an id of nine characters.
_CALL = {"id": "call00001", "type": "function", "function": {"name": "gongoozle", "arguments": {"what": "canals"}}}

_SWITCHES: dict[str, bool] = {
    "clear_thinking": False,
    "drop_thinking": False,
    "keep_past_thinking": True,
    "preserve_thinking": True,
    "truncate_history_thinking": False,
}
"""Variables with which published templates show the reasoning of earlier turns."""


@dataclass(frozen=True)
class TemplateHabits:
    """What a template drops or changes in a growing conversation.

    Attributes:
        drops_thinking: it drops the reasoning of turns before the last user message.
        drops_steps: it drops even the reasoning of the steps of one turn, between its tool calls.
        moves: what it shows only before the last user message: `system message`, `tools`.
        rewrites: it changes a user message in another way once the next one follows.
        unstable: it changes the conversation from its beginning with every turn.
        dated: it shows the date.
        passing_end: the end of a prompt that the template adds only for the next answer, such as `<think>`; later
            prompts do not have it there.
        switch: variables of the template, as JSON, with which it does not drop reasoning; "" if none is known.
    """

    drops_thinking: bool = False
    drops_steps: bool = False
    moves: tuple[str, ...] = ()
    rewrites: bool = False
    unstable: bool = False
    dated: bool = False
    passing_end: str = ""
    switch: str = ""

    @property
    def notes(self) -> list[str]:
        """Sentences that say what is prefilled again and why; none for a template that drops nothing."""
        notes: list[str] = []
        if self.unstable:
            notes.append("the template changes what was said before: each turn reads the conversation again")
        elif self.moves:
            what = " and ".join(self.moves)
            notes.append(
                f"the template moves the {what} to the last user message: after each one the turn before is read again"
            )
        elif self.rewrites:
            notes.append("the template changes a user message once another follows: then its turn is read again")
        if self.drops_steps:
            notes.append("the template drops thinking at once: after each step its answer is read again")
        elif self.drops_thinking:
            notes.append(
                "the template drops thinking of earlier turns: after each user message the last turn's answer, with "
                "its calls and their results, is read again"
                + (f" (not with `template_kwargs: {self.switch}`)" if self.switch else "")
            )
        if self.dated:
            notes.append("the template shows the date: where it changes, the conversation is read again")
        return notes


def habits_of(
    render: Callable[..., str], template: str, template_kwargs: Mapping[str, Any], *, thinks: bool
) -> TemplateHabits:
    """Returns what a template drops with these variables, as far as it renders the sample conversation.

    Args:
        render: as `Template.render`.
        template: its source.
        thinks: whether the model has markers of reasoning.

    Raises:
        Exception: whatever a template does.
    """
    dated = shows_date(template)
    habits = _SampleConversation(render, template_kwargs).habits(thinks=thinks, dated=dated)
    if habits.drops_thinking:
        for name, value in _SWITCHES.items():
            if name in template and name not in template_kwargs:
                kept = _SampleConversation(render, {**template_kwargs, name: value}).habits(thinks=thinks, dated=dated)
                if not kept.drops_thinking:
                    return replace(habits, switch=json.dumps({name: value}))
    return habits


class _SampleConversation:
    """A short conversation that is rendered after each of its turns."""

    def __init__(self, render: Callable[..., str], template_kwargs: Mapping[str, Any]) -> None:
        self._template, self._kwargs = render, template_kwargs
        system: Messages = [{"role": "system", "content": _SYSTEM}]
        user = {"role": "user", "content": _ASKED}
        # Some templates do not support system messages.
        self._opening = [*system, user] if self._render([*system, user]) else [user]
        self._answer = {"role": "assistant", "content": _SAID, "reasoning_content": _THOUGHT}
        self._next = {"role": "user", "content": _ASKED_NEXT}

    def habits(self, *, thinks: bool, dated: bool) -> TemplateHabits:
        first, second = self._render(self._opening), self._render([*self._opening, self._answer, self._next])
        if not first or not second:
            return TemplateHabits(dated=dated)
        last = {"role": "user", "content": _ASKED_LAST}
        third = self._render([*self._opening, self._answer, self._next, self._answer, last])
        answered = self._render([*self._opening, self._answer], generation_prompt=False)
        thinks = thinks or _THOUGHT in answered or _THOUGHT in second
        # Compares the first turn in later prompts: if it changes, nothing behind it can be reused either.
        unstable = bool(third) and _common(second, third) < _end_of(second, _ASKED)
        step, after = self._with_tools()
        thinks = thinks or (bool(step) and _THOUGHT in step[1])
        later = [(first, second), *([(step[0], after)] if step and after else [])]
        changes = not unstable and any(_common(prompt, then) < _end_of(prompt, _ASKED) for prompt, then in later)
        moves = {"system message": _SYSTEM, "tools": _TOOL["function"]["description"]} if changes else {}
        moved = [what for what, said in moves.items() if any(then.rfind(said) > then.find(_ASKED) for _, then in later)]
        return TemplateHabits(
            drops_thinking=thinks and not all(_THOUGHT in then for then in (second, after) if then),
            drops_steps=thinks and bool(step) and _THOUGHT not in step[1],
            moves=tuple(moved),
            rewrites=changes and not moved,
            unstable=unstable,
            dated=dated,
            passing_end=first[shared:] if (shared := _common(first, second)) >= _end_of(first, _ASKED) else "",
        )

    def _with_tools(self) -> tuple[tuple[str, str] | None, str]:
        """Returns the prompts of a turn with a call of a tool, before and after it, and of the turn after that; nothing
        if the template refuses them."""
        tools = [_TOOL]
        call = {"role": "assistant", "content": "", "reasoning_content": _THOUGHT, "tool_calls": [_CALL]}
        result = {"role": "tool", "content": _RESULT, "tool_call_id": _CALL["id"], "name": "gongoozle"}
        stepped = [*self._opening, call, result]
        before, between = self._render(self._opening, tools), self._render(stepped, tools)
        after = self._render([*stepped, self._answer, self._next], tools)
        return ((before, between) if before and between else None), after

    def _render(
        self, messages: Sequence[dict[str, Any]], tools: Messages | None = None, *, generation_prompt: bool = True
    ) -> str:
        """Returns the rendered text, "" if the template refuses it."""
        try:
            return self._template(list(messages), tools, self._kwargs, generation_prompt=generation_prompt, at=_DAY)
        except InvalidRequest:
            return ""


def _end_of(prompt: str, said: str) -> int:
    return prompt.rfind(said) + len(said)


def _common(prompt: str, later: str) -> int:
    pairs = enumerate(zip(prompt, later, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(prompt), len(later)))
