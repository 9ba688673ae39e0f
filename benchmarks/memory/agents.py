"""Two agents at once on one engine, against one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..parts import Budget, ResultTable, Say, median
from .desk import WARM_UP_ROUNDS, Desk, TimedAnswer, on_gpu

Note = Callable[[str, float], None]

LATER_PROMPT_SHARE = 8
"""How much shorter the prompt of an agent is that comes later."""


@dataclass
class Work:
    """What engines did: prefill calls and their tokens, and decode steps. Unlike times, these do not depend on what
    else the machine does, but for the sizes of chunks."""

    calls: int = 0
    tokens: int = 0
    steps: int = 0

    def watch(self, desk: Desk) -> None:
        """Count what the desk's engine does from now on."""
        executor = desk.engine.executor
        prefill, step = executor.prefill, executor.step

        def counted_prefill(work: Sequence[tuple[str, Sequence[int]]]) -> None:
            self.calls += len(work)
            self.tokens += sum(len(tokens) for _, tokens in work)
            prefill(work)

        def counted_step() -> Any:
            self.steps += 1
            return step()

        executor.prefill, executor.step = counted_prefill, counted_step

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens in {self.calls} calls, {self.steps} steps"


def two_agents(
    desk: Desk, name: str, prompt_tokens: int, tokens: int, rounds: int, budget: Budget, say: Say
) -> ResultTable:
    part = ResultTable(f"Two agents, {name}")
    found: dict[str, list[float]] = {}
    done: dict[str, Work] = {}

    def note(key: str, seconds: float) -> None:
        found.setdefault(key, []).append(seconds * 1e3)

    for number in budget.rounds(rounds):
        if number == 0 and on_gpu():
            for warm_up in range(WARM_UP_ROUNDS):
                _together(desk, -1 - warm_up, prompt_tokens // 4, tokens, _forget)
                _staggered(desk, -1 - warm_up, prompt_tokens, tokens, _forget)
        elif number == 0:
            desk.ask(desk.prompt(300, "warm-up"), 4)
        done = {
            **_together(desk, number, prompt_tokens // 4, tokens, note),
            **_staggered(desk, number, prompt_tokens, tokens, note),
        }
        say("  " + ", ".join(f"{key} {values[-1]:,.0f} ms" for key, values in found.items()))
    if not found:
        part.notes.append("There was no time for it.")
        return part
    for kind in ("together", "staggered"):
        row = {"arrival": kind, "rounds": len(found[f"{kind}: alone"])}
        one, both = found[f"{kind}: alone"], found[f"{kind}: both"]
        share = median([b / a for a, b in zip(one, both, strict=True)])
        later = found.get(f"{kind}: later's first token", [])
        prefill = found.get(f"{kind}: first's prefill", [])
        part.rows.append(
            {
                **row,
                "one after the other, ms": median(one),
                "both, ms": median(both),
                "both over that": share,
                "later one's first token, ms": median(later),
                "earlier one's prefill alone, ms": median(prefill),
            }
        )
        part.at_most(f"{kind}: both, over one after the other", share, 1.0)
        if later:
            waits = median([a / b for a, b in zip(later, prefill, strict=True)])
            part.at_most(f"{kind}: the later one's first token, over the earlier one's prefill alone", waits, 0.99)
    part.notes.append("In the last round: " + "; ".join(f"{name} {work}" for name, work in done.items()) + ".")
    part.notes.append(
        f"Together: both come at once with {prompt_tokens // 4:,} tokens each. Staggered: one comes with "
        f"{prompt_tokens:,} tokens, and after its first step another with {prompt_tokens // LATER_PROMPT_SHARE:,}. "
        f"Answers have {tokens} tokens."
    )
    if on_gpu():
        part.notes.append(f"{WARM_UP_ROUNDS} whole rounds, which do not count, came before.")
    return part


def _together(desk: Desk, number: int, prompt_tokens: int, tokens: int, note: Note) -> dict[str, Work]:
    prompts = [desk.prompt(prompt_tokens, f"together/{number}/{agent}") for agent in "ab"]
    alone = _fresh(desk)
    note("together: alone", sum(_wall([desk.ask(prompt, tokens)]) for prompt in prompts))
    both = _fresh(desk)
    note("together: both", _wall(desk.finish([desk.submit(prompt, tokens) for prompt in prompts])))
    return {"together, alone": alone, "together, both": both}


def _staggered(desk: Desk, number: int, prompt_tokens: int, tokens: int, note: Note) -> dict[str, Work]:
    sizes = (prompt_tokens, prompt_tokens // LATER_PROMPT_SHARE)
    first, later = (desk.prompt(size, f"staggered/{number}/{size}") for size in sizes)
    work = _fresh(desk)
    alone = [desk.ask(prompt, tokens) for prompt in (first, later)]
    note("staggered: alone", sum(_wall([answer]) for answer in alone))
    note("staggered: first's prefill", alone[0].first - alone[0].sent)
    both_work = _fresh(desk)
    started = time.perf_counter()
    names = [desk.submit(first, tokens)]
    desk.engine.step()
    names.append(desk.submit(later, tokens))
    both = desk.finish(names)
    note("staggered: both", max(answer.ended for answer in both) - started)
    note("staggered: later's first token", both[1].first - both[1].sent)
    return {"staggered, alone": work, "staggered, both": both_work}


def _forget(key: str, seconds: float) -> None:
    """A time that does not count."""


def _fresh(desk: Desk) -> Work:
    """A new engine, and what it will have done."""
    desk.clear()
    work = Work()
    work.watch(desk)
    return work


def _wall(answers: list[TimedAnswer]) -> float:
    return max(answer.ended for answer in answers) - min(answer.sent for answer in answers)
