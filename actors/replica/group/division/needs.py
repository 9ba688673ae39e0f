"""What each layer of a model needs, from the headers of its files. `cluster/config/stages.py` divides it by that."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from .....cluster.config.config import Model
from .....cluster.config.stages import LayerNeeds, ModelNeeds
from .....cluster.errors import ModelLoadError
from ....model_files.context import context_length
from ....model_files.foreign_code import refuse_model_file
from ....model_files.source import first_sentence, read_json
from ...kernels.sealing import POLICIES
from ...kv.caches import ModelCacheSpec, read_spec
from ...loading.kv_choice import AUTO, USUAL
from ...loading.models import pick_dtype
from ...loading.quirks import FlatCaches, with_windows
from ...memory.replica_memory import workspace_of
from .opened import Opened, open_lazily

TOKENS_MIN = 2048
"""A model fits if there is room for a sequence of this many tokens, or of its whole context if that is shorter."""

_ERRORS = (Exception, SystemExit)


def policy_of(kv: str) -> str:
    """Returns the KV policy of a divided model. With `auto` nothing is compared, because that needs the whole model."""
    return USUAL if kv == AUTO else kv


@dataclass(frozen=True)
class Headers:
    """What the headers of a model's files say.

    Attributes:
        layers: what each layer needs.
        first_bytes, last_bytes: of the weights before the layers and after them; `shared_bytes` are in both. What is
            after them includes a vision model's encoder, and what that needs.
        spec: of all layers.
    """

    layers: list[LayerNeeds]
    first_bytes: int
    last_bytes: int
    shared_bytes: int
    spec: ModelCacheSpec
    context_tokens: int
    dtype: str
    config: dict[str, Any]

    @property
    def weights_bytes(self) -> int:
        """All weights, of a model that is not divided."""
        return (
            self.first_bytes + self.last_bytes - self.shared_bytes + sum(layer.weights_bytes for layer in self.layers)
        )

    def needs(self, memory_bytes: int, chunk_tokens: int, *, whole: bool = False) -> ModelNeeds:
        """Returns what the model needs on nodes that have `memory_bytes` together.

        Args:
            chunk_tokens: the most tokens of one prefill.
            whole: whether it is not divided.
        """
        room = max(0, memory_bytes - self.weights_bytes)
        workspace = workspace_of(self.config, self.spec, self.context_tokens, self.dtype, chunk_tokens, room)
        tokens = min(TOKENS_MIN, self.context_tokens)
        last = self.last_bytes - (self.shared_bytes if whole else 0)
        return ModelNeeds(self.layers, self.first_bytes, last, workspace, tokens)


def open_headers(model: Model, folder: Path) -> Opened:
    """Returns a model of which only headers are read. Its weight files may be holes behind their headers.

    Raises:
        ModelLoadError: it cannot be served, or not be divided; the message says why in one sentence.
    """
    source = model.source
    config = read_json(folder / "config.json")
    refuse_model_file(source, config, trusted=False)
    try:
        opened = open_lazily(folder)
    except ModelLoadError:
        raise
    except _ERRORS as error:
        raise ModelLoadError(f"{source} cannot be loaded: {first_sentence(error)}") from error
    if (dtype := pick_dtype(model.dtype)) is not None:
        opened.whole.set_dtype(dtype)
    return opened


class Computed(NamedTuple):
    """What a model's caches are like, the most tokens of a sequence, and the dtype in which it computes."""

    spec: ModelCacheSpec
    context_tokens: int
    dtype: str


def computed(model: Model, opened: Opened) -> Computed:
    """Returns how an opened model, or a part of it, computes. Nothing is computed.

    Raises:
        ModelLoadError: it cannot be called.
    """
    try:
        flat: Any = FlatCaches.of(opened.called)
        caches = make_prompt_cache(flat)
        logits = flat(mx.array([[0, 0]], mx.uint32), cache=caches)
        spec = with_windows(flat, read_spec(caches, 2, POLICIES[policy_of(model.kv)]))
    except _ERRORS as error:
        raise ModelLoadError(f"{model.source} cannot be estimated: {first_sentence(error)}") from error
    context = context_length(opened.config, getattr(opened.whole, "args", None)).tokens
    return Computed(
        spec, min(context, model.context_tokens_max or context), str(logits.dtype).removeprefix("mlx.core.")
    )


def read_headers(model: Model, folder: Path) -> Headers:
    """Returns what the headers say of a model. Arguments and errors as for `open_headers`."""
    opened = open_headers(model, folder)
    try:
        chain = opened.chain()
    except ModelLoadError as error:
        raise ModelLoadError(f"{model.source}: {error.message}") from error
    found = computed(model, opened)
    modules = dict(opened.language.named_modules())
    tower_bytes = nbytes_of(opened.whole) - nbytes_of(opened.language)
    # A vision model's encoder needs embeddings of tokens too.
    last = chain.after | (chain.before if opened.seeing else frozenset())
    return Headers(
        [_layer(layer, places, found.spec) for layer, places in zip(chain.layers, chain.caches, strict=True)],
        sum(nbytes_of(modules[name]) for name in chain.before),
        sum(nbytes_of(modules[name]) for name in last) + tower_bytes,
        sum(nbytes_of(modules[name]) for name in chain.before & last),
        *found,
        opened.config,
    )


def _layer(layer: Any, caches: Iterable[int], spec: ModelCacheSpec) -> LayerNeeds:
    own = [spec.layers[place] for place in caches]
    return LayerNeeds(
        nbytes_of(layer),
        sum(each.token_bytes for each in own if not each.window),
        sum(each.sequence_bytes for each in own),
    )


def nbytes_of(module: Any) -> int:
    """Returns the bytes of a module's weights."""
    arrays: list[Any] = [array for _, array in tree_flatten(module.parameters())]
    return sum(array.nbytes for array in arrays)
