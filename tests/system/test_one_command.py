"""One command a model, with the real model: from nothing to an answer, and everything that watches it."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from satchel.cluster.bring_up.ports import free_port

from .serving import COMMAND

pytestmark = pytest.mark.slow


class Shell:
    """A user's shell with a home of its own."""

    def __init__(self, folder: Path) -> None:
        self.environment = {**os.environ, "SATCHEL_HOME": str(folder / "home"), "COLUMNS": "80"}
        self.folder = folder

    def run(self, *arguments: str, input: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, *arguments],
            env=self.environment,
            cwd=self.folder,
            input=input,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    def says(self, *arguments: str, input: str = "") -> str:
        run = self.run(*arguments, input=input)
        assert run.returncode == 0, run.stdout + run.stderr
        return run.stdout


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """A server that `satchel run` has started."""
    made = Shell(tmp_path_factory.mktemp("shell"))
    first = made.run(
        "run", "embedded:recall", "Remember: the code of ada is 1815.", "--agent", "bob", "--port", str(free_port())
    )
    try:
        assert first.returncode == 0, first.stderr
        assert first.stdout == "Noted.\n", "the answer alone"
        assert "`satchel down` stops the server" in first.stderr
        yield made
    finally:
        made.run("down")


def test_run_goes_on_in_the_running_server(shell: Shell) -> None:
    found = json.loads(shell.says("run", "recall", "--agent", "bob", "--json", input="What is the code of ada?"))
    assert found["text"] == "The code of ada is 1815."
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_run_loads_another_model_into_the_running_server(shell: Shell) -> None:
    assert shell.says("run", "satchel/script", "Hello", "--context", "4096")
    running = {each["model"]: each for each in json.loads(shell.says("ps", "--json"))}
    assert running.keys() == {"recall", "satchel/script"} and running["satchel/script"]["context_tokens"] == 4096
    assert all(each["weights_bytes"] > 0 and each["up"] for each in running.values())
    served = {each["source"]: each["served_as"] for each in json.loads(shell.says("list", "--json"))}
    assert served["embedded:recall"] == "recall" and served["embedded:shapes"] is None
    unknown = shell.run("models", "unload", "satchel/scrip")
    assert unknown.returncode == 1 and "did you mean satchel/script?" in unknown.stderr
    unloaded = json.loads(shell.says("models", "unload", "satchel/script", "--json"))
    assert unloaded == {"model": "satchel/script", "loaded": False}


def test_what_watches_it_agrees(shell: Shell) -> None:
    top = json.loads(shell.says("top", "--json"))
    assert "bob" in [each["id"] for each in top["agents"]]
    (line,) = [line for line in shell.says("status").splitlines() if line.startswith("KV ")]
    assert f"{top['totals']['agents']} agent" in line
    first = json.loads(shell.says("ps", "--json"))[0]["idle_s"]
    time.sleep(2)
    assert json.loads(shell.says("ps", "--json"))[0]["idle_s"] > first, "nobody asks it anything"


def test_logs_have_the_servers_lines_and_the_actors(shell: Shell) -> None:
    text = shell.says("logs", "-n", "1000")
    assert "Ready: http://127.0.0.1" in text
    assert all(
        f"==> {name}: " in text for name in ("server", "endpoint", "router", "kv_store-local", "replica-recall-0")
    )


def test_a_model_that_would_fit_beside_it(shell: Shell) -> None:
    found = json.loads(shell.says("fit", "embedded:shapes", "--json"))
    (node,) = found["nodes"]
    assert node["name"] == "local" and 0 < node["context_tokens"] <= found["context_tokens"]


def test_a_bench_of_the_running_server(shell: Shell) -> None:
    run = shell.run("bench", "--streams", "1,2", "--prompt", "64", "--tokens", "8", "--json")
    assert run.returncode == 0, run.stderr
    assert [each["streams"] for each in json.loads(run.stdout)["results"]] == [1, 2]
