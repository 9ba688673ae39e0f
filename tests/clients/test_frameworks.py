"""SDKs and frameworks, as their users write them: each has a tool called and says what it returned, and gets an answer
of the form that it asks for."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from satchel.cluster.bring_up.ports import free_port
from tests.system.serving import serving

pytestmark = pytest.mark.clients

PYTHON = Path(__file__).parents[2] / "build" / "clients" / "venv" / "bin" / "python"
PROGRAMS = sorted(path.stem for path in (Path(__file__).parent / "frameworks").glob("*.py"))
CONFIG = '{"models": [{"name": "satchel/script", "source": "embedded:script"}]}'


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if not PYTHON.exists():
        pytest.skip("the frameworks are not installed: make test-clients")
    home = tmp_path_factory.mktemp("server")
    (home / "config.yaml").write_text(CONFIG)
    port = free_port()
    with serving(home, "--config", str(home / "config.yaml"), "--port", str(port)):
        yield f"http://127.0.0.1:{port}"


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
