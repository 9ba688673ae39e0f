"""Measures Satchel's memory on this machine: its size, what it costs in quality, and what it saves.

    python -m benchmarks.memory.run [--parts sizes,quality] [--rounds 3] [--budget-s 3600] [--traces FOLDER]

Figures are medians over the rounds, ratios are taken within a round. Nothing here is a test of speed.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import mlx.core as mx

from satchel.cluster.environment import default_home, mlx_settings

from .. import kept, machine
from ..parts import Budget, ResultTable, markdown
from ..programs import RESULTS
from ..serve.shapes import SHAPES
from .agents import two_agents
from .desk import Desk, write_random_model
from .first_token import first_token
from .neighbours import neighbours
from .quality import quality
from .recall import recall
from .replay import replay
from .restoring import restoring
from .rewriting import rewriting
from .session import session
from .sizes import sizes

PARTS = (
    "sizes",
    "quality",
    "recall",
    "neighbours",
    "first-token",
    "restoring",
    "agents",
    "replay",
    "rewriting",
    "session",
)
EMBEDDED, RANDOM = "embedded:recall", "random-30m"


RANDOM_CONTEXT = 32_768


def say(text: str) -> None:
    print(text, flush=True)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])

    def counts(text: str) -> list[int]:
        found = [int(part) for part in text.split(",")]
        if min(found) < 1:
            raise argparse.ArgumentTypeError("numbers are positive")
        return found

    def names(known: Sequence[str], text: str) -> list[str]:
        chosen = [name.strip() for name in text.split(",") if name.strip()]
        if unknown := [name for name in chosen if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not among {', '.join(known)}")
        return chosen

    add = parser.add_argument
    add("--parts", type=partial(names, PARTS), default=list(PARTS), help=", ".join(PARTS))
    add("--rounds", type=int, default=3)
    add("--budget-s", type=float, default=3600.0, help="after this many seconds nothing is begun")
    add("--quality-lengths", type=counts, default=[512, 1024, 2048, 4096])
    add("--samples", type=int, default=4, help="conversations for the quality")
    add("--questions", type=int, default=48, help="codes asked for at each length")
    add("--lengths", type=counts, default=[1000, 2000, 4000, 8000], help="prompts of the embedded model")
    add("--random-lengths", type=counts, default=[4000, 16_000], help="prompts of models of random weights")
    add("--restore-tokens", type=int, default=4096)
    add("--agent-tokens", type=int, default=4096, help="the long prompt of two agents")
    add("--answer-tokens", type=int, default=64)
    models = (EMBEDDED, *(name for name, shape in SHAPES.items() if shape))
    add("--models", type=partial(names, models), default=[EMBEDDED, RANDOM], help=", ".join(models))
    add("--session-tokens", type=int, default=100_000, help="to which the recorded session grows")
    add("--traces", type=Path, help="the folder of recorded agents: whowhen_conversations.jsonl and others")
    add("--work", type=Path, help="where files are written, on the disk that is to be measured (else a temporary one)")
    add("--out", type=Path, default=RESULTS)
    add("--machine", help="the machine's name in the results' file names")
    return parser.parse_args()


class MemoryRun:
    """The parts, each with what it needs."""

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self.options, self.work = options, work
        self.budget = Budget(options.budget_s)
        self._desks: dict[str, Desk] = {}

    def parts(self) -> dict[str, Callable[[], ResultTable]]:
        """By name, in order; a part with several models is there once for each."""
        chosen, found = self.options, dict[str, Callable[[], ResultTable]]()
        for name in chosen.parts:
            if name in ("neighbours", "first-token", "agents", "session"):
                for model in chosen.models:
                    found[f"{name} {model}"] = lambda name=name, model=model: self._timed(name, model)
            else:
                found[name] = getattr(self, f"_{name}")
        return found

    def _sizes(self) -> ResultTable:
        return sizes()

    def _quality(self) -> ResultTable:
        return quality(self.options.quality_lengths, self.options.samples, self.budget, say)

    def _recall(self) -> ResultTable:
        return recall(self.options.questions, self.budget, say)

    def _restoring(self) -> ResultTable:
        return restoring(self.options.restore_tokens, self.options.rounds, self.work, self.budget, say)

    def _replay(self) -> ResultTable:
        return replay(self._trace("whowhen_conversations.jsonl"), self.budget, say)

    def _rewriting(self) -> ResultTable:
        texts, blocks = self._trace("agent_text.jsonl.gz"), self._trace("claude_code_agents.jsonl.gz")
        return rewriting(texts, blocks, self.budget, say)

    def _trace(self, name: str) -> Path | None:
        return None if self.options.traces is None else self.options.traces / name

    def _timed(self, part: str, model: str) -> ResultTable:
        options, source = self.options, model
        lengths: list[int] = options.lengths
        if model != EMBEDDED:
            source, lengths = str(self.work / model), options.random_lengths
            if not Path(source).exists():
                context = max(RANDOM_CONTEXT, max(lengths) + 64, options.session_tokens + 1024)
                write_random_model(model, Path(source), context)
        if source not in self._desks:
            self._desks[source] = Desk(source)
        desk = self._desks[source]
        if part == "neighbours":
            return neighbours(desk.loaded, options.rounds, self.budget, say)
        if part == "session":
            trace = self._trace("claude_code_agents.jsonl.gz")
            return session(desk, trace, options.session_tokens, self.budget, say)
        most = desk.loaded.context_tokens - options.answer_tokens
        if part == "agents":
            tokens = min(options.agent_tokens, most)
            return two_agents(desk, model, tokens, options.answer_tokens, options.rounds, self.budget, say)
        fitting = [length for length in lengths if length <= desk.loaded.context_tokens - 2]
        folder = self.work / "first-token" / model.replace(":", "-")
        return first_token(desk, model, fitting, options.rounds, folder, self.budget, say)


def main() -> None:
    options = read_options()
    # As a replica's process has it.
    os.environ.update(mlx_settings(default_home()))
    device = "gpu" if mx.default_device().type == mx.DeviceType.gpu else "cpu"
    facts = machine.facts(device)
    result = kept.begun(facts, options)
    path = options.out / f"memory-{options.machine or machine.name_of(facts)}"

    def finish(name: str, part: ResultTable, note: str) -> str:
        mx.clear_cache()
        return name

    with tempfile.TemporaryDirectory(prefix="satchel-memory-", dir=options.work) as work:
        run = MemoryRun(options, Path(work))
        kept.measure_all(run.parts(), run.budget, path, result, markdown, finish)


if __name__ == "__main__":
    main()
