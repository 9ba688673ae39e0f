"""A real `satchel serve` of several nodes, its clients' view of it, and what a kill takes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import httpx
import psutil

from satchel.cluster.bring_up.runtime import clean_up_after_killed_run
from satchel.cluster.home import Home
from satchel.cluster.processes import session_members

COMMAND = (sys.executable, "-P", "-m", "satchel.api.cli")
START_S, END_S = 180.0, 45.0
RETURN_S = 180.0
"""For a node that was killed."""


@contextmanager
def serving(
    arguments: Sequence[str],
    home: Path,
    homes: Iterable[Path],
    *,
    prefix: Sequence[str] = (),
    path: Path | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """A server that is ready, ended afterwards with all that it has started.

    Args:
        arguments: of `satchel serve`.
        home: its home.
        homes: those of the nodes that it starts.
        prefix: of the command, for another host.
        path: a folder to look for programs in before the others.

    Raises:
        RuntimeError: it does not become ready.
    """
    home.mkdir(parents=True, exist_ok=True)
    log = home.with_name(home.name + ".log")
    places = f"{path}:{os.environ['PATH']}" if path else os.environ["PATH"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*prefix, *COMMAND, "serve", "--home", str(home), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PATH": places},
        )
    try:
        ends = time.monotonic() + START_S
        while "Ready:" not in log.read_text(errors="replace"):
            if process.poll() is not None or time.monotonic() > ends:
                raise RuntimeError(f"the server is not ready: {log.read_text(errors='replace')[-1000:]}")
            time.sleep(0.1)
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(END_S)
        for each in (home, *homes):
            clean_up_after_killed_run(Home(each))


@dataclass
class ClusterStream:
    """An answer as it came; times are of `time.perf_counter`.

    Attributes:
        why: it went to that node, as the router says.
        arrivals: when each piece of its text came.
        prompt: tokens of its prompt, of which `cached` were not computed.
        ended: when its last byte came, where that is asked for.
    """

    sent: float
    node: str = ""
    why: str = ""
    text: str = ""
    arrivals: list[float] = field(default_factory=list)
    prompt: int = 0
    cached: int = 0
    ended: float = 0.0

    @property
    def first_s(self) -> float:
        """From sending to the first piece."""
        return self.arrivals[0] - self.sent


class ClusterClient:
    """The cluster's users."""

    def __init__(self, url: str, key: str = "") -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # Proxies of the environment are meant for other places.
        self._http = httpx.Client(base_url=url, timeout=300.0, trust_env=False, headers=headers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def say(self, agent: str, text: str, tokens_max: int, during: Callable[[int], None] | None = None) -> ClusterStream:
        """Say something to an agent, which remembers what was said before.

        Args:
            during: is called after each piece with their number.

        Raises:
            RuntimeError: the answer is an error, or none.
        """
        headers = {"X-Agent-ID": agent, "X-Agent-Continue": "1"}
        body = {
            "messages": [{"role": "user", "content": text}],
            "temperature": 0,
            "max_tokens": tokens_max,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        found = ClusterStream(time.perf_counter())
        with self._http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
            if answer.status_code != 200:
                raise RuntimeError(f"{answer.status_code}: {answer.read().decode()}")
            found.node, found.why = answer.headers["x-satchel-node"], answer.headers.get("x-satchel-why", "")
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    self._take(found, json.loads(line.removeprefix("data: ")), during)
        if not found.arrivals:
            raise RuntimeError("an answer without text")
        return found

    def _take(self, found: ClusterStream, chunk: dict[str, Any], during: Callable[[int], None] | None) -> None:
        if "error" in chunk:
            raise RuntimeError(f"the stream ended: {chunk['error']}")
        if (usage := chunk.get("usage")) is not None:
            found.prompt = usage["prompt_tokens"]
            found.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        if text := "".join(choice["delta"].get("content") or "" for choice in chunk["choices"]):
            found.arrivals.append(time.perf_counter())
            found.text += text
            if during is not None:
                during(len(found.arrivals))

    def json(self, method: str, path: str, body: Any = None) -> Any:
        """
        Raises:
            RuntimeError: refused.
        """
        answer = self._http.request(method, path, json=body)
        if answer.is_error:
            raise RuntimeError(f"{method} {path}: {answer.status_code} {answer.text[:300]}")
        return answer.json()

    def cluster(self) -> dict[str, Any]:
        return self.json("GET", "/v1/cluster?agents=0")

    def copies(self, agent: str) -> list[str]:
        return self.json("GET", f"/v1/cluster/agents/{agent}")["copies"]

    def replica_pid(self, node: str) -> int | None:
        """Of a replica on that node that answers, where the node is up."""
        view = self.cluster()
        if not any(each["name"] == node and each["up"] for each in view["nodes"]):
            return None
        pids = (each["pid"] for each in view["replicas"] if each["node"] == node and each["up"])
        return next((pid for pid in pids if pid), None)


def wait_for(ready: Callable[[], Any], what: str, timeout_s: float = RETURN_S) -> Any:
    """What `ready` says once that is something.

    Raises:
        RuntimeError: not in time.
    """
    ends = time.monotonic() + timeout_s
    while not (found := ready()):
        if time.monotonic() > ends:
            raise RuntimeError(f"{what}: not within {timeout_s:g} s")
        time.sleep(0.2)
    return found


def node_processes(replica_pid: int, server_pid: int) -> list[int]:
    """All processes of a node on this machine that is not the head: the command that keeps it, which would notice the
    others' end and must be killed first, and its Ray session.

    Raises:
        RuntimeError: they are not other processes than the server's own.
    """
    ray = os.getsid(replica_pid)
    # The session's leader is the keeper, which the node's command has started.
    command = psutil.Process(ray).ppid()
    if command in (0, 1, server_pid) or server_pid in (own := session_members(os.getsid(command))):
        raise RuntimeError(f"process {replica_pid} is not of a node of its own")
    return [*own, *session_members(ray)]


def kill(pids: Iterable[int]) -> float:
    """SIGKILL for all. Returns when it began, by `time.perf_counter`."""
    began = time.perf_counter()
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return began


def resumed_s(arrivals: Sequence[float], killed: float) -> float:
    """From the kill to the next token from elsewhere. What was under way still arrives after a kill, so the next token
    is the one that ends the longest gap.

    Raises:
        ValueError: nothing came afterwards.
    """
    after = [killed, *(moment for moment in arrivals if moment > killed)]
    gaps = [(later - earlier, later) for earlier, later in pairwise(after)]
    if not gaps:
        raise ValueError("nothing came after the kill")
    return max(gaps)[1] - killed
