"""A replica's part of its node's memory.

The replicas of a node are processes that know of each other by claims. A claim is a file in the node's home that says
what a model needs; its replica holds a lock on it (flock) for as long as it lives. Every replica reads all claims
periodically, so if a model is loaded or ends, the parts of the others change within seconds.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import mlx.core as mx
import psutil

from ....cluster.config import Scheduling
from ....cluster.errors import NoRoom
from ....cluster.nodes import Node
from ...model_files.source import read_json
from ...protocol.block_ids import BLOCK_TOKENS
from ..device.device import device_bytes, device_kind, on_cuda
from ..device.wired import Wired
from ..execution.loaded_model import LoadedModel
from ..kv.caches import ModelCacheSpec
from .budget import MemoryClaim, share_bytes, workspace_bytes
        if self._comes_and_goes and not self._fits(MemoryClaim(weights, self._workspace)):
            raise NoRoom(self._no_room(weights))
        self.note(weights, self._workspace)
        share = self.share_bytes()
        if limits_of(loaded, self._scheduling, share).prompt_tokens_max < 1:
            raise NoRoom(
                f"{_mib(share)} are left beside the weights ({_mib(weights)}) and other replicas, "
                "which is not enough for one sequence: raise memory_bytes_max, or unload another model"
            )
        self._wired.keep(weights + share)
        return share

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.withdraw()

    def withdraw(self) -> None:
        """Removes the claim."""
        self._withdrawn = True
        os.close(self._file)

    def share_bytes(self) -> int:
        """Returns this replica's part for KV and pictures, in bytes."""
        claims = [self._own, *self._others()]
        if self._set_bytes is not None:
            return share_bytes(self._set_bytes, claims)
        return max(share_bytes(self._own.device, claims), int(self._own.device * LEAST_PART))

    def sequences_bytes_max(self) -> int | None:
        """Returns what the deprecated `kv_bytes_max` leaves this replica's sequences; None if it is not set."""
        return None if self._sequences_bytes is None else self._sequences_bytes // (1 + len(self._others()))

    def watch(self, workspace_bytes: Callable[[], int], resize: Callable[[int, int, int], None]) -> None:
        """Tells the engine its memory every second, until the claim is withdrawn.

        Args:
            workspace_bytes: returns the temporary memory of an engine's step.
            resize: called with the replica's part of the memory, and the device's free and whole memory, in bytes.
        """
        while not self._withdrawn:
            time.sleep(POLL_S)
            try:
                self.note(self._own.weights, max(self._workspace, workspace_bytes()))
                share = self.share_bytes()
                self._wired.keep(self._own.weights + share)
                resize(share, device_bytes(free=True) + mx.get_cache_memory(), device_bytes())
            except OSError as error:
                logger.warning("the node's memory is not known: %s", error)

    def _write(self) -> None:
        os.pwrite(self._file, json.dumps(asdict(self._own)).encode().ljust(CLAIM_BYTES), 0)

    def _others(self) -> list[_Noted]:
        """Returns the claims of the other live replicas."""
        found = []
        for path in self._folder.glob("*.claim"):
            if path != self._path and (claim := _read_claim(path)) is not None:
                found.append(claim)
        return found


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.0f} MiB"


def _read_claim(path: Path) -> _Noted | None:
    """Returns a claim; None if its replica has ended."""
    try:
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return _Noted(**json.loads(file.read(CLAIM_BYTES)))
            path.unlink(missing_ok=True)
    except (OSError, ValueError, TypeError) as error:
        if not isinstance(error, FileNotFoundError):
            logger.warning("%s cannot be read: %s", path, error)
    return None


def node_bytes() -> int:
    """Returns the bytes that the device can give the replicas of a node, if none of them runs yet."""
    kind, whole = device_kind(), psutil.virtual_memory().total
    if kind == "metal":
        whole = int(mx.device_info().get("max_recommended_working_set_size", device_bytes()))
    elif kind == "cuda":
        whole = device_bytes(free=True)
    return usable_bytes(kind, whole)


def usable_bytes(kind: str, whole: int) -> int:
    """Returns how many of a device's bytes replicas use; `kind` as `device_kind` returns it."""
    return int(whole * PARTS[kind])


def workspace_of(
    config: Mapping[str, Any],
    spec: ModelCacheSpec,
    context_tokens: int,
    dtype: str,
    chunk_tokens: int,
    memory_bytes: int,
) -> int:
    """Returns the temporary memory of a model's prefill and of its growing block pool, given `memory_bytes`."""
    config = {**config, **(config.get("text_config") or {})}
    hidden = int(config.get("hidden_size") or 0)
    experts = int(config.get("num_experts_per_tok") or 1) * int(config.get("moe_intermediate_size") or 0)
    layers = [layer.token_bytes for layer in spec.layers]
    prefill = workspace_bytes(
        tokens=chunk_tokens,
        context=min(context_tokens, memory_bytes // spec.bytes_per_token),
        hidden=hidden,
        intermediate=max(experts, int(config.get("intermediate_size") or 4 * hidden)),
        itemsize=4 if dtype == "float32" else 2,
        layer=max(layer.open_bytes // BLOCK_TOKENS or layer.token_bytes for layer in spec.layers),
        # A mask of booleans, and on CUDA the same mask as 16-bit numbers.
        mask=3 if on_cuda() else 1,
    )
    return prefill + int(memory_bytes * POOL_ARRAY_PART * max(layers) / max(1, sum(layers)))
