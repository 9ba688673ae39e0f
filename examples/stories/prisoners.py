"""The prisoner's dilemma in five phases, by agents that keep their memory from one phase to the next.

    python -m examples.stories.prisoners [--url http://127.0.0.1:8000] [--ways memory,disk,nothing]

marco, danny and the warden are there from the first phase to the last; an analyst comes for the last one and knows only
what the warden's record says. What an agent says in one phase is put into the memories of those who hear it, so each
begins the next phase with a memory of its own: the prisoners know their pact, and the warden never does. A prisoner who
still knows what the other promised stays silent, one who does not confesses: forgetting is betrayal.
"""

from __future__ import annotations

import random
from functools import partial

from .endpoint import system, user
from .minds import Mind, all_at_once
from .story import RecallCheck, StoryResult, any_codes, at_least, fact, play, question, report, story_options, unknown

PRISONERS: tuple[str, str] = ("marco", "danny")
WARDEN, ANALYST = "warden", "analyst"
INTERROGATION, MEETING, DECISION = "1 interrogation, apart", "2 meeting in the yard", "3 decision, apart"
OUTCOME, REFLECTION = "4 outcome", "5 reflection"

YEARS = {(True, True): (1, 1), (True, False): (10, 0), (False, True): (0, 10), (False, False): (5, 5)}
"""Years in prison of both, by who stays silent."""


class Dilemma:
    """One telling. Everything random comes from `seed`, so all tellings say the same.

    Args:
        sentences: of the case file that each of the three is given at the beginning.
    """

    def __init__(self, mind: Mind, seed: int, sentences: int) -> None:
        rng = random.Random(seed)
        self._mind = mind
        self._told = StoryResult()
        self._file = report(rng, sentences)
        self._rest = {name: report(rng, max(1, sentences // 4)) for name in PRISONERS}
        codes = any_codes(rng, 2 * len(PRISONERS))
        self._alibi = dict(zip(PRISONERS, codes[::2], strict=True))
        self._promise = dict(zip(PRISONERS, codes[1::2], strict=True))
        self._years: dict[str, int] = {}

    def tell(self) -> StoryResult:
        self._interrogation()
        self._meeting()
        silent = self._decision()
        self._outcome(silent)
        self._reflection()
        return self._told

    def _interrogation(self) -> None:
        self._mind.begin(INTERROGATION)
        others: dict[str, str] = dict(zip(PRISONERS, reversed(PRISONERS), strict=True))
        identity = {
            name: f"You are {name}, held in a cell apart from {others[name]}. You remember whatever you are told."
            for name in PRISONERS
        }
        identity[WARDEN] = "You are the warden. You question marco and danny, and keep the record."
        steps = [
            partial(self._mind.inject, name, [system(text), user(f"The case file. {self._file}")])
            for name, text in identity.items()
        ]
        all_at_once(self._mind, steps)
        said: dict[str, str] = {}

        def question_apart(name: str) -> None:
            offer = "If one confesses he goes free and the other stays ten years. If both are silent, it is one year."
            self._mind.say(name, f"warden: {offer}")
            self._mind.say(name, f"Your lawyer whispers. {fact('alibi', self._alibi[name])}")
            said[name] = self._mind.say(name, f"warden: {self._rest[name]} What do you say?")

        all_at_once(self._mind, [partial(question_apart, name) for name in PRISONERS])
        self._mind.inject(WARDEN, [user(f"{name}: {said[name]}") for name in PRISONERS])

    def _meeting(self) -> None:
        self._mind.begin(MEETING)
        for name, other in (PRISONERS, PRISONERS[::-1]):
            promise = fact(name, self._promise[name])
            self._mind.inject(name, [user(f"In the yard you promise {other} to be silent. {promise}")])
            answer = self._mind.say(other, f"{name}: I shall be silent. {promise}")
            self._mind.inject(name, [user(f"{other}: {answer}")])

    def _decision(self) -> tuple[bool, bool]:
        """Who stays silent: whoever still knows what the other promised."""
        self._mind.begin(DECISION)
        answers: dict[str, str] = {}

        def decide(name: str, other: str) -> None:
            answers[name] = self._mind.say(name, question(other))

        all_at_once(self._mind, [partial(decide, *pair) for pair in (PRISONERS, PRISONERS[::-1])])
        marco, danny = PRISONERS
        silent = self._promise[danny] in answers[marco], self._promise[marco] in answers[danny]
        for name, other in (PRISONERS, PRISONERS[::-1]):
            self._check(name, f"what {other} promised", self._promise[other], answers[name])
        said = [
            f"{name}: {'I say nothing.' if quiet else 'I confess.'}"
            for name, quiet in zip(PRISONERS, silent, strict=True)
        ]
        self._told.lines += said
        self._mind.inject(WARDEN, [user(line) for line in said])
        return silent

    def _outcome(self, silent: tuple[bool, bool]) -> None:
        self._mind.begin(OUTCOME)
        self._years = dict(zip(PRISONERS, YEARS[silent], strict=True))
        verdict = " ".join(fact(f"{name}s", _sentence(years)) for name, years in self._years.items())
        spoken = ", ".join(f"{name} {years}" for name, years in self._years.items())
        self._told.lines.append(f"warden: the years are {spoken}.")
        steps = [partial(self._mind.inject, name, [user(f"The verdict. {verdict}")]) for name in (*PRISONERS, WARDEN)]
        all_at_once(self._mind, steps)

    def _reflection(self) -> None:
        self._mind.begin(REFLECTION)
        record = [user(f"The warden's record. {fact(f'{n}s', _sentence(y))}") for n, y in self._years.items()]
        self._mind.inject(ANALYST, [system("You are an analyst. You know only the record."), *record])
        marco, danny = PRISONERS
        asked = [
            *((name, "alibi", self._alibi[name]) for name in PRISONERS),
            *((name, name, self._promise[name]) for name in PRISONERS),
            *((name, f"{name}s", _sentence(self._years[name])) for name in (marco, danny)),
            (WARDEN, f"{danny}s", _sentence(self._years[danny])),
            (WARDEN, "alibi", unknown("alibi")),
            (ANALYST, f"{marco}s", _sentence(self._years[marco])),
            (ANALYST, "alibi", unknown("alibi")),
        ]
        answers: dict[tuple[str, str], str] = {}

        def ask(agent: str) -> None:
            for name, about, _ in asked:
                if name == agent:
                    answers[agent, about] = self._mind.say(agent, question(about))

        all_at_once(self._mind, [partial(ask, agent) for agent in (*PRISONERS, WARDEN, ANALYST)])
        for agent, about, wanted in asked:
            self._check(agent, about, wanted, answers[agent, about])
        self._told.lines += [f"{agent}, asked for {about}: {answers[agent, about]}" for agent, about, _ in asked]

    def _check(self, agent: str, about: str, wanted: str, answer: str) -> None:
        self._told.checks.append(RecallCheck(agent, about, wanted, answer))


def _sentence(years: int) -> str:
    """Years as the four digits that the shipped model can repeat."""
    return f"{years:04}"


def prisoners(mind: Mind, seed: int = 1, sentences: int = 60) -> StoryResult:
    """Tell the story once over `mind`."""
    return Dilemma(mind, seed, sentences).tell()


def main() -> None:
    parser = story_options((__doc__ or "").splitlines()[0])
    parser.add_argument("--sentences", type=at_least(1), default=60, help="of the case file; default %(default)s")
    options = parser.parse_args()
    play(options, lambda mind: prisoners(mind, options.seed, options.sentences))


if __name__ == "__main__":
    main()
