"""Texts without calls: Python's library and documentation, and JSON. Even with the most permissive tools no calls are
found in them, and they come out unchanged."""

from __future__ import annotations

import builtins
import json
import random
import sysconfig
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from satchel.api.tools.answer_pieces import ToolCall
from satchel.api.tools.call_stage import CallLimit, CallStage
from satchel.api.tools.lenient.declared import DeclaredTools
from satchel.api.tools.lenient.loose_reader import LooseReader
from satchel.api.tools.lenient.stage import LenientCalls, OwnMarks

SEED = 20_26
WORDS = [
    "search",
    "test",
    "run",
    "get",
    "read",
    "write",
    "name",
    "data",
    "function",
    "user",
    "value",
    "key",
    "call",
    "x",
]
NAMES = [*dict.fromkeys([*(name for name in dir(builtins) if name.islower() and name[0] != "_"), *WORDS])]
BODIES = LooseReader(DeclaredTools([{"function": {"name": name}} for name in NAMES]), ("<tool_call>", "</tool_call>"))


def told(text: str, size: int) -> tuple[str, list[str]]:
    stage = CallStage(None, LenientCalls(BODIES, OwnMarks(("<tool_call>",))), CallLimit())
    out = [piece for at in range(0, len(text), size) for piece in stage.add(text[at : at + size])]
    stage.end(cut=False)
    out += stage.flush()
    calls = [piece.name for piece in out if isinstance(piece, ToolCall)]
    return "".join(piece for piece in out if isinstance(piece, str)), calls


def documents() -> list[str]:
    library = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in library]
    return texts + [found.read_text("METADATA") or "" for found in distributions()]


def excerpt(text: str, rng: random.Random) -> str:
    """Returns a part of a document, by paragraphs or cut anywhere, perhaps in a code fence."""
    paragraphs = text.split("\n\n")
    first = rng.randrange(len(paragraphs))
    part = "\n\n".join(paragraphs[first : first + rng.randint(1, 6)])
    if rng.random() < 0.3:
        part = part[: rng.randint(1, len(part) or 1)]
    if rng.random() < 0.3:
        info, after = rng.choice(["python", "", "json", "xml"]), rng.choice(["", "\n\nSo."])
        part = f"So:\n\n```{info}\n{part}\n```{after}"
    return part[:4000]


def value(rng: random.Random, depth: int = 0) -> Any:
    drawn = rng.random()
    if depth > 2 or drawn < 0.3:
        return rng.choice([1, 2.5, None, True, "open", "a b", [], {}])
    if drawn < 0.8:
        keys = rng.sample([*NAMES, "name", "type", "id", "arguments", "parameters", "function"], rng.randint(0, 4))
        # An object with a tool's name and arguments is a call.
        return {key: value(rng, depth + 1) for key in [*keys, "kind"]}
    return [value(rng, depth + 1) for _ in range(rng.randint(0, 3))]


def test_documents_are_text_however_they_are_cut():
    rng = random.Random(SEED)
    for text in documents():
        for _ in range(3):
            part = excerpt(text, rng)
            whole = told(part, len(part) or 1)
            assert whole == (part, []), part
            assert told(part, rng.choice([1, 2, 7])) == whole


def test_json_is_text():
    rng = random.Random(SEED)
    for _ in range(2000):
        written = json.dumps(value(rng), indent=rng.choice([None, 2]))
        written = rng.choice(["{}", "```json\n{}\n```", "So:\n\n```\n{}\n```"]).replace("{}", written)
        assert told(written, len(written)) == (written, []) == told(written, 5)
