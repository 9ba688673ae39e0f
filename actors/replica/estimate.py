"""What a model needs, from its config and the headers of its weight files alone: its weights, KV by token, the longest
context, how many agents fit, and the size after each recipe of `satchel convert`.

The model is built with lazy weights and computes two tokens that are never evaluated: then the shapes of its caches are
known, as `ModelCacheSpec` reads them, and no weight is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ...cluster.config.config import Scheduling
from ...cluster.errors import ModelLoadError
from ..model_files.context import context_length
from ..model_files.conversion import RECIPES, lazy_model, recipe_bytes
from ..model_files.foreign_code import refuse_model_file
from ..model_files.image_folders import has_image_layout, read_component_files
from ..model_files.media.processors import sees
from ..model_files.source import first_sentence, read_json
from ..model_files.speech_folders import read_speech_weights, speech_folder
from ..model_files.weights import bytes_in_memory, read_weight_files
from .execution.media.vision import LanguagePart
from .kernels.sealing import POLICIES
from .kv.caches import ModelCacheSpec, read_spec
from .loading.kv_choice import AUTO, USUAL
from .loading.models import pick_dtype
from .loading.quirks import FlatCaches, with_windows
from .memory.budget import MemoryBudget, MemoryClaim, share_bytes
from .memory.replica_memory import workspace_of

AGENTS_TOKENS = (8_000, 32_000, 100_000)
"""Lengths that agents have: a chat, a session of an agent program, a long one."""

_ERRORS = (Exception, SystemExit)


@dataclass(frozen=True)
class Fit:
    """How a model fits on one node.

    Attributes:
        room_bytes: for KV and pictures, beside the weights, a prefill and other models; 0 if the weights do not fit.
        context_tokens: the longest sequence; 0 for none.
        agents: by length in tokens, how many sequences of that length are in memory at a time.
    """

    room_bytes: int
    context_tokens: int
    agents: dict[int, int]


@dataclass(frozen=True)
class ModelEstimate:
    """What a model needs.

    Attributes:
        weights_bytes: once loaded, as this machine's device computes.
        spec: of its layers.
        context_tokens: the model's own limit.
        recipes: bytes of the files after each recipe of `satchel convert` that suits it; {} if it is quantized.
        why_not: why it cannot be quantized again, "" if it can.
    """

    weights_bytes: int
    spec: ModelCacheSpec
    context_tokens: int
    dtype: str
    config: dict[str, Any]
    recipes: dict[str, int] = field(default_factory=dict)
    why_not: str = ""

    @property
    def kv(self) -> str:
        """The format of its KV."""
        return "fp16" if self.spec.policy is None else self.spec.policy.name

    def in_memory(self, memory_bytes: int, others: Sequence[MemoryClaim] = (), weights_bytes: int | None = None) -> Fit:
        """Returns how it fits into a node's memory, beside other replicas.

        Args:
            memory_bytes: what all replicas of the node may use.
            weights_bytes: of the model in another precision.
        """
        weights = self.weights_bytes if weights_bytes is None else weights_bytes
        room = share_bytes(memory_bytes, [MemoryClaim(weights, 0), *others])
        chunk = Scheduling().prefill_chunk_tokens
        workspace = workspace_of(self.config, self.spec, self.context_tokens, self.dtype, chunk, room)
        return self.in_room(share_bytes(memory_bytes, [MemoryClaim(weights, workspace), *others]))

    def in_room(self, room_bytes: int) -> Fit:
        """Returns how it fits if a replica has this much memory for KV and pictures."""
        usable = MemoryBudget(room_bytes, self.spec.bytes_per_token, 0, 1, paged=True).usable
        own, token = self.spec.bytes_per_sequence, self.spec.bytes_per_token
        longest = min(self.context_tokens, max(0, usable - own) // token)
        lengths = [tokens for tokens in AGENTS_TOKENS if tokens <= self.context_tokens] or [self.context_tokens]
        return Fit(room_bytes, longest, {tokens: usable // (own + tokens * token) for tokens in lengths})

    def fitting_recipe(self, memory_bytes: int, others: Sequence[MemoryClaim] = ()) -> str | None:
        """Returns the recipe that keeps most bits, and with which an agent of the shortest usual length fits; None if
        none does."""
        need = min(self.context_tokens, AGENTS_TOKENS[0])
        for recipe, weights in sorted(self.recipes.items(), key=lambda item: -item[1]):
            if weights < self.weights_bytes and self.in_memory(memory_bytes, others, weights).context_tokens >= need:
                return recipe
        return None


def estimate(source: str, folder: Path, kv: str = AUTO) -> ModelEstimate:
    """Returns what the model in a folder needs. Its weight files may be holes behind their headers.

    Args:
        kv: a policy of KV; `auto` takes the one that most models get.

    Raises:
        ModelLoadError: it cannot be served, or a file is damaged.
    """
    if has_image_layout(folder):
        weights = bytes_in_memory(read_component_files(folder), None)
        raise ModelLoadError(
            f"{source} makes images: it keeps no KV, and needs {weights / 1e9:.2f} GB for its weights besides what an "
            "image takes"
        )
    if speech_folder(folder) is not None:
        weights = bytes_in_memory(read_speech_weights(folder), None)
        raise ModelLoadError(
            f"{source} is a model of speech: it keeps no KV, and needs {weights / 1e9:.2f} GB for its weights besides "
            "what its audio takes"
        )
    config = read_json(folder / "config.json")
    refuse_model_file(source, config, trusted=False)
    files = read_weight_files(folder)
    seeing = sees(folder)
    whole = lazy_model(source, folder, seeing=seeing)
    recipes, why_not = _recipes(source, whole, seeing=seeing)
    dtype = pick_dtype("auto")
    if dtype is not None:
        whole.set_dtype(dtype)
    called: Any = LanguagePart(whole) if seeing else whole
    try:
        model: Any = FlatCaches.of(called)
        caches = make_prompt_cache(model)
        logits = model(mx.array([[0, 0]], mx.uint32), cache=caches)
        spec = with_windows(model, read_spec(caches, 2, POLICIES[USUAL if kv == AUTO else kv]))
    except _ERRORS as error:
        raise ModelLoadError(f"{source} cannot be estimated: {first_sentence(error)}") from error
    return ModelEstimate(
        weights_bytes=bytes_in_memory(files, None if dtype is None else dtype.size),
        spec=spec,
        context_tokens=context_length(config, getattr(whole, "args", None)).tokens,
        dtype=str(logits.dtype).removeprefix("mlx.core."),
        config=config,
        recipes=recipes,
        why_not=why_not,
    )


def _recipes(source: str, model: Any, *, seeing: bool) -> tuple[dict[str, int], str]:
    found, why_not = {}, ""
    for recipe in RECIPES:
        try:
            found[recipe] = recipe_bytes(source, model, recipe, seeing=seeing)
        except ModelLoadError as error:
            why_not = error.message
    return found, "" if found else why_not
