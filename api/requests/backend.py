"""The interface between the HTTP and Python APIs and the cluster.

`http/` and `views/` know only these protocols; `ray_backend/` implements them over Ray actors, and tests over plain
objects.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ...actors.protocol.pool_messages import PooledModel
from ...actors.protocol.replica_messages import (
    GenerateRequest,
    ImageRequest,
    ImageUpdate,
    ModelInfo,
    PooledTexts,
    PoolingRequest,
    ReplicaProgress,
    ReplicaStats,
    SequenceUpdate,
)
from ...actors.protocol.router_messages import Decisions
from ...actors.protocol.speech_messages import SpeechPiece, SpeechRequest, SpeechUpdate
from .loading import Loading


@dataclass(frozen=True)
class ServedModel:
    """A configured model: `info` says how a replica has loaded it, the other fields how the endpoint serves it.

    `info.files_id` is the same for all its replicas, and agents' token ids belong to it. `info.model_id` is one
    replica's: nodes that compute differently have other model ids. `template_kwargs` are defaults for variables of its
    template. With `marks_are_tokens` control tokens in callers' text are encoded as such (`control_tokens_in_text:
    tokens`). With `schema_in_prompt` the prompt has the schema that constrains the answer. With `omits_unseen` pictures
    that the model does not support are left out, except from the newest message (`unseen_media: omit`).
    """

    info: ModelInfo
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    marks_are_tokens: bool = False
    schema_in_prompt: bool = True
    omits_unseen: bool = True


@dataclass(frozen=True)
class ListedModel:
    """A model of the registry, loaded or not.

    Attributes:
        aliases: further names of it.
        comes_and_goes: whether it is loaded when a request needs it.
        loaded: whether it has replicas.
        source: where its files come from, as its config says.
        parent: the model that it is an adapter of, "" for none. It is loaded and unloaded with that one.
    """

    name: str
    aliases: tuple[str, ...] = ()
    comes_and_goes: bool = False
    loaded: bool = True
    source: str = ""
    parent: str = ""

    @property
    def replicas_of(self) -> str:
        """The name of the model whose replicas compute it."""
        return self.parent or self.name


@dataclass(frozen=True)
class Vectors:
    """The answer to a `PoolingRequest`, the replica that computed it, its node ("" if unknown), and why it was routed
    there."""

    pooled: PooledTexts
    replica: str
    node: str = ""
    why: str = ""

    @property
    def array(self) -> np.ndarray:
        """The vectors, `(vectors, dimensions)` float32."""
        return np.frombuffer(self.pooled.vectors, "<f4").reshape(-1, self.pooled.dimensions)


@dataclass(frozen=True)
class ImageAnswer:
    """The last update of an image; otherwise as `Vectors`."""

    update: ImageUpdate
    replica: str
    node: str = ""
    why: str = ""


@dataclass(frozen=True)
class SpeechAnswer:
    """The last update of a request to a model of speech; otherwise as `Vectors`."""

    update: SpeechUpdate
    replica: str
    node: str = ""
    why: str = ""


@dataclass(frozen=True)
class NodeState:
    """One machine of the cluster. None means unknown.

    Attributes:
        address: the one that other nodes use for it.
        links: (address, kind) of every network path over which its KV can be fetched, the fastest first.
        up: whether its store reported lately; if no report is known, whether the machine is in the cluster.
        rates: measured bytes per second, by the node from which KV came.
        memory_free_bytes: of the machine, or of its card if it has one of its own.
        card: such as `card 1 (NVIDIA H200)`, "" if it has none of its own.
        disk_bytes: of KV on its disk; `disk_free_bytes` more may be written.
        disk_full: whether nothing more can be written to its disk.
        disk_error: why KV cannot be written to its disk now, "" if it can.
        agents_let_go: how many were evicted to make room (`transcripts_bytes_max`) since its store started.
        blocks: of KV on its disk.
        joules: what its counters of energy have counted since its store started, by source; {} if none can be read.
        agents: how many it has, as primary or secondary.
        draining: whether it accepts no new agents.
    """

    name: str
    address: str
    links: tuple[tuple[str, str], ...]
    up: bool
    rates: Mapping[str, float] = field(default_factory=dict)
    memory_free_bytes: int | None = None
    disk_bytes: int | None = None
    disk_free_bytes: int | None = None
    disk_full: bool = False
    disk_error: str = ""
    agents_let_go: int | None = None
    blocks: int | None = None
    agents: int | None = None
    draining: bool = False
    joules: Mapping[str, float] = field(default_factory=dict)
    card: str = ""


class Generation(Protocol):
    """One running sequence. Iterating yields its updates; the last one has `finish` set.

    Closing early (`abort`, or leaving the iteration) removes the sequence from the batch within one decode step. A
    failure ends the iteration with a `SatchelError`.
    """

    replica: str
    node: str
    """The replica's node, "" if unknown."""
    why: str

    @property
    def model_id(self) -> bytes:
        """The model's id at the replica, under which its KV is kept."""
        ...

    @property
    def move_to(self) -> str:
        """The node to which the agent's memory should move after the turn, "" for none."""
        ...

    def __aiter__(self) -> AsyncIterator[SequenceUpdate]: ...

    async def abort(self) -> None: ...


class Backend(Protocol):
    @property
    def failovers(self) -> int:
        """How many sequences failed over to another or a restarted replica after theirs was lost."""
        ...

    async def listed(self) -> list[ListedModel]:
        """Returns all served models, loaded or not, the default first."""
        ...

    async def load(self, name: str, loading: Loading) -> None:
        """Waits until a model that comes and goes is loaded; returns at once if it is, or stays loaded.

        Args:
            loading: learns how far it is.

        Raises:
            ModelLoadError: it cannot be loaded.
            Unavailable: the cluster does not answer.
        """
        ...

    async def unload(self, name: str) -> None:
        """Begins to unload a model that comes and goes. What it has finishes first.

        Raises:
            InvalidRequest: it stays loaded.
            ModelBusy: requests wait for it.
            Unavailable: the pool does not answer.
        """
        ...

    async def pool_states(self) -> dict[str, PooledModel]:
        """Returns the state of the models that come and go, by name; none if that is not known now."""
        ...

    async def models(self) -> list[ServedModel]:
        """Returns the models that have been loaded at least once, in the same order."""
        ...

    async def generate(
        self,
        model: ServedModel,
        request: GenerateRequest,
        *,
        cache_salt: str = "",
        beside: str = "",
        loading: Loading | None = None,
    ) -> Generation:
        """Routes and queues one sequence. Returns once a replica has accepted it. If the model is unloaded meanwhile,
        it is loaded again first.

        Args:
            request: complete except for consumer, block ids and model id, which are filled in here.
            cache_salt: KV is shared only between sequences with the same salt.
            beside: the replica that took the first of several sequences with this prompt, "" for none.
            loading: learns how far the model is loaded.

        Raises:
            Unavailable: the queue is full, no replica lives, or the cluster is draining.
        """
        ...

    async def prepare(self, replica: str, model_id: bytes, request: GenerateRequest) -> None:
        """Has a replica prefill a prompt that an agent may send, while it has nothing else to do.

        Args:
            model_id: the model's id at this replica.
            request: as for `generate`. Its answer is not generated.

        Raises:
            Unavailable: the replica does not answer.
        """
        ...

    async def pool(self, model: ServedModel, request: PoolingRequest) -> Vectors:
        """Routes a request for vectors, and returns its answer. If its replica is lost, the request fails over to
        another one. Cancelling this cancels the request.

        Raises:
            Unavailable: the queue is full, no replica lives, or the cluster is draining.
            SatchelError: it failed.
        """
        ...

    async def make_image(
        self, model: ServedModel, request: ImageRequest, told: Callable[[ImageUpdate], None]
    ) -> ImageAnswer:
        """Routes a request for an image, and returns it. Fails over, and is cancelled, as `pool`.

        Args:
            told: called with each update before the last. If the request fails over, they begin anew.

        Raises:
            Unavailable, SatchelError: as `pool`.
        """
        ...

    async def do_speech(
        self, model: ServedModel, request: SpeechRequest, told: Callable[[SpeechPiece], None]
    ) -> SpeechAnswer:
        """Routes a request for a transcript or a spoken text. Fails over, and is cancelled, as `pool`.

        Args:
            told: called with each piece, once.

        Raises:
            Unavailable, SatchelError: as `pool`.
        """
        ...

    async def health(self) -> dict[str, bool]:
        """Returns for every served model whether a replica of it answers now."""
        ...

    async def stats(self) -> list[ReplicaStats]: ...

    async def pids(self) -> dict[str, int]:
        """Returns process ids by replica, of the replicas that answer."""
        ...

    async def nodes(self) -> list[NodeState]:
        """Returns every machine of the cluster, the head first, whether up or not."""
        ...

    async def remove_node(self, name: str) -> bool:
        """Removes a machine that has joined from the cluster for good: it needs a new invitation to join again.

        Returns:
            Whether the machine is up. If so, it learns of its removal within seconds, hands its agents over and leaves.

        Raises:
            InvalidRequest: the node is in the config.
            NodeNotFound: there is no such node.
            Unavailable: the control store does not answer.
        """
        ...

    async def explain(self, request_id: str) -> dict[str, Any] | None:
        """Returns why a recent request was routed as it was, as `messages.Explanation`. None for an unknown request.

        Raises:
            Unavailable: the router does not answer.
        """
        ...

    async def decisions(self, after: int, most: int) -> Decisions:
        """Returns the router's latest decisions, also about requests of other endpoints and handles.

        Args:
            after: only those with a higher number.
            most: how many at most.

        Raises:
            Unavailable: the router does not answer.
        """
        ...

    async def loading(self, replicas: Sequence[str]) -> dict[str, ReplicaProgress]:
        """Returns what replicas that are not ready do now; without those that do not say."""
        ...
