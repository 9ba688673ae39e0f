"""The seam between what speaks HTTP or Python and what runs on Ray.

`app.py` and `generation.py` know only these protocols; `dispatch.py` implements them over Ray actors, and tests over
plain objects.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...actors.protocol.messages import GenerateRequest, ReplicaStats, RowUpdate


@dataclass(frozen=True)
class ServedModel:
    """A configured model as its replicas loaded it. `folder` holds tokenizer and template; `created` is Unix time;
    `memory` tells a reader which layers keep what, and how.

    `files_id` is the same for all its replicas, and agents' token ids belong to it. `model_id` is one replica's: nodes
    that compute differently have others.
    """

    name: str
    model_id: bytes
    files_id: bytes
    folder: str
    context_tokens: int
    vocabulary_size: int
    created: int
    memory: str = ""
    trust_remote_code: bool = False


@dataclass(frozen=True)
class NodeState:
    """One machine of the cluster. None is what nobody has said of it.

    Attributes:
        address: the one that the others know it by.
        links: (address, kind) of every way to its KV, the fastest first.
        up: whether its store was heard lately, or while nothing is known of that, whether the machine is there.
        rates: bytes a second, as measured, by the node from which KV came.
        memory_free_bytes: of the machine.
        disk_bytes: of KV on its disk; `disk_free_bytes` may still be written.
        disk_error: why no KV is kept on its disk now, "" where it is.
        agents_let_go: how many had to make room for others (`transcripts_bytes_max`) since its store was started.
        blocks: of KV on its disk.
        agents: how many it has, as their home or as a copy.
        draining: no agent is to come here.
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


class Generation(Protocol):
    """One running row. Iterating yields its updates; the last one has `finish` set and no more follow.

    Closing early (`abort`, or leaving the iteration) takes the row out of the batch within one step. A failure ends
    the iteration with a `SatchelError`.
    """

    replica: str
    node: str
    """Where the replica is, "" where nobody has said."""
    why: str

    @property
    def model_id(self) -> bytes:
        """The id that the model has at the replica: its KV is kept under that."""
        ...

    @property
    def move_to(self) -> str:
        """The node that its agent's memory is to move to once the turn is over, "" for none."""
        ...

    def __aiter__(self) -> AsyncIterator[RowUpdate]: ...

    async def abort(self) -> None: ...


class Backend(Protocol):
    failovers: int
    """How many rows went on, elsewhere or on a replica that was started anew, after theirs was lost."""

    async def names(self) -> list[str]:
        """Every served model's name, loaded yet or not, the default first."""
        ...

    async def models(self) -> list[ServedModel]:
        """Those of them that have been loaded at least once, in the same order."""
        ...

    async def generate(
        self, model: ServedModel, request: GenerateRequest, *, cache_salt: str = "", beside: str = ""
    ) -> Generation:
        """Route and queue one row. Returns once a replica has accepted it.

        Args:
            request: but for its consumer, and for the ids of its blocks and of the model, which are filled in here.
            cache_salt: KV is shared only with rows of the same one.
            beside: the replica that took the first of several rows with this prompt, "" for none.

        Raises:
            Unavailable: the queue is full, no replica lives, or the cluster is draining.
        """
        ...

    async def health(self) -> dict[str, bool]:
        """For every served model, whether a replica of it answers now."""
        ...

    async def stats(self) -> list[ReplicaStats]: ...

    async def pids(self) -> dict[str, int]:
        """Process ids by replica, of those that answer."""
        ...

    async def nodes(self) -> list[NodeState]:
        """Every machine of the cluster, the head first, whether it is there now or not."""
        ...

    async def explain(self, request_id: str) -> dict[str, Any] | None:
        """Why a recent request went where it did: as `messages.Explanation`. None where nothing is known of it.

        Raises:
            Unavailable: the router does not answer.
        """
        ...
