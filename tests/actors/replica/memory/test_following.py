"""A sequence follows another node's prefill only as long as KV may still arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from satchel.actors.protocol.store_messages import Fetched, PullKV
from satchel.actors.replica.memory.following import FOLLOW_S, follow
from satchel.cluster.errors import QueueFull, SatchelError, Unavailable

WANTED = PullKV("studio", b"m", b"r", [b"x"], [1], "t/alice", 20.0)
DONE, LATER, NEVER = Fetched(complete=True), Fetched(more=True), Fetched()


class Clock:
    """The time of a loop in which nothing waits for anything but time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: self.now)

        async def sleep(seconds: float) -> None:
            self.now += seconds

        monkeypatch.setattr(asyncio, "sleep", sleep)


async def followed(
    clock: Clock, answers: list[Fetched | SatchelError], wait_s: float = 10.0, waits: Callable[[], bool] = lambda: True
) -> tuple[bool, list[PullKV]]:
    asked: list[PullKV] = []

    async def pull(wanted: PullKV) -> Fetched:
        asked.append(wanted)
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, SatchelError):
            raise answer
        clock.now += wanted.wait_s
        return answer

    return await follow(pull, WANTED, wait_s, waits), asked


async def test_it_asks_until_all_is_there(monkeypatch):
    came, asked = await followed(Clock(monkeypatch), [LATER, LATER, QueueFull("many pulls"), DONE])
    assert came and len(asked) == 4 and {one.wait_s for one in asked} == {FOLLOW_S}
    assert all(one.deadline_s <= WANTED.deadline_s for one in asked)


@pytest.mark.parametrize("end", [NEVER, Unavailable("no store")])
async def test_a_pull_that_ended_for_good_is_the_last(monkeypatch, end):
    came, asked = await followed(Clock(monkeypatch), [LATER, end])
    assert not came and len(asked) == 2


@pytest.mark.parametrize("answer", [LATER, QueueFull("many pulls")])
async def test_it_ends_by_its_deadline(monkeypatch, answer):
    clock = Clock(monkeypatch)
    came, asked = await followed(clock, [answer], wait_s=3.2)
    assert not came and len(asked) == 7 and 3.2 <= clock.now <= 3.2 + FOLLOW_S
    assert [one.deadline_s for one in asked][-1] == pytest.approx(0.2)


async def test_it_ends_with_the_sequence(monkeypatch):
    clock = Clock(monkeypatch)
    came, asked = await followed(clock, [LATER], waits=lambda: clock.now < 1.0)
    assert not came and len(asked) == 2
