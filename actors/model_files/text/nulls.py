"""Folders with nulls in JSON files where transformers expects objects."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

_OBJECTS = ("auto_map", "added_tokens_decoder")
_FILES = ("config.json", "tokenizer_config.json")


@contextmanager
def without_nulls(folder: Path) -> Iterator[Path]:
    """Yields a folder like this one, without the nulls that should be objects. Usually it is the folder itself,
    otherwise a temporary folder of links."""
    cleaned = {name: kept for name in _FILES if (kept := _cleaned(folder / name)) is not None}
    if not cleaned:
        yield folder
        return
    with TemporaryDirectory(prefix="satchel-") as temporary:
        # With the same name, because messages contain names of folders.
        like = Path(temporary) / folder.name
        like.mkdir()
        for path in folder.iterdir():
            if path.name not in cleaned:
                (like / path.name).symlink_to(path.resolve())
        for name, kept in cleaned.items():
            (like / name).write_text(json.dumps(kept), encoding="utf-8")
        yield like


def _cleaned(file: Path) -> dict[str, Any] | None:
    """Returns a file's content without such nulls; None if it has none or cannot be read."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(data, dict) or not any(name in data and data[name] is None for name in _OBJECTS):
        return None
    return {name: value for name, value in data.items() if value is not None or name not in _OBJECTS}
