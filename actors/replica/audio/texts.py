"""Texts of callers on their way to a model of speech."""

from __future__ import annotations


def as_text(text: str) -> str:
    """Returns a text in which no tokenizer reads a control token of the form `<|…|>`."""
    return text.replace("<|", "< |")
