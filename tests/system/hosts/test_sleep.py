"""Hosts that sleep for longer than anybody waits for them: they come back by themselves, and nothing is forgotten.

Their clocks go on meanwhile, as those of Ray's processes on a Mac do. Simulations have more of it: clocks that stop,
and hours.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from .hosts import Host, named, wait_until
from .hosts_world import NODES, RETURN_S, START_S, World, succeeds, three_hosts

pytestmark = pytest.mark.slow

NUMBERS = "Say the numbers from one to forty."
NAP_S = 30.0

SLEPT_S = 75.0
"""Longer than Ray and Satchel wait for a node or a head."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with three_hosts(tmp_path_factory, "sleep") as found:
        succeeds(found.up(), START_S)
        found.whole()
        yield found


def test_a_node_that_slept_comes_back_and_its_agents_went_on(world: World):
    talk, dora, eric = world.talk, named("dora", "mac1", NODES), named("eric", "mac1", NODES)
    talk.ask(dora, "Remember: the code of zebra is 4711.")
    talk.ask(eric, "Remember: the code of quokka is 5813.")
    for agent in (dora, eric):
        talk.settled(agent, "mac1", ["mac0"])
    slept(world, [world.second], lambda: ask(world, dora, "What is the code of zebra?", "4711"))
    assert ask(world, dora, "What is the code of zebra?", "4711") > 0
    ask(world, eric, "What is the code of quokka?", "5813")


def test_a_head_that_slept_has_its_nodes_again(world: World):
    talk, fred = world.talk, named("fred", "mac1", NODES)
    talk.ask(fred, "Remember: the code of heron is 2002.")
    talk.settled(fred, "mac1", ["mac0"])
    slept(world, [world.head])
    ask(world, fred, "What is the code of heron?", "2002")


def test_all_that_slept_go_on(world: World):
    talk, gina = world.talk, named("gina", "mac1", NODES)
    talk.ask(gina, "Remember: the code of ibis is 3773.")
    talk.settled(gina, "mac1", ["mac0"])
    slept(world, [world.head, world.second])
    ask(world, gina, "What is the code of ibis?", "3773")


def test_streams_go_on_when_those_who_compute_them_fall_asleep(world: World):
    """Elsewhere, if only their node sleeps; where they were, if all do."""
    talk, plain, hana = world.talk, named("plain", "mac0", NODES), named("hana", "mac1", NODES)
    whole = talk.ask(plain, NUMBERS, max_tokens=400).text
    stopped: list[tuple[Host, list[int]]] = []

    def wake() -> None:
        while stopped:
            machine, pids = stopped.pop()
            machine.wake(pids)

    def node_sleeps(pieces: int) -> None:
        if pieces == 3:
            stopped.append((world.second, world.second.sleep()))

    def all_sleep(pieces: int) -> None:
        if pieces == 3:
            stopped.extend((machine, machine.sleep()) for machine in (world.head, world.second))
            time.sleep(NAP_S)
            wake()

    try:
        assert talk.stream(hana, NUMBERS, node_sleeps, max_tokens=400) == whole
    finally:
        wake()
    wait_until(lambda: _whole(world), 2 * RETURN_S)
    try:
        assert talk.stream(named("iris", "mac1", NODES), NUMBERS, all_sleep, max_tokens=400) == whole
    finally:
        wake()
    wait_until(lambda: _whole(world), 2 * RETURN_S)


def ask(world: World, agent: str, question: str, answer: str) -> float:
    began = time.monotonic()
    said = world.talk.ask(agent, question, timeout_s=60.0)
    assert answer in said.text
    return time.monotonic() - began


def slept(world: World, machines: list[Host], meanwhile=lambda: None) -> None:
    """Lets machines sleep, and waits until the cluster is whole again."""
    stopped = [(machine, machine.sleep()) for machine in machines]
    began = time.monotonic()
    try:
        meanwhile()
        time.sleep(max(0.0, began + SLEPT_S - time.monotonic()))
    finally:
        for machine, pids in stopped:
            machine.wake(pids)
    woken = time.monotonic()
    wait_until(lambda: _whole(world), 2 * RETURN_S)
    print(f"whole after {time.monotonic() - woken:.0f} s")


def _whole(world: World) -> bool:
    try:
        return world.talk.answering() >= set(NODES) and all(world.talk.nodes().get(name) for name in NODES)
    except Exception:
        return False
