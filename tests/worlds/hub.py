"""A stand-in for the Hub on loopback."""

from __future__ import annotations

import hashlib
import http.server
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from satchel.actors.model_files.source import EMBEDDED

COMMIT = "a" * 40
RECALL = {path.name: path.read_bytes() for path in sorted((EMBEDDED / "recall").iterdir()) if path.is_file()}


class Hub(http.server.ThreadingHTTPServer):
    """The few answers of the Hub that a snapshot download needs, for one repository with the revisions main and v2.

    Attributes:
        files: what the repository holds.
        refuses: (method, status, error code) by file name, or for every file with the key "".
        refuses_after: files that are fetched before a refusal is answered, as several are asked for at a time.
        cut_after: the connection breaks once, after so many bytes of model.safetensors.
        gone_after_cut: whether no file's bytes come any more after that; then it is `gone`.
        bodies: the requests for a file's bytes: its name, and the Range asked for.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.files = dict(RECALL)
        self.refuses: dict[str, tuple[str, int, str]] = {}
        self.refuses_after: set[str] = set()
        self.cut_after: int | None = None
        self.gone_after_cut = False
        self.gone = False
        self.bodies: list[tuple[str, str | None]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"

    @property
    def fetched(self) -> set[str]:
        return {name for name, _ in self.bodies}


class Answers(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        files = self.server.files
        if not re.match(r"/(api/models/)?owner/model(/|$)", path):
            self.answer(b"", status=404, code="RepoNotFound")
        elif path.startswith("/api/models/owner/model/tree/"):
            listing = [{"type": "file", "path": n, "size": len(d), "oid": "0" * 40} for n, d in files.items()]
            self.answer(json.dumps(listing).encode())
        elif path.startswith("/api/models/owner/model"):
            revision = path.rpartition("/revision/")[2]
            if revision not in ("main", "v2", path):
                self.answer(b"", status=404, code="RevisionNotFound")
                return
            siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
            commit = "b" * 40 if revision == "v2" else COMMIT
            self.answer(json.dumps({"id": "owner/model", "sha": commit, "siblings": siblings}).encode())
        else:
            self.answer_file(path.partition("/resolve/")[2].partition("/")[2])

    def answer_file(self, name: str) -> None:
        refusal = self.server.refuses.get(name) or self.server.refuses.get("")
        if refusal is not None and refusal[0] == self.command:
            until = time.monotonic() + 10.0
            while not self.server.refuses_after <= self.server.fetched and time.monotonic() < until:
                time.sleep(0.01)
            self.answer(b"", status=refusal[1], code=refusal[2])
            return
        data = self.server.files.get(name)
        if data is None:
            self.answer(b"", status=404, code="EntryNotFound")
            return
        if self.server.gone and self.command == "GET":
            self.answer(b"", status=500)
            return
        if self.command == "GET":
            self.server.bodies.append((name, self.headers.get("range")))
        self.answer(data, cut_after=self.take_cut() if name == "model.safetensors" else None)

    def take_cut(self) -> int | None:
        bounded = re.search(r"-\d", self.headers.get("range") or "")
        if self.command != "GET" or bounded:
            return None
        cut, self.server.cut_after = self.server.cut_after, None
        self.server.gone = self.server.gone or (cut is not None and self.server.gone_after_cut)
        return cut

    def answer(self, data: bytes, status: int = 200, code: str = "", cut_after: int | None = None) -> None:
        etag = hashlib.sha256(data).hexdigest()
        total, begins = len(data), 0
        asked = self.headers.get("range")
        if asked and status == 200:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            begins = int(first)
            data, status = data[begins : int(last) + 1 if last else None], 206
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        if status == 206:
            self.send_header("content-range", f"bytes {begins}-{begins + len(data) - 1}/{total}")
        if code:
            self.send_header("x-error-code", code)
        self.send_header("x-repo-commit", "b" * 40 if "b" * 40 in self.path else COMMIT)
        self.send_header("etag", f'"{etag}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data if cut_after is None else data[:cut_after])
            self.close_connection = cut_after is not None

    def log_message(self, format: str, *args: object) -> None:
        return None


@contextmanager
def running_hub() -> Iterator[Hub]:
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()
