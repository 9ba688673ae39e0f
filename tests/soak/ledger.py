"""What was said, what was kept of it, what was done to the server, and the laws that hold between them. Pure.

Times are Unix seconds. A *fault* lasts from the kill (or from the moment the disk was full) until the server was seen
to be well again.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

BLOCK_TOKENS = 256
WRITTEN_S = 1.0
"""So long after a turn's end its KV is on the disk."""

RESTART_S = 5.0
"""So long after a fault its work is still felt: what was asked meanwhile is being asked again."""

TURN_LEASE_S = 75.0
"""So long a turn that a killed endpoint had taken may keep others waiting."""

STOP_TOKENS = 16
"""What was drawn of a stop string, and is no part of the transcript."""

GONE_S = 60.0
"""So long after its deletion nothing of an agent is on the disk."""

FULL = "disk full"
EXITED = "ended by itself"


@dataclass(slots=True)
class Fault:
    """`kind` is the process that was killed, or `FULL`; `ended` is infinite while it lasts."""

    kind: str
    began: float
    ended: float = float("inf")


@dataclass(slots=True)
class Attempt:
    """One request of a life, as its client saw it; also of an injection, which has no answer.

    Attributes:
        messages: what was sent: the whole conversation, or what is new.
        text: what came of the answer; `whole` where it came to its end, of which `finish` is the reason.
        prompt, cached, drawn: tokens, 0 where they were not told.
        held: tokens that the server had kept of the life before.
        kept: whether the server has it in the life's memory; None while nobody knows.
        told_unkept: the answer said that it could not be kept.
        after_stop: the turn kept before it ended by a stop string.
        repeats: the request before it was the same one, and its answer had begun.
        tier: where the server said that the life's KV was before.
        error: of the server, or of the connection.
    """

    number: int
    life: str
    kind: str
    messages: list[dict[str, str]]
    continues: bool
    stop: str = ""
    tokens_max: int = 0
    expected: str = ""
    began: float = 0.0
    ended: float = 0.0
    text: str = ""
    whole: bool = False
    finish: str = ""
    prompt: int = 0
    cached: int = 0
    drawn: int = 0
    held: int = 0
    kept: bool | None = None
    told_unkept: bool = False
    after_stop: bool = False
    repeats: bool = False
    tier: str = ""
    why: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Deed:
    """A `fork` to `other`, or a `delete`, that the server has done."""

    kind: str
    life: str
    other: str = ""


@dataclass(frozen=True, slots=True)
class Broken:
    """A law that did not hold. `law` is a key of `LAWS`."""

    law: str
    life: str
    what: str


LAWS = {
    "answers": "every answer equals the undisturbed run's",
    "words": "no agent's words are lost",
    "said": "a turn that is not kept says so",
    "recomputed": "each turn computes at most its own new tokens and one block",
    "forgotten": "what was forgotten is gone from the disk within a minute",
    "answered": "nothing is refused but for a fault",
}


@dataclass
class AgentRecord:
    """An agent as its client believes it to be.

    Attributes:
        messages: the whole conversation, where the client keeps it.
        kept: messages that the server has in memory, of `tokens` tokens.
        history: its attempts, also those of the life that it was forked from.
    """

    id: str
    continues: bool
    messages: list[dict[str, str]] = field(default_factory=list)
    kept: int = 0
    tokens: int = 0
    stopped: bool = False
    history: list[Attempt] = field(default_factory=list)

    def forked(self, other: str) -> AgentRecord:
        return AgentRecord(
            other, self.continues, [*self.messages], self.kept, self.tokens, self.stopped, [*self.history]
        )

    def after(self, attempt: Attempt) -> int:
        """How many messages the server has once it has kept the attempt."""
        answers = 0 if attempt.kind == "inject" else 1
        continued = self.continues or attempt.kind == "inject"
        return (self.kept if continued else 0) + len(attempt.messages) + answers


def tokens_held(info: Mapping[str, Any] | None, continues: bool, messages: int) -> int | None:
    """How many tokens the server has of a life of `messages` messages; None where it has another one.

    Args:
        info: what `GET /v1/agents/{id}` said, None where it knows of none.
    """
    if not messages:
        return 0 if info is None else None
    if info is None:
        return None
    if continues:
        return info["tokens"] if info["messages"] == messages else None
    # Side branches stay beside the conversation.
    found = [branch for branch in info["branches"] if branch["messages"] == messages]
    return max(found, key=lambda branch: branch["epoch"])["tokens"] if found else None


def computed_too_much(attempt: Attempt) -> int:
    """By how many tokens a turn computed more than what was new and one block; 0 where it did not."""
    new = max(0, attempt.prompt - attempt.held) + (STOP_TOKENS if attempt.after_stop else 0)
    return max(0, attempt.prompt - attempt.cached - new - BLOCK_TOKENS)


def repeated_too_much(attempt: Attempt) -> int:
    """As `computed_too_much`, of a request whose answer had begun when it was cut short: nothing of it is new."""
    return max(0, attempt.prompt - attempt.cached - BLOCK_TOKENS) if attempt.repeats else 0


def reason_of(attempt: Attempt, earlier: Sequence[Attempt], faults: Sequence[Fault]) -> str:
    """Why a turn may have had to compute more: what was done to the server; "" where nothing was.

    Args:
        earlier: the attempts of its life before it.
    """
    if (fault := _touching(faults, attempt.began - RESTART_S, attempt.ended)) is not None:
        return f"during: {fault.kind}"
    for before in reversed(earlier):
        if (fault := _touching(faults, before.began, before.ended + WRITTEN_S)) is not None:
            return f"before it was written: {fault.kind}"
        if before.kept:
            # This one was written whole, and all that was missing before it.
            if any(fault.kind == FULL and before.ended <= fault.ended for fault in faults):
                return f"since: {FULL}"
            return ""
    return ""


def _touching(faults: Sequence[Fault], began: float, ended: float) -> Fault | None:
    """The latest of them."""
    return next((fault for fault in reversed(faults) if fault.began <= ended and fault.ended >= began), None)


def excuse_of(error: str, began: float, ended: float, faults: Sequence[Fault]) -> str:
    """The fault that explains an error; "" for none."""
    slack = TURN_LEASE_S if "agent_busy" in error else RESTART_S
    fault = _touching(faults, began - slack, ended)
    return "" if fault is None else fault.kind


@dataclass(frozen=True, slots=True)
class Excess:
    """Tokens that were computed beyond the bound, and why; `repeat` after a turn that was cut short."""

    life: str
    number: int
    tokens: int
    reason: str
    repeat: bool
    tier: str


def excesses(attempts: Mapping[str, Sequence[Attempt]], faults: Sequence[Fault], roomy: bool) -> list[Excess]:
    """All turns beyond the bound.

    Args:
        attempts: by life, with those of the life that it was forked from before them.
        roomy: whether the disk has room for all; else what it had no room for is a reason.
    """
    found: list[Excess] = []
    seen: set[int] = set()
    for life, known in attempts.items():
        for index, attempt in enumerate(known):
            if attempt.number in seen or not attempt.prompt or attempt.life != life:
                continue
            seen.add(attempt.number)
            over, again = computed_too_much(attempt), repeated_too_much(attempt)
            if not over and not again:
                continue
            reason = reason_of(attempt, known[:index], faults)
            if not reason and not roomy:
                reason = "no room"
            found.append(Excess(life, attempt.number, over or again, reason, not over, attempt.tier))
    return found


def by_reason(found: Iterable[Excess]) -> dict[str, dict[str, int]]:
    """Turns and tokens by reason."""
    turns, tokens = Counter[str](), Counter[str]()
    for each in found:
        name = ("repeat, " if each.repeat else "") + (each.reason or "none")
        turns[name] += 1
        tokens[name] += each.tokens
    return {name: {"turns": turns[name], "tokens": tokens[name]} for name in sorted(turns)}


def computed_again(attempts: Mapping[str, Sequence[Attempt]]) -> dict[str, dict[str, int]]:
    """Tokens that the server had had, and computed all the same: turns and tokens by what the request before was. The
    law allows a block each; what is kept to the last token is nothing."""
    turns, tokens = Counter[str](), Counter[str]()
    for life, known in attempts.items():
        for before, attempt in pairwise(known):
            if not attempt.prompt or attempt.life != life:
                continue
            had = attempt.prompt if attempt.repeats else min(attempt.held, attempt.prompt)
            name = before.kind if before.whole else f"{before.kind}, cut short{'' if attempt.repeats else ' and left'}"
            turns[name] += 1
            tokens[name] += max(0, had - attempt.cached)
    return {name: {"turns": turns[name], "tokens": tokens[name]} for name in sorted(turns)}


def wrong_answer(attempt: Attempt, text: str, finish: str, prompt: int) -> str:
    """What is wrong with an answer, given the undisturbed run's; "" where nothing is. What a hang-up left is
    compared as a beginning."""
    if attempt.whole:
        if attempt.prompt and prompt and attempt.prompt != prompt:
            return f"its prompt had {attempt.prompt} tokens instead of {prompt}: {_apart(attempt.text, text)}"
        if attempt.text != text:
            return _apart(attempt.text, text)
        if attempt.finish != finish:
            return f"it ended by {attempt.finish!r} instead of {finish!r}"
    elif not text.startswith(attempt.text):
        return _apart(attempt.text, text)
    return ""


def _apart(found: str, wanted: str) -> str:
    if found == wanted:
        return "equal words"
    place = next(
        (i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), min(len(found), len(wanted))
    )
    start = max(0, place - 20)
    return f"{found[start : place + 40]!r} instead of {wanted[start : place + 40]!r}, from character {place}"


@dataclass
class Marks:
    """Who was told which words, and since when nobody is left who was.

    `owners` are lives; `gone` says when the last of them was deleted.
    """

    owners: dict[str, set[str]] = field(default_factory=dict)
    gone: dict[str, float] = field(default_factory=dict)
    checked: set[str] = field(default_factory=set)

    def tell(self, life: str, names: Iterable[str]) -> None:
        for name in names:
            self.owners.setdefault(name, set()).add(life)

    def of(self, life: str) -> list[str]:
        return [name for name, lives in self.owners.items() if life in lives]

    def forget(self, life: str, when: float) -> None:
        """The life was deleted: what nobody else was told shall go."""
        for name in self.of(life):
            self.owners[name].discard(life)
            if not self.owners[name]:
                self.gone[name] = when

    def due(self, now: float, faults: Sequence[Fault]) -> list[str]:
        """Those that must be gone by now, once each. While the server was being started again nobody could erase."""

        def allowed_s(when: float) -> float:
            down = (max(0.0, min(fault.ended, now) - max(fault.began, when)) for fault in faults if fault.kind != FULL)
            return GONE_S + sum(down)

        found = [name for name, when in self.gone.items() if name not in self.checked and now >= when + allowed_s(when)]
        self.checked.update(found)
        return found


def found_in(data: bytes, needles: Mapping[str, Sequence[bytes]]) -> list[str]:
    """The words of which a file has one of the forms: as text, or as token ids."""
    return [name for name, forms in needles.items() if any(form in data for form in forms)]


class RestartedCounters:
    """Sums of counters that begin again at 0 when their process does."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self.sums: defaultdict[str, float] = defaultdict(float)

    def add(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            last = self._last.get(name, 0.0)
            self.sums[name] += value - last if value >= last else value
            self._last[name] = value
