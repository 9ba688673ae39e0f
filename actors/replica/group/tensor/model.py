"""One rank's share of a model, as a model that a batch calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ....model_files.layer_ranges import LAYERS
from ....model_files.model_identity import ModelIdentity
from ...kv.caches import ModelCacheSpec
from ...loading.quirks import FlatCaches
from .ranks import Ranks
from .sharding import shard


@dataclass(frozen=True)
class AllLayers:
    """The layers of a share, as of a stage: all `count` of them."""

    start: int
    stop: int
    count: int
    last: bool = True


class Share:
    """Takes the place of a model in `Batch`. All ranks must compute the same calls in the same order: a sum of a call
    ends only when all ranks have begun it.

    Args:
        model: cut to the share.

    Attributes:
        ranks: which share it is.
        stage: its layers.
    """

    def __init__(self, model: Any, ranks: Ranks) -> None:
        self.ranks, self._called = ranks, FlatCaches.of(model)
        count = len(model.layers)
        self.stage = AllLayers(0, count, count)

    def __call__(self, tokens: mx.array, cache: Sequence[Any]) -> mx.array:
        """Returns the logits, `(sequences, tokens, vocabulary)`, for `tokens` `(sequences, tokens)`; once the ranks are
        connected, for those of the leader, and the same bits on every rank."""
        # So no rank waits until the leader has read what it has drawn.
        return self._called(self.ranks.from_last(tokens), cache=cache)

    def make_cache(self) -> list[Any]:
        """Returns empty caches of one sequence for the share's heads."""
        return make_prompt_cache(self._called)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._called, name)


class SharePart:
    """A rank's share of every layer; a `loading.Part`."""

    logits = True

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._share: Share | None = None

    @property
    def words(self) -> str:
        """As `loading.Part.words`."""
        return f"share {self._ranks.rank()} of {self._ranks.size()}"

    def cut(self, whole: Any) -> None:
        """As `loading.Part.cut`."""
        shard(whole, self._ranks)
        self._share = Share(whole, self._ranks)

    def model(self) -> Share:
        """As `loading.Part.model`."""
        assert self._share is not None, "no model was cut yet"
        return self._share

    def identity(self, whole: ModelIdentity) -> ModelIdentity:
        """As `loading.Part.identity`."""
        layers = f"share {self._ranks.rank()} of {self._ranks.size()} of all {self.model().stage.count}"
        return ModelIdentity(whole.files, {**whole.computing, LAYERS: layers})

    def joinable(self, spec: ModelCacheSpec) -> None:
        """As `loading.Part.joinable`: another share has the same layers' other heads."""

    def piece_tokens(self, spec: ModelCacheSpec) -> int | None:
        """As `loading.Part.piece_tokens`: all ranks compute at the same time anyway."""
        return None
