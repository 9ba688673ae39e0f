"""What a check of this machine found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Check:
    """The outcome of one check. `mend` says what to do, "" if nothing needs mending."""

    name: str
    result: Literal["ok", "warn", "fail"]
    found: str
    mend: str = ""
