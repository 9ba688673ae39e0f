"""A rumour network: agents in a small world tell each other what they were told, and at the end each is asked.

    python -m examples.stories.gossip [--url http://127.0.0.1:8000] [--agents 10] [--rounds 3] [--rumours 2]

A rumour is a name and its code. In every round all who were told it are asked, and their own words are put into the
memories of their neighbours who were not told yet. So a rumour travels by what agents remember: it gets one neighbour
further in a round, an agent that has forgotten tells nothing, and whoever is too far away must not know at the end.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial

from .endpoint import system, user
from .minds import Mind, all_at_once
from .story import (
    RecallCheck,
    StoryResult,
    any_codes,
    any_names,
    at_least,
    fact,
    play,
    question,
    report,
    story_options,
    unknown,
)

Network = dict[str, tuple[str, ...]]


def small_world(rng: random.Random, names: Sequence[str], shortcuts: int) -> Network:
    """A ring with some links across it.

    Args:
        shortcuts: at most so many; fewer where no two agents are left without a link.
    """
    links = {frozenset((name, names[place - 1])) for place, name in enumerate(names)}
    apart = [
        frozenset((one, other))
        for place, one in enumerate(names)
        for other in names[place + 1 :]
        if frozenset((one, other)) not in links
    ]
    links.update(rng.sample(apart, min(shortcuts, len(apart))))
    return {
        name: tuple(other for other in names if other != name and frozenset((name, other)) in links) for name in names
    }


def distances(network: Mapping[str, Sequence[str]], origin: str) -> dict[str, int]:
    """How many rounds a rumour takes from `origin` to each agent that it can reach."""
    found, waiting = {origin: 0}, deque([origin])
    while waiting:
        name = waiting.popleft()
        for other in network[name]:
            if other not in found:
                found[other] = found[name] + 1
                waiting.append(other)
    return found


class Gossip:
    """One telling.

    Args:
        network: who talks with whom.
        origins: the agent that each rumour begins with.
        rng: of codes and other talk.
        sentences: that each agent reads at the beginning.
    """

    def __init__(
        self, mind: Mind, network: Network, origins: Mapping[str, str], rng: random.Random, sentences: int
    ) -> None:
        self._mind = mind
        self._network = network
        self._origins = origins
        self._codes = dict(zip(origins, any_codes(rng, len(origins)), strict=True))
        self._talk = {name: report(rng, sentences) for name in network}
        # By rumour and agent: from whom it was heard first, in the order of the hearing.
        self._heard: dict[str, dict[str, str]] = {rumour: {origin: ""} for rumour, origin in origins.items()}
        self._told = StoryResult()

    def tell(self, rounds: int) -> StoryResult:
        self._mind.begin("0 introductions")
        all_at_once(self._mind, [partial(self._introduce, name) for name in self._network])
        for number in range(1, rounds + 1):
            self._mind.begin(f"{number} round")
            self._round(number)
        self._mind.begin(f"{rounds + 1} questions")
        self._ask(rounds)
        return self._told

    def _introduce(self, name: str) -> None:
        neighbours = ", ".join(self._network[name])
        told = [user(fact(rumour, self._codes[rumour])) for rumour, origin in self._origins.items() if origin == name]
        identity = system(f"You are {name}, one of several agents. You talk with {neighbours}.")
        self._mind.inject(name, [identity, user(self._talk[name]), *told])

    def _round(self, number: int) -> None:
        tellers = [
            (rumour, name)
            for rumour, heard in self._heard.items()
            for name in heard
            if any(other not in heard for other in self._network[name])
        ]
        words: dict[tuple[str, str], str] = {}

        def speak(name: str) -> None:
            for rumour, teller in tellers:
                if teller == name:
                    words[rumour, name] = self._mind.say(name, question(rumour))

        all_at_once(self._mind, [partial(speak, name) for name in dict.fromkeys(name for _, name in tellers)])
        messages: dict[str, list[str]] = {}
        for rumour, teller in tellers:
            for listener in self._network[teller]:
                if listener in self._heard[rumour]:
                    continue
                # Two of the same round may both tell; who was first counts.
                messages.setdefault(listener, []).append(f"{teller}: {words[rumour, teller]}")
        for rumour, teller in tellers:
            for listener in self._network[teller]:
                self._heard[rumour].setdefault(listener, teller)
        steps = [partial(self._mind.inject, name, [user(text) for text in texts]) for name, texts in messages.items()]
        all_at_once(self._mind, steps)
        self._told.lines.append(
            f"round {number}: {len(tellers)} asked, {len(messages)} told; "
            + ", ".join(
                f"{rumour} is with {len(heard)} of {len(self._network)}" for rumour, heard in self._heard.items()
            )
        )

    def _ask(self, rounds: int) -> None:
        answers: dict[tuple[str, str], str] = {}

        def ask(name: str) -> None:
            for rumour in self._origins:
                answers[rumour, name] = self._mind.say(name, question(rumour))

        all_at_once(self._mind, [partial(ask, name) for name in self._network])
        for rumour, origin in self._origins.items():
            far = distances(self._network, origin)
            for name in self._network:
                reached = far.get(name, rounds + 1) <= rounds
                wanted = self._codes[rumour] if reached else unknown(rumour)
                self._told.checks.append(RecallCheck(name, rumour, wanted, answers[rumour, name]))
            knows = [
                check for check in self._told.checks if check.about == rumour and self._codes[rumour] in check.answer
            ]
            told_by = ", ".join(f"{check.agent} ({self._heard[rumour].get(check.agent) or 'first'})" for check in knows)
            self._told.lines.append(
                f"{rumour} = {self._codes[rumour]}: {len(knows)} of {len(self._network)} know it, from whom: {told_by}"
            )


def gossip(
    mind: Mind,
    seed: int = 1,
    agents: int = 10,
    rounds: int = 3,
    rumours: int = 2,
    shortcuts: int = 2,
    sentences: int = 20,
) -> StoryResult:
    """Tell the story once over `mind`.

    Args:
        agents: at least 3.
        rumours: each begins with an agent of its own, so at most `agents`.
    """
    rng = random.Random(seed)
    names = any_names(rng, agents + rumours)
    network = small_world(rng, names[:agents], shortcuts)
    origins = dict(zip(names[agents:], rng.sample(names[:agents], rumours), strict=True))
    return Gossip(mind, network, origins, rng, sentences).tell(rounds)


def main() -> None:
    parser = story_options((__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--agents", type=at_least(3), default=10)
    add("--rounds", type=at_least(1), default=3)
    add("--rumours", type=at_least(1), default=2, help="at most one an agent")
    add("--shortcuts", type=at_least(0), default=2, help="links across the ring")
    add("--sentences", type=at_least(1), default=20, help="that each agent reads first")
    options = parser.parse_args()
    if options.rumours > options.agents:
        parser.error("--rumours: at most one an agent")
    sizes = {name: getattr(options, name) for name in ("agents", "rounds", "rumours", "shortcuts", "sentences")}
    play(options, lambda mind: gossip(mind, options.seed, **sizes))


if __name__ == "__main__":
    main()
