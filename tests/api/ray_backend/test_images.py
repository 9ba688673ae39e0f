"""A request for an image follows its replica, and begins anew on another one if that is lost."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from satchel.actors.protocol.replica_messages import ImageRequest, ImageUpdate, Pixels
from satchel.api.ray_backend.images import RayImage
from satchel.api.requests.backend import ImageAnswer
from satchel.cluster.errors import GenerationFailed, QueueFull, ReplicaLeaves, ReplicaLost
from tests.api.ray_backend import test_dispatch as worlds
from tests.api.ray_backend.test_pooling import Cluster as Pooling
from tests.worlds.api.scripted_replica import ScriptedReplica

REQUEST = ImageRequest("id/1", "m", "p", 32, 32, 7, steps=3, deadline_s=60.0)
DONE = ImageUpdate(9, 3, 3, image=Pixels(1, 1, b"abc"), prompt_tokens=4)


class Replica(ScriptedReplica):
    begin, news, done = "make_image", "next_image", DONE


class Cluster(Pooling):
    def __init__(self, **scripts: list[Any]) -> None:
        super().__init__(worlds.SOON, **scripts)
        self.replicas = {name: Replica(self, name, *script) for name, script in scripts.items()}  # type: ignore[assignment]
        self.told: list[ImageUpdate] = []

    async def image(self) -> ImageAnswer:
        async with asyncio.timeout(10):
            return await RayImage(self, REQUEST, self.told.append).run()  # type: ignore[arg-type]


async def test_updates_come_until_the_image_does_and_the_load_is_taken_back():
    first, second = ImageUpdate(1, 0, 3), ImageUpdate(4, 2, 3, partial=[Pixels(1, 1, b"xyz")])
    cluster = Cluster(a=["take", first, None, second, DONE], b=[])
    answer = await cluster.image()
    assert (answer.update, answer.replica, answer.node, answer.why) == (DONE, "a", "node of a", "why")
    assert cluster.told == [first, second]
    (routed,) = cluster.routed
    assert (routed.model, routed.prompt_tokens) == ("m", 4 * 3)
    assert cluster.loads == {"a": 0, "b": 0}


@pytest.mark.parametrize(
    "script",
    [
        ["end"],
        ["take", "end"],
        ["take", ImageUpdate(1, 0, 3), "end"],
        ["take", ReplicaLost("it does not know the image")],
        ["take", ImageUpdate(1, 0, 0, error=ReplicaLeaves("leaving").to_wire())],
        [QueueFull("full")],
    ],
)
async def test_another_replica_begins_the_same_image(script: list[Any]):
    cluster = Cluster(a=script, b=[])
    answer = await cluster.image()
    assert (answer.update, answer.replica) == (DONE, "b")
    assert cluster.replicas["b"].asked[0].seed == REQUEST.seed
    assert cluster.loads == {"a": 0, "b": 0}


async def test_a_replica_that_forgot_an_image_is_not_reported_and_may_be_asked_again():
    cluster = Cluster(a=["take", ReplicaLost("it does not know the image")])
    answer = await cluster.image()
    assert (answer.update, answer.replica) == (DONE, "a")
    assert cluster.counts() == {"a": 2} and not cluster.silent


async def test_partial_images_that_come_with_the_image_are_told():
    last = replace(DONE, partial=[Pixels(1, 1, b"xyz")])
    cluster = Cluster(a=["take", last])
    assert (await cluster.image()).update == last
    assert cluster.told == [replace(last, image=None)]


async def test_an_image_that_failed_is_not_made_again():
    failed = ImageUpdate(1, 0, 0, error=GenerationFailed("no").to_wire())
    cluster = Cluster(a=["take", failed], b=[])
    with pytest.raises(GenerationFailed):
        await cluster.image()
    assert cluster.counts() == {"a": 1, "b": 0}


async def test_a_caller_who_leaves_aborts_the_image():
    cluster = Cluster(a=["take", *[None] * 10_000])
    asks = asyncio.create_task(cluster.image())
    while not cluster.replicas["a"].asked:
        await asyncio.sleep(0)
    asks.cancel()
    await asyncio.wait({asks})
    await asyncio.sleep(0)
    assert cluster.replicas["a"].aborted == [REQUEST.request_id]
