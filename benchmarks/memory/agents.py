"""Two agents at once on one engine, against one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable

from desk import Answer, Desk
from parts import Budget, Part, Say, median

Note = Callable[[str, float], None]

LATER_PROMPT_SHARE = 8
"""How much shorter the prompt of an agent is that comes later."""


def two_agents(desk: Desk, name: str, prompt_tokens: int, tokens: int, rounds: int, budget: Budget, say: Say) -> Part:
    part = Part(f"Two agents, {name}")
    found: dict[str, list[float]] = {}

    def note(key: str, seconds: float) -> None:
        found.setdefault(key, []).append(seconds * 1e3)

    for number in budget.rounds(rounds):
        if number == 0:
            desk.ask(desk.prompt(300, "warm-up"), 4)
        _together(desk, number, prompt_tokens // 4, tokens, note)
        _staggered(desk, number, prompt_tokens, tokens, note)
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
    part.notes.append(
        f"Together: both come at once with {prompt_tokens // 4:,} tokens each. Staggered: one comes with "
        f"{prompt_tokens:,} tokens, and after its first step another with {prompt_tokens // LATER_PROMPT_SHARE:,}. "
        f"Answers have {tokens} tokens."
    )
    return part


def _together(desk: Desk, number: int, prompt_tokens: int, tokens: int, note: Note) -> None:
    prompts = [desk.prompt(prompt_tokens, f"together/{number}/{agent}") for agent in "ab"]
    desk.clear()
    note("together: alone", sum(_wall([desk.ask(prompt, tokens)]) for prompt in prompts))
    desk.clear()
    note("together: both", _wall(desk.finish([desk.submit(prompt, tokens) for prompt in prompts])))


def _staggered(desk: Desk, number: int, prompt_tokens: int, tokens: int, note: Note) -> None:
    sizes = (prompt_tokens, prompt_tokens // LATER_PROMPT_SHARE)
    first, later = (desk.prompt(size, f"staggered/{number}/{size}") for size in sizes)
    desk.clear()
    alone = [desk.ask(prompt, tokens) for prompt in (first, later)]
    note("staggered: alone", sum(_wall([answer]) for answer in alone))
    note("staggered: first's prefill", alone[0].first - alone[0].sent)
    desk.clear()
    started = time.perf_counter()
    names = [desk.submit(first, tokens)]
    desk.engine.turn()
    names.append(desk.submit(later, tokens))
    both = desk.finish(names)
    note("staggered: both", max(answer.ended for answer in both) - started)
    note("staggered: later's first token", both[1].first - both[1].sent)


def _wall(answers: list[Answer]) -> float:
    return max(answer.ended for answer in answers) - min(answer.sent for answer in answers)
