"""Each program reads a file with its own tool and says what it read, goes on with its conversation, and is an agent
whose memory is found again, also after every process of the server was killed.

One server for all of them: starting it takes longer than what they do."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from satchel.cluster.bring_up.ports import free_port
from tests.system.serving import COMMAND, kill_everything, serving

pytestmark = pytest.mark.clients

BIN = Path(__file__).parents[2] / "build" / "clients" / "node_modules" / ".bin"
SECRET = "the heron sleeps at noon"
REUSED_LEAST = 0.9
"""Of the prompts of all requests after a program's first."""


@dataclass
class Desk:
    """A user's home and a folder with a file, and a server.

    Attributes:
        program: the server's process.
    """

    folder: Path
    port: int
    program: subprocess.Popen[bytes] | None = None

    @contextmanager
    def served(self) -> Iterator[None]:
        config = self.folder / "server" / "config.yaml"
        config.parent.mkdir(mode=0o700, exist_ok=True)
        config.write_text(json.dumps({"models": [{"name": "satchel/script", "source": "embedded:script"}]}))
        with serving(config.parent, "--config", str(config), "--port", str(self.port)) as self.program:
            yield

    def launch(self, name: str, *arguments: str, says: str = "", **environment: str) -> str:
        """Runs a program in the folder as `satchel launch` starts it, and returns what it prints."""
        found = {"HOME": str(self.folder / "user"), "PATH": f"{BIN}:{os.environ['PATH']}", "TERM": "dumb"}
        run = subprocess.run(
            [*COMMAND, "launch", name, "--home", str(self.folder / "server"), "--", *arguments],
            cwd=self.folder / "work",
            env=found | environment,
            input=says,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert run.returncode == 0, run.stdout + run.stderr
        return run.stdout

    def counts(self) -> tuple[float, float]:
        """Returns all prompt tokens since the server's start, and how many of them were cached."""
        text = httpx.get(f"http://127.0.0.1:{self.port}/metrics").text
        return tuple(  # type: ignore[return-value]
            sum(map(float, re.findall(rf"^vllm:{name}_total{{.*}} (\S+)$", text, re.M)))
            for name in ("prompt_tokens", "prompt_tokens_cached")
        )

    def agents(self) -> dict[str, dict[str, Any]]:
        """Returns what `satchel agents list` shows, by the agents' ids."""
        asked = ["agents", "list", "--json", "--home", str(self.folder / "server")]
        listed = subprocess.run([*COMMAND, *asked], capture_output=True, text=True, timeout=60, check=True)
        return {agent["id"]: agent for agent in json.loads(listed.stdout)}

    def kill(self) -> None:
        """Kills every process of the server."""
        assert self.program is not None
        kill_everything(self.program.pid)
        self.program.wait(timeout=30)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    if not BIN.exists():
        pytest.skip("the programs are not installed: make test-clients")
    for name in ("user", "work"):
        (tmp_path / name).mkdir()
    (tmp_path / "work" / "note.txt").write_text(f"{SECRET}\n")
    return Desk(tmp_path, free_port())


def prompt(desk: Desk) -> str:
    return f"Please read the file {desk.folder}/work/note.txt and tell me what it says"


@dataclass(frozen=True)
class Program:
    """How a program is run.

    Attributes:
        asks: runs it with a prompt, in a new conversation or in the one before.
        known: the name that its agents have.
    """

    known: str
    asks: Callable[[str, bool], str]


def claude_code(desk: Desk) -> Program:
    quiet = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"}

    def asks(prompt: str, goes_on: bool) -> str:
        more = ["--continue"] if goes_on else []
        return desk.launch("claude", "-p", *more, prompt, "--allowedTools", "Read,Task,Agent", **quiet)

    return Program("claude-code", asks)


def codex(desk: Desk) -> Program:
    home = desk.folder / "user" / "codex"
    home.mkdir()
    options = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")

    def asks(prompt: str, goes_on: bool) -> str:
        more = ["resume", "--last"] if goes_on else []
        return desk.launch("codex", "exec", *options, *more, prompt, CODEX_HOME=str(home))

    return Program("codex", asks)


def qwen_code(desk: Desk) -> Program:
    def asks(prompt: str, goes_on: bool) -> str:
        more = ["--continue"] if goes_on else []
        return desk.launch("qwen", "--yolo", *more, "-p", prompt)

    return Program("qwen-code", asks)


def opencode(desk: Desk) -> Program:
    def asks(prompt: str, goes_on: bool) -> str:
        more = ["--continue"] if goes_on else []
        return desk.launch("opencode", "run", *more, says=prompt)

    return Program("opencode", asks)


def test_programs(desk: Desk) -> None:
    programs = [make(desk) for make in (claude_code, codex, qwen_code, opencode)]

    def say(program: Program, words: str, least: float = REUSED_LEAST) -> None:
        """The program goes on, with its memory."""
        sent, cached = desk.counts()
        assert words in program.asks(f"Say '{words}'", True)
        more_sent, more_cached = desk.counts()
        reused = (more_cached - cached) / (more_sent - sent)
        print(f"{program.known}: {reused:.3f} of {more_sent - sent:.0f} tokens reused for {words!r}")
        assert reused >= least, program.known

    with desk.served():
        for program in programs:
            assert SECRET in program.asks(prompt(desk), False), program.known
        for program in programs:
            # The first time it goes on, Qwen Code also looks for what to note down, with a prompt that is new.
            say(program, "well done", 0.6 if program.known == "qwen-code" else REUSED_LEAST)
        for program in programs:
            assert SECRET in program.asks(f"Ask a subagent: {prompt(desk)}", True), program.known
        before = desk.agents()
        assert {agent["program"] for agent in before.values()} == {program.known for program in programs}
        for program in programs:
            own = [agent for agent in before.values() if agent["program"] == program.known]
            mains = [agent["id"] for agent in own if not agent["parent"]]
            assert len(mains) == 1, own
            subagents = [agent for agent in own if agent["parent"]]
            # What Qwen Code notes down after an answer is a subagent's work too.
            assert len(subagents) == 1 or (len(subagents) == 2 and program.known == "qwen-code"), own
            assert {agent["parent"] for agent in subagents} == set(mains), own
        desk.kill()
    with desk.served():
        assert {id: agent["tokens"] for id, agent in desk.agents().items()} == {
            id: agent["tokens"] for id, agent in before.items()
        }
        for program in programs:
            say(program, "once more")
        after = desk.agents()
        for program in programs:
            (main,) = [id for id in before if before[id]["program"] == program.known and not before[id]["parent"]]
            assert after[main]["tokens"] > before[main]["tokens"], program.known
