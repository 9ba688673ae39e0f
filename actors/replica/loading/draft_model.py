"""Loads a small model that drafts for another one, and measures how long that takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from ....cluster.errors import ModelLoadError
from ...model_files.checkpoints import load_checkpoint
from ...model_files.foreign_code import refuse_model_file
from ...model_files.media.processors import sees
from ...model_files.source import Progress, first_sentence, read_json, resolve
from ...model_files.text.vocabularies import difference
from ...model_files.weights import bytes_in_memory, read_weight_files
from ..device.device import on_gpu
from ..execution.draft_model.model_drafts import PIECES, SEQUENCES_MAX, DraftModel
from ..execution.draft_model.recent_kv import ROOM, LayerShape, RecentKV, caller, forward_of
from ..execution.loaded_model import LoadedModel
from ..proving.agreement import agree
from ..proving.pieces import IN_ONE_PIECE, Pieces
from .draft_head import is_head, load_head
from .model_id import refuse_elsewhere
from .models import check_memory, pick_dtype
from .prepare import prepare_weights

_PARTS = (5, 1, 3)
"""Tokens of the calls with which the model is compared with itself."""


def load_draft_model(
    source: str,
    loaded: LoadedModel,
    *,
    dtype: str = "auto",
    weights: str = "auto",
    progress: Progress,
    claim: Callable[[int], None] = lambda nbytes: None,
    exact: bool = False,
    pieces: Pieces = IN_ONE_PIECE,
) -> DraftModel:
    """Loads a model, or a head (`draft_head.py`), that drafts for a loaded one.

    Args:
        source: its folder or Hub id.
        dtype, weights: as for `models.load`.
        claim: called with the bytes of its weights before they are read.
        exact: whether no draft may change a bit of a token's logits.
        pieces: requests are served while it is downloaded.

    Raises:
        ModelLoadError: it cannot draft for it; the message says why.
    """
    if loaded.undrafted:
        raise ModelLoadError(f"{source} does not draft: {loaded.undrafted}")
    if exact and not loaded.way.alike:
        raise ModelLoadError(f"{source} does not draft: drafts must be exact, and here they could change bits")
    try:
        folder = pieces.beside(lambda: resolve(source, progress))
        progress(f"loading {source}, which drafts", None)
        kind = pick_dtype(dtype)
        if is_head(config := read_json(folder / "config.json")):
            if exact:
                raise ModelLoadError(f"{source} does not draft: drafts must be exact, and no load tests heads for that")
            return load_head(source, folder, config, loaded, kind, claim)
        _refuse(source, folder, config, loaded.folder)
        needed = bytes_in_memory(read_weight_files(folder), None if kind is None else kind.size)
        check_memory(source, needed)
        claim(needed)
        model, _ = load_checkpoint(folder, trusted=False)
        prepare_weights(model, kind, weights, lambda fraction: None)
        return _measured(source, model, loaded)
    except ModelLoadError:
        raise
    except (Exception, SystemExit) as error:
        # What libraries raise if a folder does not match its config: any exception.
        raise ModelLoadError(f"{source} does not draft: {first_sentence(error)}") from error


def _refuse(source: str, folder: Path, config: dict[str, Any], target: Path) -> None:
    refuse_model_file(source, config, trusted=False)
    refuse_elsewhere(source, config)
    if any("eagle" in str(name).lower() for name in config.get("architectures") or ()):
        raise ModelLoadError(
            f"{source} does not draft: a head must be in the layout of speculators, as mlx-vlm reads it"
        )
    if sees(folder):
        raise ModelLoadError(f"{source} does not draft: it takes pictures, and only a model of text drafts")
    if why := difference(folder, target):
        raise ModelLoadError(f"{source} does not draft: its tokenizer is another one ({why})")


def _measured(source: str, model: Any, loaded: LoadedModel) -> DraftModel:
    """Returns a model that computes with `RecentKV` what it computes with its own caches, and how long it takes."""
    caches = make_prompt_cache(model)
    if any(type(cache) not in (KVCache, RotatingKVCache) for cache in caches):
        raise ModelLoadError(f"{source} does not draft: some of its layers are not plain attention")
    tokens = [1 + number for number in range(sum(_PARTS))]
    expected = model(mx.array([tokens], mx.uint32), cache=caches)
    mx.eval(expected)
    shapes = [LayerShape(each.keys.shape[1], each.keys.shape[3], each.values.shape[3]) for each in caches]
    call = caller(forward_of(model))
    # On a CPU a step takes longer than to build its graph.
    kv = RecentKV(shapes, caches[0].keys.dtype, call, mx.compile(call) if on_gpu() else call)
    if not agree([expected[0, -1:]], [_in_parts(kv, tokens)]):
        raise ModelLoadError(f"{source} does not draft: with sequences of different lengths it computes something else")
    token_bytes = sum(each.heads * (each.key_dim + each.value_dim) for each in shapes) * caches[0].keys.itemsize
    return DraftModel(
        name=source,
        known=min(int(expected.shape[-1]), loaded.vocabulary_size),
        kv=kv,
        kv_bytes=token_bytes * ROOM * (SEQUENCES_MAX + 1),
        pieces={size: _seconds(kv, size) for size in (PIECES if on_gpu() else PIECES[:1])},
        token_s=_seconds(kv, 1),
    )


def _in_parts(kv: RecentKV, tokens: list[int]) -> mx.array:
    """Computes tokens in parts, padded and beside a shorter sequence. Returns the last logits, `(1, vocabulary)`."""
    trial, logits, at = kv.bare(), mx.zeros((1,)), 0
    trial.open()
    trial.open()
    for count in _PARTS:
        given = tokens[at : at + count]
        logits = trial.compute([given[:1], given], count + 1) if count > 1 else trial.compute_one(mx.array(given * 2))
        at += count
    return logits[1:]


def _seconds(kv: RecentKV, count: int) -> float:
    """Returns how long `count` tokens of one sequence take, once their kernels are compiled."""
    trial, seconds = kv.bare(), 0.0
    trial.open()
    for _ in range(2):
        began = perf_counter()
        logits = trial.compute([[1] * count], count)
        mx.eval(trial.arrays(), logits if count == 1 else [])
        seconds = perf_counter() - began
    return seconds
