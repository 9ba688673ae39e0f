"""The methods of the planner, and of the followers of a divided model."""

from __future__ import annotations

from typing import Any

from ...cluster.config.timing import Timing
from ..rpc.client import ActorRef
from ..rpc.spec import Client, method
from .group_messages import FoundPart, PlannedModel, ReadPart, StageAddress, StageState
from .names import PLANNER


class PlannerClient(Client):
    """The planner of divided models.

    Args:
        handle: the planner's, if known.
    """

    def __init__(self, timing: Timing, handle: Any = None) -> None:
        super().__init__(ActorRef(PLANNER, "the planner of models does not answer now", handle=handle), timing)

    @method()
    def planned(self, name: str) -> PlannedModel:
        """Returns how far the planning of a model is.

        Raises:
            NoRoom, ModelLoadError: it cannot be placed on the nodes that there are.
            ModelNotFound: it is not a model that may be divided.
        """
        ...


class StageClient(Client):
    """A follower: the process that has a stage of a divided model and does not lead it.

    Args:
        name: for messages.
        handle: the actor's.
    """

    def __init__(self, name: str, timing: Timing, handle: Any) -> None:
        super().__init__(ActorRef(name, f"{name} does not answer now", handle=handle), timing)

    @method()
    def state(self) -> StageState:
        """Returns what it does until its stage is loaded, and then what it can hold.

        Raises:
            SatchelError: why its stage cannot be loaded.
        """
        ...

    @method(lambda timing, part: timing.block_lease_s)
    def read(self, part: ReadPart) -> FoundPart:
        """Reads its part of a prompt's KV from its node's disk, and keeps it for the leader's calls."""
        ...

    @method()
    def form(self, group: str) -> StageAddress:
        """Makes it listen for a group, which must be formed within `timing.group_form_s`. Only once.

        Raises:
            Unavailable: its stage is not loaded yet.
            SatchelError: it cannot listen.
        """
        ...
