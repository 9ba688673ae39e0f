"""Which followers of a group have loaded their stages, and which are started again. Pure."""

from __future__ import annotations

from ....cluster.errors import ActorSilent, NoRoom, SatchelError, Unavailable
from ...protocol.group_messages import StageState

ROOM_S = 30.0
"""How long a follower of a first start may have no room: a process of an earlier server may still be ending."""


class Gathering:
    """The followers of one group, by rank, while they load. Each is asked again and again, until all are ready at the
    same time: one that was ready may end while others load.

    Args:
        count: how many there are.
        patient: whether room is waited for without a limit, because the model was served before. What has no room then
            is in the way of processes that are ending, or of programs that may end.
    """

    def __init__(self, count: int, *, patient: bool) -> None:
        self._states: list[StageState | None] = [None] * count
        self._patient = patient
        self._no_room_since: dict[int, float] = {}

    @property
    def states(self) -> list[StageState] | None:
        """What all of them hold, in the order of stages; None while one is not ready."""
        ready = [state for state in self._states if state is not None and state.ready]
        return ready if len(ready) == len(self._states) else None

    def told(self, rank: int, state: StageState) -> None:
        """A follower said what it does."""
        self._states[rank] = state
        if state.ready:
            self._no_room_since.pop(rank, None)

    def failed(self, rank: int, error: SatchelError, now: float) -> bool:
        """A follower could not say what it does. Returns whether it must be started again; if not, it is asked again.

        Args:
            now: monotonic seconds.

        Raises:
            SatchelError: the same error, if starting it again cannot help.
        """
        self._states[rank] = None
        if isinstance(error, NoRoom):
            since = self._no_room_since.setdefault(rank, now)
            if not self._patient and now - since > ROOM_S:
                raise error
        elif not isinstance(error, Unavailable):
            raise error
        return not isinstance(error, ActorSilent)
