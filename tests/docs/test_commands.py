"""Every command that a page tells a reader to type is run here as it stands, or named here with why it is not.

Commands of a page run in their order, in a folder that looks like the checkout, with the port of a server of this test
in place of 8000. What a page shows of a command's output must be in it; `…` stands for anything.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from satchel.cluster.bring_up.ports import free_port
from satchel.cluster.config.config import load_config
from tests.system.serving import COMMAND, serving
from tests.worlds.api.recordings import talk, write

from .pages import PAGES, ROOT, Command, blocks, commands

NOT_HERE = {
    r"git clone": "a test has no address to clone from",
    r"(claude|codex|qwen|opencode) .*Please read": "agent programs of npm; `make test-clients` runs them",
    r"satchel keys create me|satchel up configs/three-macs": "real machines",
    r"satchel (invite|join|leave|nodes|promote)\b": "several machines; tests/system/hosts/test_members.py runs them",
    r"https://studio\.lan|SSL_CERT_FILE": "a name of the reader's own network; tests/system/test_tls.py speaks HTTPS",
    r"\.ci/run": "all tests",
    r"satchel (run|serve|fit|pull) mlx-community": "models on the Hub; tests/api/cli/models/test_pull.py has a Hub",
    r"satchel launch (claude\s*(#|$)|qwen --)": "agent programs of npm",
    r"satchel serve(?![ \w])": "it runs until it is stopped, and all of these tests have a server",
    r"uv tool install|requirements\.lock >pins|^pipx |^brew ": "they install, from an index or with programs of a Mac",
    r"networksetup": "a Mac",
}
"""Patterns of commands that are not run, and why."""

MAKE = re.compile(r"(TRACES=\S+ )?make (?P<words>.*)")
MODELS = ("recall", "shapes", "script")
SLOW = (
    "docs/getting-started.md",
    "docs/install.md",
    "docs/models.md",
    "docs/operations.md",
    "docs/python.md",
    "docs/several-machines.md",
    "docs/three-macs.md",
    "docs/api/embeddings.md",
)
"""Pages whose commands take long, and do what is tested elsewhere too."""
NODES = "docs/several-machines.md"
MACS = "docs/three-macs.md"
"""`test_three_macs.py` types what is in it."""
STORY = "examples.stories."


def commands_of(page: str) -> list[Command]:
    shells = [block for block in blocks(page) if block.language in ("sh", "console")]
    return [command for block in shells for command in commands(block)]


def reason(command: Command) -> str | None:
    return next((why for pattern, why in NOT_HERE.items() if re.search(pattern, command.text, re.DOTALL)), None)


WITH_COMMANDS = [page for page in PAGES if page not in ("CHANGELOG.md", "ARCHITECTURE.md") and commands_of(page)]


def typed(page: str) -> list[Command]:
    """What this test types of a page."""
    return [each for each in commands_of(page) if reason(each) is None and not MAKE.match(each.text)]


class Desk:
    """A folder with what the checkout has, a server, and a shell."""

    def __init__(self, folder: Path, home: Path, port: int) -> None:
        self.folder, self.port, self.home = folder, port, home
        self.background: str | None = None
        self.url = f"http://127.0.0.1:{port}"
        self.environment = {
            **os.environ,
            "PATH": f"{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}",
            "SATCHEL_HOME": str(home),
            "COLUMNS": "200",
        }

    def lay_out(self) -> None:
        """What commands name: the checkout's files, a program with this server's port, a recording."""
        (self.folder / ".venv").symlink_to(sys.prefix)
        (self.folder / "configs").symlink_to(ROOT / "configs")
        shutil.copytree(ROOT / "examples", self.folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
        for program in (self.folder / "examples").rglob("*.py"):
            program.write_text(self.here(program.read_text()))
        write(self.folder / "recording.jsonl", talk(3))

    def here(self, text: str) -> str:
        return text.replace("127.0.0.1:8000", f"127.0.0.1:{self.port}")

    def type(self, command: Command) -> None:
        text = re.sub(r"\bcurl ", "curl --silent --show-error --fail-with-body ", self.here(command.text))
        if "REQUEST_ID" in text:
            body = {"messages": [{"role": "user", "content": "Hello"}]}
            answer = httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=60)
            text = text.replace("REQUEST_ID", answer.headers["x-request-id"])
        if text.startswith("satchel up "):
            self.environment["SATCHEL_HOME"] = self.background = str(self.folder / "home")
            text += f" --port {free_port()}"
        sets = text.startswith("eval ")
        ended = subprocess.run(
            ["bash", "-c", f"{text} && env -0" if sets else text],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert ended.returncode == 0, f"{text}\n{ended.stdout}{ended.stderr}"
        if sets:
            # The next commands have what it exports: a reader types all of them into one shell.
            self.environment = dict(pair.split("=", 1) for pair in ended.stdout.split("\0") if pair)
        if text.startswith("satchel down"):
            self.environment["SATCHEL_HOME"], self.background = str(self.home), None
        if command.output is not None:
            wanted = ".*".join(re.escape(part) for part in " ".join(command.output.split()).split("…"))
            said = " ".join(ended.stdout.split()) or " ".join(ended.stderr.split())
            assert re.search(wanted.replace(r"\ ", r"\s+"), said), f"{text}\n{said}"

    def forget(self) -> None:
        """Pages do not know one another's agents, and leave no server behind."""
        if self.background is not None:
            subprocess.run([*COMMAND, "down", "--home", self.background], check=True, timeout=60)
        with httpx.Client(base_url=self.url, timeout=60) as client:
            if client.get("/v1/agents").status_code == 401:
                self.type(Command("satchel keys remove --all"))
            for agent in client.get("/v1/agents", params={"limit": 100}).json()["data"]:
                client.delete(f"/v1/agents/{agent['id']}").raise_for_status()
            client.delete("/v1/cache").raise_for_status()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    """All models that ship, for all pages but one."""
    home, port = tmp_path_factory.mktemp("docs"), free_port()
    config = home / "config.yaml"
    config.write_text(json.dumps({"models": [{"name": f"satchel/{m}", "source": f"embedded:{m}"} for m in MODELS]}))
    with serving(home, "--config", str(config), "--port", str(port)):
        yield home, port


@pytest.fixture
def desk(server: tuple[Path, int], tmp_path: Path) -> Iterator[Desk]:
    found = Desk(tmp_path, *server)
    found.lay_out()
    yield found
    found.forget()


def is_story(command: Command) -> bool:
    return STORY in command.text


@pytest.mark.parametrize("page", [page for page in WITH_COMMANDS if typed(page) and page not in SLOW])
def test_what_a_page_tells_a_reader_to_type_works(page: str, desk: Desk) -> None:
    for command in typed(page):
        if not is_story(command):
            desk.type(command)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in SLOW if page not in (NODES, MACS)])
def test_what_a_page_of_slow_commands_tells_a_reader_to_type_works(page: str, desk: Desk) -> None:
    for command in typed(page):
        desk.type(command)


@pytest.mark.slow
def test_the_stories_are_told_as_their_page_says(desk: Desk) -> None:
    stories = [each for page in WITH_COMMANDS for each in typed(page) if is_story(each)]
    assert len(stories) == 3
    for command in stories:
        desk.type(command)


@pytest.mark.slow
def test_two_nodes_on_one_machine_work_as_their_page_says(tmp_path: Path) -> None:
    home, port = tmp_path / "home", free_port()
    home.mkdir()
    (tmp_path / "desk").mkdir()
    with serving(home, "--config", str(ROOT / "configs/two-nodes-local.yaml"), "--port", str(port)):
        desk = Desk(tmp_path / "desk", home, port)
        desk.lay_out()
        for command in typed(NODES):
            desk.type(command)


@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_make_knows_what_a_page_tells_it_to_do(page: str) -> None:
    """Not what it does: the targets, and that a configuration that is served can be read."""
    for command in commands_of(page):
        if (found := MAKE.match(command.text)) is None:
            continue
        words = found["words"].partition("#")[0].split()
        done = subprocess.run(["make", "--dry-run", *words], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        for config in re.findall(r"CONFIG=(configs/\S+)", command.text):
            assert load_config(ROOT / config).models


def test_every_reason_is_of_a_command_that_there_is() -> None:
    written = "\n".join(command.text for page in WITH_COMMANDS for command in commands_of(page))
    assert not [pattern for pattern in NOT_HERE if not re.search(pattern, written, re.DOTALL)]


def test_every_example_is_run() -> None:
    written = "\n".join(command.text for page in WITH_COMMANDS for command in typed(page))
    programs = [path.name for path in (ROOT / "examples").glob("*.py") if path.name != "__init__.py"]
    assert programs and not [name for name in programs if f"examples/{name}" not in written]


def test_every_configuration_that_ships_can_be_read() -> None:
    for path in (ROOT / "configs").glob("*.yaml"):
        assert load_config(path).models and yaml.safe_load(path.read_text())
