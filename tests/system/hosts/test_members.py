"""Machines that have joined a cluster by hand: they come and go while streams run, come back by themselves after a cut,
are removed, and one of them replaces a lost head.

The hosts are network namespaces, and the tests tell one story, in order, as those in `test_hosts.py` do.
"""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from satchel.cluster.bring_up.runtime import clean_up_after_killed_run
from satchel.cluster.connection import find_cluster
from satchel.cluster.errors import NotRunning
from satchel.cluster.home import Home
from satchel.cluster.node_keeper import find_keeper
from satchel.cluster.trust.takeover_state import kept_takeover_state

from ..serving import RECALL
from . import hosts as namespaces
from .hosts import Host, Talk, hosts, named, wait_until
from .hosts_world import PORT, RETURN_S, START_S, World, ended, hear, succeeds

pytestmark = pytest.mark.slow

NAMES = ["mac0", "mac1", "mac2"]
STREAMS = 16
STORY, GREETING = "Tell me a story.", "Hello."
TOKENS, LONG_TOKENS = 200, 3000
LEAVE_S = 60.0

GIVE_UP_S = "5"
"""How long Ray's processes wait for a control store that they cannot reach, instead of 60 s."""


class Members(World):
    """A head, and two machines that no config names."""

    def __init__(self, folder: Path, machines: list[Host]) -> None:
        super().__init__(folder, machines)
        nodes = [{"name": "mac0", "address": self.head.address}]
        endpoint = {"listen": self.head.address, "port": PORT}
        # Sequences of a leaving machine fail over soon, however fast this machine is.
        config = {"models": [RECALL], "nodes": nodes, "endpoint": endpoint, "timing": {"node_drain_s": 0.5}}
        self.config.write_text(json.dumps(config))
        self.kept: dict[str, subprocess.Popen[str]] = {}

    def host(self, name: str) -> Host:
        return self.machines[NAMES.index(name)]

    def on(self, name: str, *words: str) -> subprocess.Popen[str]:
        """A command on a host, for its own home."""
        return self.satchel(self.host(name), *words, home=name)

    def comes(self, name: str, *words: str) -> None:
        """`satchel join` there, until it has joined."""
        self.kept[name] = self.on(name, "join", *words)
        hear(self.kept[name], f"{name} has joined", START_S)

    def leaves(self, name: str) -> None:
        succeeds(self.on(name, "leave", "--wait", str(LEAVE_S)), LEAVE_S + 10)
        succeeds(self.kept.pop(name), 10)

    def end(self) -> None:
        for name in NAMES:
            with suppress(AssertionError):
                if find_keeper(self.home(name)) is not None:
                    ended(self.on(name, "leave", "--wait", "30"), 60)
                with suppress(NotRunning):
                    find_cluster(self.home(name))
                    ended(self.on(name, "down", "--now", "--wait", "30"), 60)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Members]:
    if (reason := namespaces.missing()) is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("members")
    patched = pytest.MonkeyPatch()
    patched.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", GIVE_UP_S)
    try:
        with hosts(3) as machines:
            found = Members(folder, machines)
            try:
                yield found
            finally:
                found.end()
                for log in folder.glob("*/run/*.log"):
                    print(log, log.read_text(errors="replace")[-2000:])
    finally:
        patched.undo()
        # Those that were killed have left Ray's folders behind.
        for name in NAMES:
            clean_up_after_killed_run(found.home(name))


class Streams:
    """Clients that stream at the same time, each from an agent of its own.

    Args:
        wanted: what each is to say, and in how many tokens.
    """

    def __init__(self, talk: Talk, wanted: dict[str, tuple[str, int]]) -> None:
        self.wrong: list[str] = []
        self._talk = talk
        self._begun = threading.Semaphore(0)
        self._threads = [
            threading.Thread(target=self._stream, args=(agent, *each), daemon=True) for agent, each in wanted.items()
        ]
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            assert self._begun.acquire(timeout=RETURN_S), self.wrong

    def _stream(self, agent: str, wanted: str, tokens: int) -> None:
        def begun(pieces: int) -> None:
            if pieces == 3:
                self._begun.release()

        try:
            said = self._talk.stream(agent, STORY, begun, max_tokens=tokens, ignore_eos=True)
        except Exception as error:
            self.wrong.append(repr(error))
            return
        if said != wanted:
            self.wrong.append(said)

    def running(self) -> int:
        return sum(thread.is_alive() for thread in self._threads)

    def end(self) -> None:
        for thread in self._threads:
            thread.join(START_S)
        assert not self.running()


def may_lead(home: Home) -> bool:
    """Returns whether the machine has the takeover state."""
    found = kept_takeover_state(home)
    return found is not None and bool(found[0].config)


def went_on(talk: Talk) -> float:
    """Returns how many sequences have failed over."""
    (line,) = [
        line for line in talk.http.get("/metrics").text.splitlines() if line.startswith("satchel_failovers_total ")
    ]
    return float(line.split()[1])


def test_a_restart_of_every_machine_changes_and_stops_no_stream(world: Members):
    """One after the other leaves and comes again, under its name, while sixteen clients stream."""
    talk = world.talk
    succeeds(world.up(), START_S)
    for name in NAMES[1:]:
        world.comes(name, world.invitation().to_text(), "--name", name)
    wait_until(lambda: talk.answering() == set(NAMES), RETURN_S)
    assert talk.ask(named("keeper", "mac2", NAMES), "Remember: the code of heron is 2002.").node == "mac2"
    wanted = talk.stream("reference", STORY, lambda pieces: None, max_tokens=TOKENS, ignore_eos=True)
    talk.ask("long-reference", GREETING)
    long = talk.stream("long-reference", STORY, lambda pieces: None, max_tokens=LONG_TOKENS, ignore_eos=True)
    for name in NAMES[1:]:
        wait_until(partial(may_lead, world.home(name)), RETURN_S)
        # One of them is at home there, and still far from its end when the machine leaves.
        at_home = named(f"long-{name}-", name, NAMES)
        assert talk.ask(at_home, GREETING).node == name
        tellers = {f"teller-{name}-{number}": (wanted, TOKENS) for number in range(STREAMS - 1)}
        before, streams = went_on(talk), Streams(talk, {at_home: (long, LONG_TOKENS), **tellers})
        running = streams.running()
        world.leaves(name)
        assert not may_lead(world.home(name)), "it has forgotten what it was told"
        assert name not in talk.nodes()
        world.comes(name)
        streams.end()
        # Short ones may have ended before the last had begun.
        assert running and not streams.wrong, (name, running, streams.wrong)
        assert went_on(talk) > before, "sequences of that machine have gone on elsewhere"
        wait_until(lambda: talk.answering() == set(NAMES), RETURN_S)
    assert "2002" in talk.ask(named("keeper", "mac2", NAMES), "What is the code of heron?").text


def test_a_machine_that_was_cut_off_for_too_long_comes_back_by_itself(world: Members):
    """Ray gives it up, and it gives Ray up."""
    talk, kept = world.talk, world.kept["mac1"]
    world.host("mac1").cut()
    try:
        hear(kept, "mac1 has lost the cluster")
        assert not talk.nodes()["mac1"]
    finally:
        world.host("mac1").heal()
    hear(kept, "mac1 is back in the cluster")
    wait_until(lambda: talk.answering() == set(NAMES), RETURN_S)
    wait_until(lambda: all(talk.nodes().values()), RETURN_S)
    assert kept.poll() is None
    run = world.home("mac0").run
    wait_until(lambda: "(raylet)" in (run / "ray.log").read_text(), RETURN_S)
    assert "(raylet)" not in (run / "server.log").read_text(), "people read sentences"


def test_the_heads_word_ends_a_machine_and_it_stays_out_until_it_is_invited(world: Members):
    talk = world.talk
    assert "the cluster's config" in ended(world.on("mac0", "nodes", "remove", "mac0"), 30)
    assert "there is no node 'mac7'" in ended(world.on("mac0", "nodes", "remove", "mac7"), 30)
    assert "mac2" in succeeds(world.on("mac0", "nodes"))
    assert "mac2 moves its agents to other nodes and leaves" in succeeds(world.on("mac0", "nodes", "remove", "mac2"))
    assert "mac2 is no node of its cluster any more" in succeeds(world.kept.pop("mac2"), LEAVE_S)
    assert not world.home("mac2").takeover_state_file.exists() and not world.home("mac2").token_file.exists()
    assert set(talk.nodes()) == {"mac0", "mac1"} and talk.answering() == {"mac0", "mac1"}
    assert "mac2" not in succeeds(world.on("mac0", "nodes", "list"))
    refused = world.on("mac2", "join")
    assert "it was removed from the cluster; `satchel invite`" in ended(refused, 30) and refused.returncode == 1
    world.comes("mac2", world.invitation().to_text())
    wait_until(lambda: talk.answering() == set(NAMES), RETURN_S)


def test_another_machine_leads_in_the_place_of_a_lost_head(world: Members):
    """With agents, memory and keys; the third machine finds it by itself, and the former head comes as a node."""
    talk, ada = world.talk, named("ada", "mac0", NAMES)
    told = "Remember: the code of quokka is 5813."
    assert talk.ask(ada, told).node == "mac0"
    wait_until(lambda: talk.where(ada)["copies"], RETURN_S)
    assert "answers" in ended(world.on("mac1", "promote"), 60), "the head is there"
    wait_until((world.home("mac1").takeover_state_file).exists, 30)
    world.host("mac0").kill_all()
    hear(world.kept["mac1"], "joins again by itself")

    said = succeeds(world.on("mac1", "promote"), START_S)
    assert "mac1 is to lead the cluster in place of mac0" in said and "Ready: " in said
    world.talk = talk = Talk(f"http://{world.host('mac1').address}:{PORT}", world.key)
    hear(world.kept["mac2"], "mac2 is back in the cluster")
    wait_until(lambda: talk.answering() == {"mac1", "mac2"}, RETURN_S)
    answer = talk.ask(ada, "What is the code of quokka?")
    assert "5813" in answer.text and answer.node in ("mac1", "mac2")
    assert ada in talk.agents()

    refused = ended(world.up(), 60)
    assert "another machine leads this cluster now" in refused
    world.comes("mac0", refused.partition("`satchel join '")[2].partition("'")[0], "--name", "mac0")
    wait_until(lambda: talk.answering() == set(NAMES), RETURN_S)
    assert "5813" in talk.ask(ada, "What is the code of quokka?").text


def test_a_machine_that_does_not_come_back_is_removed(world: Members):
    talk = world.talk
    world.host("mac0").kill_all()
    wait_until(lambda: not talk.nodes()["mac0"], RETURN_S)
    assert "mac0 is removed" in succeeds(world.on("mac1", "nodes", "remove", "mac0"))
    assert set(talk.nodes()) == {"mac1", "mac2"} and talk.answering() == {"mac1", "mac2"}
    assert "mac0" not in succeeds(world.on("mac1", "nodes", "list"))
