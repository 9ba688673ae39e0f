"""What formats of KV cost in perplexity and recall, with `benchmarks/quality`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..parts import Budget, Say
from ..quality import measure
from ..quality.texts import TEXTS
from .figures import AGENT_MEMORY, perplexity_changes
from .page import PaperTable
from .shapes import MODELS

RECALL = "recall"
PEER = "MLX's own, 4 bits"


def quality(source: str, lengths: Sequence[int], samples: int, budget: Budget, say: Say) -> PaperTable:
    """Perplexity on code and prose, and codes recalled, under each policy and MLX's own 4-bit cache.

    Args:
        source: a folder, a Hub id or `embedded:NAME`.
    """
    name = Path(source).name
    part = PaperTable(f"{name}: what quantized KV costs", paper=AGENT_MEMORY)
    subject = measure.load(source, name)
    for text in TEXTS:
        scored = measure.divergence(subject, text, lengths, budget, say)
        _rows(part, scored.rows, lambda row, text=text: f"{text}, {row['tokens']:,} tokens", "change, %")
        part.missing += [note for note in scored.notes if "no time" in note]
    recalled = measure.recall(subject, lengths, samples, budget, say)
    _rows(part, recalled.rows, lambda row: f"codes recalled at {row['tokens']:,} tokens", "share")
    part.missing += [note for note in recalled.notes if "no time" in note]
    part.notes += subject.refused
    part.notes.append(
        "The change of perplexity beside full precision, teacher-forced, and the share of codes that come back. The "
        "draft changes logits and not KV (tab:perplexity): "
        + ", ".join(f"{MODELS[model].name} {figure.value:+g}%" for model, figure in perplexity_changes().items())
        + "."
    )
    return part


def _rows(part: PaperTable, rows: Sequence[dict[str, Any]], told: Any, field: str) -> None:
    """A row for each policy and length; the peer is MLX's own cache at that length."""
    theirs = {row["tokens"]: row[field] for row in rows if row["cache"] == PEER}
    for row in rows:
        if row["cache"].startswith("MLX's own"):
            continue
        peers = {PEER: theirs[row["tokens"]]} if row["tokens"] in theirs else {}
        shares = field == "share"
        what = f"{told(row)}, {row['cache']}" + ("" if shares else ": change of perplexity")
        part.compare(what, "share" if shares else "%", row[field], peers, ratio=shares)
