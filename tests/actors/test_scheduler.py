"""The scheduler, driven without a model: every row ends once, within the limits, whatever happens around it."""

from __future__ import annotations

import random

import pytest

from satchel.actors.replica.scheduler import Limits, Row, Scheduler, State

LIMITS = Limits(rows_max=4, queue_requests_max=6, prefill_chunk_tokens=256, kv_tokens_max=6000)


def drive(scheduler: Scheduler, now: float = 0.0) -> tuple[list[str], list[str]]:
    """One engine turn with a model that computes nothing. Returns (rows decoded, rows that left in the plan)."""
    plan = scheduler.plan(now)
    budget = scheduler.limits.prefill_chunk_tokens
    while budget > 0:
        admitted = scheduler.admit()
        if admitted is not None:
            scheduler.reused(admitted, 0)
        chunk = scheduler.next_chunk(budget)
        if chunk is None and admitted is None:
            break
        if chunk is not None:
            assert 0 < chunk.stop - chunk.start <= budget
            budget -= chunk.stop - chunk.start
            scheduler.prefilled(chunk)
    decoded = scheduler.decoding()
    for request_id in decoded:
        scheduler.decoded(request_id)
        row = scheduler.row(request_id)
        assert row is not None
        if row.generated >= row.max_tokens:
            scheduler.finish(request_id)
    return decoded, plan.expired + plan.cut


def test_rows_join_and_leave_at_every_token():
    scheduler = Scheduler(LIMITS)
    scheduler.add(Row("long", prompt=10, max_tokens=6))
    assert drive(scheduler)[0] == ["long"]
    scheduler.add(Row("short", prompt=10, max_tokens=2))
    assert [drive(scheduler)[0] for _ in range(4)] == [["long", "short"], ["long", "short"], ["long"], ["long"]]


def test_a_long_prompt_does_not_stop_running_rows():
    """While 3,000 tokens are prefilled in chunks, the running row decodes once after every chunk."""
    scheduler = Scheduler(LIMITS)
    scheduler.add(Row("running", prompt=1, max_tokens=100))
    drive(scheduler)
    scheduler.add(Row("long", prompt=2900, max_tokens=5))
    turns = 0
    while (row := scheduler.row("long")) is not None and row.state is not State.RUNNING:
        assert "running" in drive(scheduler)[0]
        turns += 1
    assert turns == -(-2900 // LIMITS.prefill_chunk_tokens)


def test_first_come_first_served_within_a_priority():
    scheduler = Scheduler(Limits(1, 10, 256, 6000))
    for name, priority in (("a", 0), ("b", 0), ("urgent", 5), ("c", 0)):
        scheduler.add(Row(name, prompt=5, max_tokens=1, priority=priority))
    order = []
    while scheduler.running or scheduler.waiting:
        order += drive(scheduler)[0]
    assert order == ["urgent", "a", "b", "c"]


def test_a_full_queue_refuses_and_has_room_again_later():
    scheduler = Scheduler(LIMITS)
    for index in range(LIMITS.rows_max + LIMITS.queue_requests_max):
        assert scheduler.refusal(5) is None
        scheduler.add(Row(str(index), prompt=5, max_tokens=3))
    assert scheduler.refusal(5) == "full"
    while scheduler.waiting:
        drive(scheduler)
    assert scheduler.refusal(5) is None


def test_a_prompt_beyond_memory_is_refused_for_good():
    assert Scheduler(LIMITS).refusal(LIMITS.kv_tokens_max) == "too_long"


def test_a_lone_row_that_fills_memory_is_cut_not_preempted():
    scheduler = Scheduler(Limits(4, 4, 256, 1000))
    scheduler.add(Row("big", prompt=900, max_tokens=10_000))
    left: list[str] = []
    for _ in range(2000):
        left += drive(scheduler)[1]
        if left:
            break
    assert left == ["big"]
    assert scheduler.row("big") is None


def test_a_failed_batch_runs_again_alone_and_only_the_culprit_ends():
    scheduler = Scheduler(LIMITS)
    for name in ("good", "bad", "fine"):
        scheduler.add(Row(name, prompt=3, max_tokens=50))
    drive(scheduler)
    lost: list[str] = []
    for _ in range(30):
        scheduler.plan(0.0)
        if admitted := scheduler.admit():
            scheduler.reused(admitted, 0)
            while chunk := scheduler.next_chunk(256):
                scheduler.prefilled(chunk)
        batch = scheduler.decoding()
        if "bad" in batch:
            ended = scheduler.batch_failed()
            for request_id in ended:
                scheduler.finish(request_id)
            lost += ended
        else:
            for request_id in batch:
                scheduler.decoded(request_id)
        scheduler.check()
    assert lost == ["bad"]
    assert set(scheduler.decoding()) == {"good", "fine"}


@pytest.mark.parametrize("seed", range(40))
def test_simulation(seed: int):
    """Random arrivals, aborts, deadlines, priorities and batch failures: no row is lost, doubled or starved."""
    rng = random.Random(seed)
    scheduler = Scheduler(Limits(rng.randint(1, 5), rng.randint(0, 5), 256, rng.choice([1500, 4000])))
    alive: set[str] = set()
    ended: set[str] = set()
    for step in range(400):
        if rng.random() < 0.3 and step < 300:
            name, prompt = f"r{step}", rng.choice([0, 1, 10, 255, 256, 700, 1300])
            if scheduler.refusal(prompt) is None:
                deadline = step + rng.choice([5, 1000, 1000])
                scheduler.add(Row(name, prompt, rng.randint(1, 40), rng.randint(0, 2), deadline))
                alive.add(name)
        if alive and rng.random() < 0.05:
            gone = rng.choice(sorted(alive))
            scheduler.finish(gone)
            alive.discard(gone)
            ended.add(gone)
        if scheduler.decoding() and rng.random() < 0.03:
            for request_id in scheduler.batch_failed():
                scheduler.finish(request_id)
        drive(scheduler, now=step)
        scheduler.check()
        now_alive = {name for name in alive if scheduler.row(name) is not None}
        ended |= alive - now_alive
        alive = now_alive
    for step in range(400, 4000):
        if not alive:
            break
        drive(scheduler, now=step)
        alive = {name for name in alive if scheduler.row(name) is not None}
    assert not alive, f"seed {seed}: starved {alive}"
    assert scheduler.running == scheduler.waiting == 0
