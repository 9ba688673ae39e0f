"""What docs/three-macs.md tells a reader to type is typed, on three network namespaces in the place of the Macs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.hosts.hosts import Host, hosts, missing

from .pages import Block, blocks, commands

PAGE = "docs/three-macs.md"
HOST = re.compile(r"# On (\w+)\n")
"""The first line of a block that is typed on one of the Macs."""

NETWORK = "10.0.10."
JOIN_S = 120.0


class Mac:
    """One of the machines, and what its user types."""

    def __init__(self, name: str, host: Host, folder: Path) -> None:
        self.name, self.host, self.folder = name, host, folder / name
        self.folder.mkdir()
        self.joined: subprocess.Popen[str] | None = None
        path = f"{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}"
        self.environment = {"HOME": str(self.folder), "PATH": path, "COLUMNS": "200", "LANG": "C.UTF-8"}

    def start(self, text: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.host.command("bash", "-c", text),
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def type(self, text: str) -> str:
        process = self.start(text)
        said, _ = process.communicate(timeout=240)
        assert process.returncode == 0, f"{self.name}: {text}\n{said}"
        return said

    def join(self, text: str) -> None:
        """Types what then runs until it is told to end, and waits until it says that the node is in the cluster."""
        self.joined = self.start(text)
        ends, said = time.monotonic() + JOIN_S, ""
        assert self.joined.stdout is not None
        while "joined" not in said.lower():
            line = self.joined.stdout.readline()
            said += line
            assert line and time.monotonic() < ends, f"{self.name}: {text}\n{said}"


@pytest.fixture
def macs(tmp_path: Path) -> Iterator[dict[str, Mac]]:
    if why := missing():
        pytest.skip(why)
    with hosts(3) as machines:
        yield {name: Mac(name, host, tmp_path) for name, host in zip(("studio", "mini", "air"), machines, strict=True)}


def typed_on_macs() -> list[tuple[str, Block]]:
    return [(found[1], block) for block in blocks(PAGE) if (found := HOST.match(block.text))]


@pytest.mark.slow
def test_an_agent_moves_between_three_macs_as_the_page_says(macs: dict[str, Mac]) -> None:
    own = macs["studio"].host.address.rpartition(".")[0] + "."
    (config,) = [block.text for block in blocks(PAGE) if block.language == "yaml"]
    (macs["studio"].folder / "macs.yaml").write_text(config.replace(NETWORK, own))
    invitation, answers = "", dict[str, str]()
    for name, block in typed_on_macs():
        for command in commands(block):
            text = command.text.replace(NETWORK, own)
            if text.startswith("#"):
                continue
            if text.startswith("satchel join"):
                macs[name].join(re.sub(r"'[^']+'", f"'{invitation}'", text, count=1))
                continue
            # A daemon is macOS's; the rest of the command is not.
            answers[f"{name}: {command.text}"] = said = macs[name].type(text.replace("--daemon", "--print"))
            if found := re.search(r"satchel join '?([\d.]+:6380#[^\s']+)", said):
                invitation = found[1]
    status = answers["studio: satchel status"]
    assert all(name in status for name in macs), status
    assert "1815" in answers['mini: satchel chat --agent scribe "What is the code of ada?"']
    assert re.search(r"mini", answers["studio: satchel agents show scribe"])
    macs["studio"].type("satchel down --now")


def test_the_page_names_a_mac_for_each_command_that_needs_one() -> None:
    assert {name for name, _ in typed_on_macs()} == {"studio", "mini", "air"}
    elsewhere = [block for block in blocks(PAGE) if block.language == "sh" and not HOST.match(block.text)]
    typed = [command.text for block in elsewhere for command in commands(block)]
    assert [text for text in typed if text.startswith("satchel")] == ["satchel doctor"]
