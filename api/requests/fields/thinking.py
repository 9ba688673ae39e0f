"""Whether and how much a model thinks: read from the fields of all protocols, returned as variables of chat templates.

Every switch says on, off or nothing, and some also a degree of effort. The protocol's own names count first, then the
others in the order of `SWITCHES`; `chat_template_kwargs` are the template's variables themselves, and count before all
others. A budget limits how many tokens of reasoning are drawn; one of 0 also switches thinking off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from ..field_aliases import SWITCHES
from ..options import whole
from ..request_body import wrong

EFFORTS = MappingProxyType(
    {"none": "low", "minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
)
"""The degree of effort that templates know, for each that clients send."""

ENABLED = "enable_thinking"
EFFORT = "reasoning_effort"

_WITHOUT = ("none", "minimal")
_KWARGS = "chat_template_kwargs"
_KWARGS_MAX = 100
_TYPES = MappingProxyType({"enabled": True, "adaptive": True, "auto": None, "disabled": False})


@dataclass(frozen=True)
class Thinking:
    """Variables for the template, the most tokens of reasoning (None for no limit), and the names of fields that
    contradict them and are ignored."""

    kwargs: dict[str, Any] = field(default_factory=dict)
    budget: int | None = None
    ignored: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Said:
    """What one field says: `on` or off, which `effort`, and the `budget` in tokens; None for nothing. `unread` are its
    parts that are ignored."""

    on: bool | None = None
    effort: str | None = None
    budget: int | None = None
    unread: tuple[str, ...] = ()


def read_thinking(given: Mapping[str, Any], own: Sequence[str] = ()) -> Thinking:
    """Reads the fields that say whether and how much a model thinks.

    Args:
        given: their values by the names in `SWITCHES`.
        own: the protocol's own names, which count first.

    Raises:
        InvalidRequest: a field is malformed; `param` is the place.
    """
    kwargs = _kwargs(given.get(_KWARGS))
    on, effort, budget, ignored = kwargs.get(ENABLED), kwargs.get(EFFORT), None, list[str]()
    for name in dict.fromkeys([*own, *SWITCHES]):
        if name == _KWARGS or (value := given.get(name)) is None:
            continue
        said = _READERS[name](value, name)
        on = said.on if on is None else on
        effort = said.effort if effort is None else effort
        budget = said.budget if budget is None else budget
        if any(
            own not in (None, taken) for own, taken in ((said.on, on), (said.effort, effort), (said.budget, budget))
        ):
            ignored.append(name)
        ignored += said.unread
    made = {name: value for name, value in ((ENABLED, on), (EFFORT, effort)) if value is not None}
    return Thinking({**made, **kwargs}, budget, ignored)


def _kwargs(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > _KWARGS_MAX:
        raise wrong(_KWARGS, f"must be an object of at most {_KWARGS_MAX} variables")
    return value


def _switch(value: Any, where: str) -> _Said:
    if not isinstance(value, bool):
        raise wrong(where, "must be a boolean")
    return _Said(value)


def _effort(value: Any, where: str) -> _Said:
    if not isinstance(value, str) or value not in EFFORTS:
        raise wrong(where, f"must be one of {', '.join(map(repr, EFFORTS))}")
    return _Said(False if value in _WITHOUT else None, EFFORTS[value])


def _degree(value: Any, where: str) -> _Said:
    return _Said(effort=_effort(value, where).effort)


def _think(value: Any, where: str) -> _Said:
    """Ollama's: on, off, or a degree, which is on."""
    if isinstance(value, bool):
        return _Said(value)
    if not isinstance(value, str) or value not in EFFORTS:
        raise wrong(where, f"must be true, false or one of {', '.join(map(repr, EFFORTS))}")
    return _Said(value not in _WITHOUT, EFFORTS[value])


def _thinking(value: Any, where: str) -> _Said:
    """Anthropic's, which DeepSeek, GLM and Kimi have too: `type`, and a budget."""
    if isinstance(value, bool):
        return _Said(value)
    if not isinstance(value, dict):
        raise wrong(where, "must be an object with a type")
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in _TYPES:
        raise wrong(f"{where}.type", f"must be one of {', '.join(map(repr, _TYPES))}")
    budget = _budget(value.get("budget_tokens"), f"{where}.budget_tokens")
    return replace(budget, on=_TYPES[kind] if budget.on is None else budget.on)


def _reasoning(value: Any, where: str) -> _Said:
    """That of the Responses API and of OpenRouter: `effort`, `enabled`, and a budget."""
    if isinstance(value, bool):
        return _Said(value)
    if not isinstance(value, dict):
        raise wrong(where, "must be an object")
    enabled, effort = value.get("enabled"), value.get("effort")
    budget = _budget(value.get("max_tokens"), f"{where}.max_tokens")
    said = _effort(effort, f"{where}.effort") if effort is not None else _Said()
    on = said.on if enabled is None else _switch(enabled, f"{where}.enabled").on
    if on is None:
        on = budget.on
    known = ("effort", "enabled", "max_tokens", "summary", "generate_summary")
    unread = tuple(f"{where}.{name}" for name, each in value.items() if name not in known and each is not None)
    return _Said(on, said.effort, budget.budget, unread)


def _budget(value: Any, where: str) -> _Said:
    if value is None:
        return _Said()
    if type(tokens := whole(value)) is not int or tokens < -1:
        raise wrong(where, "must be a number of tokens")
    # Some clients send -1 for no limit.
    return _Said(on=False if tokens == 0 else None, budget=None if tokens < 0 else tokens)


_READERS: Mapping[str, Callable[[Any, str], _Said]] = {
    "enable_thinking": _switch,
    "think": _think,
    "thinking": _thinking,
    "reasoning": _reasoning,
    "reasoning_effort": _effort,
    "output_config.effort": _degree,
    "thinking_budget": _budget,
    "reasoning_budget": _budget,
}
