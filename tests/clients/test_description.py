"""Requests drawn from the application's own description, right ones and wrong ones, to all routes: no answer is a
server's error, and each is of a status, media type and shape that the description has."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import httpx
import pytest

from .conftest import PYTHON

pytestmark = pytest.mark.clients

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "unsupported_method",
)


def test_every_route_answers_as_described(url: str, tmp_path: Path) -> None:
    satchel = httpx.get(f"{url}/openapi.json").json()["paths"]["/v1/agents/{agent_id}/satchel"]
    assert "application/octet-stream" in satchel["put"]["requestBody"]["content"] and "get" in satchel
    settings = Path(__file__).with_name("schemathesis.toml")
    run = subprocess.run(
        [
            *(str(PYTHON.with_name("schemathesis")), "--config-file", str(settings), "run", f"{url}/openapi.json"),
            *("--checks", ",".join(CHECKS), "--phases", "examples,coverage,fuzzing", "--continue-on-failure"),
            *("--max-examples", "40", "--seed", "1", "--request-timeout", "60"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    counted = re.search(r"Selected: (\d+)/\1\s+Tested: \1\n", run.stdout)
    assert counted is not None and int(counted[1]) > 40
