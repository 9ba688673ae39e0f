"""What is measured: Satchel, its engine, and the peers; how each is started, and when it is ready."""

from __future__ import annotations

import http.client
import json
import os
import queue
import shutil
import socket
import subprocess
import sys
import threading
import time
import tomllib
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ..programs import ROOT, program
from .processes import ProcessGroup
from .protocol import Command, Trace, to_line, trace_of

VLLM_MLX = "vllm-mlx==0.6.0"
MLX_OF_PEERS = ("mlx[cpu]==0.32.4; sys_platform == 'linux'", "mlx==0.32.4; sys_platform != 'linux'")
NOT_NEEDED = ("torch", "torchvision", "gradio")
"""vllm-mlx wants them for pictures and for its own web page: some gigabytes that no text passes through."""

LITTLE, LITTLE_CHUNK = 0.95, 1024
"""Of a model's weights: the memory of a card that has no room for the model, though two together have, with shorter
chunks of prefill than usual, because their temporary memory counts on every card."""

REPLY_SLACK_S = 30.0
"""A driver's own limit comes first; it answers that the time was up."""


class TargetFailed(Exception):
    """A target did not do what it was asked for; the message says why."""


class CannotStart(TargetFailed):
    """It does not run on this machine at all."""


@dataclass(frozen=True)
class RunFolder:
    """Where a run keeps its things, and what its processes find in their environment."""

    work: Path
    environment: dict[str, str]
    vllm_mlx_site: Path | None
    start_timeout_s: float
    cards: int = 2
    """How many the targets of several cards use."""


@dataclass(frozen=True)
class Launch:
    """A server's command, the name under which it serves the model, a path that answers 200 once it can, and how many
    of Satchel's replicas answer then."""

    command: list[str]
    environment: dict[str, str]
    model: str
    ready: str = "/v1/models"
    replicas: int = 1


def make_place(work: Path, vllm_mlx_site: Path | None, start_timeout_s: float, cards: int = 2) -> RunFolder:
    """Makes `satchel` importable where it is not installed: a folder of links, with the version that it asks for."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    probe = [sys.executable, "-c", "import satchel.api, importlib.metadata as m; m.version('satchel')"]
    if subprocess.run(probe, cwd=work, capture_output=True).returncode != 0:
        links = work / "links"
        (links / "satchel").mkdir(parents=True)
        for room in ("cluster", "actors", "api"):
            (links / "satchel" / room).symlink_to(ROOT / room)
        version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
        metadata = links / f"satchel-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: satchel\nVersion: {version}\n")
        environment = with_path(environment, links)
    return RunFolder(work, environment, vllm_mlx_site, start_timeout_s, cards)


def with_path(environment: dict[str, str], first: Path) -> dict[str, str]:
    """The environment in which Python looks into that folder first."""
    path = os.pathsep.join([str(first), *filter(None, [environment.get("PYTHONPATH")])])
    return {**environment, "PYTHONPATH": path}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# How each server is started: folder, port and place in, launch out.


Cards = Literal["one", "replicas", "divided", "little"]
"""What Satchel does with cards: it uses one; has a replica on each; divides the model's layers evenly; or divides them
because no card may use as much memory as the weights take."""


def _satchel(
    folder: Path, port: int, place: RunFolder, weights: str = "auto", kv: str = "fp16", cards: Cards = "one"
) -> Launch:
    home = place.work / f"home-{port}"
    # Kernels are kept from round to round, as MLX keeps those of its servers.
    kernels = place.work / "kernels"
    kernels.mkdir(exist_ok=True)
    for each in (home, *(home / "nodes" / name for name in _node_names(place.cards)[1:] if cards != "one")):
        each.mkdir(mode=0o700, parents=True)
        (each / "kernels").symlink_to(kernels)
    config = home / "config.yaml"
    # JSON is YAML.
    model = {"name": "bench", "source": str(folder), "weights": weights, "kv": kv}
    more = {} if cards == "one" else _on_cards(model, folder, cards, place.cards)
    config.write_text(json.dumps({"models": [model], "endpoint": {"port": port}, **more}))
    command = [sys.executable, "-m", "satchel.api.cli", "serve", "--config", str(config), "--home", str(home)]
    return Launch(command, place.environment, "bench", "/health", place.cards if cards == "replicas" else 1)


def _node_names(count: int) -> list[str]:
    """As Satchel calls the nodes of a machine's cards."""
    return [f"local-{number}" if number else "local" for number in range(count)]


def _on_cards(model: dict[str, Any], folder: Path, cards: Cards, count: int) -> dict[str, Any]:
    """Sets how a model is divided, and returns what else the config has for several cards; without cards their nodes
    compute on the CPU."""
    on: dict[str, Any] = {"replication": 0}
    nodes = [{"name": name} for name in _node_names(count)]
    on |= {"devices": count} if shutil.which("nvidia-smi") else {"nodes": nodes}
    if cards == "divided":
        layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
        model["split"] = {"pipeline": [layers * (n + 1) // count - layers * n // count for n in range(count)]}
    elif cards == "little":
        weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        model["split"] = {"pipeline": "auto"}
        on["scheduling"] = {"memory_bytes_max": int(LITTLE * weights), "prefill_chunk_tokens": LITTLE_CHUNK}
    return on


def _mlx_lm(folder: Path, port: int, place: RunFolder) -> Launch:
    command = [sys.executable, "-m", "mlx_lm.server", "--model", str(folder), "--host", "127.0.0.1"]
    return Launch([*command, "--port", str(port), "--log-level", "WARNING"], place.environment, "default_model")


def _mlx_vlm(folder: Path, port: int, place: RunFolder) -> Launch:
    command = [sys.executable, "-m", "mlx_vlm.server", "--model", str(folder), "--host", "127.0.0.1"]
    return Launch([*command, "--port", str(port), "--log-level", "WARNING"], place.environment, str(folder))


def _vllm_mlx(folder: Path, port: int, place: RunFolder) -> Launch:
    environment = place.environment
    if place.vllm_mlx_site is not None:
        python, environment = sys.executable, with_path(environment, place.vllm_mlx_site)
    else:
        python = str(vllm_mlx_python())
        environment = {name: value for name, value in environment.items() if name != "PYTHONPATH"}
    command = [python, "-m", "vllm_mlx.cli", "serve", str(folder), "--host", "127.0.0.1", "--port", str(port)]
    return Launch([*command, "--continuous-batching", "--served-model-name", "bench"], environment, "bench")


SERVERS: dict[str, Callable[[Path, int, RunFolder], Launch]] = {
    "satchel": _satchel,
    "satchel (weights stored)": partial(_satchel, weights="stored"),
    "satchel (4-bit KV)": partial(_satchel, kv="q4"),
    "satchel (a replica a card)": partial(_satchel, cards="replicas"),
    "satchel (divided)": partial(_satchel, cards="divided"),
    "satchel (divided for room)": partial(_satchel, kv="q4", cards="little"),
    "mlx_lm.server": _mlx_lm,
    "mlx_vlm.server": _mlx_vlm,
    "vllm-mlx": _vllm_mlx,
}
GENERATE = "mlx_lm.generate (one at a time)"
ENGINES = {
    "satchel engine": "serve.engine_driver",
    "BatchGenerator": "serve.batch_driver",
    GENERATE: "serve.generate_driver",
}
NAMES = (*SERVERS, *ENGINES)
"""In the order of the tables. Satchel keeps KV as the others do, in full precision, but for the third and the sixth,
which have its default; the second is without its choice of kernels, for quantized models. The three after the third use
several cards."""


def vllm_mlx_python() -> Path:
    """The interpreter of vllm-mlx's own environment, made in the user's cache folder if it is not there yet: it needs
    an older mlx-lm than Satchel.

    Raises:
        CannotStart: it does not install.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    version = f"py{sys.version_info[0]}{sys.version_info[1]}"
    folder = cache / "satchel-benchmarks" / f"{VLLM_MLX.replace('==', '-')}-{version}"
    python, done = folder / "bin" / "python", folder / "complete"
    if done.exists():
        return python
    uv = shutil.which("uv") or str(ROOT / ".uv" / "bin" / "uv")
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    overrides = folder.parent / "not-needed.txt"
    overrides.write_text("".join(f"{name}; sys_platform == 'never'\n" for name in NOT_NEEDED))
    install = ["pip", "install", "--quiet", "--python", str(python), "--override", str(overrides)]
    for arguments in (
        ["venv", "--quiet", "--python", sys.executable, str(folder)],
        [*install, VLLM_MLX, *MLX_OF_PEERS],
    ):
        try:
            subprocess.run([uv, *arguments], check=True, capture_output=True, text=True, timeout=900)
        except (OSError, subprocess.SubprocessError) as error:
            said = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
            raise CannotStart(f"{VLLM_MLX} does not install: {' '.join(said[-4:])}") from None
    done.touch()
    return python


def outside_engine_s(metrics: str) -> float:
    """Returns the seconds to first tokens less those in the queue and in prefill, from Satchel's `/metrics`."""

    def total(name: str) -> float:
        lines = (line for line in metrics.splitlines() if line.startswith(f"vllm:{name}_seconds_sum"))
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    return total("time_to_first_token") - total("request_queue_time") - total("request_prefill_time")


class Target:
    """A running server with its client, or a running engine. `server` is what memory and CPU are counted of.

    Attributes:
        start_s: until it answers, seconds.
        self_test_s: until its self-test has ended too, seconds; None if it has none, or if it did not end in time.
        unproven: says that it did not end in time; empty otherwise.
    """

    def __init__(self, name: str, folder: Path, place: RunFolder) -> None:
        self.name = name
        self.is_engine = name in ENGINES
        self.server: ProcessGroup | None = None
        self.driver: ProcessGroup | None = None
        self.self_test_s: float | None = None
        self.unproven = ""
        self._replies: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._is_behind = False
        self._port = 0
        self._log = place.work / f"{name.replace(' ', '-')}-{time.monotonic_ns()}"
        self._began = time.perf_counter()
        try:
            self._start(folder, place)
        except TargetFailed as error:
            self.stop()
            raise CannotStart(str(error)) from error
        except BaseException:
            self.stop()
            raise

    def _start(self, folder: Path, place: RunFolder) -> None:
        if self.is_engine:
            driver = program(ENGINES[self.name], folder)
        else:
            port = self._port = free_port()
            launch = SERVERS[self.name](folder, port, place)
            self.server = ProcessGroup(launch.command, launch.environment, self._log.with_suffix(".log"))
            self._await_answer(port, launch.ready, place.start_timeout_s)
            self.start_s = time.perf_counter() - self._began
            if self.name.startswith("satchel"):
                self._await_replicas(port, launch.replicas, place.start_timeout_s)
                self._await_self_test(port, place.start_timeout_s)
            driver = program("serve.http_client", port, launch.model)
        self.driver = ProcessGroup(driver, place.environment, self._log.with_suffix(".driver.log"), talks=True)
        if self.is_engine:
            self.server = self.driver
        threading.Thread(target=self._read_replies, name=f"replies of {self.name}", daemon=True).start()
        if self._reply(place.start_timeout_s) != "ready\n":
            raise CannotStart(f"no sign of readiness: {self.driver.tail()}")
        if self.is_engine:
            self.start_s = time.perf_counter() - self._began

    def _await_answer(self, port: int, path: str, timeout_s: float) -> None:
        """Until it says that it is healthy, or lists models, which the peers do once theirs is loaded or can be."""
        assert self.server is not None
        ends = time.monotonic() + timeout_s
        while time.monotonic() < ends:
            if self.server.process.poll() is not None:
                raise CannotStart(f"it ended with code {self.server.process.returncode}: {self.server.tail()}")
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            try:
                connection.request("GET", path)
                if connection.getresponse().status == 200:
                    return
            except (OSError, http.client.HTTPException):
                pass
            finally:
                connection.close()
            time.sleep(0.1)
        raise CannotStart(f"no answer within {timeout_s:.0f} s: {self.server.tail()}")

    def _await_replicas(self, port: int, count: int, timeout_s: float) -> None:
        """Until all replicas have loaded: it is healthy as soon as one answers."""
        ends = time.monotonic() + timeout_s
        while time.monotonic() < ends:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/cluster?agents=0", timeout=30) as answer:
                up = sum(replica["up"] for replica in json.load(answer)["replicas"])
            if up >= count:
                return
            time.sleep(0.5)
        raise CannotStart(f"not all of its {count} replicas answer within {timeout_s:.0f} s")

    def _await_self_test(self, port: int, timeout_s: float) -> None:
        """Until no model is tested any more: one sequence is computed at a time before that."""
        ends = time.monotonic() + timeout_s
        while time.monotonic() < ends:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=30) as answer:
                tested = [model["proving"] for model in json.load(answer)["data"]]
            if not any(tested):
                self.self_test_s = time.perf_counter() - self._began
                return
            time.sleep(0.5)
        self.unproven = f"its self-test did not end within {timeout_s:.0f} s, so it computed one sequence at a time"

    def _read_replies(self) -> None:
        assert self.driver is not None and self.driver.process.stdout is not None
        for line in self.driver.process.stdout:
            self._replies.put(line)
        self._replies.put("")

    def _reply(self, timeout_s: float) -> str:
        assert self.driver is not None
        try:
            line = self._replies.get(timeout=timeout_s)
        except queue.Empty:
            self._is_behind = True
            raise TargetFailed(f"no reply within {timeout_s:.0f} s") from None
        if not line:
            raise TargetFailed(f"the driver ended: {self.driver.tail()}")
        return line

    def run(self, command: Command) -> Trace:
        """
        Raises:
            TargetFailed: the command failed, or the target has failed before and cannot be asked any more.
        """
        assert self.driver is not None and self.driver.process.stdin is not None
        if self._is_behind:
            raise TargetFailed("it still owes an earlier reply")
        try:
            self.driver.process.stdin.write(to_line(command))
            self.driver.process.stdin.flush()
            return trace_of(self._reply(command.timeout_s + REPLY_SLACK_S))
        except (OSError, RuntimeError) as error:
            raise TargetFailed(str(error)) from error

    def outside_s(self) -> float | None:
        """Returns for how many seconds, in total, requests have waited for their first tokens outside the engine: on
        their way in, and on the tokens' way back. None if the server does not measure it."""
        if self.is_engine or not self.name.startswith("satchel"):
            return None
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics", timeout=30) as answer:
            return outside_engine_s(answer.read().decode())

    def stop(self) -> None:
        for group in (self.driver, self.server):
            if group is not None:
                group.stop()
