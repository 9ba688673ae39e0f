"""Starts the followers of a group, and waits until they have loaded their stages. For the leader's engine thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError

from ....cluster.config.config import Logs, Model, Scheduling, Traces
from ....cluster.config.nodes import Node
from ....cluster.config.stages import GroupPlan, Stage
from ....cluster.config.timing import Timing
from ....cluster.connection import NAMESPACE
from ....cluster.errors import NoRoom, SatchelError
from ...model_files.source import Progress
from ...protocol.group_clients import StageClient
from ...protocol.group_messages import StageAddress, StageState
from ...rpc.client import actor_class, is_restarted
from .follower import StageActor
from .gathering import Gathering

logger = logging.getLogger(__name__)

POLL_S = 0.1

AGAIN_S = 1.0
"""A follower that ended while it loaded, or had no room, is started again after this long."""


def addresses_of(nodes: Sequence[Node]) -> list[str]:
    """Returns where the processes of a group listen, one a node: at the fastest kind of link that all nodes have, else
    at the address that Ray uses. Pure."""
    common = set.intersection(*({link.kind for link in node.links} for node in nodes))
    found = []
    for node in nodes:
        links = [link.address for link in node.data_links if link.kind in common]
        found.append(links[0] if links else node.address)
    return found


class Followers:
    """The followers of one group.

    Args:
        replica: the id of the model's replica.
        progress: is told what is waited for.
    """

    def __init__(
        self,
        replica: str,
        plan: GroupPlan,
        model: Model,
        scheduling: Scheduling,
        timing: Timing,
        logs: Logs,
        traces: Traces,
        progress: Progress,
    ) -> None:
        self._replica, self._plan, self._timing, self._progress = replica, plan, timing, progress
        nodes = [each.name for each in plan.nodes]
        self._arguments: Callable[[int, Stage, Node, str], tuple[Any, ...]] = lambda rank, stage, node, address: (
            (replica, rank, model, scheduling, stage, node, nodes, address, timing, logs, traces)
        )
        # Kept, because Ray ends an actor without a lifetime when its last handle is gone.
        self._handles: list[Any] = []
        self._clients: list[StageClient] = []
        addresses = addresses_of(plan.nodes)
        self.address = addresses[-1]
        self._addresses = addresses[:-1]
        for rank in range(len(plan.stages) - 1):
            self._handles.append(None)
            self._clients.append(self._started(rank))

    def _started(self, rank: int) -> StageClient:
        stage, node = self._plan.stages[rank], self._plan.nodes[rank]
        options = actor_class(StageActor).options(
            namespace=NAMESPACE, num_cpus=0, max_restarts=0, max_task_retries=0, resources={node.resource: 1}
        )
        self._handles[rank] = options.remote(*self._arguments(rank, stage, node, self._addresses[rank]))
        return StageClient(f"stage {rank} of {self._replica} on {node.name}", self._timing, self._handles[rank])

    @property
    def clients(self) -> Sequence[StageClient]:
        """Of all followers, in the order of stages."""
        return self._clients

    def ready(self) -> list[StageState]:
        """Waits until all have loaded their stages, for as long as that takes: their nodes may be away.

        Raises:
            SatchelError: one cannot be loaded.
        """
        gathering = Gathering(len(self._clients), patient=is_restarted())
        while (states := gathering.states) is None:
            for rank in range(len(self._clients)):
                self._ask(rank, gathering)
            time.sleep(POLL_S)
        return states

    def _ask(self, rank: int, gathering: Gathering) -> None:
        node = self._plan.stages[rank].node
        try:
            state = self._clients[rank].state().within(self._timing.brief_answer_s).wait()
        except SatchelError as error:
            again = gathering.failed(rank, error, time.monotonic())
            self._progress(f"waiting for {'memory on ' if isinstance(error, NoRoom) else ''}node {node}", None)
            if again:
                logger.warning("stage %d on %s is started again: %s", rank, node, error.message)
                time.sleep(AGAIN_S)
                self._clients[rank] = self._started(rank)
            return
        gathering.told(rank, state)
        if not state.ready:
            self._progress(f"{node}: {state.what}", state.fraction)

    def end(self) -> None:
        """Ends all of them."""
        for handle in self._handles:
            with suppress(RayError, ValueError):
                ray.kill(handle)

    def form(self, group: str) -> list[StageAddress]:
        """Has all of them listen for a group. Returns where.

        Raises:
            SatchelError: one does not.
        """
        return [client.form(group).wait() for client in self._clients]
