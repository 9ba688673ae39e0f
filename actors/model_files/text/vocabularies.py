"""Whether two models' tokens are the same: one can draft for the other only then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..source import read_json

_FILE = "tokenizer.json"


def tokens_by_id(folder: Path) -> dict[int, str]:
    """Returns the vocabulary of the tokenizer in `folder`, with its added tokens; {} if it has no tokenizer.json.

    Raises:
        ModelLoadError: the file cannot be read.
    """
    if not (folder / _FILE).is_file():
        return {}
    data = read_json(folder / _FILE)
    model, added = data.get("model"), data.get("added_tokens")
    vocabulary: Any = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        tokens = {number: str(text) for text, number in vocabulary.items()}
    else:
        # Unigram: pairs of a text and its logarithmic probability.
        tokens = {number: str(each[0]) for number, each in enumerate(vocabulary or ())}
    return tokens | {int(each["id"]): str(each["content"]) for each in added or ()}


def difference(folder: Path, other: Path) -> str:
    """Returns how the tokens of two models in folders differ, as the end of a sentence; empty if every id that both
    have is the same token. One may have further ids.

    Raises:
        ModelLoadError: as `tokens_by_id`.
    """
    first, second = tokens_by_id(folder), tokens_by_id(other)
    for tokens, whose in ((first, folder), (second, other)):
        if not tokens:
            return f"{whose.name} has no {_FILE} with a vocabulary"
    for number in sorted(first.keys() & second.keys()):
        if first[number] != second[number]:
            return f"token {number} is {first[number]!r} in {folder.name} and {second[number]!r} in {other.name}"
    return "" if first.keys() & second.keys() else f"{folder.name} and {other.name} have no id in common"
