"""The variable with which a chat template switches thinking; each model family has its own.

Callers send `enable_thinking`, or a name that they know from another model. The template's own variable is set too, so
that the switch works under any of these names.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

_SWITCHES = ("enable_thinking", "thinking", "enable_reasoning", "reasoning", "think", "thinking_enabled")
_EFFORT = "reasoning_effort"
_MODES = {"thinking_mode": ("enabled", "disabled")}
"""Variables whose values are words, with the words for on and off."""


def with_thinking(template: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns variables for a template, with the one that switches its thinking under the template's own name."""
    said = next((given[name] for name in _SWITCHES if isinstance(given.get(name), bool)), None)
    if said is None:
        return dict(given)
    variables, more = _variables(template), dict[str, Any]()
    own = [name for name in _SWITCHES if name in variables]
    if any(name in given for name in own):
        return dict(given)
    if own:
        more = dict.fromkeys(own, said)
    else:
        for name, (on, off) in _MODES.items():
            if name in variables and name not in given and _quotes(template, word := on if said else off):
                more[name] = word
        if not more and not said and _EFFORT in variables and _quotes(template, "none"):
            # This template's effort is its switch.
            more[_EFFORT] = "none"
    return {**given, **more}


def _quotes(template: str, word: str) -> bool:
    return f"'{word}'" in template or f'"{word}"' in template


@lru_cache(maxsize=64)
def _variables(template: str) -> frozenset[str]:
    """Returns the variables that a template reads and does not set; none if it is not a template."""
    from jinja2 import Environment, TemplateError, meta

    # Removes transformers' own tags around assistants' texts, and allows loops that end early.
    bare = template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    bare = bare.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        return frozenset(meta.find_undeclared_variables(environment.parse(bare)))
    except TemplateError:
        return frozenset()
