"""A model ready to run."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict

from mlx_lm.models.cache import make_prompt_cache

from ...model_files.identity.model_identity import ModelIdentity, adapted_id
from ...model_files.identity.model_parts import ModelPart
from ...model_files.sentence_modules import SentenceModules
from ...protocol.replica_messages import EmbeddingInfo, GenerateRequest
from ..adapters.adapters import Adapters
from ..device.device import on_gpu
from ..kernels.sealing import FULL_PRECISION
from ..kv.caches import ModelCacheSpec, new_caches
from ..kv.pool import BlockPool
from .decode_way import DEQUANTIZED, DecodeWay
from .hidden_states import HiddenStates
from .media.language_inputs import LanguageInputs
from .media.vision import Vision
from .recorded.deferral import Deferral
from .recorded.fused_products import FusedProducts
from .recorded.residual_sums import ResidualSums, fusions_of

IN_CONFIG = "set in the config"
"""The reason for a KV policy that the config names."""


class MediaTaken(TypedDict):
    """Fields of `ModelInfo`."""

    pictures: bool
    blind: str
    stills: str
    audio: bool
    no_audio: str


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
        context_tokens: the limit for prompt and answer together.
        weights: as in `prepare_weights`.
        multiplying: what multiplies matrices on a CPU; empty for a GPU.
        kv_why: the reason for the KV policy.
        pool: has the sealed blocks of all sequences; None if nothing is sealed.
        way: how decode steps read sealed blocks.
        unbatched: whether decode steps compute sequence by sequence.
        vision: encodes pictures; None for a text model.
        language_inputs: the model's inputs besides tokens; None for a text model.
        blind: why a vision model gets no pictures; empty for other models.
        stills: why a model that supports videos gets them as single pictures; empty for other models.
        hidden: computes hidden states, or says why that is not possible.
        sentences: how hidden states become embeddings.
        part: which part of a model this is, and how many layers the whole has, if KV of other parts can be joined to
            its own.
        adapters: LoRA adapters that requests may name.
        piece_tokens: prompts are computed in pieces of at most so many tokens; None if each call is one piece.
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
    language_inputs: LanguageInputs | None = None
    blind: str = ""
    stills: str = ""
    hidden: HiddenStates | str = "its hidden states were not looked for"
    sentences: SentenceModules = field(default_factory=SentenceModules)
    part: tuple[ModelPart, int] | None = None
    piece_tokens: int | None = None
    adapters: Adapters = field(default_factory=Adapters)

    @property
    def model_id(self) -> bytes:
        """32 bytes that identify everything a block's content depends on besides its tokens."""
        return self.identity.model_id

    def computes(self, request: GenerateRequest) -> bool:
        """Whether a request was made for this model as it computes here, with one of its adapters or none."""
        own = adapted_id(self.model_id, request.adapter)
        return self.adapters.holds(request.adapter) and request.model_id in (b"", own)

    @property
    def embedding(self) -> EmbeddingInfo:
        """How the model embeds texts, or why it does not."""
        sentences, hidden = self.sentences, self.hidden
        if refusal := sentences.refusal or (hidden if isinstance(hidden, str) else ""):
            return EmbeddingInfo(refusal=refusal)
        assert isinstance(hidden, HiddenStates)
        return EmbeddingInfo(hidden.dimensions, sentences.pooling, sentences.normalizes, sentences.stated, "")

    @property
    def media(self) -> MediaTaken:
        """What media the model takes, as in `ModelInfo`."""
        vision = self.vision
        return {
            "pictures": vision is not None,
            "blind": self.blind,
            "stills": self.stills,
            "audio": vision is not None and vision.audio is not None,
            "no_audio": self.no_audio,
        }

    @property
    def no_audio(self) -> str:
        """Why a model with an encoder of audio takes none, as the end of a sentence; empty if it takes audio, and for
        other models."""
        return "" if self.vision is None else self.vision.no_audio

    @property
    def undrafted(self) -> str:
        """Why its sequences are not drafted; empty if they may be."""
        if self.spec.policy is None or self.spec.recurrent or self.unbatched:
            return "not all of its layers can take tokens back"
        if self.identity.computing.get("numerics") == "reproducible":
            if on_gpu() or self.weights == "both":
                return "its products depend on how many tokens are computed, and its numerics must be reproducible"
            if self.spec.rule.window:
                return "windows are added up in another order, and its numerics must be reproducible"
        return ""

    @property
    def kv(self) -> str:
        """The name of the KV policy. Always `fp16` if the model's layers cannot be sealed."""
        return FULL_PRECISION if self.spec.policy is None else self.spec.policy.name

    @cached_property
    def deferral(self) -> Deferral | None:
        """What recorded steps leave to the kernel; None if nothing."""
        return Deferral(self.model) if self.way.fused else None

    @cached_property
    def fusions(self) -> list[ResidualSums | FusedProducts]:
        """What else recorded steps compute by fewer operations."""
        return fusions_of(self.model, summed=self.way.summed, gated=self.way.gated)

    def new_caches(self) -> list[Any]:
        """Empty caches for one sequence, one a layer."""
        return new_caches(self.spec, make_prompt_cache(self.model), self.pool, self.way.reads)
