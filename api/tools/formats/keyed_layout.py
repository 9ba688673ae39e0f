"""The layout of calls whose arguments have keys but are not JSON, recognised by two known calls. Computation only."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from .call_format import ARGUMENTS, NAMES, pieces_around

_KEYED = re.compile(r"(?P<assign>\s*[=:]\s*)(?P<quote>\S*)", re.DOTALL)
_PAIRS = {"(": ")", "{": "}"}


@dataclass(frozen=True)
class KeyedLayout:
    """The layout of calls whose arguments have keys but are not JSON, such as Python's and Gemma's::

        head name opening [key assign value (comma key assign value)*] closing (between name …)* tail

    Attributes:
        quote: the quotation mark around a text; if it has more than one character, the text has no escapes.
    """

    head: str
    opening: str
    assign: str
    comma: str
    quote: str
    closing: str
    between: str
    tail: str

    @property
    def pythonic(self) -> bool:
        """Whether values are Python's."""
        return self.opening.endswith("(")

    @property
    def listed(self) -> bool:
        """Whether several calls are in one list."""
        return self.between.strip() == ","

    @classmethod
    def read(cls, written: str, ids: Sequence[str]) -> Self | None:
        count = 1 + (NAMES[1] in written)
        words: list[str] = []
        for name, given in zip(NAMES[:count], ARGUMENTS, strict=False):
            words += [name, *(word for pair in given.items() for word in pair)]
        if (pieces := pieces_around(written, words)) is None:
            return None
        head, opening, assigned, comma, again = pieces[:5]
        tail, keyed = pieces[-1], _KEYED.fullmatch(assigned)
        if keyed is None or again != assigned or opening[-1:] not in _PAIRS or not head.strip():
            return None
        quote, passage = keyed["quote"], pieces[5] if count > 1 else tail
        closing = f"{quote}{_PAIRS[opening[-1]]}"
        alike = count == 1 or pieces[6:-1] == [opening, assigned]
        comma_said = comma.removeprefix(quote)
        if not (alike and comma.startswith(quote) and comma_said.strip() == ","):
            return None
        if not tail.startswith(closing) or not passage.startswith(closing):
            return None
        return cls(
            head,
            opening,
            keyed["assign"],
            comma_said,
            # Without quotation marks, a text could not be told apart from other values.
            quote or '"',
            closing.removeprefix(quote),
            passage[len(closing) :] if count > 1 else "",
            tail[len(closing) :],
        )
