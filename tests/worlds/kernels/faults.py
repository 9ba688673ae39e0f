"""Faults put into kernels' text, to see whether a check notices them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest


@contextmanager
def fault(module: ModuleType, old: str, new: str) -> Iterator[None]:
    """Replaces a piece of the module's texts, wherever it is in them."""
    texts = {name: text for name, text in vars(module).items() if isinstance(text, str) and old in text}
    assert texts, f"{module.__name__} has no {old!r}"
    with pytest.MonkeyPatch.context() as patch:
        for name, text in texts.items():
            patch.setattr(module, name, text.replace(old, new))
        yield
