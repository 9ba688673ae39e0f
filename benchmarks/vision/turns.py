"""Conversations about one picture over HTTP: with what was computed kept, and without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .. import parts
from .parts import Costs, Sight, warm_ups
from .scenery import OTHER, TALK, asked, circle, fresh_number, picture
from .servers import KEPT, VisionServer

TARGET_SIDE = 1024
TURN_TARGETS = {2: 19.0, 3: 28.0}
KINDS = {"first": "first token", "whole": "whole answer"}
QUESTIONS = [question for question, _ in TALK]
Start = Callable[..., Any]
"""A context with a server: `start(name, settings)`."""


@dataclass
class Spread:
    """Times in milliseconds by what they are of, a value a round."""

    times: dict[tuple[Any, ...], list[float]] = field(default_factory=dict)

    def note(self, *key: Any, ms: float) -> None:
        self.times.setdefault(key, []).append(ms)

    def median(self, *key: Any) -> float:
        return parts.median(self.times.get(key, []))

    def ratio(self, above: tuple[Any, ...], below: tuple[Any, ...]) -> float:
        """The median of the rounds' ratios."""
        pairs = zip(self.times.get(above, []), self.times.get(below, []), strict=True)
        return parts.median([one / other for one, other in pairs])


@dataclass
class Answers:
    """How many answers are right, of those where it is known what is, and how many of those that were compared with the
    same turn's cold one are equal to it."""

    known: int = 0
    right: int = 0
    compared: int = 0
    equal: int = 0

    def check(self, said: str, wanted: str | None, cold: str | None = None) -> None:
        if wanted is not None:
            self.known, self.right = self.known + 1, self.right + (said == wanted)
        if cold is not None:
            self.compared, self.equal = self.compared + 1, self.equal + (said == cold)

    @property
    def shares(self) -> tuple[str | None, str | None]:
        """Right ones and equal ones, None where there are none to count."""
        return (
            f"{self.right} of {self.known}" if self.known else None,
            f"{self.equal} of {self.compared}" if self.compared else None,
        )

    def note(self, part: Any, what: str) -> None:
        right, equal = self.shares
        said = [f"{right} right"] if right else []
        said += [f"{equal} equal to the same turn's cold one"] if equal else []
        if said:
            part.notes.append(f"{what}: {', '.join(said)}.")


@dataclass(frozen=True)
class TalkOptions:
    """How conversations are held: `tokens` of an answer at the most, and whether right answers are known."""

    tokens: int
    known: bool

    def wanted(self, turn: int) -> str | None:
        return TALK[turn][1] if self.known else None

    def said(self, turn: int) -> list[str]:
        """The answers before a turn: always the same, so that every conversation has the same prompts."""
        return [answer for _, answer in TALK[:turn]]

    def messages(self, part: Any, turn: int) -> list[Any]:
        return asked(part, QUESTIONS[: turn + 1], self.said(turn))


def first_ms(stream: Any) -> float:
    return stream.first_s * 1e3


def whole_ms(stream: Any) -> float:
    return (stream.ended - stream.sent) * 1e3


def turns(
    sight: Sight,
    start: Start,
    sides: Sequence[int],
    talk: TalkOptions,
    rounds: int,
    budget: Any,
    say: Callable[[str], None],
) -> Any:
    """Latency by turn, with caches and without."""
    part = parts.ResultTable("Latency by turn of a conversation about one picture")
    costs = {
        side: sight.costs(rounds, lambda side=side: [circle(side, fresh_number())], QUESTIONS[0], video=False)
        for side in sides
    }
    spread, answers, tokens = Spread(), Answers(), dict[tuple[int, int], tuple[int, int]]()
    with start() as server:
        for side in sides:
            for number in budget.rounds(rounds + warm_ups()):
                counted = spread if number >= warm_ups() else Spread()
                _one_round(server, side, number, talk, counted, answers, tokens)
            told = (f"{spread.median(side, turn, 'with', 'first'):,.0f} ms" for turn in range(len(TALK)))
            say(f"  {side}: turns {', '.join(told)}")
    for side in sides:
        if (side, "hot") not in spread.times:
            part.notes.append(f"There was no time for {side} pixels.")
            continue
        part.rows += [_turn_row(spread, side, turn) for turn in range(len(TALK))]
        if side == TARGET_SIDE:
            _targets(part, spread, side)
        fixed_s = max(0.0, spread.median(side, "hot") / 1e3 - costs[side].step_s)
        for turn, wanted in TURN_TARGETS.items():
            over_http_s = spread.median(side, turn - 1, "without", "first") / 1e3
            whole = replace(costs[side], fixed_s=fixed_s, over_http_s=over_http_s)
            own = _of_turn(whole, *tokens[side, turn - 1])
            part.notes.append(own.verdict(f"{side} pixels, turn {turn}, first token", [wanted]))
    answers.note(part, "Answers")
    part.notes.append(
        "`with`: a fresh agent's conversation about a fresh picture, of which the first turn computes everything. "
        "`without`: the same prompt of another fresh agent about another fresh picture, after `DELETE /v1/cache`. "
        "Medians; ratios within a round. `fixed` is the first token of a prompt that is asked again, all of it kept, "
        "less an engine's time for the same, which is the first step; encode (with all that the engine does for it) "
        "and prefill are an engine's too, without Ray and HTTP. The further tokens of a whole answer take as long with "
        "as without."
    )
    return part


def _targets(part: Any, spread: Spread, side: int) -> None:
    for turn, wanted in TURN_TARGETS.items():
        for kind, what in KINDS.items():
            ratio = spread.ratio((side, turn - 1, "without", kind), (side, turn - 1, "with", kind))
            part.at_least(f"{side} pixels, turn {turn}: {what}, without / with", ratio, wanted)


def _of_turn(costs: Costs, prompt: int, cached: int) -> Costs:
    """Of a turn with a prompt of another length, of which `cached` tokens are kept, at the same rate of prefill."""
    prefill_s = costs.prefill_s * prompt / costs.tokens
    return replace(costs, prefill_s=prefill_s, tokens=prompt, new_tokens=prompt - cached)


def _one_round(
    server: VisionServer,
    side: int,
    number: int,
    talk: TalkOptions,
    spread: Spread,
    answers: Answers,
    tokens: dict[tuple[int, int], tuple[int, int]],
) -> None:
    """Notes in `tokens` those of each turn's prompt, and the cached ones among them."""
    eyes, kept = server.eyes, list[str]()
    for turn in range(len(TALK)):
        eyes.forget()
        stream = eyes.see(talk.messages(picture(side), turn), talk.tokens, f"without-{side}-{number}-{turn}")
        spread.note(side, turn, "without", "first", ms=first_ms(stream))
        spread.note(side, turn, "without", "whole", ms=whole_ms(stream))
        answers.check(stream.text, talk.wanted(turn))
    eyes.forget()
    part = picture(side)
    for turn in range(len(TALK)):
        stream = eyes.see(talk.messages(part, turn), talk.tokens, f"with-{side}-{number}")
        spread.note(side, turn, "with", "first", ms=first_ms(stream))
        spread.note(side, turn, "with", "whole", ms=whole_ms(stream))
        kept.append(stream.text)
        tokens[side, turn] = stream.prompt, stream.cached
    spread.note(side, "hot", ms=first_ms(eyes.see(talk.messages(part, 0), talk.tokens)))
    for turn, said in enumerate(kept if number == 0 else []):
        eyes.forget()
        # Nobody's: nothing of it comes from the disk.
        cold = eyes.see(talk.messages(part, turn), talk.tokens)
        answers.check(said, talk.wanted(turn), cold.text)


def _turn_row(spread: Spread, side: int, turn: int) -> dict[str, Any]:
    row: dict[str, Any] = {"picture": f"{side} x {side}", "turn": turn + 1}
    for kind, what in KINDS.items():
        without, kept = (side, turn, "without", kind), (side, turn, "with", kind)
        row[f"{what} without, ms"], row[f"{what} with, ms"] = spread.median(*without), spread.median(*kept)
        row[f"{what}, without / with"] = spread.ratio(without, kept)
    return {**row, "rounds": len(spread.times[side, turn, "with", "first"])}


def ablation(start: Start, side: int, talk: TalkOptions, rounds: int, budget: Any, say: Callable[[str], None]) -> Any:
    """What features alone, KV alone and both save."""
    part = parts.ResultTable(f"What is kept in memory of a picture of {side} x {side}")
    spread, encodes = Spread(), dict[str, float]()
    steps = [*range(len(TALK)), "other"]
    for kept in ("none", "both", "KV", "features"):
        if budget.left_s <= 0:
            part.notes.append(f"There was no time for {kept}.")
            continue
        answers = Answers()
        with start(settings=KEPT[kept]) as server:
            for number in budget.rounds(rounds + warm_ups()):
                before, shown = server.eyes.encodes(), picture(side)
                for step in steps:
                    about = asked(shown, [OTHER[0]], []) if step == "other" else talk.messages(shown, int(step))
                    stream = server.eyes.see(about, talk.tokens)
                    if number >= warm_ups():
                        spread.note(kept, step, ms=first_ms(stream))
                    right = (OTHER[1] if talk.known else None) if step == "other" else talk.wanted(int(step))
                    answers.check(stream.text, right)
                if number >= warm_ups():
                    encodes[kept] = server.eyes.encodes() - before
        if kept not in encodes:
            part.notes.append(f"There was no time for {kept}.")
            continue
        answers.note(part, f"Answers with {kept} kept")
        say(f"  {kept}: " + ", ".join(f"{spread.median(kept, step):,.0f} ms" for step in steps))
    for kept in encodes:
        row: dict[str, Any] = {"kept": kept}
        for step in steps:
            named = "another conversation" if step == "other" else f"turn {int(step) + 1}"
            row[f"{named}, ms"] = spread.median(kept, step)
            if step:
                row[f"{named}, none / this"] = spread.median("none", step) / spread.median(kept, step)
        part.rows.append({**row, "encodes": encodes[kept]})
    part.notes.append(
        "Times to the first token over HTTP, medians; a server each, one after the other, so ratios are of medians. A "
        "limit of one byte switches a part off: `scheduling.vision_bytes_max` features, `prefix_bytes_max` KV. The "
        "conversations are nobody's, so that they are not on the disk. `encodes`: of one round's four requests."
    )
    return part
