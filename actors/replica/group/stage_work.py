"""What a follower's thread that computes does: loads its stage, and follows the leader.

A module of its own, because it imports the libraries of models: the follower's process answers meanwhile, and whoever
starts it need not import them.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import mlx.core as mx

from ....cluster.config.config import Model, Scheduling
from ....cluster.config.nodes import Node
from ....cluster.config.stages import Stage
from ....cluster.config.timing import Timing
from ....cluster.environment import cluster_key, default_home
from ...protocol.group_messages import FoundPart, ReadPart, StageState
from ..loading.warming import compile_ahead
from ..memory.budget import bearable_bytes
from ..memory.other_parts import disk_tier_of
from ..memory.replica_memory import ReplicaMemory
from .forming import GroupTimes, Member
from .link.ending import end_soon
from .loading import load_planned
from .parts import FollowerParts
from .tensor.member import joining_of

if TYPE_CHECKING:
    from ..execution.batch import Batch
    from ..execution.loaded_model import LoadedModel


@dataclass(frozen=True)
class StageTask:
    """What a follower is to do, as in `StageActor`.

    Attributes:
        note: is told its state.
    """

    name: str
    rank: int
    model: Model
    scheduling: Scheduling
    stage: Stage
    node: Node
    nodes: Sequence[str]
    timing: Timing
    note: Callable[[StageState], None]


class StageWork:
    """The stage of one follower."""

    def __init__(self, task: StageTask) -> None:
        self._task = task
        self._state = StageState("starting")
        self._bytes = self._weights = 0
        self._loaded: LoadedModel | None = None
        self._parts: FollowerParts | None = None

    def load(self) -> None:
        """Loads the stage.

        Raises:
            SatchelError: it cannot be loaded.
        """
        task = self._task
        compile_ahead.begin_here(task.model.dtype)
        with ReplicaMemory(default_home().memory_claims, task.name, task.node, task.scheduling) as memory:
            loaded = load_planned(
                task.model,
                task.stage,
                task.rank,
                lambda what, fraction: self._note(StageState(what, fraction)),
                memory.make_way,
                task.scheduling.memory_bytes_max,
            )
            self._bytes = memory.settle(loaded)
            self._weights = mx.get_active_memory()
            spec = loaded.spec
            self._note(
                StageState(
                    "waiting for the group", None, True, self._bytes, spec.bytes_per_token, spec.open_sequence_bytes
                )
            )

        def resize(share_bytes: int, free_bytes: int, device_bytes: int) -> None:
            used = max(0, mx.get_active_memory() - self._weights)
            self._bytes = bearable_bytes(share_bytes, used, free_bytes, device_bytes)
            if loaded.pool is not None:
                loaded.pool.limit(self._bytes)

        threading.Thread(target=memory.watch, args=(lambda: 0, resize), name="memory", daemon=True).start()
        self._loaded = loaded

    def _note(self, state: StageState) -> None:
        self._state = state
        self._task.note(state)

    def follow(self, group: str, listener: socket.socket) -> None:
        """Joins a group and does what its leader tells, until it ends.

        Raises:
            GroupBroken: it cannot be formed, or something failed.
        """
        task, loaded = self._task, self._loaded
        assert loaded is not None
        member = Member(
            group,
            task.rank,
            cluster_key(),
            listener,
            GroupTimes.of(task.timing),
            lambda: self._bytes,
            lambda why: end_soon(task.name, why),
            joining_of(task.model, task.timing),
        )
        try:
            following = member.follow(loaded)
            if loaded.spec.reusable:
                self._parts = following.batch.parts = self._parts_of(loaded, following.batch)
            self._note(replace(self._state, what="serving"))
            following.run()
        finally:
            member.close()

    def _parts_of(self, loaded: LoadedModel, batch: Batch) -> FollowerParts:
        task = self._task
        disk = disk_tier_of(loaded, task.node.name, task.nodes, task.scheduling, task.timing)
        return FollowerParts(disk, batch, loaded.model_id)

    def read(self, part: ReadPart) -> FoundPart:
        """As `StageClient.read`; from any thread."""
        return FoundPart(0, []) if self._parts is None else self._parts.read(part)
