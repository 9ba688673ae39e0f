"""SDKs and frameworks, as their users write them: each has a tool called and says what it returned, and gets an answer
of the form that it asks for."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from .conftest import PYTHON

pytestmark = pytest.mark.clients

PROGRAMS = sorted(path.stem for path in (Path(__file__).parent / "frameworks").glob("*.py"))


@pytest.mark.parametrize("name", PROGRAMS)
def test_framework(name: str, url: str, tmp_path: Path) -> None:
    program = Path(__file__).parent / "frameworks" / f"{name}.py"
    keys = {"OPENAI_API_KEY": "none", "ANTHROPIC_API_KEY": "none", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    run = subprocess.run(
        [str(PYTHON), "-P", str(program)],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "SERVER": url, **keys},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert run.returncode == 0, run.stdout + run.stderr
