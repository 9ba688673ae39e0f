"""The methods of the router, of the pool and of replicas. Each returns a `Call`, which is made when it is awaited, or
by `wait` in a thread; `within` changes its time limit. `rpc/client.py` describes the errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...cluster.config.config import Config
from ...cluster.config.timing import Timing
from ..rpc.client import ActorRef, Call
from ..rpc.local import LocalAddress
from ..rpc.spec import Client, method
from .names import POOL, ROUTER, replica_actor_name
from .pool_messages import PooledModel
from .replica_messages import (
    GenerateRequest,
    ImageRequest,
    ImageUpdate,
    KVSelection,
    ModelInfo,
    PooledTexts,
    PoolingRequest,
    ReplicaProgress,
    ReplicaStats,
    SequenceUpdate,
)
from .router_messages import (
    Decision,
    Decisions,
    Explanation,
    NodeReport,
    Places,
    ReplicaReport,
    RouteRequest,
    SequenceLeft,
    StoreReport,
)
from .speech_messages import SpeechRequest, SpeechUpdate

GIVE_ROOM_S = 10.0
"""How long the pool waits for a model to become idle, to give its room away."""

CONFIG_S = 30.0
"""How long the router may take to return the config: this is the first request, and it may be starting."""


class RouterClient(Client):
    """The router.

    Args:
        handle: the router's, if known.
        kind: as for `ReplicaClient`.
    """

    def __init__(self, timing: Timing, handle: Any = None, *, kind: type[ActorRef] = ActorRef) -> None:
        super().__init__(kind(ROUTER, "the router does not answer now", handle=handle, retry_after_s=2.0), timing)

    @method()
    def local_address(self) -> LocalAddress:
        """As `ReplicaClient.local_address`."""
        ...

    @method()
    def route(self, request: RouteRequest) -> Decision:
        """Returns where the request goes; the router counts it there at once.

        Raises:
            NoReplica: no replica of the model answers now.
        """
        ...

    @method()
    def report(self, report: ReplicaReport) -> bool:
        """Sends a replica's heartbeat. Returns False if the next one must be full: the router missed an earlier one."""
        ...

    @method()
    def store_report(self, report: StoreReport) -> bool:
        """Sends a store's heartbeat. Returns as `report`."""
        ...

    @method()
    def lose(self, replica: str) -> None:
        """Reports that a call to the replica failed: the router avoids it until it reports again."""
        ...

    @method()
    def lose_node(self, node: str) -> None:
        """Reports that a node is gone: the router avoids its replicas and its disk until they report again."""
        ...

    @method()
    def release(self, left: SequenceLeft) -> None:
        """Reports that a request does not load its replica: it was refused, or ended before a report mentioned it."""
        ...

    @method()
    def explain(self, request_id: str) -> Explanation | None:
        """Returns why a recent request went where it did; None if the router does not know it.

        Args:
            request_id: the `x-request-id` of a response.
        """
        ...

    @method()
    def decisions(self, after: int, most: int) -> Decisions:
        """Returns the latest decisions that are remembered.

        Args:
            after: only those with a higher number.
            most: how many at most.
        """
        ...

    def config(self) -> Call[Config]:
        """Returns the config that the cluster was started with."""
        return self.actor.call(lambda router: router.config.remote(), _config, CONFIG_S)

    @method()
    def alive(self, model: str) -> list[str]:
        """Returns the names of the model's replicas that reported lately."""
        ...

    @method()
    def places(self, agents: Sequence[str]) -> Places:
        """Returns where agents' memory is.

        Args:
            agents: their keys, `tenant/agent_id`.
        """
        ...

    @method()
    def moved(self, agent: str, node: str, epoch: int) -> None:
        """Reports that `node` is the agent's home since `epoch`: its next turn need not wait for the node's report."""
        ...

    @method()
    def agents_on(self, node: str) -> list[str]:
        """Returns the keys of the agents whose home the node is."""
        ...

    @method()
    def nodes(self) -> list[NodeReport]:
        """Returns every node, sorted by name; those whose stores have not reported yet come last."""
        ...


def _within_wait(timing: Timing, name: str, wait_s: float) -> float:
    return wait_s + timing.answer_s


class PoolClient(Client):
    """The pool of models that come and go.

    Args:
        handle: the pool's, if known.
    """

    def __init__(self, timing: Timing, handle: Any = None) -> None:
        super().__init__(ActorRef(POOL, "the pool of models does not answer now", handle=handle), timing)

    @method(_within_wait)
    def ensure(self, name: str, wait_s: float) -> PooledModel:
        """Begins to load a model, unless it is loaded or on its way. Returns its state once it is loaded, and at the
        latest after `wait_s`. The load goes on whether anybody waits for it or not.

        Raises:
            ModelNotFound: it is not a model that comes and goes.
            ModelLoadError: it cannot be loaded, or could not a moment ago.
        """
        ...

    @method()
    def unload(self, name: str) -> None:
        """Begins to unload a model, unless it is not loaded. What it has finishes first.

        Raises:
            ModelNotFound: it is not a model that comes and goes.
            ModelBusy: somebody waits for it.
        """
        ...

    @method(lambda timing, nodes, wait_s: GIVE_ROOM_S + wait_s + timing.answer_s)
    def give_room(self, nodes: Sequence[str], wait_s: float) -> bool:
        """Unloads the least recently used idle model on these nodes, for one that stays loaded; waits a moment if all
        are busy. Returns whether there was one, and it ended within `wait_s`."""
        ...

    @method()
    def models(self) -> list[PooledModel]:
        """Returns the models that come and go, in the order of the registry."""
        ...


def _by_deadline(timing: Timing, request: GenerateRequest | PoolingRequest | ImageRequest | SpeechRequest) -> float:
    return request.deadline_s + timing.answer_s


class ReplicaClient(Client):
    """One replica.

    Args:
        replica: its id.
        handle: its actor's, if known.
        kind: how it is called if it is on this machine: by Ray too, or without it, by an event loop (`NearActor`) or by
            threads (`NearActorOfThreads`).
    """

    def __init__(self, replica: str, timing: Timing, handle: Any = None, *, kind: type[ActorRef] = ActorRef) -> None:
        silent = f"replica {replica} does not answer now"
        super().__init__(kind(replica_actor_name(replica), silent, handle=handle), timing)

    @method()
    def progress(self) -> ReplicaProgress:
        """Returns what the replica does until it is ready.

        Raises:
            SatchelError: why its model cannot be loaded.
        """
        ...

    @method()
    def info(self) -> ModelInfo | None:
        """Returns the loaded model; None before it is loaded."""
        ...

    @method()
    def stats(self) -> ReplicaStats:
        """Returns current figures: running and waiting sequences, token totals, memory."""
        ...

    @method(_by_deadline)
    def submit(self, request: GenerateRequest) -> None:
        """Queues a sequence. The replica accepts it by its deadline.

        Raises:
            SatchelError: the refusal.
        """
        ...

    @method(large=True)
    def prepare(self, request: GenerateRequest) -> None:
        """Has a prompt prefilled while the replica has nothing else to do, instead of the former one of its agent. It
        is left out if there is no room, or if the replica is still loading.

        Args:
            request: only its prompt counts, and who shares its KV.
        """
        ...

    @method(_by_deadline, large=True)
    def pool(self, request: PoolingRequest) -> PooledTexts:
        """Returns the vectors of texts, by the request's deadline.

        Raises:
            SatchelError: the refusal, or why it failed.
        """
        ...

    @method(_by_deadline, large=True)
    def make_image(self, request: ImageRequest) -> None:
        """Queues an image. Its progress comes by `next_image`; if nobody asks for it for `timing.consumer_lease_s`, the
        image is given up.

        Raises:
            SatchelError: the refusal.
        """
        ...

    @method(lambda timing, request_id, number: timing.frame_silence_s)
    def next_image(self, request_id: str, number: int) -> ImageUpdate | None:
        """Returns how far an image is, once there is more than update `number`; None if there was nothing new for a
        while.

        Raises:
            ReplicaLost: the replica does not know the image: it has started anew, or has given the image up.
        """
        ...

    @method(_by_deadline, large=True)
    def do_speech(self, request: SpeechRequest) -> None:
        """Queues a transcript, or a text to be spoken; as `make_image`."""
        ...

    @method(lambda timing, request_id, number: timing.frame_silence_s)
    def next_speech(self, request_id: str, number: int) -> SpeechUpdate | None:
        """Returns how far it is; as `next_image`."""
        ...

    @method(lambda timing, consumer, number: timing.frame_silence_s)
    def next_frame(self, consumer: str, number: int) -> list[SequenceUpdate] | None:
        """Returns a consumer's next frame: what its sequences produced in one engine step, or in several if it was slow
        to ask; an empty one if there were no tokens for a while; None if the consumer is gone.

        Args:
            number: the frame's, counted from 0; acknowledges those before it.
        """
        ...

    @method()
    def local_address(self) -> LocalAddress:
        """Returns where it is called without Ray by its own machine."""
        ...

    @method()
    def abort(self, request_ids: Sequence[str]) -> None:
        """Removes sequences and texts from the queue or the batch, within one step. Ignores unknown ids."""
        ...

    @method()
    def go_on(self, request_ids: Sequence[str]) -> None:
        """Ends the wait of sequences for another node's prefill: missing KV is computed. Ignores unknown ids."""
        ...

    @method()
    def release(self, kept: KVSelection) -> int:
        """Drops blocks, the tails after them, the tails that are prefixes of `first`, and image embeddings from memory,
        but not from the disk. Returns the bytes freed."""
        ...

    @method()
    def held(self, kept: KVSelection) -> int:
        """Returns how many of these blocks are in memory (before a missing one); without blocks, how many tails."""
        ...

    @method()
    def clear_cache(self) -> int:
        """Drops everything that is cached in memory for later requests. Returns the bytes freed."""
        ...

    @method()
    def drain(self, *, end_sequences: bool = False, leaves: bool = False) -> None:
        """Makes the replica refuse new sequences; running ones finish, or with `end_sequences` end with an error. With
        `leaves` too, only the replica's node leaves and not the model: its sequences fail over to other replicas."""
        ...


def _config(answer: Any) -> Config:
    """The only answer that is not a message: the config travels as a Ray object, as it does to new actors."""
    if not isinstance(answer, Config):
        raise ValueError("it has another config")
    return answer
