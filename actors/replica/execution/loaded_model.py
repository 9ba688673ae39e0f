"""A model ready to run."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from mlx_lm.models.cache import make_prompt_cache

from ...model_files.model_identity import ModelIdentity
from ...model_files.sentence_modules import SentenceModules
from ...protocol.replica_messages import EmbeddingInfo
from ..kernels.sealing import FULL_PRECISION
from ..kv.caches import ModelCacheSpec, new_caches
from ..kv.pool import BlockPool
from .decode_way import DEQUANTIZED, DecodeWay
from .deferral import Deferral
from .hidden_states import HiddenStates
from .vision import Vision

IN_CONFIG = "set in the config"
"""Why KV is kept as it is, where it is kept as it was asked for."""


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
        context_tokens: bounds prompt and answer together.
        weights: as in `prepare_weights`.
        multiplying: with what a CPU multiplies; empty for a GPU.
        kv_why: why KV is kept as it is.
        pool: has the sealed blocks of all its sequences; None if nothing is sealed.
        way: how decode steps read them.
        unbatched: whether they compute sequence by sequence.
        vision: encodes pictures; None for a model of text.
        blind: why one that could see does not; empty for others.
        stills: why one is shown videos as single pictures that could take more; empty for others.
        hidden: computes hidden states, or is why nothing does.
        sentences: what becomes of them.
    """

    model: Any
    folder: Path
    identity: ModelIdentity
    spec: ModelCacheSpec
    context_tokens: int
    vocabulary_size: int
    eos_token_ids: frozenset[int]
    dtype: str
    weights: str
    multiplying: str = ""
    kv_why: str = IN_CONFIG
    pool: BlockPool | None = None
    way: DecodeWay = DEQUANTIZED
    unbatched: bool = False
    vision: Vision | None = None
    blind: str = ""
    stills: str = ""
    hidden: HiddenStates | str = "its hidden states were not looked for"
    sentences: SentenceModules = field(default_factory=SentenceModules)

    @property
    def model_id(self) -> bytes:
        """32 bytes that identify everything a block's content depends on besides its tokens."""
        return self.identity.model_id

    @property
    def embedding(self) -> EmbeddingInfo:
        """How it embeds texts, or why it does not."""
        sentences, hidden = self.sentences, self.hidden
        if refusal := sentences.refusal or (hidden if isinstance(hidden, str) else ""):
            return EmbeddingInfo(refusal=refusal)
        assert isinstance(hidden, HiddenStates)
        return EmbeddingInfo(hidden.dimensions, sentences.pooling, sentences.normalizes, sentences.stated, "")

    @property
    def kv(self) -> str:
        """The policy by which KV is kept, by name. Always `fp16` if the model's layers cannot be sealed."""
        return FULL_PRECISION if self.spec.policy is None else self.spec.policy.name

    @cached_property
    def deferral(self) -> Deferral | None:
        """What recorded steps leave to the kernel; None for nothing."""
        return Deferral(self.model) if self.way.fused else None

    def new_caches(self) -> list[Any]:
        """Empty caches for one sequence, one a layer."""
        return new_caches(self.spec, make_prompt_cache(self.model), self.pool, self.way.reads)
