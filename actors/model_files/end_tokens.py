"""The tokens that end an answer, read from the model's folder alone, so that replica and endpoint agree."""

from __future__ import annotations

import json
from pathlib import Path


def read_end_tokens(folder: Path) -> frozenset[int]:
    """Returns every end-of-sequence token in config.json and generation_config.json; empty if there is none.

    Raises:
        ValueError: one of the files is not JSON.
    """
    tokens: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        if not (folder / name).is_file():
            continue
        data = json.loads((folder / name).read_text(encoding="utf-8"))
        value = data.get("eos_token_id", data.get("text_config", {}).get("eos_token_id"))
        tokens.update([value] if isinstance(value, int) else value or [])
    return frozenset(tokens)
