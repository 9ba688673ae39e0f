"""The other processes that have layers of a model, as a batch sees them: they do its calls too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import mlx.core as mx

from ..kv.caches import Records, Slab
from .media.language_inputs import ImageEmbeddings

T = TypeVar("T")
P = ParamSpec("P")


@dataclass(frozen=True)
class ShownPictures:
    """What sequences' next tokens need of their pictures: embeddings of these tokens, by sequence id and the picture's
    index. Empty for a process that has all of it anyway."""

    sequences: Mapping[str, Mapping[int, ImageEmbeddings]] = field(default_factory=dict)


class Followers(Protocol):
    """The processes that have the other layers of the model. The one that leads them has the last layers. It gets the
    hidden states of the layers before, and while it computes with them, the others compute the next piece of a prompt,
    or the next micro-batch.

    Attributes:
        count: how many they are.
        overlaps: whether they compute something else while the leader computes. If not, they have a share of every
            layer, and all compute the same call at the same time.
    """

    count: int
    overlaps: bool

    def lead(self, call: str, given: Sequence[Any], named: Mapping[str, Any], run: Callable[[], T]) -> T:
        """Lets them do a call of `Batch`, and does it here.

        Args:
            run: does it here.
        """
        ...

    def tell_ahead(self, call: str, given: Sequence[Any]) -> None:
        """Lets them do a call at once. It must be led later, after other calls told ahead, and before any other call
        than those that only prepare a step."""
        ...

    def copies_of(self, inputs: mx.array) -> list[mx.array]:
        """Returns what is to be launched together with tokens that a call will tell, while it is not known when that
        can be launched alone: behind a prompt it would have to wait for the prompt."""
        ...

    def know(self, inputs: mx.array, tokens: Callable[[], Sequence[int]]) -> None:
        """Says which tokens are in an array that the next call tells: it may only be computed behind a prompt.

        Args:
            tokens: returns them; is called with the next call or not at all.
        """
        ...

    def pass_tokens(self) -> None:
        """Waits until the tokens of calls that were told are on their way."""
        ...


class Parts(Protocol):
    """Keeps a follower's part of sequences' KV on its node's disk."""

    def save(
        self,
        owner: str,
        root: bytes,
        scope: str,
        chain: Sequence[bytes],
        items: Sequence[Sequence[Any]],
        limits: Any,
    ) -> None:
        """Writes KV. Arguments as for `Batch.save`."""

    def blocks(self, reading: str, count: int) -> list[Records]:
        """Returns the next `count` blocks of those that were read, in runs."""
        ...

    def slabs(self, reading: str, blocks: int, tails: Sequence[bytes]) -> list[Slab]:
        """Returns what was read; arguments as for `Batch.adopt_slabs`."""
        ...

    def forget(self, reading: str) -> None:
        """Forgets what was read and not used."""


def replayed(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Marks a call that the batches of all processes do."""

    @wraps(method)
    def call(self: Any, *given: P.args, **named: P.kwargs) -> T:
        run = partial(method, self, *given, **named)
        return run() if self.followers is None else self.followers.lead(method.__name__, given, named, run)

    vars(call)["replayed"] = True
    return call
