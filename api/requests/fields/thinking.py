"""Whether and how much a model thinks: read from the fields of all protocols, returned as variables of chat templates.

Every switch says on, off or nothing, and some also a degree of effort. The protocol's own names count first, then the
others in the order of `SWITCHES`; `chat_template_kwargs` are the template's variables themselves, and count before all
others. Budgets are not enforced, but a budget of 0 switches thinking off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
    """Variables for the template, and the names of fields that contradict them and are ignored."""

    kwargs: dict[str, Any] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Said:
    """What one field says: `on` or off, and which `effort`; None for nothing. `unread` are its parts that are
    ignored."""

    on: bool | None = None
    effort: str | None = None
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
    on, effort, ignored = kwargs.get(ENABLED), kwargs.get(EFFORT), list[str]()
    for name in dict.fromkeys([*own, *SWITCHES]):
        if name == _KWARGS or (value := given.get(name)) is None:
            continue
        said = _READERS[name](value, name)
        on = said.on if on is None else on
        effort = said.effort if effort is None else effort
        if said.on not in (None, on) or said.effort not in (None, effort):
            ignored.append(name)
        ignored += said.unread
    made = {name: value for name, value in ((ENABLED, on), (EFFORT, effort)) if value is not None}
    return Thinking({**made, **kwargs}, ignored)


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
    return _Said(_TYPES[kind] if budget.on is None else budget.on)


def _reasoning(value: Any, where: str) -> _Said:
    """That of the Responses API and of OpenRouter: `effort`, `enabled`, and a budget."""
    if isinstance(value, bool):
        return _Said(value)
    if not isinstance(value, dict):
        raise wrong(where, "must be an object")
    enabled, effort, budget = value.get("enabled"), value.get("effort"), value.get("max_tokens")
    said = _effort(effort, f"{where}.effort") if effort is not None else _Said()
    on = said.on if enabled is None else _switch(enabled, f"{where}.enabled").on
    if on is None:
        on = _budget(budget, f"{where}.max_tokens").on
    known = ("effort", "enabled", "max_tokens", "summary", "generate_summary")
    unread = tuple(f"{where}.{name}" for name, each in value.items() if name not in known and each is not None)
    return _Said(on, said.effort, unread)


def _budget(value: Any, where: str) -> _Said:
    if value is None:
        return _Said()
    if type(tokens := whole(value)) is not int or tokens < -1:
        raise wrong(where, "must be a number of tokens")
    return _Said(False if tokens == 0 else None)


def _budget_alone(value: Any, where: str) -> _Said:
    said = _budget(value, where)
    return said if said.on is not None else _Said(unread=(where,))


_READERS: Mapping[str, Callable[[Any, str], _Said]] = {
    "enable_thinking": _switch,
    "think": _think,
    "thinking": _thinking,
    "reasoning": _reasoning,
    "reasoning_effort": _effort,
    "output_config.effort": _degree,
    "thinking_budget": _budget_alone,
    "reasoning_budget": _budget_alone,
}
