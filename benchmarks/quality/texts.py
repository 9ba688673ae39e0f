"""The texts: Python's own, of the interpreter that runs, so every machine has them and the results name its version."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from satchel.actors.replica.loading import real_text


def code() -> str:
    """The sources of some of Python's library, one module after the other."""
    return "\n\n".join(real_text.sources())


def prose() -> str:
    """Python's documentation of its language, topic by topic, with its examples and tables.

    Raises:
        ImportError: this installation lacks it.
    """
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    return "\n\n".join(text for _, text in sorted(topics.items()))


TEXTS: dict[str, Callable[[], str]] = {"code": code, "prose": prose}
