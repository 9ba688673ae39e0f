"""Recordings of conversations, as the replay of scenarios reads them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

FILLER = "The ferry was late again and nobody knew why. "


def talk(turns: int) -> dict[str, Any]:
    said = [("human", "Sort the parts. " + FILLER * 20)]
    for number in range(turns):
        said.append((("planner", "worker")[number % 2], f"Step {number}. {FILLER * 5}"))
    return {"id": "talk", "messages": [{"agent": agent, "content": content} for agent, content in said]}


def calls(*inputs: str) -> dict[str, Any]:
    each = [{"timestamp": number, "input": text, "output": f"Reply {number}."} for number, text in enumerate(inputs)]
    return {"id": "calls", "calls": each}


def write(path: Path, *records: Any) -> Path:
    text = "\n".join(json.dumps(record) for record in records) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path
