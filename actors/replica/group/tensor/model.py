"""One rank's share of a model, as a model that a batch calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ....model_files.identity.model_identity import ModelIdentity
from ....model_files.identity.model_parts import ModelPart, identity_of
from ...execution.media.language_inputs import LanguageInputs, separate
from ...execution.media.vision import Vision
from ...kv.caches import ModelCacheSpec
from ...loading.quirks import FlatCaches
from ...proving.findings import Findings
from ..division.opened import Opened
from ..pictures.encoder import encoder_of
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
        called: as for `shard`.

    Attributes:
        ranks: which share it is.
        stage: its layers.
    """

    def __init__(self, model: Any, ranks: Ranks, called: Any = None) -> None:
        self.ranks, self._called = ranks, FlatCaches.of(model if called is None else called)
        count = len(model.layers)
        self.stage = AllLayers(0, count, count)

    def __call__(self, tokens: mx.array, cache: Sequence[Any], **given: mx.array) -> mx.array:
        """Returns the logits, `(sequences, tokens, vocabulary)`, for `tokens` `(sequences, tokens)`; once the ranks are
        connected, for those of the leader, and the same bits on every rank.

        Args:
            given: the other inputs of a vision model's language part (`LanguageInputs`).
        """
        # So no rank waits until the leader has read what it has drawn.
        return self._called(self.ranks.from_last(tokens), cache=cache, **given)

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
    def _part(self) -> ModelPart:
        return ModelPart(0, self.model().stage.count, self._ranks.rank(), self._ranks.size())

    @property
    def words(self) -> str:
        """As `loading.Part.words`."""
        return f"share {self._ranks.rank()} of {self._ranks.size()}"

    @property
    def leads(self) -> bool:
        """As `loading.Part.leads`."""
        return self._ranks.rank() == self._ranks.size() - 1

    @property
    def shares(self) -> int:
        """As `loading.Part.shares`."""
        return self._ranks.size()

    def cut(self, opened: Opened) -> None:
        """As `loading.Part.cut`."""
        shard(opened.language, self._ranks, opened.called)
        self._share = Share(opened.language, self._ranks, opened.called)

    def model(self) -> Share:
        """As `loading.Part.model`."""
        assert self._share is not None, "no model was cut yet"
        return self._share

    def identity(self, whole: ModelIdentity) -> ModelIdentity:
        """As `loading.Part.identity`."""
        return identity_of(whole, self._part, self.model().stage.count)

    def joinable(self, spec: ModelCacheSpec) -> tuple[ModelPart, int] | None:
        """As `loading.Part.joinable`."""
        count = self.model().stage.count
        return (self._part, count) if len(spec.layers) == count and spec.reusable else None

    def language_inputs(self, whole: Any) -> LanguageInputs:
        """As `loading.Part.language_inputs`."""
        return LanguageInputs(separate(whole))

    def encoder(
        self, whole: Any, given: LanguageInputs, folder: Path, spec: ModelCacheSpec, findings: Findings
    ) -> tuple[Vision | None, str]:
        """As `loading.Part.encoder`."""
        own = self.model()

        def compute(tokens: mx.array, embeds: mx.array, others: dict[str, Any]) -> mx.array:
            return own(tokens, own.make_cache(), inputs_embeds=embeds, **others)[0]

        return encoder_of(whole, given, compute, folder, spec, findings, adds_levels=True)

    def piece_tokens(self, spec: ModelCacheSpec) -> int | None:
        """As `loading.Part.piece_tokens`: all ranks compute at the same time anyway."""
        return None
