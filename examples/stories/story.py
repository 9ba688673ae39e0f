"""What the stories have in common: facts whose recall can be checked, other talk, and running one in several ways."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .endpoint import ScenarioEndpoint, endpoint_at
from .ledger import Ledger, Say, Seq, compared, table
from .minds import WAYS, Mind

_CONSONANTS = "bcdfghjklmnprstvwz"
_PLACES = ("harbour", "mill", "old bridge", "station", "market", "quarry", "lighthouse", "garden wall")
_THINGS = ("a lantern", "two crates", "a torn map", "wet boots", "a bicycle", "an empty cart", "some rope", "a ladder")
_WITNESSES = ("The baker", "A porter", "The night watch", "A child", "The ferryman", "Nobody", "The clerk", "A nurse")
_HOURS = ("at dusk", "before dawn", "around noon", "late at night", "after the bell", "in the rain", "towards evening")


@dataclass(frozen=True)
class RecallCheck:
    """A question to an agent at the end, the words that its answer has to have, and the answer."""

    agent: str
    about: str
    wanted: str
    answer: str

    @property
    def right(self) -> bool:
        return self.wanted.lower() in self.answer.lower()


@dataclass
class StoryResult:
    """What became of a story: what there is to say of it, and what its agents knew at the end."""

    lines: list[str] = field(default_factory=list)
    checks: list[RecallCheck] = field(default_factory=list)

    @property
    def right(self) -> int:
        return sum(check.right for check in self.checks)


@dataclass(frozen=True)
class StoryRun:
    """A story in one of the ways to keep what agents hear."""

    told: StoryResult
    ledger: Ledger


def fact(name: str, code: str) -> str:
    """A sentence that the shipped model remembers as well as larger ones do."""
    return f"Remember: the code of {name} is {code}."


def question(name: str) -> str:
    return f"What is the code of {name}?"


def unknown(name: str) -> str:
    """How the shipped model says that it was never told."""
    return f"not know the code of {name}"


def any_codes(rng: random.Random, count: int) -> list[str]:
    """Different codes of four digits, the first of which is no zero."""
    return [str(number) for number in rng.sample(range(1000, 10_000), count)]


def any_names(rng: random.Random, count: int) -> list[str]:
    """Different made-up names of consonants and vowels in turns."""
    found: dict[str, None] = {}
    while len(found) < count:
        length = rng.choice((4, 5, 6))
        found["".join(rng.choice("aeiou" if place % 2 else _CONSONANTS) for place in range(length))] = None
    return list(found)


def report(rng: random.Random, sentences: int) -> str:
    """Other talk, so that conversations are as long as real ones."""
    return " ".join(
        f"{rng.choice(_WITNESSES)} saw {rng.choice(_THINGS)} by the {rng.choice(_PLACES)} {rng.choice(_HOURS)}."
        for _ in range(sentences)
    )


def run_all(
    endpoint: ScenarioEndpoint, ways: Sequence[str], tell: Callable[[Mind], StoryResult], say: Say
) -> dict[str, StoryRun]:
    """Run a story in several ways, and say what each took.

    Args:
        tell: the story over a mind; it must do the same whatever the mind.
    """
    runs: dict[str, StoryRun] = {}
    for way in ways:
        say(f"\n## KV kept: {way}\n")
        mind = WAYS[way](endpoint)
        try:
            runs[way] = StoryRun(tell(mind), mind.ledger)
        finally:
            mind.close()
        for line in runs[way].told.lines:
            say(line)
        say("\n" + table(mind.ledger.by_phase()))
    say("\n## Together\n\n" + table(summary(runs)))
    return runs


def summary(runs: dict[str, StoryRun]) -> list[Seq]:
    """A sequence for each way, with how many answers were right, and how many were those of the first way."""
    first = next(iter(runs.values())).told.checks
    sequences = compared({way: run.ledger for way, run in runs.items()})
    for sequence, run in zip(sequences, runs.values(), strict=True):
        checks = run.told.checks
        same = sum(one.answer == other.answer for one, other in zip(first, checks, strict=True))
        sequence["right"] = f"{run.told.right} of {len(checks)}"
        sequence["as the first"] = f"{same} of {len(checks)}"
    return sequences


def at_least(least: int) -> Callable[[str], int]:
    """A number for `argparse`."""

    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}")
        return value

    return number


def ways(text: str) -> list[str]:
    """Names of `WAYS` for `argparse`."""
    chosen = [name.strip() for name in text.split(",") if name.strip()]
    if not chosen or any(name not in WAYS for name in chosen):
        raise argparse.ArgumentTypeError(f"not among {', '.join(WAYS)}: {text!r}")
    return list(dict.fromkeys(chosen))


def common_options(description: str) -> argparse.ArgumentParser:
    """Where the endpoint is, and its model."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="a running endpoint; default %(default)s")
    parser.add_argument("--model", default="", help="one of its models; else its default")
    parser.add_argument("--seed", type=int, default=1)
    return parser


def story_options(description: str) -> argparse.ArgumentParser:
    """The options of a story."""
    parser = common_options(description)
    parser.add_argument(
        "--ways",
        type=ways,
        default=list(WAYS),
        help="how KV is kept: memory, disk (each phase begins from it), nothing; compared in this order. All of them "
        "let the server drop the KV that it keeps in memory, other clients' too",
    )
    return parser


def play(options: argparse.Namespace, tell: Callable[[Mind], StoryResult]) -> None:
    """A story's command.

    Raises:
        SystemExit: nothing answers, or an answer was wrong (status 1).
    """
    with endpoint_at(options.url, options.model) as endpoint:
        runs = run_all(endpoint, options.ways, tell, print)
    wrong = [check for run in runs.values() for check in run.told.checks if not check.right]
    for check in wrong:
        print(f"WRONG: {check.agent} on {check.about}: {check.answer!r}, wanted {check.wanted!r}")
    raise SystemExit(1 if wrong else 0)
