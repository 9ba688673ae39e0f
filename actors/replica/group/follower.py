"""The actor of a follower: a process that has a stage of a divided model and does what the leader tells it.

The leader starts it, and Ray ends it with the leader. It ends by itself if no leader asks for it, because Ray may not
reach its node. It is never restarted: the leader starts a new one when it forms the group again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ....cluster.config.config import Logs, Model, Scheduling, Traces
from ....cluster.config.nodes import Node
from ....cluster.config.stages import Stage
from ....cluster.config.timing import Timing
from ....cluster.errors import ModelLoadError, SatchelError, Unavailable
from ....cluster.telemetry.process import begin_telemetry
from ...patches import without_torch
from ...protocol.group_clients import StageClient
from ...protocol.group_messages import FoundPart, ReadPart, StageAddress, StageState
from ...rpc.shell import SWITCH_S, answers
from ...supervision.watchdog import Watchdog
from .link.broken import GroupBroken

if TYPE_CHECKING:
    from .stage_work import StageWork

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Call:
    """A group that is to be joined."""

    group: str
    listener: socket.socket


class StageActor:
    """A follower. It is called through `StageClient`, which documents its methods.

    Args:
        replica: the id of the model's replica.
        rank: the number of its stage.
        nodes: the names of all nodes of the group.
        address: where it listens for the leader and the stage before.
    """

    def __init__(
        self,
        replica: str,
        rank: int,
        model: Model,
        scheduling: Scheduling,
        stage: Stage,
        node: Node,
        nodes: Sequence[str],
        address: str,
        timing: Timing,
        logs: Logs,
        traces: Traces,
    ) -> None:
        self._name, self._rank, self._model, self._scheduling = f"{replica}-stage{rank}", rank, model, scheduling
        self._stage, self._node, self._address, self._timing = stage, node, address, timing
        self._nodes = nodes
        sys.setswitchinterval(SWITCH_S)
        self._logs, self._traces = logs, traces
        self._state = StageState("starting")
        self._error: SatchelError | None = None
        self._calls = threading.Semaphore(0)
        # The leader first asks once it has loaded its own stage, which may take long.
        self._asked_at = math.inf
        self._call: _Call | None = None
        self._work: StageWork | None = None
        Watchdog(self._name, poll_s=timing.heartbeat_s).start()
        threading.Thread(target=self._run, name="stage", daemon=True).start()

    @answers(StageClient.state)
    async def state(self) -> StageState:
        self._asked_at = time.monotonic()
        if self._error is not None:
            raise self._error
        return self._state

    @answers(StageClient.form)
    async def form(self, group: str) -> StageAddress:
        if not self._state.ready or self._call is not None:
            raise Unavailable(f"{self._name} is not ready for a group")
        try:
            listener = socket.create_server((self._address, 0))
        except OSError as error:
            raise Unavailable(f"{self._name} cannot listen at {self._address}: {error}") from error
        self._call = _Call(group, listener)
        self._calls.release()
        host, port = listener.getsockname()[:2]
        return StageAddress(host, port)

    @answers(StageClient.read)
    async def read(self, part: ReadPart) -> FoundPart:
        if self._work is None:
            return FoundPart(0, [])
        return await asyncio.to_thread(self._work.read, part)

    # The thread that computes.

    def _run(self) -> None:
        begin_telemetry(self._name, self._logs, self._traces)
        try:
            without_torch()
            # Imported here, so that the event loop answers meanwhile.
            from .stage_work import StageTask, StageWork

            task = StageTask(
                self._name,
                self._rank,
                self._model,
                self._scheduling,
                self._stage,
                self._node,
                self._nodes,
                self._timing,
                self._note,
            )
            work = StageWork(task)
            work.load()
        except SatchelError as error:
            self._error = error
            return
        except Exception as error:
            logger.exception("loading a stage of %s failed", self._model.source)
            self._error = ModelLoadError(f"{self._model.source} cannot be loaded: {error}")
            return
        self._work = work
        if not self._is_called():
            logger.warning("%s ends: no leader asks for it", self._name)
            os._exit(1)
        assert self._call is not None
        try:
            work.follow(self._call.group, self._call.listener)
        except GroupBroken as error:
            logger.warning("the group of %s has ended: %s", self._name, error)
        except BaseException:
            logger.exception("%s failed", self._name)
        finally:
            # The leader starts a new process for a new group.
            os._exit(1)

    def _is_called(self) -> bool:
        """Waits until the leader calls for a group. Returns False if it does not ask for this process any more."""
        while not self._calls.acquire(timeout=self._timing.unwanted_s):
            if time.monotonic() - self._asked_at > self._timing.unwanted_s:
                return False
        return True

    def _note(self, state: StageState) -> None:
        self._state = state
