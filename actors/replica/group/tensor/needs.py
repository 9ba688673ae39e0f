"""What one share of a model needs, from the headers of its files. `cluster/stages.py` places shares by that."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from .....cluster.config import Model
from .....cluster.errors import ModelLoadError
from .....cluster.stages import LayerNeeds, ModelNeeds, Stage, share
from ....model_files.context import context_length
from ....model_files.conversion import lazy_model
from ....model_files.foreign_code import refuse_model_file
from ....model_files.processors import sees
from ....model_files.source import first_sentence, read_json
from ...kernels.sealing import POLICIES
from ...kv.caches import read_spec
from ...loading.models import pick_dtype
from ...loading.quirks import FlatCaches, with_windows
from ...memory.replica_memory import workspace_of
from ..needs import TOKENS_MIN, policy_of
from .ranks import Ranks
from .sharding import shard

_ERRORS = (Exception, SystemExit)


def shares_of(model: Model, folder: Path, memory_bytes: Mapping[str, int], chunk_tokens: int) -> list[Stage]:
    """Returns the stages of a model of which each node has a share. Its weight files may be holes behind their headers.

    Args:
        memory_bytes: what it may use on each node, in the order of ranks.
        chunk_tokens: the most tokens of one prefill.

    Raises:
        NoRoom: it does not fit; the message has all sizes.
        ModelLoadError: it cannot be served, or not be divided into so many shares.
    """
    assert model.split is not None and model.split.tensor is not None
    count, source = model.split.tensor, model.source
    config = read_json(folder / "config.json")
    refuse_model_file(source, config, trusted=False)
    if sees(folder):
        raise ModelLoadError(f"{source} takes pictures: only models of text can be divided among nodes")
    whole = lazy_model(source, folder, seeing=False)
    if (dtype := pick_dtype(model.dtype)) is not None:
        whole.set_dtype(dtype)
    shard(whole, Ranks(0, count))
    layers = len(whole.layers)
    least = min(sorted(memory_bytes.values())[-count:], default=0)
    try:
        needs = _needs(model, whole, config, least, chunk_tokens)
    except _ERRORS as error:
        raise ModelLoadError(f"{source} cannot be estimated: {first_sentence(error)}") from error
    return share(needs, layers, memory_bytes, count)


def _needs(model: Model, own: Any, config: dict[str, Any], memory_bytes: int, chunk_tokens: int) -> ModelNeeds:
    """Returns what a share, `own`, needs on a node that has `memory_bytes`, as a single layer. Nothing is computed."""
    flat: Any = FlatCaches.of(own)
    caches = make_prompt_cache(flat)
    logits = flat(mx.array([[0, 0]], mx.uint32), cache=caches)
    spec = with_windows(flat, read_spec(caches, 2, POLICIES[policy_of(model.kv)]))
    context = context_length(config, getattr(own, "args", None)).tokens
    context = min(context, model.context_tokens_max or context)
    arrays: list[Any] = [array for _, array in tree_flatten(own.parameters())]
    weights = sum(array.nbytes for array in arrays)
    dtype = str(logits.dtype).removeprefix("mlx.core.")
    # The hidden states are whole on every node, so a prefill needs nearly as much as that of the whole model.
    workspace = workspace_of(config, spec, context, dtype, chunk_tokens, max(0, memory_bytes - weights))
    layer = LayerNeeds(
        weights,
        sum(each.token_bytes for each in spec.layers if not each.window),
        sum(each.sequence_bytes for each in spec.layers),
    )
    return ModelNeeds([layer], workspace_bytes=workspace, tokens_min=min(TOKENS_MIN, context))
