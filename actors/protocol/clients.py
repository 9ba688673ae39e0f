"""Clients of the router and of replicas. Each method returns a `Call`, which is made when it is awaited, or by `wait`
in a thread; `within` changes its time limit. `calls.py` describes the errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ...cluster.config import Config
from ...cluster.timing import Timing
from .calls import ActorRef, Call
from .codec import decode, decode_any, encode
from .handles import ROUTER, replica_actor_name
from .messages import (
    Count,
    Drain,
    Frame,
    GenerateRequest,
    KVSelection,
    ModelInfo,
    NextFrame,
    Nothing,
    PooledTexts,
    PoolingRequest,
    ReplicaProgress,
    ReplicaStats,
    RowIds,
)
from .router_messages import (
    AgentKeys,
    AgentMoved,
    Decision,
    Explanation,
    ModelName,
    Names,
    NodeName,
    NodeReport,
    NodeReports,
    Places,
    ReplicaName,
    ReplicaReport,
    ReportAck,
    RequestId,
    RouteRequest,
    RowLeft,
    StoreReport,
)

CONFIG_S = 30.0
"""How long the router may take to return the config: this is the first request, and it may be starting."""


class RouterClient:
    """The router, for every process that calls it.

    Args:
        timing: of the cluster: an answer may take `answer_s`, unless a method says otherwise.
        handle: the router's, if known.
    """

    def __init__(self, timing: Timing, handle: Any = None) -> None:
        self._answer_s = timing.answer_s
        self.actor = ActorRef(ROUTER, "the router does not answer now", handle=handle, retry_after_s=2.0)

    def route(self, request: RouteRequest) -> Call[Decision]:
        """Returns where the request goes; the router counts it there at once.

        Raises:
            NoReplica: no replica of the model answers now.
        """
        return self.actor.call(
            lambda router: router.route.remote(encode(request)), partial(decode, Decision), self._answer_s
        )

    def report(self, report: ReplicaReport | StoreReport) -> Call[bool]:
        """Sends a heartbeat. Returns False if the next one must be full."""

        def send(router: Any) -> Any:
            method = router.report if isinstance(report, ReplicaReport) else router.store_report
            return method.remote(encode(report))

        return self.actor.call(send, lambda answer: decode(ReportAck, answer).complete, self._answer_s)

    def lose(self, replica: str) -> Call[None]:
        """Reports that a call to the replica failed: the router avoids it until it reports again."""
        message = ReplicaName(replica)
        return self.actor.call(lambda router: router.lose.remote(encode(message)), _nothing, self._answer_s)

    def lose_node(self, node: str) -> Call[None]:
        """Reports that a node is gone: the router avoids its replicas and its disk until they report again."""
        message = NodeName(node)
        return self.actor.call(lambda router: router.lose_node.remote(encode(message)), _nothing, self._answer_s)

    def release(self, left: RowLeft) -> Call[None]:
        """Reports that a request does not load its replica: it was refused, or ended before a report mentioned it."""
        return self.actor.call(lambda router: router.release.remote(encode(left)), _nothing, self._answer_s)

    def explain(self, request_id: str) -> Call[Explanation | None]:
        """Returns why a recent request went where it did; None if the router does not know it.

        Args:
            request_id: the `x-request-id` of a response.
        """
        message, read = RequestId(request_id), partial(decode_any, Explanation)
        return self.actor.call(lambda router: router.explain.remote(encode(message)), read, self._answer_s)

    def config(self) -> Call[Config]:
        """Returns the config that the cluster was started with."""
        return self.actor.call(lambda router: router.config.remote(), _config, CONFIG_S)

    def alive(self, model: str) -> Call[list[str]]:
        """Returns the names of the model's replicas that reported lately."""
        message = ModelName(model)
        return self.actor.call(lambda router: router.alive.remote(encode(message)), _names, self._answer_s)

    def places(self, agents: Sequence[str]) -> Call[Places]:
        """Returns where agents' memory is.

        Args:
            agents: their keys, `tenant/agent_id`.
        """
        message = AgentKeys(list(agents))
        return self.actor.call(
            lambda router: router.places.remote(encode(message)), partial(decode, Places), self._answer_s
        )

    def moved(self, agent: str, node: str, epoch: int) -> Call[None]:
        """Reports that `node` is the agent's home since `epoch`: its next turn need not wait for the node's report."""
        message = AgentMoved(agent, node, epoch)
        return self.actor.call(lambda router: router.moved.remote(encode(message)), _nothing, self._answer_s)

    def agents_on(self, node: str) -> Call[list[str]]:
        """Returns the keys of the agents whose home the node is."""
        message = NodeName(node)
        return self.actor.call(lambda router: router.agents_on.remote(encode(message)), _names, self._answer_s)

    def nodes(self) -> Call[list[NodeReport]]:
        """Returns every node, sorted by name; those whose stores have not reported yet come last."""
        message = Nothing()
        return self.actor.call(
            lambda router: router.nodes.remote(encode(message)),
            lambda answer: decode(NodeReports, answer).nodes,
            self._answer_s,
        )


class ReplicaClient:
    """One replica, for every process that calls it.

    Args:
        replica: its id.
        timing: as for `RouterClient`.
        handle: its actor's, if known.
    """

    def __init__(self, replica: str, timing: Timing, handle: Any = None) -> None:
        self._answer_s, self._frame_silence_s = timing.answer_s, timing.frame_silence_s
        self.actor = ActorRef(replica_actor_name(replica), f"replica {replica} does not answer now", handle=handle)

    def progress(self) -> Call[ReplicaProgress]:
        """Returns what the replica does until it is ready.

        Raises:
            SatchelError: why its model cannot be loaded.
        """
        message, read = Nothing(), partial(decode, ReplicaProgress)
        return self.actor.call(lambda replica: replica.progress.remote(encode(message)), read, self._answer_s)

    def info(self) -> Call[ModelInfo | None]:
        """Returns the loaded model; None before it is loaded."""
        message, read = Nothing(), partial(decode_any, ModelInfo)
        return self.actor.call(lambda replica: replica.info.remote(encode(message)), read, self._answer_s)

    def stats(self) -> Call[ReplicaStats]:
        """Returns current figures: running and waiting rows, token totals, memory."""
        message, read = Nothing(), partial(decode, ReplicaStats)
        return self.actor.call(lambda replica: replica.stats.remote(encode(message)), read, self._answer_s)

    def submit(self, request: GenerateRequest) -> Call[None]:
        """Queues a row. The replica accepts it by its deadline.

        Raises:
            SatchelError: the refusal.
        """
        timeout_s = request.deadline_s + self._answer_s
        return self.actor.call(lambda replica: replica.submit.remote(encode(request)), _nothing, timeout_s)

    def pool(self, request: PoolingRequest) -> Call[PooledTexts]:
        """Returns the vectors of texts, by the request's deadline.

        Raises:
            SatchelError: the refusal, or why it failed.
        """
        timeout_s = request.deadline_s + self._answer_s
        return self.actor.call(
            lambda replica: replica.pool.remote(encode(request)), partial(decode, PooledTexts), timeout_s, large=True
        )

    def next_frame(self, consumer: str, number: int) -> Call[Frame | None]:
        """Returns the new tokens of the consumer's rows, of one engine step or several; an empty frame if there are
        none for a while, None if the consumer is gone."""
        message, read = NextFrame(consumer, number), partial(decode_any, Frame)
        return self.actor.call(lambda replica: replica.next_frame.remote(encode(message)), read, self._frame_silence_s)

    def abort(self, request_ids: Sequence[str]) -> Call[None]:
        """Removes rows and texts from the queue or the batch, within one step. Ignores unknown ids."""
        message = RowIds(list(request_ids))
        return self.actor.call(lambda replica: replica.abort.remote(encode(message)), _nothing, self._answer_s)

    def go_on(self, request_ids: Sequence[str]) -> Call[None]:
        """Has rows that wait for another node's prefill wait no more: what has not come is computed. Ignores unknown
        ids."""
        message = RowIds(list(request_ids))
        return self.actor.call(lambda replica: replica.go_on.remote(encode(message)), _nothing, self._answer_s)

    def release(self, kept: KVSelection) -> Call[int]:
        """Drops blocks, the tails after them, the tails that `first` begins with, and image embeddings from memory, but
        not from the disk. Returns the bytes freed."""
        return self.actor.call(lambda replica: replica.release.remote(encode(kept)), _count, self._answer_s)

    def held(self, kept: KVSelection) -> Call[int]:
        """Returns how many of these blocks are in memory (before a missing one); without blocks, how many tails."""
        return self.actor.call(lambda replica: replica.held.remote(encode(kept)), _count, self._answer_s)

    def clear_cache(self) -> Call[int]:
        """Drops everything that is kept in memory for later requests. Returns the bytes freed."""
        message = Nothing()
        return self.actor.call(lambda replica: replica.clear_cache.remote(encode(message)), _count, self._answer_s)

    def drain(self, *, end_rows: bool = False, leaves: bool = False) -> Call[None]:
        """Makes the replica refuse new rows; running ones finish, or with `end_rows` end with an error. With `leaves`
        too they go on at other replicas."""
        message = Drain(end_rows, leaves)
        return self.actor.call(lambda replica: replica.drain.remote(encode(message)), _nothing, self._answer_s)


def _nothing(answer: bytes) -> None:
    decode_any(Nothing, answer)


def _names(answer: bytes) -> list[str]:
    return decode(Names, answer).names


def _count(answer: bytes) -> int:
    return decode(Count, answer).count


def _config(answer: Any) -> Config:
    """The only answer that is not a message: the config travels as a Ray object, as it does to new actors."""
    if not isinstance(answer, Config):
        raise ValueError("it has another config")
    return answer
