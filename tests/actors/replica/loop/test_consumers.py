"""Frames for the consumers of a replica's tokens: nothing twice, nothing missing, and no consumer waits for another."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator

import pytest

from satchel.actors.kv_store.actor import KVStoreActor
from satchel.actors.protocol.replica_messages import SequenceUpdate
from satchel.actors.replica.actor import ReplicaActor
from satchel.actors.replica.loop.consumers import Consumers
from satchel.actors.router.actor import RouterActor
from satchel.cluster.config.timing import Timing


class Readers:
    """A replica's consumers. `ended` are the sequences that were aborted."""

    def __init__(self, **timing: float) -> None:
        self.ended: list[str] = []
        self.all = Consumers(self._abort, Timing(report_s=0.05, **timing))

    async def _abort(self, request_ids: list[str]) -> None:
        self.ended += request_ids

    def say(self, consumer: str, *tokens: int, sequence: str = "r", finish: str | None = None) -> None:
        self.all.deliver({consumer: [SequenceUpdate(sequence, list(tokens), finish)]})

    async def hears(self, consumer: str, number: int) -> dict[str, list[int]] | None:
        updates = await self.all.next_frame(consumer, number)
        return None if updates is None else {update.request_id: update.tokens for update in updates}


@pytest.fixture
async def readers() -> AsyncIterator[Readers]:
    readers = Readers()
    yield readers
    readers.all._reaper.cancel()


async def test_a_frame_has_all_that_is_new_and_an_empty_one_says_that_nothing_is(readers: Readers):
    assert await readers.hears("c", 0) == {}
    readers.say("c", 1, 2)
    readers.say("c", 3)
    readers.say("c", 7, sequence="s")
    readers.say("d", 9)
    assert await readers.hears("c", 1) == {"r": [1, 2, 3], "s": [7]}
    waiting = asyncio.create_task(readers.hears("c", 2))
    await asyncio.sleep(0)
    readers.say("c", 4)
    assert await waiting == {"r": [4]}
    assert await readers.hears("c", 3) == {}


async def test_updates_that_share_a_frame_lose_nothing_that_one_of_them_says(readers: Readers):
    assert await readers.hears("c", 0) == {}
    admitted = SequenceUpdate("r", [], cached_tokens=5, disk_tokens=2, queued_s=0.5)
    readers.all.deliver({"c": [admitted, SequenceUpdate("r", [1], prefill_s=0.25), SequenceUpdate("r", [2], "stop")]})
    whole = SequenceUpdate("r", [1, 2], "stop", cached_tokens=5, disk_tokens=2, queued_s=0.5, prefill_s=0.25)
    assert await readers.all.next_frame("c", 1) == [whole]


async def test_a_frame_that_was_lost_on_the_way_ends_the_consumer(readers: Readers):
    """If a consumer asks for the first frame again, it has not received it."""
    assert await readers.hears("c", 0) == {}
    readers.say("c", 1)
    assert await readers.hears("c", 1) == {"r": [1]}
    assert await readers.hears("c", 1) is None
    assert await readers.hears("c", 3) is None
    assert await readers.hears("c", 0) is None


async def test_two_that_ask_for_one_frame_do_not_share_it(readers: Readers):
    await readers.hears("c", 0)
    both = [asyncio.create_task(readers.hears("c", 1)) for _ in range(2)]
    await asyncio.sleep(0)
    readers.say("c", 1)
    first, second = await asyncio.gather(*both)
    assert first == {"r": [1]} and second is None


async def test_who_asks_no_more_is_forgotten_with_its_sequences():
    readers = Readers(consumer_lease_s=0.2)
    readers.all.sequences("c").add("r")
    assert await readers.hears("c", 0) == {}
    async with asyncio.timeout(10):
        while not readers.ended:
            await asyncio.sleep(0.05)
    assert readers.ended == ["r"]
    assert await readers.hears("c", 1) is None
    # A request that comes late makes it known again, and what it has heard before is still of another life.
    readers.all.sequences("c").add("s")
    assert await readers.hears("c", 1) is None


@pytest.mark.parametrize("actor", [ReplicaActor, KVStoreActor, RouterActor])
def test_no_actor_answers_with_a_generator(actor: type):
    """Before one ends, Ray waits on the actor's event loop until its caller has acknowledged every item."""
    methods = dict(inspect.getmembers(actor, inspect.isfunction))
    generators = (inspect.isasyncgenfunction, inspect.isgeneratorfunction)
    assert methods and not [name for name, method in methods.items() if any(is_one(method) for is_one in generators)]
