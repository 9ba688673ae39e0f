"""A model that neither of two nodes has room for is divided between them, and served as any other."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from satchel.cluster.bring_up.ports import free_port
from satchel.cluster.connection import find_cluster
from satchel.cluster.home import Home
from satchel.cluster.processes import session_members
from tests.worlds.pictures import red_circle

from ..hosts.hosts import Talk, wait_until
from ..serving import COMMAND, RECALL, kill_everything, serving

NUMBERS = "Say the numbers from one to sixty."
CODES = {"Anna": "6305", "Ben": "3471", "Carla": "7468", "David": "1791", "Emma": "2186"}
RETURN_S = 90.0


def config(path: Path, memory: str) -> Path:
    """Two nodes on this machine that may use so much memory each."""
    # JSON is YAML.
    path.write_text(
        json.dumps(
            {
                "models": [{**RECALL, "split": {"pipeline": "auto"}, "context_tokens_max": 2048}],
                "nodes": [{"name": "mac0"}, {"name": "mac1"}],
                "scheduling": {"memory_bytes_max": memory, "prefill_chunk_tokens": 256},
                # This machine may be busy.
                "timing": {"group_silent_s": 10.0},
            }
        )
    )
    return path


def stages(home: Path) -> list[int]:
    """The processes of both nodes that have layers."""
    records = [find_cluster(Home(folder)) for folder in (home, home / "nodes" / "mac1")]
    members = {pid for record in records for pid in session_members(record.ray_sid)}
    return [pid for pid in members if re.match(r"ray::(StageActor|ReplicaActor)", command_of(pid))]


def command_of(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return ""


@pytest.mark.slow
def test_a_divided_model_is_served_remembers_and_goes_on_after_a_process_was_killed(tmp_path: Path):
    """In the middle of an answer, and everything at once."""
    port = free_port()
    arguments = ("--config", str(config(tmp_path / "config.yaml", "32 MiB")), "--port", str(port))
    talk = Talk(f"http://127.0.0.1:{port}")
    with serving(tmp_path, *arguments) as server:
        (model,) = talk.http.get("/v1/models").json()["data"]
        assert model["stages"] == [
            {"node": "mac0", "first_layer": 0, "layers": 3},
            {"node": "mac1", "first_layer": 3, "layers": 3},
        ]
        wait_until(lambda: bool(talk.answering()), RETURN_S)
        assert talk.answering() == {"mac1"}, "the router sees one replica"
        known = talk.tell_codes("alice", CODES)
        undisturbed = talk.stream("bert", NUMBERS, lambda pieces: None, max_tokens=400)
        assert "fifty-nine, sixty" in undisturbed
        before = stages(tmp_path)
        assert len(before) == 2

        def kill(pieces: int) -> None:
            if pieces == 5:
                follower = next(pid for pid in before if "StageActor" in command_of(pid))
                os.kill(follower, signal.SIGKILL)
                wait_until(lambda: not {*stages(tmp_path)} & {*before}, 5)

        assert talk.stream("carl", NUMBERS, kill, max_tokens=400) == undisturbed
        wait_until(lambda: len(stages(tmp_path)) == 2, RETURN_S)
        # Its KV reaches the disks behind its turns.
        time.sleep(2)
        kill_everything(server.pid)
    with serving(tmp_path, *arguments):
        said = talk.ask("alice", "What is the code of Anna?")
        assert CODES["Anna"] in said.text and said.cached >= known - 20 > 256
        left = stages(tmp_path)
        subprocess.run([*COMMAND, "down", "--home", str(tmp_path)], check=True, timeout=60, capture_output=True)
        wait_until(lambda: not any(map(command_of, left)), 10)


@pytest.mark.slow
def test_a_divided_model_sees_pictures_and_remembers_them_after_everything_was_killed(tmp_path: Path):
    """The encoder is on the last node alone."""
    port, path = free_port(), tmp_path / "config.yaml"
    model = {"name": "satchel/shapes", "source": "embedded:shapes", "split": {"pipeline": [2, 4]}}
    path.write_text(json.dumps({**json.loads(config(path, "1 GiB").read_text()), "models": [model]}))
    arguments, headers = ("--config", str(path), "--port", str(port)), {"X-Agent-ID": "scout"}
    picture = {"url": f"data:image/png;base64,{base64.b64encode(red_circle()).decode()}"}
    asked = [{"type": "image_url", "image_url": picture}, {"type": "text", "text": "What is in the picture?"}]
    talk, messages = Talk(f"http://127.0.0.1:{port}"), [dict[str, Any](role="user", content=asked)]

    def say() -> tuple[str, int]:
        body = {"messages": messages, "temperature": 0, "max_tokens": 20}
        answer = talk.http.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        said = answer.json()["choices"][0]["message"]["content"]
        messages.extend([{"role": "assistant", "content": said}, {"role": "user", "content": "What color is it?"}])
        return said, answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    with serving(tmp_path, *arguments) as server:
        assert [stage["layers"] for stage in talk.http.get("/v1/models").json()["data"][0]["stages"]] == [2, 4]
        assert say() == ("A red circle.", 0)
        said, known = say()
        assert "red" in said.lower() and known > 20
        time.sleep(2)
        kill_everything(server.pid)
    with serving(tmp_path, *arguments):
        said, cached = say()
        assert "red" in said.lower() and cached > known


@pytest.mark.slow
def test_a_model_without_room_is_refused_with_numbers(tmp_path: Path):
    port = free_port()
    arguments = ("--config", str(config(tmp_path / "config.yaml", "20 MiB")), "--port", str(port))
    numbers = r"the model needs .* MiB .*its nodes may use: mac0 20\.0 MiB, mac1 20\.0"
    with pytest.raises(AssertionError, match=numbers), serving(tmp_path, *arguments):
        pass
