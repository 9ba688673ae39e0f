"""A model of which two nodes have a share of every layer is served as any other, over MLX's ring."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from satchel.actors.protocol.block_ids import BLOCK_TOKENS
from satchel.cluster.bring_up.ports import free_port

from ..hosts.hosts import Said, Talk, wait_until
from ..serving import RECALL, kill_everything, serving
from .test_divided import CODES, NUMBERS, RETURN_S, command_of, stages

SPLIT = {"tensor": 2, "backend": "ring", "trusted_wires": True}


def config(path: Path) -> Path:
    """Two nodes on this machine."""
    # JSON is YAML.
    path.write_text(
        json.dumps(
            {
                "models": [{**RECALL, "split": SPLIT, "context_tokens_max": 2048}],
                "nodes": [{"name": "mac0"}, {"name": "mac1"}],
                "scheduling": {"memory_bytes_max": "64 MiB", "prefill_chunk_tokens": 256},
                # This machine may be busy.
                "timing": {"group_silent_s": 5.0},
            }
        )
    )
    return path


@pytest.mark.slow
@pytest.mark.parametrize("stopped", ["StageActor", "ReplicaActor"])
def test_a_model_in_shares_is_served_remembers_and_goes_on_after_a_rank_hung(tmp_path: Path, stopped: str):
    """In the middle of an answer, while the other rank waits in a sum; and after everything was killed at once."""
    port = free_port()
    arguments = ("--config", str(config(tmp_path / "config.yaml")), "--port", str(port))
    talk = Talk(f"http://127.0.0.1:{port}")
    with serving(tmp_path, *arguments) as server:
        (model,) = talk.http.get("/v1/models").json()["data"]
        assert [(one["node"], one["first_layer"], one["layers"]) for one in model["stages"]] == [
            ("mac0", 0, 6),
            ("mac1", 0, 6),
        ]
        wait_until(lambda: bool(talk.answering()), RETURN_S)
        assert talk.answering() == {"mac1"}, "the router sees one replica"
        known = talk.tell_codes("alice", CODES)
        undisturbed = talk.stream("bert", NUMBERS, lambda pieces: None, max_tokens=400)
        assert "fifty-nine, sixty" in undisturbed
        before = stages(tmp_path)
        assert len(before) == 2

        def stop(pieces: int) -> None:
            if pieces == 5:
                os.kill(next(pid for pid in before if stopped in command_of(pid)), signal.SIGSTOP)

        assert talk.stream("carl", NUMBERS, stop, max_tokens=400) == undisturbed
        wait_until(lambda: len(stages(tmp_path)) == 2 and not {*stages(tmp_path)} & {*before}, RETURN_S)
        # Its KV reaches the disks behind its turns.
        time.sleep(2)
        kill_everything(server.pid)
    with serving(tmp_path, *arguments):
        said = talk.ask("alice", "What is the code of Anna?")
        assert CODES["Anna"] in said.text and said.cached >= known - 20 > 256


class Agent:
    """An agent of a server with two nodes, on which the model is whole or in shares."""

    def __init__(self, home: Path) -> None:
        self._home, self._path, port = home, home / "config.yaml", free_port()
        self._divided = json.loads(config(self._path).read_text())
        self._arguments = ("--config", str(self._path), "--port", str(port))
        self.talk = Talk(f"http://127.0.0.1:{port}")
        self.known = 0

    @contextmanager
    def served(self, *, whole: bool) -> Iterator[None]:
        models = [{**RECALL, "nodes": ["mac1"], "context_tokens_max": 2048}] if whole else self._divided["models"]
        self._path.write_text(json.dumps({**self._divided, "models": models}))
        with serving(self._home, *self._arguments):
            yield

    def ask(self, name: str) -> Said:
        said = self.talk.ask("alice", f"What is the code of {name}?")
        assert said.text == f"The code of {name} is {CODES[name]}."
        # KV reaches the disks behind the turns.
        time.sleep(2)
        return said

    def kv_files(self) -> list[Path]:
        """Of both nodes."""
        return [*self._home.glob("**/kv/segments/*/*.kv")]


@pytest.fixture
def agent(tmp_path: Path, request: pytest.FixtureRequest) -> Agent:
    """One that has talked with the model, whole or in shares as the test says."""
    agent = Agent(tmp_path)
    with agent.served(whole=request.param == "whole"):
        agent.known = agent.talk.tell_codes("alice", CODES)
        assert agent.ask("Anna").node == "mac1" and agent.known > BLOCK_TOKENS
    return agent


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["whole"], indirect=True)
def test_a_model_in_shares_goes_on_from_memory_of_the_whole_model(agent: Agent):
    """The agent's satchel has the parts of both ranks then."""
    with agent.served(whole=False):
        assert agent.ask("Ben").cached >= agent.known
        satchel = agent.talk.http.get("/v1/agents/alice/satchel").content
        unpacked = agent.talk.http.put("/v1/agents/twin/satchel", content=satchel)
        assert unpacked.status_code == 200, unpacked.text
        kv = unpacked.json()["kv"]
        assert kv["entries"] == kv["of"] >= 2 * (agent.known // BLOCK_TOKENS + 1), kv


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["shares"], indirect=True)
def test_the_whole_model_goes_on_from_memory_of_shares(agent: Agent):
    """It pulls the part that the other node has. Once the agent is forgotten, no node has any part of its KV."""
    with agent.served(whole=True):
        assert agent.ask("Emma").cached >= agent.known
        assert agent.kv_files()
        assert agent.talk.http.delete("/v1/agents/alice").status_code == 200
        wait_until(lambda: not agent.kv_files(), 60)
