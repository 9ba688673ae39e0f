"""Forms a group: its processes connect and agree on what they compute. The last stage leads.

Every process listens. The leader connects to each follower twice, for calls and for heartbeats, and says where the next
stage listens; to the first stage it connects a third time, for tokens. Each stage but the last connects to the next
one, for hidden states, and if that is not the leader also for heartbeats, because the link between two followers is
another one. Whoever connects must have the cluster's key.
Processes that have a share of every layer pass no hidden states; they form MLX's own group (`tensor/member.py`).
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

from ....cluster.config.timing import Timing
from ....cluster.errors import ClusterError, LinkError, SatchelError
from ....cluster.trust.strangers import host_of
from ...model_files.identity.model_parts import LAYERS
from ..execution.batch import Batch
from ..execution.loaded_model import LoadedModel
from .calls.following import Following
from .calls.leading import Leading
from .link.broken import Wholeness
from .link.connection import FAILED, HANDSHAKE_S, Address, Connection
from .link.device_ring import Offer, answer
from .link.heartbeats import Heartbeats
from .link.times import Times
from .pictures.picture_messages import Wanted
from .tensor.member import Joining
from .tensor.model import Share
from .tensor.ranks import Ranks

logger = logging.getLogger(__name__)

_CALLS, _HEARTBEATS, _TOKENS, _STATES = "calls", "heartbeats", "tokens", "states"
_NEIGHBOUR = "heartbeats of the stage before"
"""What a connection is for: the kind of its first message."""

_FORM, _RANK = "form", "rank"
"""Kinds of messages: where the next stage listens, and what a process says of itself."""


@dataclass(frozen=True)
class GroupTimes:
    """Times of a group.

    Attributes:
        form_s: for forming, once the model is loaded on all nodes.
        beat_s: between two heartbeats.
        silent_s: after which a process is lost whose machine cannot be reached.
        stalled_s: after which a silent process is lost.
    """

    form_s: float = 30.0
    beat_s: float = 0.2
    silent_s: float = 2.0
    stalled_s: float = 20.0

    @classmethod
    def of(cls, timing: Timing) -> GroupTimes:
        return cls(timing.group_form_s, timing.group_beat_s, timing.group_silent_s, timing.group_stalled_s)


@dataclass(frozen=True)
class Rank:
    """What processes of a group must agree on.

    Attributes:
        start, stop: the layers of its stage.
        layers: of the whole model.
        computing: the model's files and how this process computes, as in its identity, and how it batches.
        share, shares: which share of its layers it has, and into how many they are divided.
        embeds, levels_from: what its layers need of pictures; see `Wanted`.
    """

    start: int
    stop: int
    layers: int
    computing: Mapping[str, str]
    share: int = 0
    shares: int = 1
    embeds: bool = False
    levels_from: int = 0

    @classmethod
    def of(cls, loaded: LoadedModel, batch: Batch) -> Rank:
        """Returns what a process says of itself."""
        stage, identity = loaded.model.stage, loaded.identity
        how = {
            "padded prompts": str(batch.batched_prefill),
            "pieces of prompts": str(loaded.piece_tokens),
            "sequences one by one": str(loaded.unbatched),
            # The leader finds what all processes can reuse by what its own layers can.
            "a rule for reuse": str(loaded.spec.rule),
        }
        own, share = {LAYERS}, (0, 1)
        if (ranks := ranks_of(loaded)) is not None:
            how["decode steps"] = loaded.way.describe()
            share = ranks.rank(), ranks.size()
        else:
            # Each stage may compute its layers in the way that is fastest for them.
            own.add("weights")
        computing = {name: value for name, value in identity.computing.items() if name not in own}
        given = loaded.language_inputs
        wanted = Wanted() if given is None else Wanted(given.embeds, given.levels_from)
        return cls(stage.start, stage.stop, stage.count, {**identity.files, **computing, **how}, *share, *wanted)


def why_not(ranks: Sequence[Rank]) -> str:
    """Returns why stages, in order, are not one model; empty if they are. Pure."""
    leader = ranks[-1]
    for number, rank in enumerate(ranks):
        differing = sorted(
            name
            for name in {*rank.computing, *leader.computing}
            if rank.computing.get(name) != leader.computing.get(name)
        )
        if differing:
            name = differing[0]
            return (
                f"stage {number} has {name} {rank.computing.get(name)!r}, the last stage {leader.computing.get(name)!r}"
            )
    if leader.shares > 1 or any(rank.shares > 1 for rank in ranks):
        shares = [(rank.share, rank.shares) for rank in ranks]
        return "" if shares == [(each, len(ranks)) for each in range(len(ranks))] else f"their shares are {shares}"
    ends = [0, *(rank.stop for rank in ranks)]
    spans = ", ".join(f"{rank.start} to {rank.stop}" for rank in ranks)
    if [rank.start for rank in ranks] != ends[:-1] or ends[-1] != leader.layers:
        return f"their layers, {spans}, are not the {leader.layers} of the model"
    return ""


def ranks_of(loaded: LoadedModel) -> Ranks | None:
    """Returns which share of every layer a process has; None if it has whole layers."""
    return loaded.model.ranks if isinstance(loaded.model, Share) else None


class Member:
    """One process of a group, with its connections.

    Args:
        group: the group's name, a new one each time it is formed.
        rank: the number of its stage.
        key: the cluster's.
        listener: where it listens.
        memory_bytes: returns what this process may use for KV now; heartbeats tell it.
        broken: called once, with the reason, when the group breaks; by the thread that noticed.
        joining: forms MLX's own group, if this process has a share of every layer.

    Attributes:
        wholeness: whether the group is whole.
        times: where this process's time goes.
    """

    def __init__(
        self,
        group: str,
        rank: int,
        key: bytes,
        listener: socket.socket,
        times: GroupTimes,
        memory_bytes: Callable[[], int] = lambda: 0,
        broken: Callable[[str], object] = lambda why: None,
        joining: Joining | None = None,
    ) -> None:
        self._joining = joining
        self.wholeness, self.times = Wholeness(self._shut), Times()
        self._memory_bytes, self._broken = memory_bytes, broken
        self._group, self._rank, self._key, self._times = group, rank, key, times
        self._listener = listener
        self._until = time.monotonic() + times.form_s
        self._connections: list[Connection] = []
        # Those of heartbeats, which end by themselves.
        self._beating: list[Connection] = []
        self._heartbeats: list[Heartbeats] = []
        self._leading: Leading | None = None

    def lead(self, loaded: LoadedModel, batch: Batch, addresses: Sequence[Address]) -> None:
        """Forms the group as its last stage. From then on the followers do the calls of `batch` too.

        Args:
            loaded: the stage; its model is a `PipelinedStage`.
            addresses: where each process listens, in the order of stages.

        Raises:
            GroupBroken: it cannot be formed.
        """
        with self.wholeness.kept():
            calls, beating, tokens = [], [], None
            for number, (address, after) in enumerate(pairwise(addresses)):
                calls.append(self._connect(address, number, _CALLS))
                calls[-1].send(_FORM, [*after, number + 1 == self._rank, loaded.spec.bytes_per_token])
                beating.append((self._connect(address, number, _HEARTBEATS), f"stage {number}"))
            if (shared := ranks_of(loaded)) is None:
                self._begin_heartbeats(beating)
                tokens = self._connect(addresses[0], 0, _TOKENS)
                ring = Offer(tokens, self._until)
                (loaded.model.before,) = self._accept([_STATES])
                loaded.model.before.receiving = answer(loaded.model.before, self._until)
                # The first stage answers once it has tried its own.
                tokens.sending = ring.tried()
                tokens.leaves_nothing = loaded.model.before.receiving is not None
                loaded.model.times = self.times
            ranks = [Rank(**connection.expect(_RANK, self._until)) for connection in calls]
            if why := why_not([*ranks, Rank.of(loaded, batch)]):
                for connection in calls:
                    connection.send(FAILED, why)
                raise ClusterError(f"the stages of the model do not fit together: {why}")
            if shared is not None:
                assert self._joining is not None, "a share needs a way to join the others"
                self._joining.lead(shared, calls, self._listener.getsockname()[0], self._until)
                self._begin_heartbeats(beating)
            wanted = [Wanted(rank.embeds, rank.levels_from) for rank in ranks]
            batch.followers = self._leading = Leading(
                calls,
                self.wholeness,
                wanted,
                overlaps=shared is None,
                tokens=tokens if shared is None and loaded.model.launches else None,
                times=self.times,
            )

    def follow(self, loaded: LoadedModel) -> Following:
        """Joins the group as another stage than the last. Returns the follower, which is to be run.

        Args:
            loaded: as for `lead`.

        Raises:
            GroupBroken: the group cannot be formed.
        """
        with self.wholeness.kept():
            shared = ranks_of(loaded)
            before = [] if shared is not None else [_STATES, _NEIGHBOUR] if self._rank else [_TOKENS]
            calls, beats, *before = self._accept([_CALLS, _HEARTBEATS, *before])
            leader = [(beats, "the leader")]
            if shared is None:
                self._begin_heartbeats(leader)
            host, port, leads, token_bytes = calls.expect(_FORM, self._until)
            after = self._take_place(loaded, before, (host, port), leads) if shared is None else None
            tokens = before[0] if before and not self._rank else None
            if tokens is not None:
                tokens.receiving = answer(tokens, self._until)
            batch = Batch(loaded)
            if after is not None:
                loaded.model.tokens, loaded.model.times = tokens, self.times
                come_from = (loaded.model.before, tokens)
                after.leaves_nothing = any(each is not None and each.receiving is not None for each in come_from)
                batch.runs_ahead = batch.may_run_ahead
                loaded.model.before_launch = batch.wait_for_prefill
            calls.send(_RANK, asdict(Rank.of(loaded, batch)))
            if shared is not None:
                assert self._joining is not None, "a share needs a way to join the others"
                self._joining.follow(shared, calls, self._listener.getsockname()[0], self._until)
                self._begin_heartbeats(leader)
            relative_bytes = loaded.spec.bytes_per_token / token_bytes
            return Following(batch, calls, after, self.wholeness, relative_bytes, tokens, self.times)

    def _take_place(self, loaded: LoadedModel, before: Sequence[Connection], after: Address, leads: bool) -> Connection:
        """Connects a stage with its neighbours. Returns the connection to the next one.

        Args:
            before: from the stage before, for hidden states and for heartbeats; for the first stage none that it uses.
            after: where the next stage listens.
            leads: whether that is the leader, which has heartbeats already.
        """
        loaded.model.before = None
        if self._rank:
            loaded.model.before = before[0]
            self._begin_heartbeats([(before[1], f"stage {self._rank - 1}")])
            before[0].receiving = answer(before[0], self._until)
        loaded.model.after = connection = self._connect(after, self._rank + 1, _STATES)
        if not leads:
            self._begin_heartbeats([(self._connect(after, self._rank + 1, _NEIGHBOUR), f"stage {self._rank + 1}")])
        connection.sending = Offer(connection, self._until).tried()
        if connection.sending is not None:
            connection.sending.failed = self.wholeness.break_off
        return connection

    def memory_bytes_of(self, rank: int) -> int:
        """Returns what a follower may use for KV, as its last heartbeat said; 0 before the first. For the leader."""
        return self._heartbeats[rank].said

    @property
    def leading(self) -> Leading:
        """The calls of the group that was formed. For the leader."""
        assert self._leading is not None
        return self._leading

    def close(self) -> None:
        """Ends the process's part of the group; the leader's ends the group."""
        if self._leading is not None and not self.wholeness.why:
            self._leading.end()
        for heartbeats in self._heartbeats:
            heartbeats.end(self.wholeness.why)
            heartbeats.join()
        # Those first by which a card may still wait for another one: freeing any ring waits for the card.
        for connection in sorted((*self._connections, *self._beating), key=lambda each: each.receiving is None):
            connection.close()
        self._listener.close()
        if self._joining is not None:
            self._joining.end()

    def _connect(self, address: Address, rank: int, what: str) -> Connection:
        connection = Connection.connect(address, self._key, self._name(rank), self._until)
        self._begin(connection)
        connection.send(what)
        return connection

    def _begin(self, connection: Connection) -> None:
        connection.failed, connection.times = self.wholeness.break_off, self.times
        self._connections.append(connection)

    def _accept(self, wanted: Sequence[str]) -> list[Connection]:
        """Returns a connection for each of these uses, in order. Others are closed."""
        found: dict[str, Connection] = {}
        while len(found) < len(wanted):
            try:
                self._listener.settimeout(max(0.001, self._until - time.monotonic()))
                sock, address = self._listener.accept()
            except TimeoutError:
                missing = ", ".join(what for what in wanted if what not in found)
                raise LinkError(f"nobody connects for {missing} within {self._times.form_s:g} s") from None
            try:
                connection = Connection.accept(sock, self._key, self._name(self._rank))
            except SatchelError as error:
                logger.warning("a connection of %s to a group is refused: %s", host_of(address), error)
                continue
            self._begin(connection)
            what, _ = connection.receive(HANDSHAKE_S) or ("", [])
            if what in wanted and what not in found:
                found[what] = connection
        return [found[what] for what in wanted]

    def _begin_heartbeats(self, peers: Sequence[tuple[Connection, str]]) -> None:
        """Begins those with some peers: the connection to each, and its name."""
        times = self._times
        for connection, peer in peers:
            self._connections.remove(connection)
            self._beating.append(connection)
            broken, says = self.wholeness.break_off, self._memory_bytes
            self._heartbeats.append(
                Heartbeats(connection, peer, times.beat_s, times.silent_s, times.stalled_s, broken, says)
            )

    def _name(self, rank: int) -> str:
        return f"{self._group}/{rank}"

    def _shut(self) -> None:
        for connection in self._connections:
            connection.shut()
        for heartbeats in self._heartbeats:
            heartbeats.end(self.wholeness.why)
        self._broken(self.wholeness.why)
