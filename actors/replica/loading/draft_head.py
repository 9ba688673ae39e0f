"""Loads a head that drafts from the outputs of some layers of a model: EAGLE-3 (Li et al. 2025), with the modules and
the config of mlx-vlm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ....cluster.errors import ModelLoadError
from ...model_files.source import files_in
from ...model_files.weights import bytes_in_memory, read_weight_files
from ..device.device import as_numpy, on_gpu
from ..drafting.pace import TOKENS_MOST
from ..execution.draft_model.head_drafts import STEPS
from ..execution.draft_model.model_drafts import SEQUENCES_MAX, DraftModel
from ..execution.draft_model.recent_kv import ROOM, Forward, LayerShape, RecentKV, States, caller
from ..execution.loaded_model import LoadedModel
from ..execution.recorded.layer_outputs import LayerOutputs
from .models import check_memory

KIND = "eagle3"


def is_head(config: Mapping[str, Any]) -> bool:
    """Whether a config is that of a head, not of a whole model."""
    return KIND in (config.get("model_type"), config.get("speculators_model_type"))


def load_head(
    source: str,
    folder: Path,
    config: Mapping[str, Any],
    loaded: LoadedModel,
    dtype: mx.Dtype | None,
    claim: Callable[[int], None],
) -> DraftModel:
    """Loads the head in a folder for a loaded model, some of whose layers note their outputs from now on.

    Args:
        dtype: in which it computes; None for its own.
        claim: called with the bytes of its weights before they are read.

    Raises:
        ModelLoadError: it is not a head of this model; the message says why.
        Exception: whatever mlx-vlm and MLX raise.
    """
    from mlx_vlm.speculative.drafters.eagle3 import Eagle3DraftModel
    from mlx_vlm.speculative.drafters.eagle3.config import Eagle3Config

    layers: Any = getattr(loaded.model, "layers", None)
    if not isinstance(layers, list) or len(layers) != len(loaded.spec.layers):
        raise ModelLoadError(f"{source} does not draft: the layers of the model are not found")
    settings = Eagle3Config.from_dict(dict(config))
    needed = bytes_in_memory(read_weight_files(folder), None if dtype is None else dtype.size)
    check_memory(source, needed)
    claim(needed)
    head = Eagle3DraftModel(settings)
    _read_weights(head, folder, config, loaded.model)
    if dtype is not None:
        head.set_dtype(dtype)
    mx.eval(head.parameters())
    known = min(head.target_vocab_size, loaded.vocabulary_size)
    if head.d2t is not None and int(as_numpy(_target_ids(head)).max()) >= known:
        raise ModelLoadError(f"{source} does not draft: it has tokens that the model has not")
    text = settings.transformer_layer_config
    shape = LayerShape(text.num_key_value_heads, int(text.head_dim or 0), int(text.head_dim or 0))
    call = caller(_forward(head))
    like: Any = head.norm.weight
    kv_bytes = 2 * shape.heads * shape.key_dim * like.itemsize * len(head.layers) * ROOM * SEQUENCES_MAX
    # Three layers' outputs of the last steps, from which it drafts.
    outputs_bytes = STEPS * TOKENS_MOST * 3 * head.target_hidden_size * like.itemsize
    kv = RecentKV([shape] * len(head.layers), like.dtype, call, mx.compile(call) if on_gpu() else call)
    token_s = _token_seconds(kv, 3 * head.target_hidden_size)
    return DraftModel(
        name=source,
        known=known,
        kv=kv,
        kv_bytes=kv_bytes + outputs_bytes,
        # It needs no prompt.
        pieces={1: 0.0},
        token_s=token_s,
        # The last, because it changes the model.
        outputs=LayerOutputs([layers[number] for number in _noted(source, settings, len(layers))]),
    )


def _noted(source: str, settings: Any, layers: int) -> Sequence[int]:
    """Returns the layers from whose outputs a head drafts. A config names those whose inputs these are."""
    named = settings.eagle_aux_hidden_state_layer_ids or [2, layers // 2, layers - 3]
    found = [max(0, int(number) - 1) for number in named]
    if len(set(found)) != 3 or max(found) >= layers:
        raise ModelLoadError(f"{source} does not draft: it needs layers {named}, and the model has {layers}")
    return found


def _read_weights(head: Any, folder: Path, config: Mapping[str, Any], model: Any) -> None:
    weights: dict[str, mx.array] = {}
    for path in files_in(folder, "*.safetensors"):
        weights |= mx.load(str(path))  # type: ignore[operator]
    weights = head.sanitize(weights)
    quantized = config.get("quantization")
    if isinstance(quantized, Mapping):
        nn.quantize(
            head,
            group_size=int(quantized["group_size"]),
            bits=int(quantized["bits"]),
            class_predicate=lambda path, module: hasattr(module, "to_quantized") and f"{path}.scales" in weights,
        )
    head.load_weights(list(weights.items()), strict=False)
    places = {name for name, _ in tree_flatten(head.parameters())}
    missing = {name for name in places - weights.keys() if not name.startswith("embed_tokens.")}
    if more := sorted(missing | (weights.keys() - places)):
        raise ModelLoadError(f"{folder.name} does not draft: its weights do not fit its config ({more[0]})")
    if "embed_tokens.weight" not in weights:
        # Many heads share the model's.
        head.update_modules({"embed_tokens": getattr(model, "model", model).embed_tokens})


def _target_ids(head: Any) -> mx.array:
    """Returns the token of each of the head's logits, `(draft vocabulary,)`."""
    return mx.arange(head.draft_vocab_size) + head.d2t


def _forward(head: Any) -> Forward:
    ids = None if head.d2t is None else _target_ids(head)
    dtype = head.norm.weight.dtype

    def forward(tokens: mx.array, states: States, caches: Sequence[Any]) -> tuple[mx.array, States]:
        (hidden,) = states
        hidden = hidden.astype(dtype)
        if hidden.shape[-1] != head.hidden_size:
            # The layers' outputs; else what it gave itself.
            hidden = head.fc(hidden if head.input_norm is None else head.input_norm(hidden))
        first, *rest = zip(head.layers, caches, strict=True)
        mask, offset = caches[0].make_mask(tokens.shape[1]), caches[0].offset
        hidden = first[0](head.embed_tokens(tokens).astype(dtype), hidden, mask, first[1], offset)
        for layer, cache in rest:
            hidden = layer(hidden, mask, cache, offset)
        normed = head.norm(hidden)
        logits = head.embed_tokens.as_linear(normed) if head.lm_head is None else head.lm_head(normed)
        if ids is None:
            return logits, [hidden]
        none = mx.full((*logits.shape[:2], head.target_vocab_size), -mx.inf, logits.dtype)
        return mx.put_along_axis(none, mx.broadcast_to(ids, logits.shape), logits, axis=-1), [hidden]

    return forward


def _token_seconds(kv: RecentKV, dimensions: int) -> float:
    """Returns how long a token of one sequence takes, once its kernels are compiled."""
    trial, seconds = kv.bare(), 0.0
    trial.open()
    mx.eval(trial.compute([[1]], 1, [mx.zeros((1, 1, dimensions))]))
    for _ in range(2):
        began = perf_counter()
        mx.eval(trial.compute_one(mx.array([1])), trial.arrays())
        seconds = perf_counter() - began
    return seconds
