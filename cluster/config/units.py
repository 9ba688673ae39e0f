"""Types of values in the config: sizes, counts, times and paths, each with its limits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AliasChoices, BeforeValidator, ConfigDict, Field

STRICT = ConfigDict(extra="forbid")

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def _parse_bytes(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", value)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError("a size is a number with an optional unit: 512 MiB, 2 GB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def bytes_of(text: str) -> int:
    """Returns the number of bytes that a size such as `48 GB` says.

    Raises:
        ValueError: it is no size.
    """
    found = _parse_bytes(text)
    if found <= 0:
        raise ValueError("a size is more than 0")
    return found


def _parse_seconds(value: Any) -> Any:
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*s\s*", value) if isinstance(value, str) else None
    return float(match[1]) if match is not None else value


Bytes = Annotated[int, BeforeValidator(_parse_bytes), Field(gt=0)]
Count = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
StrictOrSeconds = Annotated[Literal["strict"] | Seconds, BeforeValidator(_parse_seconds)]
"""`strict`, or a time: 1.5 or 1.5s."""


def _checked_path(value: str) -> str:
    try:
        path = Path(value).expanduser()
    except RuntimeError:
        raise ValueError("begins with the home of a user that is not known") from None
    if not path.is_absolute():
        raise ValueError("must be an absolute path, or begin with ~")
    return str(path)


AbsolutePath = Annotated[str, AfterValidator(_checked_path)]


def also_named(name: str, former: str) -> Any:
    """Returns a marker for a field's type: it takes its value under its former name too."""
    return Field(validation_alias=AliasChoices(name, former))
