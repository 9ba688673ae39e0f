"""Agents of a node that leaves: all are moved, a few at a time, and none blocks the others for ever."""

from __future__ import annotations

import asyncio

import pytest

from satchel.actors import start
from satchel.actors.protocol.clients import ReplicaClient
from satchel.actors.protocol.replica_messages import ReplicaStats
from satchel.actors.rpc.codec import encode
from satchel.api.ray_backend.leaving import AT_ONCE, HandedOver, hand_over
from satchel.cluster.config.timing import USUAL
from satchel.cluster.errors import ActorLost
from tests.worlds.direct import Direct

AGENTS = [f"default/agent{number}" for number in range(3 * AT_ONCE)]


async def test_all_agents_are_handed_over_a_few_at_the_same_time():
    moving, most, moved = 0, 0, []

    async def move(agent: str) -> bool:
        nonlocal moving, most
        moving += 1
        most = max(most, moving)
        await asyncio.sleep(0)
        moving -= 1
        moved.append(agent)
        return True

    assert await hand_over(AGENTS, move, 60.0) == HandedOver(len(AGENTS), 0)
    assert sorted(moved) == sorted(AGENTS) and most == AT_ONCE


async def test_an_agent_that_cannot_be_moved_is_left_and_the_others_are_not():
    async def move(agent: str) -> bool:
        if agent == AGENTS[1]:
            raise ActorLost("its new home has died")
        return agent != AGENTS[2]

    assert await hand_over(AGENTS, move, 60.0) == HandedOver(len(AGENTS) - 2, 2)


async def test_nobody_waits_for_a_move_that_does_not_end():
    begun = []

    async def move(agent: str) -> bool:
        begun.append(agent)
        if len(begun) > AT_ONCE:
            await asyncio.Event().wait()
        return True

    assert await hand_over(AGENTS, move, 0.05) == HandedOver(AT_ONCE, len(AGENTS) - AT_ONCE)
    assert len(begun) == 2 * AT_ONCE, "once the time is up none is begun"


async def test_who_has_no_agents_hands_nothing_over():
    async def move(agent: str) -> bool:
        raise AssertionError

    assert await hand_over([], move, 60.0) == HandedOver()


class BusyReplica:
    """A replica whose sequence does not end by itself."""

    def __init__(self) -> None:
        self.told: list[list[bool]] = []

    async def drain(self, how: bytes) -> bytes:
        self.told.append(ReplicaClient.drain.asked(how))
        return encode(None)

    async def stats(self, _: bytes) -> bytes:
        return encode(ReplicaStats("m-0", "m", True, running=1))


@pytest.mark.parametrize("leaves", [True, False])
async def test_sequences_that_outlast_a_drain_are_told_whether_only_their_node_goes(leaves: bool, monkeypatch):
    monkeypatch.setattr(start, "POLL_S", 0.01)
    monkeypatch.setattr(start, "FLUSH_S", 0.01)
    replica = BusyReplica()
    client = ReplicaClient("m-0", USUAL, Direct(lambda: replica))
    await start.drain({"m-0": client}, 0.1, USUAL, leaves=leaves)
    assert replica.told == [[False, False], [True, leaves]]
