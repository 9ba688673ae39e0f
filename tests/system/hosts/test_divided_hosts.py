"""A model that is larger than what each of two hosts may use: it is divided between them, remembers after everything
was killed, and ends an answer during which a host died once that host is back."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from tests.worlds.models.deep import write_deep_recall

from ..nodes.test_divided import command_of
from .hosts import wait_until
from .hosts_world import NODES, RETURN_S, START_S, World, succeeds, three_hosts
from .test_hosts import CODES

pytestmark = pytest.mark.slow

LAYERS, MEMORY = 18, "54 MiB"
"""The model has 57 MiB of weights."""

NUMBERS = "Say the numbers from one to sixty."
SILENT_S = 6.0

BACK_S = 240.0
"""For a host that died: Ray notices after 15 s, the head starts it again, and both load their layers."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with three_hosts(tmp_path_factory, "divided") as found:
        config = json.loads(found.config.read_text())
        folder = write_deep_recall(found.folder / "deep", LAYERS)
        (model,) = config["models"]
        model |= {"source": str(folder), "split": {"pipeline": "auto"}, "context_tokens_max": 2048}
        config["scheduling"] = {"memory_bytes_max": MEMORY, "prefill_chunk_tokens": 256}
        # This machine may be busy.
        config["timing"] = {"group_silent_s": SILENT_S}
        found.config.write_text(json.dumps(config))
        yield found


def test_two_hosts_serve_a_model_that_is_larger_than_either_may_use(world: World):
    succeeds(world.up(), 2 * START_S)
    talk = world.talk
    wait_until(lambda: talk.nodes() == dict.fromkeys(NODES, True), RETURN_S)
    (model,) = talk.http.get("/v1/models").json()["data"]
    assert [(stage["node"], stage["first_layer"]) for stage in model["stages"]] == [("mac0", 0), ("mac1", 9)]
    assert "layers divided: 0 to 9 on mac0, 9 to 18 on mac1" in " ".join(
        succeeds(world.satchel(world.head, "status", "--long", home="mac0")).split()
    )
    known = talk.tell_codes("alice", CODES)
    said = talk.ask("alice", "What is the code of Anna?")
    assert CODES["Anna"] in said.text and said.node == "mac1" and said.cached >= known - 20 > 256


def test_a_link_dies_in_the_middle_of_an_answer_which_ends_right_once_it_is_back(world: World):
    """All processes of the group end meanwhile, on both sides."""
    talk = world.talk
    undisturbed = talk.stream("dora", NUMBERS, lambda pieces: None, max_tokens=400)
    before = {pid for host in (world.head, world.second) for pid in host.pids() if is_stage(pid)}
    assert len(before) == 2
    talk.http.timeout = BACK_S

    def cut(pieces: int) -> None:
        if pieces == 5:
            world.second.cut()
            try:
                wait_until(lambda: not any(map(is_stage, before)), SILENT_S + 3)
            finally:
                world.second.heal()

    assert talk.stream("eric", NUMBERS, cut, max_tokens=400) == undisturbed


def is_stage(pid: int) -> bool:
    """Whether the process has layers."""
    return re.match(r"ray::(StageActor|ReplicaActor)", command_of(pid)) is not None


def test_a_host_dies_in_the_middle_of_an_answer_which_ends_right_once_it_is_back(world: World):
    """The one that leads: the other one's process ends by itself."""
    talk = world.talk
    undisturbed = talk.stream("bert", NUMBERS, lambda pieces: None, max_tokens=400)
    assert "fifty-nine, sixty" in undisturbed
    talk.http.timeout = BACK_S

    def kill(pieces: int) -> None:
        if pieces == 5:
            world.kill(world.second)

    assert talk.stream("carl", NUMBERS, kill, max_tokens=400) == undisturbed


def test_after_everything_was_killed_the_agent_goes_on_with_her_memory(world: World):
    for machine in (world.second, world.head):
        world.kill(machine)
    succeeds(world.up(), 2 * START_S)
    wait_until(lambda: world.talk.answering() == {"mac1"}, RETURN_S)
    said = world.talk.ask("alice", "What is the code of Emma?")
    assert CODES["Emma"] in said.text
    assert said.prompt - said.cached < 60, "only the new words are computed"
