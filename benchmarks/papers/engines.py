"""One sequence at a time on an engine in a process of its own, without Ray and HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..energy import EnergySpent
from ..memory.desk import on_gpu
from ..parts import Budget, median
from ..serve.measures import Incomplete, check
from ..serve.prompts import Prompts
from ..serve.protocol import Burst
from ..serve.targets import GENERATE, RunFolder, Target, TargetFailed

OURS, PEER = "satchel engine", GENERATE
LIMIT_S = 240.0
WARM_UP_PROMPT_TOKENS, WARM_UP_TOKENS = 32, 8


@dataclass(frozen=True)
class SingleRun:
    """One answer: tokens a second of prefill, up to the first token, and of decoding after it; the peak of MLX's
    memory, in bytes; joules by token of the answer, None if no counter of energy can be read."""

    prefill_per_s: float
    decode_per_s: float
    peak_bytes: int
    joules: float | None

    @classmethod
    def median_of(cls, found: Sequence[SingleRun]) -> SingleRun:
        return cls(
            median([each.prefill_per_s for each in found]),
            median([each.decode_per_s for each in found]),
            max(each.peak_bytes for each in found),
            median(joules) if (joules := [each.joules for each in found if each.joules is not None]) else None,
        )


@contextmanager
def started(name: str, folder: Path, place: RunFolder) -> Iterator[Target]:
    """A target, ended afterwards."""
    target = Target(name, folder, place)
    try:
        yield target
    finally:
        target.stop()


def single_runs(
    folder: Path,
    place: RunFolder,
    prompt_tokens: int,
    tokens: int,
    rounds: int,
    budget: Budget,
    missing: Callable[[str], None],
) -> dict[str, SingleRun]:
    """Returns the medians by engine. An engine that fails is reported as `missing`."""
    prompts, found = Prompts(folder), dict[str, SingleRun]()
    for name in (OURS, PEER):
        try:
            with started(name, folder, place) as target:
                # A GPU compiles a kernel for every new shape; on a CPU a short prompt warms as well.
                sizes = (prompt_tokens, tokens) if on_gpu() else (WARM_UP_PROMPT_TOKENS, WARM_UP_TOKENS)
                _single(target, prompts, *sizes, f"{name}/warm")
                runs = [
                    _single(target, prompts, prompt_tokens, tokens, f"{name}/{number}")
                    for number in budget.rounds(rounds)
                ]
        except (TargetFailed, Incomplete) as error:
            missing(f"{name}: {error}")
            continue
        if runs:
            found[name] = SingleRun.median_of(runs)
        else:
            missing(f"{name}: there was no time.")
    return found


def _single(target: Target, prompts: Prompts, prompt_tokens: int, tokens: int, seed: str) -> SingleRun:
    """
    Raises:
        Incomplete, TargetFailed: there is no whole answer.
    """
    energy = EnergySpent()
    trace = target.run(Burst([prompts.one(prompt_tokens, seed, as_ids=True)], tokens, LIMIT_S))
    joules = energy.per_token(tokens)
    check(trace.streams, tokens)
    (stream,) = trace.streams
    first, last = stream.times[0], stream.times[-1]
    rates = prompt_tokens / (first - stream.sent), (tokens - 1) / (last - first)
    return SingleRun(*rates, trace.peak_bytes or 0, joules)


def joules_of(ours: SingleRun | None, peers: Mapping[str, SingleRun]) -> dict[str, float]:
    """Returns the known joules by token of an answer, by peer; "" for ours."""
    runs = {**peers, **({"": ours} if ours is not None else {})}
    return {name: run.joules for name, run in runs.items() if run.joules is not None}
