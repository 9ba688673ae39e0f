"""Texts to be embedded: which comes next, how a batch is filled, and that none waits for ever."""

from __future__ import annotations

import random

import pytest

from satchel.actors.replica.scheduling.text_queue import PADDING_MAX, TextJob, TextQueue


def queue_of(*jobs: TextJob, jobs_max: int = 8) -> TextQueue:
    queue = TextQueue(jobs_max)
    for job in jobs:
        queue.add(job)
    return queue


def picked(queue: TextQueue, budget: int) -> list[tuple[str, int, int, int]]:
    picks = queue.next_batch(budget)
    queue.computed(picks)
    queue.check()
    return [(pick.job.request_id, pick.index, pick.start, pick.stop) for pick in picks]


def test_a_batch_has_the_shortest_texts_of_the_first_job_and_what_fits_beside_them_of_others():
    queue = queue_of(TextJob("a", [30, 10, 90]), TextJob("b", [20, 40]))
    assert picked(queue, 100) == [("a", 1, 0, 10), ("a", 0, 0, 30), ("b", 0, 0, 20)]
    assert picked(queue, 100) == [("a", 2, 0, 90)]
    assert picked(queue, 100) == [("b", 1, 0, 40)]
    assert len(queue) == 0 and queue.next_batch(100) == []
    queue = queue_of(TextJob("a", [10, 10, 10, 90]), TextJob("b", [20]))
    assert [pick[3] for pick in picked(queue, 1000)] == [10, 10, 10, 20], "90 beside them would pad too much"


def test_a_text_longer_than_the_budget_goes_alone_in_chunks_and_one_at_a_time():
    queue = queue_of(TextJob("a", [250]), TextJob("b", [300, 5], flow="other"))
    assert picked(queue, 100) == [("a", 0, 0, 100)] and queue.long_text == ("a", 250)
    assert queue.pending_tokens == 150 + 305
    # The other flow has been given less; its long text waits for the first one.
    assert picked(queue, 100) == [("b", 1, 0, 5)]
    assert picked(queue, 100) == [("a", 0, 100, 200)]
    assert picked(queue, 64) == [("a", 0, 200, 250)], "and the budget may change"
    assert queue.long_text is None
    assert [picked(queue, 200) for _ in range(2)] == [[("b", 0, 0, 200)], [("b", 0, 200, 300)]]


def test_an_aborted_job_takes_its_long_text_away():
    queue = queue_of(TextJob("a", [250]), TextJob("b", [300]))
    picked(queue, 100)
    queue.remove("a")
    queue.check()
    assert queue.long_text is None and picked(queue, 400) == [("b", 0, 0, 300)]


def test_urgent_jobs_come_first_and_tenants_take_turns():
    queue = queue_of(
        TextJob("big", [50] * 10, tenant="x"),
        TextJob("small", [50, 50], tenant="y"),
        TextJob("urgent", [50], priority=1),
    )
    assert [picked(queue, 50)[0][0] for _ in range(5)] == ["urgent", "big", "small", "big", "small"]


def test_a_full_queue_refuses_and_keeps_room_for_others():
    queue = queue_of(*(TextJob(str(number), [1], flow="f", tenant="t") for number in range(5)), jobs_max=6)
    assert queue.refusal("t", "f") == "full_for_it" and queue.refusal("u", "g") is None
    queue.add(TextJob("last", [1]))
    assert queue.refusal("u", "g") == "full"
    with pytest.raises(ValueError, match="already here"):
        queue.add(TextJob("last", [1]))


def test_deadlines():
    queue = queue_of(TextJob("a", [1], deadline=5.0), TextJob("b", [1]))
    assert (queue.expired(4.9), queue.expired(5.0)) == ([], ["a"])


@pytest.mark.parametrize("seed", range(20))
def test_any_jobs_are_all_computed_once_within_the_budget(seed: int):
    rng = random.Random(seed)
    queue, left = TextQueue(100), {}
    done: dict[tuple[str, int], int] = {}
    number = 0
    for _ in range(400):
        if number < 30 and rng.random() < 0.3:
            lengths = [rng.choice([1, 3, 60, 64, 100, 700]) for _ in range(rng.randint(1, 12))]
            job = TextJob(f"j{number}", lengths, rng.randint(0, 1), tenant=rng.choice("ab"), flow=rng.choice("xy"))
            left[job.request_id] = job
            queue.add(job)
            number += 1
        if left and rng.random() < 0.02:
            gone = rng.choice(list(left))
            queue.remove(gone)
            del left[gone]
        budget = rng.choice([64, 128, 512])
        picks = queue.next_batch(budget)
        assert bool(picks) == bool(left)
        if not picks:
            continue
        longest = max(pick.stop - pick.start for pick in picks)
        assert len(picks) * longest <= budget
        assert len(picks) * longest <= PADDING_MAX * sum(pick.stop - pick.start for pick in picks)
        assert len(picks) == 1 or all(pick.start == 0 and pick.ends for pick in picks)
        for pick in picks:
            assert done.get((pick.job.request_id, pick.index), 0) == pick.start
            done[pick.job.request_id, pick.index] = pick.stop
        for finished in queue.computed(picks):
            assert [done[finished, index] for index in range(len(left[finished].lengths))] == left[finished].lengths
            del left[finished]
        queue.check()
    while left:
        for finished in queue.computed(queue.next_batch(512)):
            del left[finished]
    assert len(queue) == 0 and queue.pending_tokens == 0
