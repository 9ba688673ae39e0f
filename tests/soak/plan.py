"""What the agents do, one after the other, by a seed. Pure: a seed gives the same steps, whatever the server does.

A *slot* is one client. It has one agent at a time, for a while two after a fork; an agent that has grown to its limit
is deleted and another one begins. Each is a *life* with an id of its own, and everything it is told to remember has a
made-up word, a *mark*, that nobody else is told: by it the life's words are found on the disk, or not.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from training.recall import filler, talk, words

LIMITS = (600, 2000, 600, 2000, 6000, 2000, 600, 6000)
"""Tokens at which a life ends, by slot."""

KINDS = {
    "tell": 18, "ask": 22, "count": 6, "repeat": 6, "story": 3, "paste": 12, "stop": 12, "hang_up": 10, "timeout": 4,
    "inject": 8, "fork": 4, "release": 5, "delete": 1,
}  # fmt: skip
"""What is done next, by weight."""

SPOKEN = frozenset(("tell", "ask", "count", "repeat", "story", "paste", "stop", "hang_up", "timeout"))
"""Kinds that are turns: the agent is told something and answers."""

_MARKS_A_SLOT = 40_000
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"


@dataclass(frozen=True, slots=True)
class Mark:
    """A word that only one life is told, and its code."""

    name: str
    code: str

    @property
    def sentence(self) -> str:
        return talk.fact(self.name, self.code)


@dataclass(frozen=True, slots=True)
class SoakStep:
    """One thing that a slot does.

    Attributes:
        kind: a key of `KINDS`.
        life: the agent's id.
        text: what the agent is told.
        expected: the answer of a model that makes no mistakes; "" where nobody knows.
        stop: a string that occurs in that answer; "" for none.
        pieces: after so many pieces of the answer the client hangs up; 0 for never.
        goes_on: after a turn that was cut short the client does not repeat it.
        other: the new agent's id, of a fork.
        marks: what the text tells.
    """

    kind: str
    life: str
    text: str = ""
    expected: str = ""
    stop: str = ""
    tokens_max: int = 0
    streamed: bool = False
    pieces: int = 0
    timeout_s: float | None = None
    goes_on: bool = False
    other: str = ""
    marks: tuple[Mark, ...] = ()


@dataclass(slots=True)
class _PlannedAgent:
    id: str
    tokens: int = 0
    codes: dict[str, str] = field(default_factory=dict)
    steps: int = 0


class SlotPlan:
    """The steps of one slot.

    Args:
        size_of: tokens of a text.

    Attributes:
        continues: whether its agents are sent only what is new (`agent_continue`), else the whole conversation.
        official: whether it talks through the openai client.
    """

    def __init__(self, seed: int, slot: int, size_of: Callable[[str], int]) -> None:
        self.slot = slot
        self.continues = slot % 2 == 1
        self.official = slot % 3 == 0
        self.limit = LIMITS[slot % len(LIMITS)]
        self._rng = random.Random(f"{seed}/{slot}")
        self._size_of = size_of
        self._lives: list[_PlannedAgent] = []
        self._born = 0
        self._marks = 0

    def next(self) -> SoakStep:
        """The next step."""
        rng = self._rng
        if not self._lives:
            self._lives.append(_PlannedAgent(self._new_id()))
            return self._done(self._lives[0], self._tell(self._lives[0]))
        life = rng.choice(self._lives)
        if life.tokens > self.limit or (len(self._lives) == 2 and life.steps > 3 and rng.random() < 0.2):
            return self._delete(life)
        kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
        if kind == "delete":
            return self._delete(life)
        if kind == "fork":
            if len(self._lives) == 2:
                kind = "ask"
            else:
                other = _PlannedAgent(self._new_id(), life.tokens, dict(life.codes))
                self._lives.append(other)
                life.steps = 0
                return SoakStep("fork", life.id, other=other.id)
        step: SoakStep = getattr(self, f"_{kind}")(life)
        return self._done(life, step)

    def closing(self) -> list[SoakStep]:
        """At the end each life is asked for the first thing that it was told."""
        found: list[SoakStep] = []
        for life in self._lives:
            name = next(iter(life.codes))
            text = talk.question(name)
            found.append(SoakStep("ask", life.id, text, talk.answer(name, life.codes[name]), tokens_max=60))
        return found

    def _done(self, life: _PlannedAgent, step: SoakStep) -> SoakStep:
        life.steps += 1
        life.tokens += self._size_of(step.text) + self._size_of(step.expected) + 12
        if step.kind == "story":
            life.tokens += step.tokens_max
        if step.kind in ("tell", "inject"):
            # What else is told is in turns that may never be kept: nobody is asked for it.
            life.codes.update((mark.name, mark.code) for mark in step.marks)
        return step

    def _new_id(self) -> str:
        self._born += 1
        return f"soak-{self.slot:02}.{self._born}"

    def _mark(self) -> Mark:
        """Words of four syllables, each made once: the digits of its number."""
        number = self.slot * _MARKS_A_SLOT + self._marks
        self._marks += 1
        syllables = len(_CONSONANTS) * len(_VOWELS)
        # Neighbouring numbers shall not look alike.
        number = (number * 7_654_321 + 1_234_567) % syllables**4
        name = ""
        for _ in range(4):
            number, syllable = divmod(number, syllables)
            name += _CONSONANTS[syllable // len(_VOWELS)] + _VOWELS[syllable % len(_VOWELS)]
        return Mark(name, words.any_code(self._rng))

    def _paste_tokens(self) -> int:
        most = max(40, self.limit // 10)
        return self._rng.randint(20, most)

    def _filler(self, tokens: int) -> str:
        # About two characters of such text are a token.
        text = filler.any_filler(self._rng, 2 * tokens)
        while self._size_of(text) > 2 * tokens:
            text = text[: len(text) * 2 // 3]
        return text.strip() or "nothing"

    def _delete(self, life: _PlannedAgent) -> SoakStep:
        self._lives.remove(life)
        return SoakStep("delete", life.id)

    def _tell(self, life: _PlannedAgent) -> SoakStep:
        rng = self._rng
        marks = tuple(self._mark() for _ in range(rng.choice([1, 1, 1, 2, 3])))
        text = " ".join(f"Remember: {mark.sentence}" for mark in marks)
        if rng.random() < 0.2:
            text = f"{self._filler(self._paste_tokens())}\n{text}"
        return SoakStep("tell", life.id, text, talk.NOTED, tokens_max=40, streamed=rng.random() < 0.3, marks=marks)

    def _ask(self, life: _PlannedAgent) -> SoakStep:
        name = self._rng.choice(list(life.codes))
        text, expected = talk.question(name), talk.answer(name, life.codes[name])
        return SoakStep("ask", life.id, text, expected, tokens_max=60, streamed=self._rng.random() < 0.3)

    def _count(self, life: _PlannedAgent, least: int = 5, most: int = 40) -> SoakStep:
        last = self._rng.randint(least, most)
        text = f"Say the numbers from one to {words.number_in_words(last)}."
        streamed = self._rng.random() < 0.3
        return SoakStep("count", life.id, text, talk.count_reply(last), tokens_max=400, streamed=streamed)

    def _repeat(self, life: _PlannedAgent) -> SoakStep:
        text = " ".join(words.any_name(self._rng) for _ in range(self._rng.randint(3, 10)))
        return SoakStep("repeat", life.id, f"Repeat after me: {text}", text, tokens_max=120)

    def _story(self, life: _PlannedAgent) -> SoakStep:
        return SoakStep("story", life.id, "Tell me a story.", tokens_max=self._rng.randint(30, 120), streamed=True)

    def _paste(self, life: _PlannedAgent) -> SoakStep:
        streamed = self._rng.random() < 0.2
        text = self._filler(self._paste_tokens())
        return SoakStep("paste", life.id, text, talk.SEEN, tokens_max=40, streamed=streamed)

    def _stop(self, life: _PlannedAgent) -> SoakStep:
        rng = self._rng
        whole = rng.choice([self._count, self._ask, self._repeat])(life)
        if whole.kind == "ask":
            stop = rng.choice([" is", "code of"])
        else:
            pieces = whole.expected.replace(",", "").split()
            stop = pieces[rng.randrange(len(pieces) // 2, len(pieces))]
        return SoakStep(
            "stop", life.id, whole.text, whole.expected, stop, tokens_max=whole.tokens_max, streamed=whole.streamed
        )

    def _long(self, life: _PlannedAgent) -> tuple[str, str, tuple[Mark, ...]]:
        """Something with a long answer, behind something that only this turn tells."""
        mark = self._mark()
        whole = self._count(life, 50, 99)
        return f"The number of {mark.name} is {mark.code}. {whole.text}", whole.expected, (mark,)

    def _hang_up(self, life: _PlannedAgent) -> SoakStep:
        rng = self._rng
        text, expected, marks = self._long(life)
        goes_on = rng.random() < 0.5
        pieces = rng.randint(2, 25)
        return SoakStep(
            "hang_up", life.id, text, expected, "", 400, streamed=True, pieces=pieces, goes_on=goes_on, marks=marks
        )

    def _timeout(self, life: _PlannedAgent) -> SoakStep:
        rng = self._rng
        text, expected, marks = self._long(life)
        goes_on, streamed = rng.random() < 0.5, rng.random() < 0.5
        timeout_s = round(rng.uniform(0.5, 2.0), 2)
        return SoakStep(
            "timeout", life.id, text, expected, "", 400, streamed, timeout_s=timeout_s, goes_on=goes_on, marks=marks
        )

    def _inject(self, life: _PlannedAgent) -> SoakStep:
        mark = self._mark()
        text = f"Remember: {mark.sentence}"
        if self._rng.random() < 0.2:
            text = f"{self._filler(self._paste_tokens())}\n{text}"
        return SoakStep("inject", life.id, text, marks=(mark,))

    def _release(self, life: _PlannedAgent) -> SoakStep:
        return SoakStep("release", life.id)
