"""A model of which two nodes have a share of every layer is served as any other, over MLX's ring."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from satchel.cluster.bring_up.ports import free_port

from ..hosts.hosts import Talk, wait_until
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
        assert talk.answering() == {"mac1"}, "the router sees one replica"
        known = talk.tell_codes("alice", CODES)
        undisturbed = talk.stream("bert", NUMBERS, lambda pieces: None, max_tokens=400)
        assert "fifty-nine, sixty" in undisturbed
        before = stages(tmp_path)
        assert len(before) == 2

        def stop(pieces: int) -> None:
            if pieces == 5:
                os.kill(next(pid for pid in before if stopped.encode() in command_of(pid)), signal.SIGSTOP)

        assert talk.stream("carl", NUMBERS, stop, max_tokens=400) == undisturbed
        wait_until(lambda: len(stages(tmp_path)) == 2 and not {*stages(tmp_path)} & {*before}, RETURN_S)
        # Its KV reaches the disks behind its turns.
        time.sleep(2)
        kill_everything(server.pid)
    with serving(tmp_path, *arguments):
        said = talk.ask("alice", "What is the code of Anna?")
        assert CODES["Anna"] in said.text and said.cached >= known - 20 > 256
