"""The replicas and nodes of the cluster as the router knows them, from reports and from what it counts. Pure.

Reports come twice a second and may be late, lost or out of order. What a report says of blocks is the directory's, of
agents `places.py`'s, of links `nodes.py`'s; what it says of load only corrects the router's own count (`load.py`),
where each request is on one replica at most.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from typing import Any

from ...cluster.timing import USUAL, Timing
from ..protocol.messages import ReplicaReport, RouteRequest, StoreReport
from .columns import Columns
from .directory import Directory, Disk, Seat
from .load import Load, ReplicaState
from .nodes import Nodes
from .places import AgentPlaces, Whereabouts
from .voice import Voice


class Members:
    """Who is there, what they hold, and what they have to do.

    Args:
        timeout_s: a replica or store that has not reported for this long is avoided.
        agents_max: how many agents' last turns are remembered.
        timing: for how long a request is counted that no report mentions, and who is silent is known.
    """

    def __init__(self, *, timeout_s: float, agents_max: int, timing: Timing = USUAL) -> None:
        self._reservation_s, self._gone_s = timing.reservation_s, timing.gone_s
        self.directory = Directory(agents_max)
        self.places = AgentPlaces()
        self.nodes = Nodes()
        self.timeout_s = timeout_s
        self._replicas: dict[str, ReplicaState] = {}
        self._models: dict[str, list[ReplicaState]] = {}
        """The replicas of each model, by name."""
        self._columns: dict[str, Columns] = {}
        """Of each model, until one of its replicas comes or goes, or any node."""
        self._placed: dict[str, ReplicaState] = {}
        """Where each request is counted."""
        self._coming: list[tuple[str, list[bytes], float]] = []
        """Replica, blocks and until when they are expected there; not in the directory yet."""
        self._assignments = 0

    # Reports.

    def observe(self, report: ReplicaReport, now: float) -> bool:
        """Take a replica's report. Returns False when one before it was missed: the replica must send a full one."""
        *_, complete = self.observe_in_parts(report, now)
        return complete

    def observe_in_parts(self, report: ReplicaReport, now: float) -> Iterator[bool]:
        """`observe` with pauses, for a report of very many blocks; every pause yields what `observe` returns.

        Routing may go on in the pauses, but the next report must wait for the end.
        """
        self.settle()
        state = self._replicas.get(report.replica)
        if state is not None and state.voice.is_late(report.incarnation, report.sequence, now, self.timeout_s):
            yield True
            return
        known = state is not None and state.voice.incarnation == report.incarnation
        if state is None or not known:
            state = self._join(report, state)
        complete = state.voice.hear(report.sequence, now, full=report.full, known=known)
        if state.node != report.node:
            self._columns.pop(state.model, None)
        state.apply(report)
        for request_id in state.correct(set(report.active), now, self._reservation_s):
            del self._placed[request_id]
        if report.full:
            # A router that has restarted learns what runs. What was routed elsewhere since is about to end here.
            for request_id in set(report.active) - self._placed.keys():
                state.add(request_id, Load(now, max(0, report.pending_tokens), seen=True))
                self._placed[request_id] = state
        self._forget_silent(now)
        if state.model in self._columns:
            self._columns[state.model].refresh(state)
        self.directory.expire(report.replica, now)
        whole = report.full or not known
        for _ in self.directory.update(report.replica, report.announced, report.retracted, whole=whole):
            yield complete

    def observe_store(self, report: StoreReport, now: float) -> bool:
        """Take a store's report. Returns False when one before it was missed: the store must send a full one.

        Raises:
            ValueError: it names no node; the name "" is of replicas that have not said theirs.
        """
        *_, complete = self.observe_store_in_parts(report, now)
        return complete

    def observe_store_in_parts(self, report: StoreReport, now: float) -> Iterator[bool]:
        """`observe_store` with pauses, as `observe_in_parts`."""
        if not report.node:
            raise ValueError("a store's report names no node")
        self.settle()
        node = self.nodes.states.get(report.node)
        if node is not None and node.voice.is_late(report.incarnation, report.sequence, now, self.timeout_s):
            yield True
            return
        known = node is not None and node.voice.incarnation == report.incarnation
        disk = Disk(report.node)
        if node is None or not known:
            voice = node.voice.succeed(report.incarnation) if node else Voice(report.incarnation)
            self.directory.join(disk)
            node = self.nodes.join(report.node, voice, self.directory.index(disk))
            self._columns.clear()
        complete = node.voice.hear(report.sequence, now, full=report.full, known=known)
        self.nodes.apply(node, report, now)
        self._forget_silent(now)
        whole = report.full or not known
        for _ in self.places.update(
            report.node, report.agents, report.agents_retracted, report.tombstones, whole=whole
        ):
            yield complete
        for _ in self.directory.update(disk, report.announced, report.retracted, whole=whole):
            yield complete

    # What others say of them.

    def lose(self, replica: str) -> None:
        """Somebody saw the replica fail: avoid it until it reports again.

        What it holds is forgotten when it comes back as another process, or is silent for `gone_s`, not before: a
        broken connection is no death.
        """
        state = self._replicas.get(replica)
        if state is not None:
            state.voice.lose()
            self._refresh(state)

    def lose_node(self, node: str, now: float) -> None:
        """The node is gone: avoid its replicas and its disk until they report again.

        Reports that were on their way do not bring them back, so for the first `timeout_s` only new processes do.
        """
        until = now + self.timeout_s
        self.nodes.lose(node, until)
        for state in self._replicas.values():
            if state.node == node:
                state.voice.lose(until)
                self._refresh(state)

    def release(self, replica: str, request_id: str) -> None:
        """The request is no load on the replica any more: it was refused, or has ended."""
        state = self._placed.get(request_id)
        if state is not None and state.name == replica:
            self._remove(request_id)

    # Questions.

    @property
    def requests(self) -> dict[str, str]:
        """The replica on which each request is counted."""
        return {request_id: state.name for request_id, state in self._placed.items()}

    def alive(self, model: str, now: float) -> list[str]:
        """Replicas of `model` that reported lately, by name."""
        states = self._models.get(model, ())
        return [state.name for state in states if state.voice.lives(now, self.timeout_s)]

    def node_of(self, replica: str) -> str | None:
        """Where a replica runs; None where it is not known."""
        state = self._replicas.get(replica)
        return None if state is None else state.node

    def alive_nodes(self, now: float) -> list[str]:
        """Nodes whose stores reported lately, by name."""
        return sorted(name for name in self.nodes.states if self.nodes.lives(name, now, self.timeout_s))

    def where(self, agent: str) -> Whereabouts | None:
        """Where the agent's memory is, whether or not those nodes live now; None where no store has said."""
        return self.places.where(agent)

    def node_views(self, now: float) -> list[dict[str, Any]]:
        """Every node by name, as `NodeReport`."""
        return [
            {
                "name": name,
                "alive": state.voice.lives(now, self.timeout_s),
                "seen_s": now - state.voice.seen,
                "draining": state.draining,
                "disk_full": state.disk_full,
                "disk_error": state.disk_error,
                "agents_let_go": state.agents_let_go,
                "used_bytes": state.used_bytes,
                "free_bytes": state.free_bytes,
                "memory_free_bytes": None if state.memory_free_bytes < 0 else state.memory_free_bytes,
                "blocks": state.blocks,
                "agents": self.places.count(name),
                "replicas": sorted(other.name for other in self._replicas.values() if other.node == name),
                "links": {other: link.bytes_per_s for other, link in sorted(state.links.items())},
            }
            for name, state in sorted(self.nodes.states.items())
        ]

    def settle(self) -> None:
        """Note what the last requests will leave where they went. Left undone, the next call of anything does it."""
        for replica, blocks, until in self._coming:
            self.directory.expect(replica, blocks, until)
        self._coming.clear()

    def check(self) -> None:
        """Raise AssertionError where the tables disagree."""
        self.directory.check()
        self.places.check()
        self.nodes.check()
        assert self.directory.holders == self._replicas.keys() | set(map(Disk, self.nodes.states))
        grouped = [state for states in self._models.values() for state in states]
        assert sorted(state.name for state in grouped) == sorted(self._replicas), "each replica has one model"
        for model, states in self._models.items():
            assert states and all(state.model == model for state in states)
            assert states == sorted(states, key=_name)
        for model, columns in self._columns.items():
            assert columns.states == self._models.get(model, [])
            columns.check(self.directory, self.nodes)
        counted = 0
        for name, state in self._replicas.items():
            assert state.name == name
            assert all(self._placed[request_id] is state for request_id in state.requests)
            state.check()
            counted += len(state.requests)
        assert counted == len(self._placed), "each request is counted once"

    # For the choice.

    def columns_of(self, model: str) -> Columns:
        """The model's replicas, in order of their names."""
        columns = self._columns.get(model)
        if columns is None:
            columns = Columns(self._models.get(model, ()), self.directory, self.nodes)
            if model in self._models:
                # Not of a name that anybody may make up.
                self._columns[model] = columns
        return columns

    def assign(self, state: ReplicaState, request: RouteRequest, load: Load, coming: Sequence[bytes]) -> str:
        """Count the request there, and expect the blocks that it will leave.

        Returns:
            The node to which the agent's memory is to move, "" where it stays.
        """
        self._remove(request.request_id)
        state.add(request.request_id, load)
        self._placed[request.request_id] = state
        self._assignments += 1
        state.last_assigned = self._assignments
        self._refresh(state)
        if coming:
            # Whoever comes next with the same prefix finds it there, after the same queue.
            self._coming.append((state.name, list(coming), load.since + self._reservation_s + 2.0 * state.queue_s))
        if not request.agent:
            return ""
        place = self.places.where(request.agent)
        seat = Seat(state.name, request.prompt_tokens, place.epoch if place else 0)
        self.directory.set_seat(request.agent, request.model, seat)
        again = self.places.answer(request.agent, state.node)
        if place is None or not place.node or request.beside or request.exclude:
            # Further choices and attempts are no further turns; where a home is lost, a copy adopts the agent.
            return ""
        return self._drained_to(request, place, load.since) or self._followed_to(state, place, again, load.since)

    def _followed_to(self, state: ReplicaState, place: Whereabouts, again: bool, now: float) -> str:
        """Where an agent is answered that lives elsewhere, if that is so for the second time in a row."""
        both_live = all(self.nodes.lives(name, now, self.timeout_s) for name in (place.node, state.node))
        return state.node if again and both_live and not self.nodes.drains(state.node) else ""

    def _drained_to(self, request: RouteRequest, place: Whereabouts, now: float) -> str:
        """Where an agent is to live whose home is drained: where it has a copy, or else where fewest agents are."""
        if not self.nodes.drains(place.node) or not self.nodes.lives(place.node, now, self.timeout_s):
            return ""
        serving = {other.node for other in self._models.get(request.model, ())}
        living = [name for name in self.alive_nodes(now) if name in serving and not self.nodes.drains(name)]
        copies = [name for name in place.copies if name in living]
        return copies[0] if copies else min(living, key=self.places.count, default="")

    def _remove(self, request_id: str) -> None:
        state = self._placed.pop(request_id, None)
        if state is not None:
            state.remove(request_id)
            self._refresh(state)

    def _refresh(self, state: ReplicaState) -> None:
        """Bring its load into the columns, and whether it is lost."""
        columns = self._columns.get(state.model)
        if columns is not None:
            columns.refresh_load(state)

    # Replicas and nodes that come and go.

    def _join(self, report: ReplicaReport, earlier: ReplicaState | None) -> ReplicaState:
        """A state for a replica's new process. The blocks of an earlier one go when the report's come."""
        voice = Voice(report.incarnation)
        if earlier is not None:
            voice = earlier.voice.succeed(report.incarnation)
            self._remove_state(earlier)
            self.directory.restart(earlier.name)
        state = ReplicaState(report.replica, report.model, voice, report.node, report.model_id)
        self.directory.join(state.name)
        self._replicas[state.name] = state
        insort(self._models.setdefault(state.model, []), state, key=_name)
        self._columns.pop(state.model, None)
        return state

    def _forget_silent(self, now: float) -> None:
        for state in [state for state in self._replicas.values() if now - state.voice.seen > self._gone_s]:
            self._remove_state(state)
            self.directory.forget(state.name)
        for node in [node for node in self.nodes.states.values() if now - node.voice.seen > self._gone_s]:
            self.nodes.forget(node.name)
            self.directory.forget(Disk(node.name))
            self.places.forget(node.name)
            self._columns.clear()

    def _remove_state(self, state: ReplicaState) -> None:
        for request_id in state.requests:
            del self._placed[request_id]
        del self._replicas[state.name]
        self._models[state.model].remove(state)
        self._columns.pop(state.model, None)
        if not self._models[state.model]:
            del self._models[state.model]


def _name(state: ReplicaState) -> str:
    return state.name
