"""`satchel probe`: measures which KV quantization suits a model, on this machine and without a server."""

from __future__ import annotations

import json as json_text
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from ..options import Dtype, JsonOption

if TYPE_CHECKING:
    from ....actors.replica.selftest.probe import KVSize, ProbeResult, Report

_SAMPLES_MAX = 100
_SEED = 1

Tell = Callable[[str, float | None], None]


def probe(
    model: Annotated[
        str, typer.Argument(help="A Hub id (owner/name or owner/name@revision), a folder, embedded:NAME.")
    ],
    lengths: Annotated[
        str, typer.Option("--lengths", metavar="TOKENS,…", help="Conversations of these lengths, 512 or more.")
    ] = "512,1024,2048,4096",
    policies: Annotated[
        str, typer.Option("--policies", metavar="NAME,…", help="Any of q4, k6v4, k8v4 and fp16.")
    ] = "q4,k6v4,k8v4,fp16",
    samples: Annotated[
        int, typer.Option("--samples", min=1, max=_SAMPLES_MAX, help="How many conversations of each length.")
    ] = 4,
    dtype: Annotated[Dtype, typer.Option("--dtype", help="The data type in which it computes.")] = Dtype.auto,
    json: JsonOption = False,
) -> None:
    """Measure how quantized KV changes a model's answers, and recommend a format."""
    chosen_lengths, chosen_policies = _numbers(lengths), _names(policies)
    from ..progress import ProgressDisplay

    progress = ProgressDisplay()

    def tell(step: str, fraction: float | None) -> None:
        # Standard output has only the JSON.
        if not json:
            progress.report(step, fraction)

    try:
        report = _measure(model, chosen_lengths, chosen_policies, samples, dtype, tell)
    finally:
        progress.close()
    if json:
        print(_as_json(report))
    else:
        _show(report)


def _numbers(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not a list of numbers such as 512,1024", param_hint="--lengths"
        ) from None
    if not found or min(found) < 512:
        raise typer.BadParameter("each length must be 512 tokens or more", param_hint="--lengths")
    return found


def _names(text: str) -> list[str]:
    known = ("q4", "k6v4", "k8v4", "fp16")
    found = [part.strip() for part in text.split(",") if part.strip()]
    if not found or any(name not in known for name in found):
        raise typer.BadParameter(f"the policies are {', '.join(known)}", param_hint="--policies")
    return found


def _measure(model: str, lengths: list[int], policies: list[str], samples: int, dtype: Dtype, tell: Tell) -> Report:
    # MLX and transformers take seconds to import.
    from ....actors.replica.loading.models import load
    from ....actors.replica.selftest.probe import probe as measure
    from ....actors.replica.selftest.probe_texts import Texts, load_tokenizer

    loaded = load(
        model,
        dtype=dtype.value,
        context_tokens_max=None,
        progress=tell,
        kv="fp16",
        numerics="reproducible",
    )
    texts = Texts(load_tokenizer(loaded.folder))
    return measure(model, loaded, texts, lengths=lengths, policies=policies, samples=samples, seed=_SEED, progress=tell)


def _as_json(report: Report) -> str:
    return json_text.dumps(asdict(report), indent=2, allow_nan=False)


def _show(report: Report) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    console.print(
        f"{report.model}: {report.layers} layers, computed in {report.dtype}. Open blocks are kept in that type. "
        f"Text: {report.text}, and the model's own words."
    )
    table = Table(box=SIMPLE_HEAD)
    titles = (
        "policy",
        "tokens",
        "KL mean, nats",
        "KL p99",
        "same likeliest token",
        "codes recalled",
        "KV bytes a token",
    )
    for number, title in enumerate(titles):
        table.add_column(title, justify="right" if number else "left")
    memory = {kept.policy: kept for kept in report.memory}
    last = ""
    for row in report.rows:
        table.add_row(*_cells(row, memory[row.policy], row.policy != last))
        last = row.policy
    console.print(table)
    tokens, full = report.memory[0].tokens, memory["fp16"].total_bytes
    parts = [
        f"{kept.policy} {kept.total_bytes / 1e6:,.1f} MB ({kept.total_bytes / full:.0%})" for kept in report.memory
    ]
    console.print(
        f"KL from full precision and whether the likeliest token is the same: at {report.rows[0].places:,} places each."
    )
    console.print(f"A conversation of {tokens:,} tokens takes {', '.join(parts)}, open block included.")
    for note in report.notes:
        console.print(note)
    console.print(f"Recommended: {report.recommended}, because {report.why}.")
    console.print(f"The rule: {report.rule}.")


def _cells(row: ProbeResult, kept: KVSize, first: bool) -> list[str]:
    measured = row.policy != "fp16"
    return [
        row.policy if first else "",
        f"{row.tokens:,}",
        f"{row.kl_mean:.6f}" if measured else "–",
        f"{row.kl_p99:.6f}" if measured else "–",
        f"{row.top1:.2%}" if measured else "–",
        f"{row.right}/{row.questions}" if row.questions else "–",
        f"{kept.token_bytes:,}" if first else "",
    ]
