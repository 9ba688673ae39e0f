"""Downloading from the Hub, against a stand-in for it on loopback: the same client, the same cache, the same model."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from satchel.actors.replica.models import EMBEDDED

COMMIT = "a" * 40
FILES = {path.name: path.read_bytes() for path in sorted((EMBEDDED / "recall").iterdir()) if path.is_file()}
SCRIPT = """
import json, sys
from satchel.actors.replica import models
from satchel.cluster.errors import ModelLoadError
seen = []
try:
    folder = models.resolve("owner/model", lambda what, fraction: seen.append(fraction))
    print(json.dumps({"folder": str(folder), "seen": seen, "id": models.model_id(folder, "float32").hex()}))
except ModelLoadError as error:
    print(json.dumps({"error": error.message}))
"""


class Hub(http.server.BaseHTTPRequestHandler):
    """The few answers of the Hub that a snapshot download needs."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/owner/model/tree/"):
            listing = [{"type": "file", "path": n, "size": len(d), "oid": "0" * 40} for n, d in FILES.items()]
            self.answer(json.dumps(listing).encode())
        elif path.startswith("/api/models/owner/model"):
            siblings = [{"rfilename": name, "size": len(data)} for name, data in FILES.items()]
            self.answer(json.dumps({"id": "owner/model", "sha": COMMIT, "siblings": siblings}).encode())
        elif path.rpartition("/")[2] in FILES:
            self.answer(FILES[path.rpartition("/")[2]])
        else:
            self.answer(b"", status=404)

    def answer(self, data: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.send_header("x-repo-commit", COMMIT)
        self.send_header("etag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        return None


@pytest.fixture
def hub() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def resolve(hub: str, cache: Path, **environment: str) -> dict:
    # The Hub's client reads the environment while it is imported.
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "HF_ENDPOINT": hub, "HF_HOME": str(cache), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return json.loads(run.stdout.splitlines()[-1])


def test_a_model_is_downloaded_once_with_progress_and_found_offline(hub: str, tmp_path: Path):
    first = resolve(hub, tmp_path)
    fractions = [fraction for fraction in first["seen"] if fraction is not None]
    assert fractions and fractions[-1] == 1.0
    assert (Path(first["folder"]) / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    offline = resolve("http://127.0.0.1:9", tmp_path, HF_HUB_OFFLINE="1")
    assert (offline["folder"], offline["id"]) == (first["folder"], first["id"])


def test_offline_without_the_model_says_what_to_do(tmp_path: Path):
    for environment in ({"HF_HUB_OFFLINE": "1"}, {}):
        answer = resolve("http://127.0.0.1:9", tmp_path, **environment)
        assert "connect once to download it" in answer["error"]
