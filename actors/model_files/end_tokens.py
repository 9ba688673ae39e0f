"""Which tokens end an answer. Read from the model's folder alone, so that replica and endpoint agree."""

from __future__ import annotations

import json
from pathlib import Path


def read_end_tokens(folder: Path) -> frozenset[int]:
    """Every end-of-sequence token that config.json or generation_config.json names; empty where neither does."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        if not (folder / name).is_file():
            continue
        data = json.loads((folder / name).read_text(encoding="utf-8"))
        value = data.get("eos_token_id", data.get("text_config", {}).get("eos_token_id"))
        found.update([value] if isinstance(value, int) else value or [])
    return frozenset(found)
