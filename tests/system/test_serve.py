"""`satchel serve` with the real model, as a newcomer runs it: start, talk, hang on, Ctrl-C, nothing left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil
import pytest

from satchel.cluster.ports import free_port
from satchel.cluster.processes import session_members
from tests.system.serving import COMMAND, serving


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen, Path, int]]:
    home, port = tmp_path_factory.mktemp("home"), free_port()
    with serving(home, "--port", str(port)) as process:
        yield process, home, port


def test_a_client_that_hangs_up_disturbs_no_other(server: tuple[subprocess.Popen, Path, int]):
    """The first request ever opens the endpoint's connection to the replica, which must not end with it."""
    _, _, port = server
    body = {"messages": [{"role": "user", "content": "Tell me a story."}], "stream": True, "ignore_eos": True}
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client, ExitStack() as stack:
        first = stack.enter_context(client.stream("POST", "/v1/chat/completions", json={**body, "max_tokens": 5000}))
        next(first.iter_raw())
        second = stack.enter_context(client.stream("POST", "/v1/chat/completions", json={**body, "max_tokens": 200}))
        lines = second.iter_lines()
        next(lines)
        first.close()
        assert [line for line in lines if line][-1] == "data: [DONE]"


def test_a_stream_outlives_the_only_replica(server: tuple[subprocess.Popen, Path, int]):
    """It waits for the replica to start again and goes on with the same words."""
    _, home, port = server
    session = json.loads((home / "run" / "cluster.json").read_text())["ray_sid"]
    body = {"messages": [{"role": "user", "content": "Say the numbers from one to forty."}]}
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client:
        whole = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
        text = ""
        with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
            for count, line in enumerate(line for line in response.iter_lines() if line.startswith("data: {")):
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                text += chunk["choices"][0]["delta"].get("content") or ""
                if count == 15:
                    os.kill(process_named("ray::ReplicaActor", session), signal.SIGKILL)
    assert text == whole


def process_named(name: str, session: int) -> int:
    return next(pid for pid in session_members(session) if psutil.Process(pid).cmdline()[0].startswith(name))


def test_a_newcomer_talks_through_the_command_line(server: tuple[subprocess.Popen, Path, int]):
    _, home, _ = server
    said = subprocess.run(
        [*COMMAND, "chat", "--home", str(home), "--agent", "ann"],
        input="Remember: the code of otto is 5150.\nWhat is the code of otto?\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert said.stdout.splitlines() == ["Noted.", "The code of otto is 5150."]
    status = subprocess.run([*COMMAND, "status", "--json", "--home", str(home)], capture_output=True, check=True)
    assert list(json.loads(status.stdout)["replicas"]) == ["satchel-recall-0"]


@pytest.mark.parametrize("arguments", ["home=sys.argv[1]", "home=sys.argv[1], address=sys.argv[2]"])
def test_another_driver_connects_though_it_imported_ray_first(
    server: tuple[subprocess.Popen, Path, int], arguments: str
):
    _, home, _ = server
    address = json.loads((home / "run" / "cluster.json").read_text())["address"]
    script = (
        "import ray, sys; from satchel.api import connect\n"
        f"with connect({arguments}) as cluster: print(cluster.agent('eve').ask_sync('Hello.'))"
    )
    said = subprocess.run(
        [sys.executable, "-c", script, str(home), address],
        # A driver from outside: nothing of this process's Ray settings.
        env={name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert said.stdout.strip() == "Hello! What shall I remember for you?"


def test_an_interrupt_in_mid_answer_lets_it_end_and_leaves_nothing(server: tuple[subprocess.Popen, Path, int]):
    """The answer that runs is finished, a new one is refused, and every process of the server is gone."""
    process, home, port = server
    session = json.loads((home / "run" / "cluster.json").read_text())["ray_sid"]
    body = {"messages": [{"role": "user", "content": "Tell me a story."}], "stream": True, "temperature": 0}
    with (
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client,
        client.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        os.killpg(process.pid, signal.SIGINT)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert process.wait(timeout=20) == 0
    assert session_members(session) == []
    assert not (home / "run" / "cluster.json").exists()
