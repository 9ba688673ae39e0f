"""Images take turns by priority and fairness, and the queue has a limit."""

from __future__ import annotations

import pytest

from satchel.actors.protocol.replica_messages import image_tokens
from satchel.actors.replica.jobs.queue import SerialJob, SerialQueue


def job(name: str, tenant: str = "a", *, priority: int = 0, steps: int = 4, deadline: float = 10.0) -> SerialJob:
    return SerialJob(name, 16, steps, priority, deadline, tenant, f"{tenant}/")


def order(queue: SerialQueue) -> list[str]:
    """Makes all images, and returns them in the order in which they began."""
    made = []
    while (current := queue.begin()) is not None:
        for _ in range(current.steps):
            queue.step()
        made.append(current.request_id)
        queue.remove(current.request_id)
    return made


def test_a_higher_priority_comes_first_and_equals_in_their_order():
    queue = SerialQueue(10)
    for each in (job("late", priority=-1), job("first"), job("second"), job("soon", priority=1)):
        queue.add(each)
    assert order(queue) == ["soon", "first", "second", "late"]


def test_tenants_take_turns():
    queue = SerialQueue(10)
    for each in (*(job(f"a{i}") for i in range(3)), job("b0", "b"), job("b1", "b")):
        queue.add(each)
    assert order(queue) == ["a0", "b0", "a1", "b1", "a2"]


def test_the_limit_counts_those_that_wait_and_leaves_room_for_others():
    queue = SerialQueue(5)
    queue.add(job("made"))
    queue.begin()
    taken = 0
    while queue.refusal("a", "a/") is None:
        queue.add(job(f"a{taken}"))
        taken += 1
    assert taken == 4 and queue.refusal("a", "a/") == "full_for_it"
    assert queue.refusal("b", "b/") is None
    queue.add(job("b", "b"))
    assert queue.refusal("c", "c/") == "full"
    assert (queue.running, queue.waiting) == (1, 5)


def test_what_is_pending_shrinks_by_steps_and_removals():
    queue = SerialQueue(5)
    queue.add(job("a"))
    queue.add(job("b", steps=2))
    assert queue.pending_tokens == 16 * 6
    queue.begin()
    queue.step()
    assert queue.pending_tokens == 16 * 5
    assert queue.remove("a") is not None and queue.current is None
    assert queue.remove("a") is None
    assert queue.pending_tokens == 32


def test_deadlines_pass_in_the_queue_and_while_an_image_is_made():
    queue = SerialQueue(5)
    queue.add(job("made", deadline=1.0))
    queue.begin()
    queue.add(job("waits", deadline=2.0))
    queue.add(job("later", deadline=3.0))
    assert queue.expired(2.0) == ["made", "waits"]


def test_a_request_is_here_once():
    queue = SerialQueue(5)
    queue.add(job("a"))
    with pytest.raises(ValueError, match="already here"):
        queue.add(job("a"))


@pytest.mark.parametrize(("size", "tokens"), [((16, 16), 1), ((64, 48), 12), ((8, 8), 1), ((1024, 1024), 4096)])
def test_tokens_are_patches(size: tuple[int, int], tokens: int):
    assert image_tokens(*size) == tokens
