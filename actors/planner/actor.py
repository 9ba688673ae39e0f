"""The actor of the planner: waits for the nodes of models that may be divided, places the models, and starts their
replicas."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from ...cluster.config.config import Config, Model, Scheduling
from ...cluster.config.nodes import Node
from ...cluster.config.stages import GroupPlan, Stage
from ...cluster.errors import ModelLoadError, ModelNotFound, SatchelError, Unavailable
from ...cluster.telemetry.process import begin_telemetry
from ..protocol import registry
from ..protocol.group_clients import PlannerClient
from ..protocol.group_messages import PlannedModel
from ..protocol.names import PLANNER
from ..rpc.client import actor_class
from ..rpc.shell import answers
from ..start import located, on_node, present_nodes, start_replica
from ..supervision.watchdog import Watchdog
from .planning import Divider, memory_of

logger = logging.getLogger(__name__)

POLL_S = 1.0

NODES_WAIT_S = 120.0
"""How long a model waits for all of its nodes, if those that are there have room for it together."""

AGAIN_S = 30.0
"""A model without room is planned again after this long: other models may have ended."""


def start_planner(config: Config) -> None:
    """Starts the planner on the head, if the config has models that may be divided."""
    if any(model.split is not None for model in config.models):
        actor_class(PlannerActor).options(name=PLANNER, **on_node(config.machines[0])).remote(config)


@dataclass
class _Planning:
    """A model that may be divided, and how far its planning is.

    Attributes:
        nodes: those for which it was planned last.
        planned_at: when that was.
        error: why it cannot be placed on the nodes that there are.
        divider: the process that divides it, as long as there is one.
    """

    model: Model
    since: float = field(default_factory=time.monotonic)
    what: str = "waiting for its nodes"
    replica: str = ""
    nodes: tuple[str, ...] = ()
    planned_at: float = 0.0
    stages: list[Stage] = field(default_factory=list)
    error: SatchelError | None = None
    divider: _DividerProcess | None = None


class PlannerActor:
    """The actor that places models that may be divided. Named `planner` in the cluster's namespace. It is called
    through `PlannerClient`, which says what its methods do."""

    def __init__(self, config: Config) -> None:
        begin_telemetry(PLANNER, config.logs, config.traces)
        self._config = config
        models = [model for model in map(located, config.models) if model.split is not None]
        self._plannings = {model.name: _Planning(model) for model in models}
        loop = asyncio.get_running_loop()
        self._watchdog = Watchdog(PLANNER, poll_s=config.timing.heartbeat_s)
        self._watchdog.watch("event loop", loop.call_soon_threadsafe)
        self._watchdog.start()
        self._running = loop.create_task(self._run())

    @answers(PlannerClient.planned)
    async def planned(self, name: str) -> PlannedModel:
        planning = self._plannings.get(name)
        if planning is None:
            raise ModelNotFound(f"{name!r} is not a model that may be divided", param="model")
        if planning.error is not None:
            raise planning.error
        return PlannedModel(name, planning.what, planning.replica)

    async def _run(self) -> None:
        while any(not planning.replica for planning in self._plannings.values()):
            # One after the other: the next one sees what this one claims.
            for planning in self._plannings.values():
                if not planning.replica:
                    try:
                        await self._plan(planning)
                    except Exception:
                        # This task must survive any error.
                        logger.exception("%s cannot be planned now", planning.model.name)
            await asyncio.sleep(POLL_S)

    async def _plan(self, planning: _Planning) -> None:
        """Places a model, if its nodes are there."""
        model = planning.model
        entries, present = await asyncio.to_thread(lambda: (registry.entries(), present_nodes(self._config)))
        placed = next((entry.replicas for entry in entries if entry.model.name == model.name), {})
        if placed:
            # Before this process was started again.
            planning.replica, planning.what = next(iter(placed)), ""
            return
        self._divider_of(planning)
        wanted = list(model.nodes) or list(dict.fromkeys([node.name for node in self._config.machines] + list(present)))
        here = tuple(name for name in wanted if name in present)
        missing = [name for name in wanted if name not in present]
        now = time.monotonic()
        if (len(here) >= _least(model) or not missing) and (
            here != planning.nodes or now - planning.planned_at > AGAIN_S
        ):
            await self._divide(planning, {name: present[name] for name in here}, missing)
        if planning.stages and (len(planning.stages) == 1 or not missing or now - planning.since > NODES_WAIT_S):
            self._place(planning, present)
        elif missing:
            planning.what = f"waiting for node {missing[0]}"

    async def _divide(self, planning: _Planning, nodes: Mapping[str, Node], missing: list[str]) -> None:
        """Divides a model among nodes."""
        planning.nodes, planning.stages, planning.error = tuple(nodes), [], None
        planning.what = "asking the nodes for their memory"
        scheduling = self._config.scheduling
        try:
            memory = await asyncio.gather(*(_on(node, memory_of, node, scheduling) for node in nodes.values()))
            planning.what = "dividing its layers"
            known = dict(zip(nodes, memory, strict=True))
            planning.stages = await self._divider_of(planning).divide(known)
        except SatchelError as error:
            logger.warning("%s cannot be placed on %s: %s", planning.model.name, ", ".join(nodes), error.message)
            # With further nodes it may fit.
            planning.error = error if not missing else None
        planning.planned_at = time.monotonic()

    def _divider_of(self, planning: _Planning) -> _DividerProcess:
        if planning.divider is None or planning.divider.ended:
            planning.divider = _DividerProcess(self._config.machines[0], planning.model, self._config.scheduling)
        return planning.divider

    def _place(self, planning: _Planning, present: Mapping[str, Node]) -> None:
        stages, model = planning.stages, planning.model
        plan = GroupPlan(tuple(stages), tuple(present[stage.node] for stage in stages)) if len(stages) > 1 else None
        replica, node = f"{model.slug}-0", present[stages[-1].node]
        where = plan.describe() if plan is not None else f"all layers on {node.name}"
        logger.info("%s: %s", model.name, where)
        registry.place(model, replica, node.name, stages if plan is not None else ())
        start_replica(replica, model, self._config, node, plan, get_if_exists=True)
        planning.replica, planning.what = replica, ""
        if planning.divider is not None:
            planning.divider.end()


def _least(model: Model) -> int:
    """Returns among how many nodes a model is divided at least."""
    assert model.split is not None
    stages = model.split.pipeline
    return model.split.tensor or (len(stages) if isinstance(stages, tuple) else 1)


class _DividerProcess:
    """The process of a model's `Divider`, on the head. It reads at once what it needs.

    Attributes:
        ended: whether it has ended.
    """

    def __init__(self, head: Node, model: Model, scheduling: Scheduling) -> None:
        options = actor_class(Divider).options(num_cpus=0, max_restarts=0, resources={head.resource: 1})
        self._node = head
        self._handle: Any = options.remote(model, scheduling)
        self._handle.read.remote()
        self.ended = False

    async def divide(self, memory_bytes: Mapping[str, int]) -> list[Stage]:
        """As `Divider.stages`. Raises as `_answer`."""
        try:
            return await _answer(self._node, self._handle.stages.remote(memory_bytes))
        except SatchelError:
            # Whatever it has read may have changed when it is asked again.
            self.end()
            raise

    def end(self) -> None:
        if not self.ended:
            self.ended = True
            ray.kill(self._handle)


async def _on(node: Node, work: Any, *given: Any) -> Any:
    """Returns what `work` returns in a process on a node, which ends afterwards. Raises as `_answer`."""
    return await _answer(node, _task(work).options(resources={node.resource: 1}).remote(*given))


@cache
def _task(work: Any) -> Any:
    """Returns what calls `work` in a process. Made once, as an actor's class."""
    return ray.remote(num_cpus=0, max_calls=1, max_retries=0)(work)


async def _answer(node: Node, result: Any) -> Any:
    """Waits for the result of a process on a node.

    Raises:
        SatchelError: what it raised, or that its process has ended.
    """
    try:
        return await result
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, SatchelError):
            raise cause from None
        raise ModelLoadError(f"{node.name} cannot plan: {cause}") from error
    except RayError as error:
        raise Unavailable(f"{node.name} does not answer now") from error
