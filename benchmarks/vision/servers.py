"""Satchel with what it keeps switched on and off, and its peers: started, asked about pictures, ended."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..cluster import server
from ..serve import processes, targets

SATCHEL, SATCHEL_FP16 = "satchel (4-bit KV)", "satchel"
PEERS: dict[str, tuple[str, Mapping[str, str], tuple[str, ...]]] = {
    "mlx_vlm.server": ("mlx_vlm.server", {}, ()),
    "mlx_vlm.server (prefix cache on)": ("mlx_vlm.server", {"APC_ENABLED": "1"}, ()),
    "vllm-mlx": ("vllm-mlx", {}, ()),
    "vllm-mlx (one at a time)": ("vllm-mlx", {}, ("--continuous-batching",)),
}
"""The others by name: which of `targets.SERVERS` it is, what it has in its environment besides, what it is not told."""

NOTHING_BYTES = 1
"""The least that a limit may be, which nothing fits into."""
FRAMES_MAX = 64

Settings = Mapping[str, Mapping[str, int]]
KEPT: dict[str, Settings] = {
    "both": {},
    "features": {"scheduling": {"prefix_bytes_max": NOTHING_BYTES}},
    "KV": {"scheduling": {"vision_bytes_max": NOTHING_BYTES}},
    "none": {"scheduling": {"prefix_bytes_max": NOTHING_BYTES, "vision_bytes_max": NOTHING_BYTES}},
}
"""What is kept in memory of pictures, and the settings that make it so."""

SETTLED_S, SETTLES_S_MAX = 2.0, 30.0
"""How long nothing must have been written until a turn counts as being on the disk, and how long that is waited for."""


class VisionServer(targets.Target):
    """A running server of one model.

    Args:
        name: as in `PEERS` or `targets.SERVERS`.
        settings: of Satchel, beside the defaults.

    Raises:
        CannotStart: with the end of what it said.
    """

    def __init__(self, name: str, folder: Path, place: Any, settings: Settings | None = None) -> None:
        self._settings = settings or {}
        super().__init__(name, folder, place)

    def _start(self, folder: Path, place: Any) -> None:
        port = targets.free_port()
        known, environment, left_out = PEERS.get(self.name, (self.name, {}, ()))
        launch = targets.SERVERS[known](folder, port, place)
        command = [word for word in launch.command if word not in left_out]
        self.home = place.work / f"home-{port}"
        if (config := self.home / "config.yaml").exists():
            told = {**json.loads(config.read_text()), "media": {"frames_max": FRAMES_MAX}, **self._settings}
            config.write_text(json.dumps(told))
        self.server = processes.ProcessGroup(
            command, {**launch.environment, **environment}, self._log.with_suffix(".log")
        )
        self._await_answer(port, launch.ready, place.start_timeout_s)
        if known.startswith("satchel"):
            # Before that it takes no pictures.
            self._await_self_test(port, place.start_timeout_s)
        self.eyes = Eyes(f"http://127.0.0.1:{port}", launch.model)

    def disk_bytes(self) -> int:
        """Of KV and features in the home, once everything is written."""
        counted, since, ends = -1, time.monotonic(), time.monotonic() + SETTLES_S_MAX
        while time.monotonic() < min(since + SETTLED_S, ends):
            files = (self.home / "kv").rglob("*.kv")
            if (now := sum(path.stat().st_size for path in files)) != counted:
                counted, since = now, time.monotonic()
            time.sleep(0.1)
        return counted

    def stop(self) -> None:
        if (eyes := getattr(self, "eyes", None)) is not None:
            eyes.__exit__()
        super().stop()


class Eyes(server.ClusterClient):
    """A server's user, who shows it pictures."""

    def __init__(self, url: str, model: str) -> None:
        super().__init__(url)
        self._model = model

    def see(self, messages: Sequence[Any], tokens_max: int, agent: str = "") -> server.ClusterStream:
        """What came of a conversation, with `ended`.

        Raises:
            RuntimeError: the answer is an error, or none.
        """
        body = {
            "model": self._model,
            "messages": messages,
            "temperature": 0,
            "max_tokens": tokens_max,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        written = json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **({"X-Agent-ID": agent} if agent else {})}
        found = server.ClusterStream(time.perf_counter())
        with self._http.stream("POST", "/v1/chat/completions", content=written, headers=headers) as answer:
            if answer.status_code != 200:
                raise RuntimeError(f"{answer.status_code}: {answer.read().decode()[:300]}")
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    self._take(found, json.loads(line.removeprefix("data: ")), None)
        found.ended = time.perf_counter()
        if not found.arrivals:
            raise RuntimeError("an answer without text")
        return found

    def forget(self) -> int:
        """Have KV and features dropped from memory. Returns their bytes."""
        return self.json("DELETE", "/v1/cache")["bytes"]

    def kv_bytes(self) -> int:
        """Of KV kept in memory."""
        return self.json("GET", "/v1/cache/stats")["current_memory_bytes"]

    def encodes(self) -> int:
        """How many pictures and groups of frames have been encoded since the start."""
        lines = self._http.get("/metrics").text.splitlines()
        return round(sum(float(line.split()[-1]) for line in lines if line.startswith("satchel_vision_encodes_total")))
