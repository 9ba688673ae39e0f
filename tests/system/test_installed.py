"""Satchel installed from its wheel, without the checkout: what a user of uv, pipx or Homebrew has."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from satchel.cluster.bring_up.ports import free_port
from tests.worlds.wheels import ROOT, build_wheel

UV = shutil.which("uv") or shutil.which("uv", path=ROOT / ".uv" / "bin") or ""

pytestmark = pytest.mark.skipif(not UV, reason="needs uv")


class Installed:
    """A user who has the command, a home and an empty folder."""

    def __init__(self, folder: Path) -> None:
        self.tool, self.desk, self.home = folder / "tool", folder / "desk", folder / "home"
        self.desk.mkdir()
        subprocess.run([UV, "venv", "--quiet", "--python", sys.executable, self.tool], check=True, timeout=60)
        command = [UV, "pip", "install", "--quiet", "--no-deps", "--no-index", "--python", self.tool / "bin/python"]
        subprocess.run([*command, build_wheel(folder)], check=True, timeout=120)
        # The dependencies are those of this environment; a path in such a file does not bring the checkout with it.
        (found,) = self.tool.glob("lib/python*/site-packages")
        (found / "dependencies.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n")

    def run(self, *command: str, must: bool = True) -> str:
        path = f"{self.tool / 'bin'}:{os.environ['PATH']}"
        environment = {"HOME": str(self.home.parent), "SATCHEL_HOME": str(self.home), "PATH": path, "COLUMNS": "200"}
        done = subprocess.run(
            command, cwd=self.desk, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0 or not must, done.stdout + done.stderr
        return done.stdout


@pytest.fixture
def installed(tmp_path: Path) -> Iterator[Installed]:
    found = Installed(tmp_path)
    yield found
    found.run("satchel", "down", must=False)


@pytest.mark.slow
def test_it_serves_from_any_folder_without_the_checkout(installed: Installed) -> None:
    """What `make serve` gives, with a config that came with the wheel."""
    where = "import satchel.cluster as c, importlib.util as u; print(c.__file__, u.find_spec('datasets'))"
    file, datasets = installed.run("python", "-P", "-c", where).split()
    assert file.startswith(str(installed.tool)) and datasets == "None"

    (installed.desk / "my.yaml").write_text(installed.run("satchel", "configs", "one-mac"))
    port = str(free_port())
    assert "satchel status" in installed.run("satchel", "up", "my.yaml", "--port", port)
    assert installed.run("satchel", "chat", "--agent", "scribe", "Remember: the code of ada is 1815.") == "Noted.\n"
    assert "1815" in installed.run("satchel", "chat", "--agent", "scribe", "What is the code of ada?")
    assert "satchel/shapes" in installed.run("satchel", "models")
    assert f"http://127.0.0.1:{port}" in installed.run("satchel", "doctor")
    unit = installed.run("satchel", "install-service", "my.yaml", "--print")
    assert str(installed.tool) in unit and str(installed.desk / "my.yaml") in unit and str(ROOT) not in unit
    assert "Stopped" in installed.run("satchel", "down")
