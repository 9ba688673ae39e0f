"""The date that a chat template shows, which can be another day's than today.

transformers lets templates call `strftime_now(format)` for the present time, and passes no functions of a caller's to
them. So a macro of that name is put before the template: it looks up what each of the template's formats gives.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache

_CALLS = re.compile(r"\bstrftime_now\s*\(")
_FORMATS = re.compile(r"\bstrftime_now\s*\(\s*(?:\"([^\"\\]*)\"|'([^'\\]*)')\s*\)")

# `+%}` leaves the template's first line break alone.
_MACRO = "{%- macro strftime_now(format) -%}{{ satchel_dates[format] }}{%- endmacro +%}"


@dataclass(frozen=True)
class DatedTemplate:
    """A template that shows the date by these `formats`; `text` is the template with the macro before it."""

    text: str
    formats: tuple[str, ...]

    def variables(self, at: datetime) -> dict[str, dict[str, str]]:
        """Returns what `text` must be rendered with, beside its own variables, to show the date of `at`."""
        return {"satchel_dates": {format: at.strftime(format) for format in self.formats}}


def shows_date(template: str) -> bool:
    """Returns whether a template shows the date."""
    return _CALLS.search(template) is not None


@lru_cache(maxsize=64)
def dated(template: str) -> DatedTemplate | None:
    """Returns the template so that its date can be chosen; None if it shows none, or in formats that it computes."""
    formats = [first or second for first, second in _FORMATS.findall(template)]
    if not formats or len(formats) < len(_CALLS.findall(template)):
        return None
    return DatedTemplate(_MACRO + template, tuple(dict.fromkeys(formats)))
