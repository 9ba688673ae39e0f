"""The date that a chat template shows, which can be set to another day than today.

transformers lets templates call `strftime_now(format)` for the present time, and does not pass a caller's functions to
them. So a macro of that name is put before the template: it looks up the text for each of the template's formats.
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
        """Returns the additional variables with which `text` shows the date of `at`."""
        return {"satchel_dates": {format: at.strftime(format) for format in self.formats}}


def shows_date(template: str) -> bool:
    """Returns whether a template shows the date."""
    return _CALLS.search(template) is not None


@lru_cache(maxsize=64)
def dated(template: str) -> DatedTemplate | None:
    """Returns the template with a date that can be chosen; None if it shows no date, or computes its formats."""
    formats = [first or second for first, second in _FORMATS.findall(template)]
    if not formats or len(formats) < len(_CALLS.findall(template)):
        return None
    return DatedTemplate(_MACRO + template, tuple(dict.fromkeys(formats)))
