"""The engine of images: requests come, go and end between two steps, and an error ends one of them alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from satchel.actors.model_files.identity.model_identity import ModelIdentity
from satchel.actors.protocol.replica_messages import ImageInfo, ImageRequest, ImageUpdate, Pixels
from satchel.actors.replica.images.engine import ImageEngine
from satchel.actors.replica.images.pipeline import FinishedImage
from satchel.actors.replica.jobs.pace import JobPace
from satchel.cluster.errors import SatchelError

PIXELS = Pixels(16, 16, b"\x00" * 768)
REQUEST = ImageRequest("a/1", "m", "prompt", 16, 16, 0, steps=4)


class Steps:
    """A pipeline whose every step waits to be let on. It does what its prompt says."""

    info = ImageInfo("fake", 4, 1.0, generates=True, edits=False)

    def __init__(self) -> None:
        self.turns = threading.Semaphore(0)
        self.begun: list[str] = []

    def steps_of(self, request: ImageRequest) -> int:
        return request.steps or 4

    def make(self, request: ImageRequest, paused: Callable[[int], None], partial: Any = None) -> FinishedImage:
        self.begun.append(request.request_id)
        if request.prompt == "no memory":
            raise RuntimeError("out of memory")
        for step in range(1, self.steps_of(request) + 1):
            assert self.turns.acquire(timeout=20)
            if request.prompt == "fail":
                raise KeyError("what it lacks")
            paused(step)
            if partial is not None and step == 1:
                partial(PIXELS)
        return FinishedImage(PIXELS, 3)


class World:
    def __init__(self, waiting_max: int = 4) -> None:
        self.pipeline = Steps()
        self.updates: dict[str, list[ImageUpdate]] = {}
        self.ended: dict[str, Future[ImageUpdate]] = {}
        identity = ModelIdentity({}, {})
        self.engine = ImageEngine(self.pipeline, identity, waiting_max, 2**30, self._take)  # type: ignore[arg-type]
        self.thread = threading.Thread(target=self.engine.run, daemon=True)
        self.thread.start()

    def _take(self, request_id: str, update: ImageUpdate) -> None:
        self.updates.setdefault(request_id, []).append(update)
        if update.is_last:
            self.ended[request_id].set_result(update)

    def submit(self, name: str, **fields: Any) -> SatchelError | None:
        answer: Future[SatchelError | None] = Future()
        self.ended[name] = Future()
        self.engine.submit(replace(REQUEST, request_id=name, **fields), answer.set_result)
        return answer.result(20)

    def end_of(self, name: str) -> ImageUpdate:
        return self.ended[name].result(20)

    def between_steps(self) -> None:
        """Waits until the engine has taken what was sent to it before."""
        done = threading.Event()
        self.engine.call(done.set)
        self.pipeline.turns.release()
        assert done.wait(20)

    def let_on(self, steps: int = 1000) -> None:
        for _ in range(steps):
            self.pipeline.turns.release()

    def close(self) -> None:
        self.engine.end_all()
        self.let_on()
        self.engine.stop()
        self.thread.join(20)
        assert not self.thread.is_alive()


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def kind(update: ImageUpdate) -> str | None:
    return None if update.error is None else update.error["kind"]


def test_an_image_says_each_step_and_then_comes(world: World):
    assert world.submit("a", partial_images=1) is None
    world.let_on()
    last = world.end_of("a")
    assert (last.image, last.prompt_tokens) == (PIXELS, 3)
    told = world.updates["a"]
    assert [each.step for each in told if not each.partial and not each.is_last] == [0, 1, 2, 3, 4]
    assert [each.partial for each in told if each.partial] == [[PIXELS]]
    assert {each.steps for each in told} == {4}
    assert (world.engine.counters.images, world.engine.counters.steps) == (1, 4)
    assert world.engine.pace.tokens_per_s > 0 and world.engine.queue.request_ids == []


def test_commands_are_taken_between_two_steps_of_a_long_image(world: World):
    world.submit("a", steps=200)
    world.between_steps()
    # Also another request, which is accepted long before the image is done.
    accepted: Future[SatchelError | None] = Future()
    world.ended["b"] = Future()
    world.engine.submit(replace(REQUEST, request_id="b"), accepted.set_result)
    world.let_on(2)
    assert accepted.result(20) is None
    assert not world.ended["a"].done() and world.engine.queue.waiting == 1


def test_an_aborted_image_ends_before_its_next_step_and_the_next_one_begins(world: World):
    world.submit("a", steps=200)
    world.engine.abort(("a", "unknown"))
    world.let_on(2)
    assert kind(world.end_of("a")) == "RequestAborted"
    world.let_on()
    assert world.submit("b") is None
    assert world.end_of("b").image == PIXELS
    assert world.engine.counters.steps < 200


def test_an_aborted_request_that_waits_is_never_begun(world: World):
    world.submit("a", steps=3)
    answer: Future[SatchelError | None] = Future()
    world.ended["b"] = Future()
    world.engine.submit(replace(REQUEST, request_id="b"), answer.set_result)
    world.engine.abort(("b",))
    world.let_on()
    assert kind(world.end_of("b")) == "RequestAborted"
    assert world.end_of("a").image == PIXELS
    assert world.pipeline.begun == ["a"]


@pytest.mark.parametrize("prompt", ["fail", "no memory"])
def test_an_error_ends_that_image_alone(world: World, prompt: str):
    world.let_on()
    assert world.submit("a", prompt=prompt) is None
    assert kind(world.end_of("a")) == "GenerationFailed"
    assert world.submit("b") is None
    assert world.end_of("b").image == PIXELS
    assert world.engine.counters.device_failures == (prompt == "no memory")


def test_a_deadline_ends_an_image_between_two_steps(world: World):
    world.submit("a", steps=200, deadline_s=0.05)
    while not world.ended["a"].done():
        world.let_on(1)
        time.sleep(0.01)
    assert kind(world.end_of("a")) == "DeadlineExceeded"


def test_a_full_queue_refuses(world: World):
    world.submit("made", steps=200)
    refusals: list[Future[SatchelError | None]] = []
    for number in range(6):
        answer: Future[SatchelError | None] = Future()
        name = f"w{number}"
        world.ended[name] = Future()
        world.engine.submit(replace(REQUEST, request_id=name, tenant=name, flow=name), answer.set_result)
        refusals.append(answer)
    world.let_on(3)
    kinds = [type(each.result(20)).__name__ for each in refusals]
    assert kinds == ["NoneType"] * 4 + ["QueueFull"] * 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"width": 24}, "size"),
        ({"height": 4096}, "size"),
        ({"steps": 0}, "steps"),
        ({"steps": 251}, "steps"),
        ({"images": [PIXELS]}, "model"),
    ],
)
def test_what_the_model_cannot_do_is_refused_by_name(world: World, fields: dict[str, Any], param: str):
    # A request of 0 steps: the model's own number is for None alone.
    world.pipeline.steps_of = lambda request: 4 if request.steps is None else request.steps  # type: ignore[method-assign]
    refusal = world.submit("a", **fields)
    assert refusal is not None and refusal.status == 400
    assert getattr(refusal, "param", None) == param


def test_an_image_that_would_not_fit_into_memory_is_refused(world: World):
    world.engine.pace.note_job(64 * 64, 2**29)
    refusal = world.submit("a", width=2048, height=2048)
    assert refusal is not None and "MiB of memory" in refusal.message
    assert world.submit("b", width=1024, height=1024) is None


def test_a_small_image_whose_memory_hardly_grows_keeps_out_no_large_one(world: World):
    world.engine.pace.note_job(1, 7 * 2**20)
    assert world.submit("a", width=2048, height=2048) is None


def test_memory_is_predicted_from_the_largest_image():
    pace = JobPace()
    assert pace.job_bytes(100) == 0
    for tokens, nbytes in ((100, 5000), (1, 4000), (200, 7000), (200, 6000), (200, 6500), (100, 9000)):
        pace.note_job(tokens, nbytes)
    assert [pace.job_bytes(tokens) for tokens in (100, 400, 800, 8000)] == [3000, 12000, 24000, 24000]


def test_memory_is_claimed_before_an_image_that_needs_more(world: World):
    engine, claimed = world.engine, list[int]()
    engine._claim, engine.given_bytes_max = claimed.append, 100
    engine.pace.note_job(1, 2**40)
    engine.pace.note_job(4, 2**20)
    engine.temporary_bytes = 2**20
    world.submit("a", width=64, height=64, steps=200)
    world.between_steps()
    assert claimed == [2**22 + 100] == [engine.needed_bytes]
    # Memory that has gone meanwhile ends a request that waited for it.
    waits: Future[SatchelError | None] = Future()
    world.ended["b"] = Future()
    engine.submit(replace(REQUEST, request_id="b", width=64, height=64), waits.set_result)
    world.let_on(2)
    assert waits.result(20) is None
    engine.memory_bytes = 2**21
    engine.abort(("a",))
    world.let_on()
    assert kind(world.end_of("b")) == "InvalidRequest"
    assert engine.needed_bytes == 2**20 + 100


def test_the_images_that_wait_to_be_edited_are_limited_by_their_bytes(world: World):
    world.pipeline.info = replace(world.pipeline.info, edits=True, edit_steps=4)
    world.engine.given_bytes_max = 3 * len(PIXELS.data)
    world.submit("a", steps=200)
    answers: dict[str, Future[SatchelError | None]] = {}
    for name, images in (("b", [PIXELS] * 2), ("c", []), ("d", [PIXELS]), ("e", [PIXELS])):
        answers[name], world.ended[name] = Future(), Future()
        given = {"images": images, "tenant": name, "flow": name}
        world.engine.submit(replace(REQUEST, request_id=name, **given), answers[name].set_result)
    world.let_on(2)
    kinds = {name: type(answer.result(20)).__name__ for name, answer in answers.items()}
    assert kinds == {"b": "NoneType", "c": "NoneType", "d": "NoneType", "e": "QueueFull"}
    world.let_on()
    world.end_of("d")
    # A single request may have more.
    assert world.submit("f", images=[PIXELS] * 5) is None


def test_a_draining_replica_refuses_and_finishes_what_it_has(world: World):
    world.submit("a")
    world.engine.drain()
    world.let_on()
    assert world.end_of("a").image == PIXELS
    refusal = world.submit("b")
    assert type(refusal).__name__ == "Draining"


def test_a_leaving_node_ends_its_images_so_that_they_fail_over(world: World):
    world.submit("a", steps=200)
    world.engine.end_all(leaves=True)
    world.let_on(3)
    assert kind(world.end_of("a")) == "ReplicaLeaves"
