"""The replicas and nodes of the cluster as the router knows them, from reports and its own counts. Pure.

Reports come twice a second and may be late, lost or out of order. `directory.py` keeps what they say of blocks,
`places.py` of agents, `nodes.py` of links. What they say of load only corrects the router's own count (`load.py`), in
which each request is on one replica at most.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from typing import Any

from ...cluster.config.timing import USUAL, Timing
from ..protocol.router_messages import ReplicaReport, RouteRequest, StoreReport, prefill_sequence
from .columns import Columns
from .directory import Directory, Disk, Seat
from .load import Load, ReplicaState
from .nodes import NodeTable
from .places import AgentPlaces, Whereabouts
from .voice import Voice


class Members:
    """All replicas and nodes, what they hold, and their load.

    Args:
        timeout_s: a replica or store that has not reported for this long is avoided.
        agents_max: how many agents' last turns are remembered.
        timing: how long a request that no report mentions is counted, and how long a silent process is remembered.
    """

    def __init__(self, *, timeout_s: float, agents_max: int, timing: Timing = USUAL) -> None:
        self._reservation_s, self._gone_s = timing.reservation_s, timing.gone_s
        self.directory = Directory(agents_max)
        self.places = AgentPlaces()
        self.nodes = NodeTable()
        self.timeout_s = timeout_s
        self._replicas: dict[str, ReplicaState] = {}
        self._models: dict[str, list[ReplicaState]] = {}
        """The replicas of each model, by name."""
        self._columns: dict[str, Columns] = {}
        """By model; dropped if one of its replicas joins or leaves, or any node."""
        self._placed: dict[str, ReplicaState] = {}
        """The replica on which each request is counted."""
        self._coming: list[tuple[str, list[bytes], float]] = []
        """(Replica, blocks, until when they are expected there); not in the directory yet."""
        self._assignments = 0

    # Reports.

    def observe(self, report: ReplicaReport, now: float) -> bool:
        """Takes a replica's report. Returns False if an earlier one was missed: the replica must send a full one."""
        *_, complete = self.observe_in_parts(report, now)
        return complete

    def observe_in_parts(self, report: ReplicaReport, now: float) -> Iterator[bool]:
        """Does `observe` with pauses, for reports of very many blocks; every pause yields its result.

        Requests may be routed in the pauses, but the next report must wait for the end.
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
        if (state.node, state.model_id) != (report.node, report.model_id):
            self._columns.pop(state.model, None)
        state.apply(report)
        for request_id in state.correct(set(report.active), now, self._reservation_s):
            del self._placed[request_id]
        if report.full:
            # A restarted router learns the running requests. One routed elsewhere since is about to end here.
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
        """Takes a store's report. Returns False if an earlier one was missed: the store must send a full one.

        Raises:
            ValueError: it names no node; "" stands for the unknown node of a replica.
        """
        *_, complete = self.observe_store_in_parts(report, now)
        return complete

    def observe_store_in_parts(self, report: StoreReport, now: float) -> Iterator[bool]:
        """Does `observe_store` with pauses, as `observe_in_parts`.

        Raises:
            ValueError: as `observe_store`.
        """
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

    # Failures that others saw.

    def lose(self, replica: str) -> None:
        """Avoids a replica, to which a call has failed, until it reports again.

        Its blocks are forgotten only when it comes back as another process, or is silent for `gone_s`: a broken
        connection does not mean that it has died.
        """
        state = self._replicas.get(replica)
        if state is not None:
            state.voice.lose()
            self._refresh(state)

    def lose_node(self, node: str, now: float) -> None:
        """Avoids a lost node's replicas and disk until they report again.

        For the first `timeout_s` only new processes count, because reports may have been on their way before the loss.
        """
        until = now + self.timeout_s
        self.nodes.lose(node, until)
        for state in self._replicas.values():
            if state.node == node:
                state.voice.lose(until)
                self._refresh(state)

    def release(self, replica: str, request_id: str) -> None:
        """Uncounts a request that was refused or has ended. Ignored if it is counted on another replica."""
        state = self._placed.get(request_id)
        if state is not None and state.name == replica:
            self._remove(request_id)

    # Queries.

    @property
    def requests(self) -> dict[str, str]:
        """The replica on which each request is counted."""
        return {request_id: state.name for request_id, state in self._placed.items()}

    def alive(self, model: str, now: float) -> list[str]:
        """Returns the names of the replicas of `model` that reported lately."""
        states = self._models.get(model, ())
        return [state.name for state in states if state.voice.lives(now, self.timeout_s)]

    def node_of(self, replica: str) -> str | None:
        """Returns the node of a replica; None if the replica is unknown."""
        state = self._replicas.get(replica)
        return None if state is None else state.node

    def alive_nodes(self, now: float) -> list[str]:
        """Returns the names of the nodes whose stores reported lately, sorted."""
        return sorted(name for name in self.nodes.states if self.nodes.lives(name, now, self.timeout_s))

    def where(self, agent: str) -> Whereabouts | None:
        """Returns where the agent's memory is, whether or not those nodes are alive; None if no store claims it."""
        return self.places.where(agent)

    def node_views(self, now: float) -> list[dict[str, Any]]:
        """Returns the fields of `NodeReport` for every node, sorted by name."""
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
                "joules": state.joules,
                "links": {other: link.bytes_per_s for other, link in sorted(state.links.items())},
            }
            for name, state in sorted(self.nodes.states.items())
        ]

    def settle(self) -> None:
        """Enters the blocks that the last requests will leave into the directory. `route` leaves this for after its
        answer; other calls do it first."""
        for replica, blocks, until in self._coming:
            self.directory.expect(replica, blocks, until)
        self._coming.clear()

    def check(self) -> None:
        """Checks all tables.

        Raises:
            AssertionError: they disagree.
        """
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

    # For the policy.

    def columns_of(self, model: str) -> Columns:
        """Returns the columns of a model's replicas, sorted by name."""
        columns = self._columns.get(model)
        if columns is None:
            columns = Columns(self._models.get(model, ()), self.directory, self.nodes)
            if model in self._models:
                # Unknown names are not cached: clients may invent them.
                self._columns[model] = columns
        return columns

    def assign(self, state: ReplicaState, request: RouteRequest, load: Load, coming: Sequence[bytes]) -> str:
        """Counts a request on a replica, and expects the blocks that it will leave there.

        Args:
            coming: ids of those blocks and image embeddings.

        Returns:
            The node to which the agent's memory is to move, "" if it stays.
        """
        self._remove(prefill_sequence(request.request_id))
        self._place(state, request.request_id, load, coming)
        if not request.agent:
            return ""
        place = self.places.where(request.agent)
        seat = Seat(state.name, request.prompt_tokens, place.epoch if place else 0)
        self.directory.set_seat(request.agent, request.sits_by, seat)
        again = self.places.answer(request.agent, state.node)
        if place is None or not place.node or request.beside or request.exclude:
            # Further choices and retries are no new turns. If a primary is lost, a secondary adopts the agent.
            return ""
        return self._drained_to(request, place, load.since) or self._followed_to(state, place, again, load.since)

    def assign_prefill(self, state: ReplicaState, sequence: str, load: Load, coming: Sequence[bytes]) -> None:
        """Counts the prefill of a request, which another replica decodes, as the sequence `sequence` of its own. Call
        it after `assign`.

        Args:
            coming: ids of the blocks that it will leave.
        """
        self._place(state, sequence, load, coming)

    def _place(self, state: ReplicaState, sequence: str, load: Load, coming: Sequence[bytes]) -> None:
        """Counts a sequence on a replica, and on no other one, and expects the blocks that it will leave there."""
        self._remove(sequence)
        state.add(sequence, load)
        self._placed[sequence] = state
        self._assignments += 1
        state.last_assigned = self._assignments
        self._refresh(state)
        if coming:
            # The next request with the same prefix finds it there, after the same queue.
            self._coming.append((state.name, list(coming), load.since + self._reservation_s + 2.0 * state.queue_s))

    def _followed_to(self, state: ReplicaState, place: Whereabouts, again: bool, now: float) -> str:
        """Returns the node of this answer if the agent was answered there, away from its primary, twice in a row."""
        both_live = all(self.nodes.lives(name, now, self.timeout_s) for name in (place.node, state.node))
        return state.node if again and both_live and not self.nodes.drains(state.node) else ""

    def _drained_to(self, request: RouteRequest, place: Whereabouts, now: float) -> str:
        """Returns the new node of an agent whose primary is drained: a secondary, else the one with fewest agents."""
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
        """Updates the replica's load and liveness in the columns."""
        columns = self._columns.get(state.model)
        if columns is not None:
            columns.refresh_load(state)

    # Joins and leaves.

    def _join(self, report: ReplicaReport, earlier: ReplicaState | None) -> ReplicaState:
        """Makes the state of a replica's new process. The report's blocks later replace those of an earlier process."""
        voice = Voice(report.incarnation)
        if earlier is not None:
            voice = earlier.voice.succeed(report.incarnation)
            self._remove_state(earlier)
            self.directory.restart(earlier.name)
        state = ReplicaState(report.replica, report.model, voice, report.node)
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
