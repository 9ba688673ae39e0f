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
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self

import mlx.core as mx

from ....cluster.config.config import Scheduling
from ....cluster.config.nodes import Node
from ....cluster.errors import NoRoom
from ...model_files.source import read_json
from ...protocol.block_ids import BLOCK_TOKENS
from ..device.device import device_bytes, on_cuda, size_graphs
from ..device.temporary_memory import TEMPORARY
from ..device.wired import Wired
from ..execution.loaded_model import LoadedModel
from ..kv.caches import ModelCacheSpec
from .budget import MemoryClaim, claimable_bytes, has_room, share_bytes, workspace_bytes
from .claims import CLAIM_BYTES, Claim, node_bytes, read_claim
from .room import limits_of

logger = logging.getLogger(__name__)

LEAST_PART = 1 / 16
"""The least part of the device's memory that a replica gets if the config names no figure."""

TEMPORARY_PART = 4
"""What is launched ahead may need this fraction of what KV might have, if that is more than a prompt's layer needs."""

POLL_S = 1.0

YIELD_S = 10.0
"""How long loading waits for the other replicas to make room for the weights."""

ENDING_S = 2.0
"""How long loading waits for the processes of other replicas to end, which may have been unloaded to make room."""

POOL_ARRAY_PART = 2 / 3
"""The largest array of a layer has at most this share of the layer's bytes: 8-bit codes of keys beside 4-bit codes of
values."""


class ReplicaMemory:
    """The node's memory as one replica sees it. For one thread at a time, with `watch` on another. As a context manager
    it withdraws its claim if an error leaves the context.

    Args:
        folder: where all replicas of the node write their claims.
        replica: this one's name.
        node, scheduling: what the config allows.
        comes_and_goes: whether others may be unloaded for its model, so that it need not squeeze in beside them.
        kv: whether its model has KV.
    """

    def __init__(
        self,
        folder: Path,
        replica: str,
        node: Node,
        scheduling: Scheduling,
        *,
        comes_and_goes: bool = False,
        kv: bool = True,
    ) -> None:
        self._folder, self._scheduling, self._workspace = folder, scheduling, 0
        self._comes_and_goes = comes_and_goes
        self._noting, self._withdrawn = threading.Lock(), False
        self._node, self._wired = node.name, Wired()
        self._set_bytes = scheduling.memory_bytes_max if node.memory_bytes_max is None else node.memory_bytes_max
        self._sequences_bytes = scheduling.kv_bytes_max if node.kv_bytes_max is None else node.kv_bytes_max
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._path = folder / f"{replica}-{os.getpid()}.claim"
        self._own = Claim(0, 0, kv, max([node_bytes(), *(other.device for other in self._others())]))
        size_graphs(self.bytes_max)
        # The file gets its name once it is locked: other replicas remove claims that are not locked.
        started = self._path.with_suffix(".new")
        self._file = os.open(started, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._write()
        started.rename(self._path)

    def note(self, weights: int | None = None, workspace: int | None = None) -> None:
        """Notes what the model needs, in bytes; None leaves it as it was."""
        with self._noting:
            own = self._own
            noted = replace(
                own,
                weights=own.weights if weights is None else weights,
                workspace=own.workspace if workspace is None else workspace,
            )
            if noted != self._own:
                self._own = noted
                self._write()

    def make_way(self, weights: int) -> None:
        """Claims a model's weights before they are loaded, and waits until the other replicas have made room.

        Raises:
            NoRoom: they cannot.
        """
        self._make_way(0, weights)

    def make_way_beside(self, weights: int) -> None:
        """As `make_way`, for a second model that is loaded too."""
        self._make_way(self._own.weights, weights)

    def _make_way(self, loaded: int, weights: int) -> None:
        """As `make_way`, beside so many bytes of weights that are loaded."""
        # Not claimed before it is known to fit: the others would give up their KV for nothing, and refuse requests.
        claim = MemoryClaim(loaded + weights, 0, self._own.kv)
        ends = time.monotonic() + ENDING_S
        while not self._fits(claim):
            if time.monotonic() > ends:
                raise NoRoom(self._no_room(loaded + weights))
            time.sleep(POLL_S / 4)
        self.note(loaded + weights)
        if not self._fits(claim):
            # Another one was loaded at the same moment.
            self.note(loaded)
            raise NoRoom(self._no_room(loaded + weights))
        self._wait_for(weights)

    def _wait_for(self, nbytes: int) -> None:
        """Waits until the other replicas have made room for what is claimed, for a while."""
        ends = time.monotonic() + YIELD_S
        while device_bytes(free=True) < nbytes and self._others() and time.monotonic() < ends:
            time.sleep(POLL_S / 4)

    def grow(self, workspace: int) -> None:
        """Claims so much temporary memory in all before a model needs it, in bytes, and waits until the other replicas
        have made room. `watch` takes it back once less is needed."""
        more = workspace - self._own.workspace
        if more <= 0:
            return
        try:
            self.note(workspace=workspace)
        except OSError as error:
            logger.warning("memory cannot be claimed: %s", error)
            return
        self._wait_for(more)

    def _fits(self, claim: MemoryClaim) -> bool:
        """Returns whether there is room for the model. Without a configured figure one that does not come and go always
        takes its part."""
        if self._comes_and_goes:
            return has_room(self.bytes_max, self._others(), claim)
        return self._set_bytes is None or share_bytes(self._set_bytes, [claim, *self._others()]) > 0

    def _no_room(self, weights: int) -> str:
        others = self._others()
        taken = sum(claim.weights + claim.workspace for claim in others)
        beside = f", and {len(others)} other replicas need {_mib(taken)} besides their KV" if others else ""
        return (
            f"no room on {self._node}: its weights take {_mib(weights)}, models and KV may take "
            f"{_mib(self.bytes_max)}{beside}: raise memory_bytes_max, or unload another model"
        )

    @property
    def bytes_max(self) -> int:
        """What all replicas of the node may use together, in bytes."""
        return self._own.device if self._set_bytes is None else self._set_bytes

    @property
    def workspace_bytes(self) -> int:
        """What it claims besides its weights, in bytes."""
        return self._own.workspace

    @property
    def claimed_bytes(self) -> int:
        """What this replica needs before anything is divided, in bytes."""
        return self._own.weights + self._own.workspace

    def settle(self, loaded: LoadedModel, beside_bytes: int = 0) -> int:
        """Notes what a loaded model needs. Returns this replica's part for KV and pictures, in bytes.

        Args:
            beside_bytes: what it needs besides that is not allocated yet.

        Raises:
            NoRoom: the part is too small for a single sequence.
        """
        weights = max(0, mx.get_active_memory() - (loaded.pool.nbytes if loaded.pool is not None else 0))
        weights += beside_bytes
        self.note(weights, 0)
        self._workspace = workspace_of(
            read_json(loaded.folder / "config.json"),
            loaded.spec,
            loaded.context_tokens,
            loaded.dtype,
            self._scheduling.prefill_chunk_tokens,
            self.share_bytes(),
        )
        if self._comes_and_goes and not self._fits(MemoryClaim(weights, self._workspace)):
            raise NoRoom(self._no_room(weights))
        self.note(weights, self._workspace)
        share = self.share_bytes()
        TEMPORARY.bytes_max = max(self._workspace, share // TEMPORARY_PART)
        if limits_of(loaded, self._scheduling, share).prompt_tokens_max < 1:
            raise NoRoom(
                f"{_mib(share)} are left beside the weights ({_mib(weights)}) and other replicas, "
                "which is not enough for one sequence: raise memory_bytes_max, or unload another model"
            )
        self._wired.keep(weights + share)
        return share

    def settle_weights(self, weights: int, workspace: int) -> int:
        """As `settle`, for a model without KV. Returns what it may claim in all besides its weights, in bytes.

        Args:
            weights, workspace: bytes of its weights, and of what it has needed besides until now.

        Raises:
            NoRoom: there is no room for it.
        """
        if self._comes_and_goes and not self._fits(MemoryClaim(weights, workspace, self._own.kv)):
            raise NoRoom(self._no_room(weights))
        self._workspace = workspace
        self.note(weights, workspace)
        self._wired.keep(weights + workspace)
        return self.share_bytes() + workspace

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
        """Returns this replica's part for KV and pictures, in bytes; if it has no KV, what more it may claim."""
        claims = [self._own, *self._others()]
        if not self._own.kv:
            return claimable_bytes(self.bytes_max, claims)
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
                self.note(workspace=max(self._workspace, workspace_bytes()))
                share = self.share_bytes()
                self._wired.keep(self._own.weights + (share if self._own.kv else self._own.workspace))
                resize(share, device_bytes(free=True) + mx.get_cache_memory(), device_bytes())
            except OSError as error:
                logger.warning("the node's memory is not known: %s", error)

    def _write(self) -> None:
        os.pwrite(self._file, json.dumps(asdict(self._own)).encode().ljust(CLAIM_BYTES), 0)

    def _others(self) -> list[Claim]:
        """Returns the claims of the other live replicas."""
        found = []
        for path in self._folder.glob("*.claim"):
            if path != self._path and (claim := read_claim(path)) is not None:
                found.append(claim)
        return found


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.0f} MiB"


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
