"""Text by people that every machine has: Python's own documentation, and the sources of its library.

Random tokens would say little about a model: its keys and its attention are different on real text.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path

PARAGRAPH_WORDS_MIN = 20
MODULES = (
    "textwrap",
    "heapq",
    "shlex",
    "statistics",
    "difflib",
    "argparse",
    "tarfile",
    "zipfile",
    "mailbox",
    "http.client",
    "http.cookiejar",
    "urllib.request",
    "inspect",
    "doctest",
    "typing",
)
"""Modules of Python's library whose code is long and changes little from version to version."""

_PIECE_CHARACTERS = 500


def paragraphs() -> list[str]:
    """Returns paragraphs of prose from the topics of Python's `help`, in their order; none if an installation lacks
    them."""
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        return []
    parts = (part for _, text in sorted(topics.items()) for part in re.split(r"\n\s*\n", text))
    prose = (" ".join(part.split()) for part in parts if not part.startswith((" ", "*", "-", "+", "|", ".")))
    return [part for part in prose if len(part.split()) >= PARAGRAPH_WORDS_MIN and part.isascii()]


def sources() -> Iterator[str]:
    """Yields the source text of Python's modules, one after another, then of this folder's. Modules of which an
    installation has no source text are left out."""
    for name in MODULES:
        try:
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
                yield Path(spec.origin).read_text(encoding="utf-8")
        except (ImportError, OSError, ValueError):
            continue
    for path in sorted(Path(__file__).parent.glob("*.py")):
        yield path.read_text(encoding="utf-8")


def mixed(characters: int) -> str:
    """Returns about this many characters of prose and code, in turns."""
    prose, code = _pieces(paragraphs(), characters), _pieces(_functions(), characters)
    text = "\n\n".join(part for pair in zip_longest(prose, code) for part in pair if part is not None)
    return text[:characters]


def _functions() -> Iterator[str]:
    """Yields the code of modules from one definition to the next."""
    for source in sources():
        yield from re.split(r"\n(?=(?:def|class|async def) )", source)[1:]


def _pieces(parts: Sequence[str] | Iterator[str], characters: int) -> list[str]:
    """Joins parts into pieces of at least `_PIECE_CHARACTERS`, until there are enough characters."""
    pieces: list[str] = []
    piece, total = "", 0
    for part in parts:
        piece = f"{piece}\n\n{part}" if piece else part
        if len(piece) >= _PIECE_CHARACTERS:
            pieces.append(piece[: 2 * _PIECE_CHARACTERS])
            total += len(pieces[-1])
            piece = ""
        if total >= characters:
            break
    return pieces
