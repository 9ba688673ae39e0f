"""SDKs and frameworks, as their users write them: each has a tool called and says what it returned, and gets an answer
of the form that it asks for."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from .conftest import PYTHON

pytestmark = pytest.mark.clients

FOLDER = Path(__file__).parent / "frameworks"
PROGRAMS = sorted(path.name for path in FOLDER.iterdir() if path.suffix in (".py", ".cjs"))
NODE_MODULES = Path(__file__).parents[2] / "build" / "clients" / "node_modules"


@pytest.mark.parametrize("name", PROGRAMS)
def test_framework(name: str, url: str, tmp_path: Path) -> None:
    interpreter = [str(PYTHON), "-P"] if name.endswith(".py") else ["node"]
    keys = {"OPENAI_API_KEY": "none", "ANTHROPIC_API_KEY": "none", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    run = subprocess.run(
        [*interpreter, str(FOLDER / name)],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "NODE_PATH": str(NODE_MODULES), "SERVER": url, **keys},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert run.returncode == 0, run.stdout + run.stderr
