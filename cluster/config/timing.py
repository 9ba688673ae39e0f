"""The times by which processes wait for each other, and what must hold between them. Pure.

A time is here if another process has one that must fit it: a heartbeat and the lease that outlives it, an answer and
the deadline that it must meet. A time that concerns one process alone is a constant where it is used. `docs/timing.md`
lists the fields and the relations, and a test compares it with this file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from operator import attrgetter
from typing import Any, NamedTuple

from pydantic.dataclasses import dataclass as validated

from .units import STRICT, Seconds


@validated(frozen=True, config=STRICT)
class Timing:
    """How long processes wait for each other. The defaults are for one local network; few clusters need others."""

    report_s: Seconds = 0.5
    """Every replica and store reports to the router at this interval. A consumer gets an empty frame after this long
    without tokens. The router learns of an agent's move within this time."""
    answer_s: Seconds = 5.0
    """How long a caller waits for an actor whose answer it needs: a replica, the router, or a store."""
    brief_answer_s: Seconds = 2.0
    """How long a caller waits if it can continue without the answer: a report, a list of nodes, an agent's memory."""
    ask_s: Seconds = 1.0
    """How long a store waits for what another store knows of an agent, and a leaving node for the router."""
    retry_s: Seconds = 0.25
    """A caller that got no answer tries again after this long."""
    frame_silence_s: Seconds = 4.0
    """If a consumer gets no frame from a replica for this long, its sequences fail over to another replica."""
    consumer_lease_s: Seconds = 10.0
    """If a consumer has not asked for a frame for this long, the replica removes its sequences."""
    reservation_s: Seconds = 5.0
    """The router counts a request as running on a replica for this long, even if no report mentions it."""
    recovery_s: Seconds = 20.0
    """If its replica is lost, a sequence waits this long for another one. A model's only replica can restart in this
    time."""
    gone_s: Seconds = 600.0
    """The router forgets a silent replica or node, with all that it held, after this long."""
    heartbeat_s: Seconds = 1.0
    """Every process sends a heartbeat to its machine's server at this interval, and the server counts missed ones."""
    registry_s: Seconds = 0.5
    """A process caches the list of served models for this long. Unloading a model waits twice as long."""
    nodes_s: Seconds = 1.0
    """The endpoint caches the router's list of live nodes for this long, and reads it at this interval while it waits
    for a store."""
    peers_s: Seconds = 2.0
    """A store caches its list of the other nodes for this long, then refreshes it in the background."""
    peers_old_s: Seconds = 10.0
    """If a store's list of the other nodes is older than this, it waits for the router before it continues."""
    learn_s: Seconds = 5.0
    """A store that starts, or was cut off, waits this long for news from the others before it accepts turns."""
    introduce_s: Seconds = 2.0
    """A store retries nodes that did not answer for this long before it announces its agents to the router."""
    turn_lease_s: Seconds = 60.0
    """The lease of an agent's turn at its store. The endpoint renews it at a third of this interval."""
    turn_answer_s: Seconds = 10.0
    """A running turn retries a store that does not answer for this long. Meanwhile a secondary may be promoted."""
    store_answer_s: Seconds = 180.0
    """The endpoint waits this long for the answer of a live store, in addition to `timeouts.turn_wait_s`."""
    hold_s: Seconds = 5.0
    """How long a move blocks an agent's turns while it copies the KV that was added since the move began."""
    fetch_s: Seconds = 60.0
    """How long a primary waits for another node to fetch all of an agent's KV."""
    pull_s: Seconds = 20.0
    """How long a request waits for KV from another node. A replica adds it to the time it waits for its store."""
    block_lease_s: Seconds = 30.0
    """How long a store keeps files for a reader or for another node's pull. A sequence's KV is read back within this
    time."""
    claim_wait_s: Seconds = 1.0
    """How long a store holds a replica's KV until the endpoint commits the turn."""
    unwanted_s: Seconds = 30.0
    """A replica whose model is no longer served ends if no driver has asked about it for this long."""
    node_drain_s: Seconds = 4.0
    """How long a leaving node lets its running sequences finish."""
    hand_over_s: Seconds = 18.0
    """How long a node that leaves for good has to move its agents to other nodes. `satchel leave` waits 30 s in all."""
    node_leave_s: Seconds = 6.0
    """The head waits this long for its nodes to leave, then ends them."""
    group_form_s: Seconds = 30.0
    """The processes of a divided model connect to each other within this time, once all have loaded their layers."""
    group_beat_s: Seconds = 0.2
    """The leader of a divided model and each follower, and followers that are neighbours, send each other a heartbeat
    at this interval."""
    group_silent_s: Seconds = 2.0
    """If the machine of a process of a divided model acknowledges nothing for this long, the process is lost, and so
    are all the others: they end, and the leader starts them again."""
    group_stalled_s: Seconds = 20.0
    """A process of a divided model that sends no heartbeat for this long is lost too, though its machine answers:
    compiling a kernel may hold it up for seconds."""
    group_recovery_s: Seconds = 300.0
    """If a process or a node of a divided model is lost, its sequences wait this long for it, instead of
    `recovery_s`."""

    @property
    def turn_renewal_s(self) -> float:
        """Seconds between an endpoint's renewals of a turn: two may fail before the lease runs out."""
        return self.turn_lease_s / 3


class Relation(NamedTuple):
    """A rule: `longer` must be more than the sum `than`, written as `2 x timing.report_s + timing.ask_s`."""

    longer: str
    than: str
    why: str


RELATIONS = tuple(
    Relation(*relation)
    for relation in (
        ("timing.consumer_lease_s", "2 x timing.report_s", "a lease outlives two heartbeats"),
        (
            "timing.consumer_lease_s",
            "timing.frame_silence_s",
            "a consumer that still waits for a frame keeps its sequences",
        ),
        ("timing.frame_silence_s", "2 x timing.report_s", "one empty frame may be late"),
        (
            "routing.replica_timeout_s",
            "timing.brief_answer_s + 3 x timing.report_s",
            "one report may be lost before its sender is avoided",
        ),
        (
            "routing.replica_timeout_s",
            "timing.introduce_s + timing.brief_answer_s + timing.report_s",
            "a store that first asks the other stores before it reports again must not count as lost",
        ),
        (
            "timing.reservation_s",
            "timing.brief_answer_s + 3 x timing.report_s",
            "the report that would mention a request may be lost",
        ),
        (
            "timing.recovery_s",
            "routing.replica_timeout_s + timing.frame_silence_s",
            "the loss of a sequence's replica, and of the next one, is noticed before the sequence is given up",
        ),
        (
            "timing.gone_s",
            "2 x routing.replica_timeout_s",
            "an avoided replica or node is still known afterwards",
        ),
        ("timeouts.silent_s", "2 x timing.heartbeat_s", "a process may miss a heartbeat"),
        (
            "timing.peers_old_s",
            "timing.peers_s + timing.brief_answer_s",
            "a list is refreshed before a caller has to wait for it",
        ),
        ("timing.answer_s", "timing.brief_answer_s", "a commit first asks the router where the agent lives"),
        (
            "timing.answer_s",
            "3 x timing.ask_s",
            "a promotion asks all other nodes, fetches the latest copy, and tells the former primaries",
        ),
        ("timing.answer_s", "timing.claim_wait_s", "the store answers a replica only after it has waited for the turn"),
        (
            "timing.learn_s",
            "2 x timing.ask_s",
            "the other stores are asked which agents were deleted, and then where agents live",
        ),
        (
            "timing.turn_answer_s",
            "routing.replica_timeout_s + timing.nodes_s + 3 x timing.ask_s",
            "a silent primary is noticed and a secondary promoted while a turn retries",
        ),
        ("timing.turn_answer_s", "2 x timing.retry_s", "a failed call is retried"),
        (
            "timing.turn_lease_s",
            "timing.hold_s + 6 x timing.answer_s",
            "a move keeps its turn without renewing it",
        ),
        (
            "timing.store_answer_s",
            "timing.fetch_s + timing.hold_s + 8 x timing.answer_s",
            "a move may take this long",
        ),
        ("timing.block_lease_s", "2 x timing.answer_s", "a reader's renewal may be answered late"),
        ("timing.group_silent_s", "3 x timing.group_beat_s", "two heartbeats may be late"),
        (
            "timing.group_stalled_s",
            "timing.group_silent_s",
            "a process that only stands still may come back, one that is cut off must be noticed soon",
        ),
        ("timing.group_recovery_s", "timing.recovery_s", "all processes of a group load their layers again"),
        (
            "timing.unwanted_s",
            "2 x timing.answer_s",
            "a driver that loads a model asks about it at least twice in this time",
        ),
        (
            "timing.node_leave_s",
            "timing.node_drain_s + timing.ask_s",
            "a node lets its sequences finish, and announces that it leaves, before the head ends it",
        ),
    )
)

_FIELD = re.compile(r"[a-z]+\.[a-z_]+")


def broken(config: Any) -> Iterable[str]:
    """Yields a sentence for every relation that a config breaks, with both sides and the reason."""
    for longer, than, why in RELATIONS:
        if attrgetter(longer)(config) <= _total_s(config, than):
            yield f"{_with_values(config, longer)} must be more than {_with_values(config, than)}: {why}"


def _total_s(config: Any, than: str) -> float:
    """The right side of a relation, in seconds."""
    return sum(_term_s(config, term) for term in than.split(" + "))


def _term_s(config: Any, term: str) -> float:
    times, _, field = term.rpartition(" x ")
    return int(times or 1) * attrgetter(field)(config)


def _with_values(config: Any, expression: str) -> str:
    return _FIELD.sub(lambda found: f"{found[0]} ({attrgetter(found[0])(config)})", expression)


USUAL = Timing()
"""The defaults, for tests and for code that runs before the config is known."""
