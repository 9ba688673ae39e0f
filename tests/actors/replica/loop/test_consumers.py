"""Frames for the consumers of a replica's tokens: nothing twice, nothing missing, and no consumer waits for another."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator

import pytest

from satchel.actors.kv_store.actor import KVStoreActor
from satchel.actors.protocol.clients import ReplicaClient
from satchel.actors.protocol.replica_messages import SequenceUpdate
from satchel.actors.replica.actor import ReplicaActor
from satchel.actors.replica.loop.consumers import Consumers
from satchel.actors.router.actor import RouterActor
from satchel.actors.rpc.local import AHEAD
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


class Asked:
    """Where frames go that a consumer has asked for ahead; `lost` once its connection has ended."""

    def __init__(self) -> None:
        self.frames: list[list[list[int]] | None] = []
        self.lost = False

    def send(self, answer: bytes) -> bool:
        if not self.lost:
            updates = ReplicaClient.next_frame.answered(answer)
            self.frames.append(None if updates is None else [update.tokens for update in updates])
        return not self.lost

    def take(self) -> list[list[list[int]] | None]:
        frames, self.frames = self.frames, []
        return frames


async def test_frames_that_are_asked_for_ahead_are_sent_at_once_by_whoever_delivers(readers: Readers):
    asked = Asked()
    readers.all.sequences("c").update(("r", "s"))
    readers.say("c", 1)
    readers.all.send_ahead("c", 0, asked)
    assert asked.take() == [[[1]]], "what was there already"
    await asyncio.to_thread(readers.say, "c", 2)
    readers.say("d", 9)
    readers.say("c", 3, finish="stop")
    assert asked.take() == [[[2]], [[3]]]
    assert readers.all.sequences("c") == {"s"}


async def test_no_more_frames_are_sent_than_were_asked_for_and_the_next_one_has_the_rest(readers: Readers):
    asked = Asked()
    readers.all.send_ahead("c", 0, asked)
    for token in range(AHEAD):
        readers.say("c", token)
    assert asked.take() == [[[token]] for token in range(AHEAD)]
    readers.say("c", 1)
    readers.say("c", 2)
    readers.say("c", 3, sequence="s")
    await asyncio.sleep(0.12)
    assert asked.take() == []
    readers.all.send_ahead("c", AHEAD, asked)
    assert asked.take() == [[[1, 2], [3]]]
    readers.say("c", 4)
    assert asked.take() == [[[4]]]


async def test_who_asks_again_while_frames_are_on_their_way_has_not_lost_them(readers: Readers):
    asked, other = Asked(), Asked()
    readers.all.send_ahead("c", 0, asked)
    for token in range(3):
        readers.say("c", token)
    readers.all.send_ahead("c", 1, asked)
    readers.say("c", 3)
    assert asked.take() == [[[token]] for token in range(4)]
    readers.all.send_ahead("c", 5, asked)
    assert asked.take() == [None], "there was no such frame"
    readers.all.send_ahead("c", 3, other)
    assert other.take() == [None], "on another connection they do not come"
    readers.all.send_ahead("c", 4, other)
    readers.say("c", 4)
    assert (asked.take(), other.take()) == ([], [[[4]]])
    readers.all.send_ahead("unknown", 2, other)
    assert other.take() == [None]


async def test_a_connection_that_has_ended_loses_no_frame_that_it_did_not_take(readers: Readers):
    asked = Asked()
    readers.all.send_ahead("c", 0, asked)
    readers.say("c", 1)
    asked.lost = True
    readers.say("c", 2)
    readers.say("c", 3)
    assert asked.take() == [[[1]]]
    assert await readers.hears("c", 1) == {"r": [2, 3]}
    assert await readers.hears("c", 2) == {}


async def test_who_asks_for_one_frame_gets_nothing_ahead_any_more(readers: Readers):
    asked = Asked()
    readers.all.send_ahead("c", 0, asked)
    waiting = asyncio.create_task(readers.hears("c", 0))
    await asyncio.sleep(0)
    readers.say("c", 1)
    assert await waiting == {"r": [1]}
    readers.say("c", 2)
    assert asked.take() == []


async def test_frames_ahead_are_empty_if_there_is_nothing_new_for_a_while(readers: Readers):
    asked = Asked()
    readers.all.send_ahead("c", 0, asked)
    async with asyncio.timeout(10):
        while len(asked.frames) < 3:
            await asyncio.sleep(0.01)
    assert asked.take()[:3] == [[], [], []]


async def test_whose_lease_runs_out_is_told_where_its_frames_went():
    readers, asked = Readers(consumer_lease_s=0.2), Asked()
    readers.all.sequences("c").add("r")
    readers.all.send_ahead("c", 0, asked)
    async with asyncio.timeout(10):
        while not readers.ended:
            await asyncio.sleep(0.05)
    assert readers.ended == ["r"] and asked.frames[-1] is None
    readers.all._reaper.cancel()


async def test_updates_that_cannot_be_sent_end_their_consumer_and_no_other(readers: Readers):
    """They are sent on the engine's thread, without which the process is useless."""
    asked, other = Asked(), Asked()
    readers.all.sequences("c").add("s")
    readers.all.send_ahead("c", 0, asked)
    readers.all.send_ahead("d", 0, other)
    unsendable = SequenceUpdate("r", [], "error", error={"message": "a file named \udcff"})
    readers.all.deliver({"c": [unsendable], "d": [SequenceUpdate("r", [1])]})
    assert (asked.take(), other.take()) == ([None], [[[1]]])
    readers.say("c", 2)
    readers.all.send_ahead("c", 0, asked)
    assert asked.take() == [None], "an update is missing"
    assert await readers.hears("c", 0) is None
    async with asyncio.timeout(10):
        while not readers.ended:
            await asyncio.sleep(0.05)
    assert readers.ended == ["s"]
    readers.say("d", 2)
    assert other.take()[-1] == [[2]]


@pytest.mark.parametrize("actor", [ReplicaActor, KVStoreActor, RouterActor])
def test_no_actor_answers_with_a_generator(actor: type):
    """Before one ends, Ray waits on the actor's event loop until its caller has acknowledged every item."""
    methods = dict(inspect.getmembers(actor, inspect.isfunction))
    generators = (inspect.isasyncgenfunction, inspect.isgeneratorfunction)
    assert methods and not [name for name, method in methods.items() if any(is_one(method) for is_one in generators)]
