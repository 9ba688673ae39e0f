"""Shell completion, as the shell asks for it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

from .conftest import Served


async def completions(home: Path, *words: str) -> list[str]:
    environment = {
        **os.environ,
        "SATCHEL_HOME": str(home),
        "_SATCHEL_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(["satchel", *words]),
        "COMP_CWORD": str(len(words)),
    }
    program = "import sys; sys.argv = ['satchel']; from satchel.api.cli.main import main; main()"
    run = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60
    )
    assert run.stderr == ""
    return run.stdout.split()


async def test_names_of_models_and_agents_complete(served: Served) -> None:
    assert await completions(served.home.root, "chat", "--model", "sat") == ["satchel/tiny"]
    assert await completions(served.home.root, "agents", "show", "a") == ["ann"]
    assert await completions(served.home.root, "run", "embedded:r") == ["embedded:recall"]
    assert {"serve", "status"} <= set(await completions(served.home.root, "s"))


async def test_without_a_server_there_are_none(tmp_path: Path) -> None:
    assert await completions(tmp_path, "chat", "--model", "sat") == []
