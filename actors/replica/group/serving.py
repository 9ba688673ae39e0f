"""The engine's thread of a divided model's leader: starts the followers, loads the last stage, forms the group and
serves the model with the usual engine."""

from __future__ import annotations

import logging
import os
import socket
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ....cluster.config.config import Logs, Traces
from ....cluster.config.stages import GroupPlan
from ....cluster.environment import cluster_key, default_home
from ....cluster.errors import SatchelError, Unavailable
from ...protocol.group_messages import StageState
from ...supervision.stall import limit_s
from ..device.device import on_gpu
from ..execution.batch import Batch
from ..execution.loaded_model import LoadedModel
from ..kv.caches import ModelCacheSpec
from ..loading.warming.warm_up import WarmUp
from ..loop.engine import Engine
from ..memory.other_parts import disk_tier_of
from ..memory.replica_memory import ReplicaMemory
from ..selftest.self_test import Proven
from ..serving import COMPILES_TIMES, Serving
from .calls.leading import Leading
from .followers import Followers
from .forming import GroupTimes, Member
from .link.broken import GroupBroken, in_words
from .link.ending import end_soon
from .loading import load_planned
from .parts import GroupDisk
from .self_test import prove_group
from .served_alone import ServedAlone
from .tensor.member import joining_of

logger = logging.getLogger(__name__)


def leaders_bytes(spec: ModelCacheSpec, follower: StageState, memory_bytes: int) -> int:
    """Returns how many bytes the leader may use for KV so that a follower uses at most `memory_bytes`. Pure.

    Args:
        spec: the leader's.
    """
    tokens = follower.token_bytes / spec.bytes_per_token
    # A stage without KV that grows has 1 byte a token.
    sequences = follower.sequence_bytes / spec.open_sequence_bytes if spec.open_sequence_bytes else tokens
    return int(memory_bytes / max(tokens, sequences))


class GroupServing(Serving):
    """As `Serving`, for the leader of a divided model.

    Args:
        plan: the stages; the last one is this process's.
        followers: those that were started already; None starts them.
    """

    def __init__(
        self, *given: Any, plan: GroupPlan, logs: Logs, traces: Traces, followers: Followers | None = None
    ) -> None:
        super().__init__(*given)
        self._begun = followers
        self._plan, self._logs, self._traces = plan, logs, traces
        self._states: Sequence[StageState] = ()
        self._member: Member | None = None
        self._spec: ModelCacheSpec | None = None
        self._group_disk: GroupDisk | None = None
        # It must not be collected while the group lives: with its handles Ray would end the followers.
        self._started: Followers | None = None

    @property
    def _rank(self) -> int:
        return len(self._plan.stages) - 1

    def run(self) -> None:
        """As `Serving.run`. Ends the process if the group cannot be formed; Ray starts another."""
        try:
            super().run()
        except GroupBroken as error:
            logger.error("the group of %s broke: %s", self._name, error)
            os._exit(1)
        if self._begun is not None:
            # The model is refused.
            self._begun.end()

    def _ready(self, memory: ReplicaMemory) -> tuple[Proven, int]:
        """Loads the last stage while the followers load theirs, forms the group, and runs its self-test."""
        followers = self._begun or Followers(
            self._name,
            self._plan,
            self._model,
            self._scheduling,
            self._timing,
            self._logs,
            self._traces,
            self._shell.note_progress,
        )
        try:
            return self._formed(memory, followers)
        except BaseException:
            # In order, so that this process stays and can say why.
            if self._member is not None:
                with suppress(SatchelError):
                    self._member.close()
            # The error refers to them, so they would live as long as it does.
            followers.end()
            raise

    def _formed(self, memory: ReplicaMemory, followers: Followers) -> tuple[Proven, int]:
        loaded = load_planned(
            self._model,
            self._plan.leader,
            self._rank,
            self._shell.note_progress,
            memory.make_way,
            self._scheduling.memory_bytes_max,
        )
        own = memory.settle(loaded)
        self._states, self._spec = followers.ready(), loaded.spec
        self._form(loaded, followers)
        assert self._followers is not None
        shared = f", {len(self._plan.stages)} equal shares" if self._plan.shared else ""
        layers = "; ".join(f"{stage.start} to {stage.stop}" for stage in self._plan.stages) + shared
        known = default_home().trials_file
        divided = f"its layers are divided: {self._plan.describe()}"

        def begin(alone: LoadedModel) -> Engine:
            return self.begin(Proven(alone, together=False, notes=[divided]), memory, self._bearable(own))

        served = ServedAlone(self._model.plain_after_s or 0.0, begin, lambda: os._exit(1))
        progress = self._shell.note_progress
        proven = prove_group(
            loaded, self._followers, layers, self._model, progress, known, served if self._may_be_plain else None
        )
        notes = [divided, *proven.notes]
        return Proven(proven.loaded, proven.together, notes), self._bearable(own)

    def _form(self, loaded: LoadedModel, followers: Followers) -> None:
        """Raises `GroupBroken` if the group cannot be formed."""
        self._shell.note_progress("forming the group", None)
        group = f"{self._name}-{uuid.uuid4().hex}"
        try:
            listener = socket.create_server((followers.address, 0))
            addresses = [(each.host, each.port) for each in followers.form(group)]
        except (OSError, Unavailable) as error:
            # A follower has ended, or a link is down: new processes may have better luck.
            raise GroupBroken(f"the group cannot be formed: {in_words(error)}") from error
        self._member = Member(
            group,
            self._rank,
            cluster_key(),
            listener,
            GroupTimes.of(self._timing),
            broken=lambda why: end_soon(self._name, why),
            joining=joining_of(self._model, self._timing),
        )
        batch = Batch(loaded)
        self._member.lead(loaded, batch, [*addresses, listener.getsockname()[:2]])
        self._followers = batch.followers
        self._started = followers
        self._watch_calls(self._member.leading)

    def _watch_calls(self, leading: Leading) -> None:
        """Has the watchdog end this process if a call hangs in any process of the group: all calls end here. While the
        model is served the engine is watched too, with a limit from measured steps; the self-test is not."""
        floor_s = self._scheduling.stuck_s * (COMPILES_TIMES if on_gpu() else 1.0)
        self._shell.watchdog.watch("group", leading.between_calls, lambda: limit_s(floor_s, None))

    def _bearable(self, share_bytes: int) -> int:
        """A sequence needs KV in all processes, so the one with the least room limits all."""
        assert self._member is not None and self._spec is not None
        least = share_bytes
        for rank, state in enumerate(self._states):
            told = self._member.memory_bytes_of(rank) or state.memory_bytes
            least = min(least, leaders_bytes(self._spec, state, told))
        return least

    def _warm_up(self, loaded: LoadedModel) -> WarmUp | None:
        return None

    def _disk(self, loaded: LoadedModel) -> GroupDisk | None:
        if not loaded.spec.reusable:
            return None
        nodes = [each.name for each in self._plan.nodes]
        self._group_disk = disk_tier_of(loaded, self._node.name, nodes, self._scheduling, self._timing, GroupDisk)
        return self._group_disk

    def begin(self, *given: Any, **named: Any) -> Engine:
        engine = super().begin(*given, **named)
        if self._group_disk is not None and self._started is not None:
            self._group_disk.serve(engine, self._started.clients)
        return engine
