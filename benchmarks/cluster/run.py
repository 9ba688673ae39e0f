"""Measures several nodes: moving KV, what that costs rows that decode, first tokens after a move and of split prompts,
recovery from a killed node, and (simulated) speed.

    python -m benchmarks.cluster.run [--parts moving,recovering] [--rounds 3] [--budget-s 1800]

Figures are medians over the rounds, ratios are taken within a round. Nothing here is a test of speed.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from .. import kept, machine, parts
from ..options import names_among
from ..programs import RESULTS
from .arriving import arriving
from .beside import beside
from .moving import moving
from .recovering import recovering
from .splitting import splitting
from .together import together
from .uneven import uneven

PARTS = ("moving", "beside", "recovering", "arriving", "splitting", "uneven", "together")


def say(text: str) -> None:
    print(text, flush=True)


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])

    def numbers(kind: type, text: str) -> list[Any]:
        found = [kind(word) for word in text.split(",") if word.strip()]
        if not all(0 < number < float("inf") for number in found):
            raise argparse.ArgumentTypeError("numbers are positive")
        return found

    def count(text: str) -> int:
        if (found := int(text)) < 1:
            raise argparse.ArgumentTypeError("numbers are positive")
        return found

    add = parser.add_argument
    add("--parts", type=names_among(PARTS), default=list(PARTS), help=", ".join(PARTS))
    add("--rounds", type=count, default=3, help="of each part but recovering")
    add("--kills", type=count, default=5, help="of each kind, for recovering")
    add("--budget-s", type=float, default=1800.0, help="after this many seconds nothing is begun")
    add("--tokens", type=count, default=8192, help="that are moved; at the most 25,000 fit in Ray's object store")
    add("--gbits", type=partial(numbers, float), default=[10.0, 1.0], help="links for moving and beside")
    add("--agent-tokens", type=count, default=4000)
    add("--mbits", type=partial(numbers, int), default=[10_000, 1000, 100], help="links for arriving")
    add("--work", type=Path, help="where files are written, on the disk that is to be measured (else a temporary one)")
    add("--out", type=Path, default=RESULTS)
    add("--machine", help="the machine's name in the results' file names")
    return parser.parse_args(arguments)


def measures(options: argparse.Namespace, work: Path, budget: Any) -> dict[str, Callable[[], Any]]:
    """The chosen parts by name, each with what it needs."""
    known: dict[str, Callable[[Path], Any]] = {
        "moving": lambda folder: moving(options.tokens, options.gbits, options.rounds, folder, budget, say),
        "beside": lambda folder: beside(options.tokens, options.gbits, options.rounds, folder, budget, say),
        "recovering": lambda folder: recovering(options.kills, folder, budget, say),
        "arriving": lambda folder: arriving(options.agent_tokens, options.mbits, options.rounds, folder, budget, say),
        "splitting": lambda folder: splitting(options.agent_tokens, options.rounds, folder, budget, say),
        "uneven": lambda folder: uneven(options.agent_tokens, options.rounds, folder, budget, say),
        "together": lambda folder: together(),
    }

    def measure(name: str) -> Any:
        (folder := work / name).mkdir()
        return known[name](folder)

    return {name: partial(measure, name) for name in dict.fromkeys(options.parts)}


def main() -> None:
    options = read_options()
    facts = machine.facts("gpu" if mx.default_device().type == mx.DeviceType.gpu else "cpu")
    result = kept.begun(facts, options)
    path = options.out / f"cluster-{options.machine or machine.name_of(facts)}"
    result["parts"] = kept.earlier(path, result, PARTS)
    budget = parts.Budget(options.budget_s)
    with tempfile.TemporaryDirectory(prefix="satchel-cluster-", dir=options.work) as work:
        kept.measure_all(measures(options, Path(work), budget), budget, path, result, markdown)


def markdown(result: dict[str, Any]) -> str:
    """The results as tables."""
    return parts.markdown(result).replace("# Memory", "# Several nodes", 1)


if __name__ == "__main__":
    main()
