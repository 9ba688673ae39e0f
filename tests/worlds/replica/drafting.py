"""Drafts that do not depend on chance: of what comes, with faults, and of random lengths."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest

from satchel.actors.replica.drafting.pace import WIDTHS, DraftPace, Hope
from satchel.actors.replica.execution import drafts


class Oracle:
    """Stands for `Drafter`: drafts what a script has next, with a fault in every third draft or so.

    Attributes:
        scripts: sequences from their prompts' begin.
    """

    scripts: ClassVar[list[list[int]]] = []
    chance: ClassVar[random.Random] = random.Random(0)
    share = 0.9
    drafts = True

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)

    @property
    def count(self) -> int:
        return len(self.tokens)

    def add(self, token: int) -> None:
        self.tokens.append(token)

    def draft(self, most: int) -> list[int]:
        fits = [script for script in self.scripts if script[: self.count] == self.tokens]
        draft = fits[0][self.count : self.count + most] if fits else []
        if draft and self.chance.random() < 0.35:
            draft[self.chance.randrange(len(draft))] = self.chance.randrange(100)
        return draft


def _any_lengths(pace: DraftPace, hopes: Sequence[Hope], *, ragged: bool) -> list[int]:
    chance = Oracle.chance
    width = chance.choice((1, *WIDTHS))
    return [min(hope.most, chance.randrange(width) if ragged else width - 1) for hope in hopes]


@contextmanager
def oracle(scripts: list[list[int]], seed: int = 0) -> Iterator[None]:
    """Lets every sequence be drafted by an oracle, in drafts of random lengths."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Oracle, "scripts", scripts)
        patch.setattr(Oracle, "chance", random.Random(seed))
        patch.setattr(drafts, "Drafter", Oracle)
        patch.setattr(DraftPace, "lengths", _any_lengths)
        yield


def _any_best(
    pace: DraftPace, hopes: Sequence[Hope], *, ragged: bool, before_s: float = 0.0
) -> tuple[float, list[int]]:
    """What a model drafts, in most steps."""
    chance = Oracle.chance
    if before_s == 0.0 or chance.random() < 0.2:
        looked_up = 0 if chance.random() < 0.7 else 1
        return 1.0 + looked_up, [looked_up * length for length in _any_lengths(pace, hopes, ragged=ragged)]
    return 3.0 + before_s, [chance.randrange(hope.most + 1) for hope in hopes]


@contextmanager
def eager(seed: int = 0) -> Iterator[None]:
    """Lets a drafting model follow every sequence that it can, and draft for it in drafts of random lengths."""

    def follow(made: drafts.Drafts, sequences: Sequence[Any], model: Any, **_: Any) -> Any:
        made._rests_follow = 0
        new = [each for each in sequences if each.drafter is not None and not model.is_ready(each)]
        return (new[0], True) if new else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Oracle, "chance", random.Random(seed))
        patch.setattr(DraftPace, "best", _any_best)
        patch.setattr(DraftPace, "is_timed", lambda *_: True)
        patch.setattr(DraftPace, "single_s", lambda *_: 1.0)
        patch.setattr(drafts.Drafts, "_worth_following", follow)
        patch.setattr(drafts, "RESTS_STEPS", 1)
        yield
