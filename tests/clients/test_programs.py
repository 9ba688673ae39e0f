"""Each program reads a file with its own tool and says what it read, goes on with its conversation, and is an agent
whose memory is found again, also after every process of the server was killed."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from satchel.cluster.bring_up.ports import free_port
from tests.system.serving import kill_everything, serving

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
    environment: dict[str, str] = field(default_factory=dict)

    @contextmanager
    def served(self) -> Iterator[None]:
        config = self.folder / "server" / "config.yaml"
        config.parent.mkdir(mode=0o700, exist_ok=True)
        config.write_text(json.dumps({"models": [{"name": "satchel/script", "source": "embedded:script"}]}))
        with serving(config.parent, "--config", str(config), "--port", str(self.port)) as self.program:
            yield

    def run(self, name: str, *arguments: str, says: str = "", **environment: str) -> str:
        """Runs a program in the folder, and returns what it prints."""
        found = {"HOME": str(self.folder / "user"), "PATH": f"{BIN}:{os.environ['PATH']}", "TERM": "dumb"}
        run = subprocess.run(
            [str(BIN / name), *arguments],
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
            sum(map(float, re.findall(rf"^satchel_{name}_tokens_total{{.*}} (\S+)$", text, re.M)))
            for name in ("prompt", "cached")
        )

    def agents(self) -> dict[str, int]:
        """Returns the tokens of every agent's memory."""
        listed = httpx.get(f"http://127.0.0.1:{self.port}/v1/agents").json()["data"]
        return {agent["id"]: agent["tokens"] for agent in listed}


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


def test_claude_code(desk: Desk) -> None:
    settings = {
        "ANTHROPIC_BASE_URL": f"http://127.0.0.1:{desk.port}",
        "ANTHROPIC_API_KEY": "none",
        # Without it the descriptions of tools name another model in every run.
        "ANTHROPIC_MODEL": "satchel/script",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }
    with desk.served():
        assert SECRET in desk.run("claude", "-p", prompt(desk), "--allowedTools", "Read", **settings)
        first = desk.counts()
        assert "well done" in desk.run("claude", "-p", "--continue", "Say 'well done'", **settings)
        second = desk.counts()
        assert second[1] - first[1] >= REUSED_LEAST * (second[0] - first[0])
        (agent,) = desk.agents()
        assert agent.startswith("claude-code:")
        tokens = desk.agents()[agent]
        assert desk.program is not None
        kill_everything(desk.program.pid)
        desk.program.wait(timeout=30)
    with desk.served():
        assert desk.agents() == {agent: tokens}
        assert "once more" in desk.run("claude", "-p", "--continue", "Say 'once more'", **settings)
        sent, cached = desk.counts()
        assert cached >= REUSED_LEAST * sent and desk.agents()[agent] > tokens


def test_codex(desk: Desk) -> None:
    settings = {"CODEX_HOME": str(desk.folder / "user" / "codex"), "SATCHEL_KEY": "none"}
    Path(settings["CODEX_HOME"]).mkdir()
    fields = f'name="Satchel", base_url="http://127.0.0.1:{desk.port}/v1", wire_api="responses", env_key="SATCHEL_KEY"'
    asked = ("-m", "satchel/script", "-c", "model_provider=satchel", "-c", f"model_providers.satchel={{{fields}}}")
    asked = (*asked, "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    with desk.served():
        assert SECRET in desk.run("codex", "exec", *asked, prompt(desk), **settings)
        assert any(agent.startswith("codex:") for agent in desk.agents())
        first = desk.counts()
        assert "well done" in desk.run("codex", "exec", *asked, "resume", "--last", "Say 'well done'", **settings)
        second = desk.counts()
        assert second[1] - first[1] >= REUSED_LEAST * (second[0] - first[0])


def test_qwen_code(desk: Desk) -> None:
    settings = {
        "OPENAI_BASE_URL": f"http://127.0.0.1:{desk.port}/v1",
        "OPENAI_API_KEY": "none",
        "OPENAI_MODEL": "satchel/script",
    }
    with desk.served():
        assert SECRET in desk.run("qwen", "--yolo", "-p", prompt(desk), **settings)
        sent, cached = desk.counts()
        # Two requests of one length, about, of which the second repeats the first.
        assert cached >= 0.45 * sent


def test_opencode(desk: Desk) -> None:
    models = {"satchel/script": {"name": "script"}}
    options = {"baseURL": f"http://127.0.0.1:{desk.port}/v1", "apiKey": "none"}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "Satchel", "options": options, "models": models}
    (desk.folder / "work" / "opencode.json").write_text(json.dumps({"provider": {"satchel": provider}}))
    with desk.served():
        told = desk.run("opencode", "run", "-m", "satchel/satchel/script", says=prompt(desk))
        assert SECRET in told
        assert any(agent.startswith("opencode:") for agent in desk.agents())
        first = desk.counts()
        more = desk.run("opencode", "run", "-m", "satchel/satchel/script", "--continue", says="Say 'well done'")
        second = desk.counts()
        assert "well done" in more and second[1] - first[1] >= REUSED_LEAST * (second[0] - first[0])
