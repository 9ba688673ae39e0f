"""Other projects' routers as they are: HTTP proxies of processes of their own, with simulated nodes behind them.

A proxy runs in real time and the nodes in simulated time, in lockstep: a request is sent through the proxy at the
moment of its arrival, and the worker that gets it holds it, unanswered, until its simulated end. So a proxy sees at
every decision exactly the requests that are running, however long its own work takes, and its decisions are compared
and not its overhead. Its timers are set off or, where it asks the workers for their load from time to time, made to
ask at the simulated moments.

A prompt's text is one short word for each of its blocks, so two texts have as much in common as the prompts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from satchel.actors.protocol.router_messages import Decision, RouteRequest

from .engines import Replica

START_TIMEOUT_S = 60.0
DECISION_TIMEOUT_S = 30.0
BODY_BYTES_MAX = 2**20
POLL_S = 1
"""The shortest real time between two questions for the workers' load."""
TAKEN_S = 0.05
"""How long it may take to take their answers."""
ROUTING_KEY = "X-SMG-Routing-Key"


class ProxyUnavailable(Exception):
    """A router does not install or start here."""


@dataclass(frozen=True)
class Peer:
    """A router of a package.

    Attributes:
        package: with its version, as pip takes it.
        options: of its `launch`.
        polls_s: how much simulated time passes between its questions for the workers' load; 0 where it counts itself.
    """

    package: str
    command: str
    options: tuple[str, ...]
    polls_s: float = 0.0


_SGLANG = ("sglang-router==0.3.2", "sglang-router")
_SMG = ("smg==1.13.0", "smg")
_TUNED = ("--balance-abs-threshold", "4", "--balance-rel-threshold", "1.2")
# Clocks that would run in real time: loads that nobody reports, slow starts, stalls.
_SMG_CLOCKS = ("--disable-load-monitoring", "--worker-warmup-secs", "0", "--worker-wedge-secs", "1000000")
PROXIES = {
    "sglang cache_aware": Peer(*_SGLANG, ("--policy", "cache_aware")),
    "sglang cache_aware, tuned": Peer(*_SGLANG, ("--policy", "cache_aware", *_TUNED)),
    "sglang power_of_two": Peer(*_SGLANG, ("--policy", "power_of_two"), polls_s=30.0),
    "sglang power_of_two, tuned": Peer(*_SGLANG, ("--policy", "power_of_two"), polls_s=10.0),
    "sglang manual by agent": Peer(*_SGLANG, ("--policy", "manual", "--assignment-mode", "min_load")),
    "smg cache_aware": Peer(*_SMG, ("--policy", "cache_aware", *_SMG_CLOCKS)),
    "smg cache_aware, tuned": Peer(*_SMG, ("--policy", "cache_aware", *_TUNED, *_SMG_CLOCKS)),
}
"""With their own defaults, and tuned: requests leave a worker that has four, and a fifth, more than the least, where
the default is 64 and a half; loads are asked for every 10 s and not 30."""


@lru_cache(maxsize=1_000_000)
def word(block: bytes) -> str:
    """A block's six letters."""
    return blake2b(block, digest_size=3).hexdigest()


def text_of(request: RouteRequest) -> str:
    """The prompt's blocks in words; one of its own for a prompt that fills none."""
    return "".join(map(word, request.block_ids)) or word(request.request_id.encode())


def install(peer: Peer) -> Path:
    """The peer's command, in an environment of its own in the user's cache folder.

    Raises:
        CannotStart: it does not install.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    version = f"py{sys.version_info[0]}{sys.version_info[1]}"
    folder = cache / "satchel-benchmarks" / f"{peer.package.replace('==', '-')}-{version}"
    command, done = folder / "bin" / peer.command, folder / "complete"
    if done.exists():
        return command
    shutil.rmtree(folder, ignore_errors=True)
    for arguments in (
        [sys.executable, "-m", "venv", str(folder)],
        [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", peer.package],
    ):
        try:
            subprocess.run(arguments, check=True, capture_output=True, text=True, timeout=600)
        except (OSError, subprocess.SubprocessError) as error:
            said = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
            raise ProxyUnavailable(f"{peer.package} does not install: {' '.join(said[-2:])}") from None
    done.touch()
    return command


class Workers:
    """Stand-ins for the nodes: an HTTP server each, which hold what they are sent."""

    def __init__(self, names: list[str]) -> None:
        self.ports: dict[str, int] = {}
        self.arrived: asyncio.Future[str] | None = None
        """Of the request that is being routed: the name of the worker that it came to."""
        self.held: dict[str, asyncio.Event] = {}
        self.loads = dict.fromkeys(names, 0)
        """What each one says that it has, in tokens."""
        self.polled: set[str] = set()
        """Who was asked for that since it was last emptied."""
        self._servers: list[asyncio.Server] = []

    async def start(self) -> None:
        for name in self.loads:
            server = await asyncio.start_server(partial(self._serve, name), "127.0.0.1", 0, limit=BODY_BYTES_MAX)
            self._servers.append(server)
            self.ports[name] = server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        for server in self._servers:
            server.close()

    async def _serve(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer what comes over a connection, until its other end closes it."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError), contextlib.closing(writer):
            while True:
                start, body = await read_message(reader)
                if not start.endswith("http/1.1"):
                    # It tries another protocol first.
                    return
                answer = json.dumps(await self._answer(name, start.split()[1], body)).encode()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n")
                writer.write(b"content-length: %d\r\n\r\n%b" % (len(answer), answer))
                await writer.drain()

    async def _answer(self, name: str, path: str, body: bytes) -> Any:
        if path == "/generate":
            return await self._hold(name, json.loads(body)["rid"])
        if path == "/get_load":
            self.polled.add(name)
            return [{"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": self.loads[name]}]
        if path == "/v1/models":
            return {"object": "list", "data": [{"id": "m", "object": "model"}]}
        return {"model_id": "m", "model_path": "m", "served_model_name": "m", "is_generation": True, "dp_size": 1}

    async def _hold(self, name: str, request_id: str) -> dict[str, Any]:
        assert self.arrived is not None and request_id not in self.held, "no request comes twice"
        ended = self.held[request_id] = asyncio.Event()
        self.arrived.set_result(name)
        await ended.wait()
        return {"text": "", "meta_info": {}}


async def read_message(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    """The first line and the body of a message whose length is told."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    length = next((line[15:] for line in head.split("\r\n") if line.startswith("content-length:")), "0")
    return head.split("\r\n", 1)[0], await reader.readexactly(int(length))


async def ask(port: int, path: str, body: bytes = b"", headers: str = "") -> tuple[int, bytes]:
    """One request over a connection of its own: the status and the body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=BODY_BYTES_MAX)
    with contextlib.closing(writer):
        method = "POST" if body else "GET"
        head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{headers}"
        writer.write(f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        start, answer = await read_message(reader)
        return int(start.split()[1]), answer


class Proxy:
    """A peer's process before stand-in workers; a `Router` for `replaying.py`. Made by `running`."""

    def __init__(self, peer: Peer, workers: Workers, port: int, runner: asyncio.Runner) -> None:
        self._peer, self._workers, self._port, self._runner = peer, workers, port, runner
        self._answers: dict[str, asyncio.Task[tuple[int, bytes]]] = {}
        self._tokens: dict[str, tuple[str, int]] = {}
        self._next_poll_s = 0.0

    def route(self, request: RouteRequest, now: float) -> Decision:
        name = self._runner.run(self._send(request))
        self._tokens[request.request_id] = (name, request.prompt_tokens)
        return Decision(name, "peer")

    def release(self, replica: str, request_id: str) -> None:
        del self._tokens[request_id]
        self._runner.run(self._end(request_id))

    def observe(self, engines: Iterable[Replica], now: float) -> None:
        if not self._peer.polls_s or now < self._next_poll_s:
            return
        self._next_poll_s = now + self._peer.polls_s
        for name in self._workers.loads:
            self._workers.loads[name] = sum(tokens for there, tokens in self._tokens.values() if there == name)
        self._runner.run(self._poll())

    async def await_ready(self, process: subprocess.Popen[bytes]) -> None:
        """Wait until the proxy has all workers."""
        async with asyncio.timeout(START_TIMEOUT_S):
            while process.poll() is None:
                await asyncio.sleep(0.1)
                try:
                    status, answer = await ask(self._port, "/workers")
                    workers = json.loads(answer)["workers"] if status == 200 else []
                except (OSError, ValueError, KeyError, asyncio.IncompleteReadError):
                    continue
                if sum(worker["is_healthy"] for worker in workers) == len(self._workers.ports):
                    return
        raise ProxyUnavailable(f"{self._peer.package} ended with {process.returncode}")

    async def _send(self, request: RouteRequest) -> str:
        arrived = self._workers.arrived = asyncio.get_running_loop().create_future()
        key = f"{ROUTING_KEY}: {request.agent}\r\n" if request.agent else ""
        body = {"rid": request.request_id, "text": text_of(request), "sampling_params": {"max_new_tokens": 1}}
        answer = asyncio.create_task(ask(self._port, "/generate", json.dumps(body).encode(), key))
        await asyncio.wait([arrived, answer], timeout=DECISION_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        if not arrived.done():
            said = answer.result() if answer.done() else "nothing"
            raise RuntimeError(f"{self._peer.package} sent a request nowhere, and said {said}")
        self._answers[request.request_id] = answer
        return arrived.result()

    async def _end(self, request_id: str) -> None:
        """Answer a request; the proxy has counted its end when its client has the answer."""
        self._workers.held.pop(request_id).set()
        status, answer = await self._answers.pop(request_id)
        if status != 200:
            raise RuntimeError(f"{self._peer.package} answered {status}: {answer.decode()}")

    async def _poll(self) -> None:
        """Wait until the proxy has asked every worker for its load, and had the time to take what it was told."""
        self._workers.polled.clear()
        async with asyncio.timeout(DECISION_TIMEOUT_S):
            while len(self._workers.polled) < len(self._workers.ports):
                await asyncio.sleep(0.01)
        await asyncio.sleep(TAKEN_S)


@contextlib.contextmanager
def running(peer: Peer, names: list[str], log: Path) -> Iterator[Proxy]:
    """The peer before stand-ins for the nodes `names`.

    Raises:
        CannotStart: it does not install or start.
    """
    command = install(peer)
    workers = Workers(names)
    with asyncio.Runner() as runner:
        runner.run(workers.start())
        port, metrics = free_port(), free_port()
        words = [str(command), "launch", *peer.options, "--host", "127.0.0.1", "--port", str(port)]
        words += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics), "--log-level", "error"]
        words += ["--disable-retries", "--disable-circuit-breaker", "--health-check-interval-secs", "1000000"]
        words += ["--worker-startup-check-interval", str(POLL_S), "--request-timeout-secs", "1000000"]
        words += ["--worker-urls", *(f"http://127.0.0.1:{worker}" for worker in workers.ports.values())]
        proxy = Proxy(peer, workers, port, runner)
        with log.open("wb") as output:
            process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT)
        try:
            runner.run(proxy.await_ready(process))
            yield proxy
        finally:
            process.kill()
            process.wait(30)
            runner.run(workers.stop())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
