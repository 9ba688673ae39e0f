"""When a node looks for agents whose primary is lost. What it then does: `simulations/test_orphans.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from satchel.actors.kv_store.replication.orphans import RETRY_S, RETURN_S, WAITS_S, Orphans
from satchel.cluster.config.timing import USUAL
from tests.simulations.cluster_time import VirtualLoop

TICK_S = 1.0


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    yield loop
    loop.close()


def looks(loop: VirtualLoop, members: Callable[[float], list[str]], *, made: bool = True, until: float) -> list[float]:
    """Tends for so many seconds. Returns when it looked, in seconds from the begin."""
    began, found = loop.now, list[float]()

    async def others() -> list[str]:
        return members(loop.now - began)

    async def copy() -> bool:
        found.append(loop.now - began)
        return made

    nothing: Any = None
    peers: Any = SimpleNamespace(others=others)
    orphans = Orphans("n0", nothing, nothing, nothing, nothing, peers, count=1, timing=USUAL)
    orphans.copy = copy  # type: ignore[method-assign]

    async def tend() -> None:
        while loop.now - began < until:
            await orphans.tend()
            await asyncio.sleep(TICK_S)

    loop.run_until_complete(tend())
    return found


def test_a_node_that_was_lost_has_its_time_to_come_back(loop: VirtualLoop):
    """However many others were lost or came just before."""
    lost = 15.0
    (look,) = looks(loop, lambda now: ["n1", "n2"] if now < lost else ["n1"], until=100)
    assert RETURN_S <= look - lost < RETURN_S + 2 * TICK_S


def test_nodes_that_come_and_go_put_it_off_for_a_while_only(loop: VirtualLoop):
    found = looks(loop, lambda now: ["n1", "n2"] if now // 7 % 2 else ["n1"], until=200)
    gaps = [later - sooner for sooner, later in zip([0.0, *found], found, strict=False)]
    assert all(WAITS_S <= gap < WAITS_S + 2 * TICK_S for gap in gaps) and len(gaps) == 4


def test_copies_that_failed_are_soon_made(loop: VirtualLoop):
    first, *later = looks(loop, lambda now: ["n1"], made=False, until=40)
    assert RETURN_S <= first < RETURN_S + 2 * TICK_S
    assert later[0] - first < RETRY_S + 2 * TICK_S and len(later) >= 2
