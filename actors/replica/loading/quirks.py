"""Special needs of some families' code for masks and caches, found by running a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, RotatingKVCache, make_prompt_cache

from ...patches import NO_CHANGE, Change, masks_made, rebound
from ..kv.caches import ModelCacheSpec, merge, new_caches, new_pool
from ..kv.paged_cache import PagedKVCache, Reads
from ..proving.agreement import MODEL_ERRORS, Verdict, try_change, unless_equal
from ..proving.findings import NOWHERE, Findings
from ..proving.pieces import IN_ONE_PIECE, Pieces

_MASK = "create_attention_mask"
_LENGTHS = (4, 2, 3)
"""Tokens of the sequences with which batches are tested."""

_AS_THEY_ARE, _BY_GROUP = "as they are", "by group"
_WHAT, _VERSION = "masks", 1
"""Increased whenever the test of masks changes."""


class FlatCaches:
    """Wraps a model whose layers keep several caches each, so that it takes a flat list of caches. Each of these is
    then cached, moved and reused as if it were a layer's only one."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._sizes = [_size(cache) for cache in make_prompt_cache(model)]

    @staticmethod
    def of(model: Any) -> Any:
        """Returns the model, wrapped if its layers keep several caches."""
        return FlatCaches(model) if any(map(_size, make_prompt_cache(model))) else model

    def __call__(self, tokens: mx.array, cache: Sequence[Any], **given: Any) -> mx.array:
        """Calls the model, with `cache` from `make_cache`."""
        left = iter(cache)
        layers = [CacheList(*(next(left) for _ in range(size))) if size else next(left) for size in self._sizes]
        return self._model(tokens, cache=layers, **given)

    def make_cache(self) -> list[Any]:
        """Returns empty caches."""
        layers = make_prompt_cache(self._model)
        return [each for layer in layers for each in (layer.caches if type(layer) is CacheList else [layer])]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _size(cache: Any) -> int:
    """How many caches a layer has in a list; 0 if it has one without a list."""
    return len(cache.caches) if type(cache) is CacheList else 0


def shares_kv(model: Any, spec: ModelCacheSpec) -> bool:
    """Whether layers of the model attend to other layers' KV."""
    spec = replace(spec, shares=True)
    caches = new_caches(spec, make_prompt_cache(model), new_pool(spec), Reads.DEQUANTIZED)
    try:
        mx.eval(model(mx.array([[0, 0]], mx.uint32), cache=caches))
    except MODEL_ERRORS:
        return False
    return any(cache.was_shared for cache in caches if isinstance(cache, PagedKVCache))


def with_windows(model: Any, spec: ModelCacheSpec) -> ModelCacheSpec:
    """Returns a spec whose sealed window layers have the windows for which the model requests masks, if these are
    longer than its caches. Such a model sees one token more in prompts than in steps; with this spec it sees the same
    in both."""
    caches, asked = make_prompt_cache(model), dict[int, int]()

    def noting(cache: Any) -> Any:
        plain = cache.make_mask

        def make_mask(*given: Any, **named: Any) -> Any:
            asked[cache.max_size] = max(asked.get(cache.max_size, 0), named.get("window_size") or 0)
            return plain(*given, **named)

        return make_mask

    for cache in caches:
        if isinstance(cache, RotatingKVCache):
            masks_made(cache, noting(cache))
    model(mx.array([[0, 0]], mx.uint32), cache=caches)
    layers = [
        replace(layer, window=max(layer.window, asked.get(layer.window, 0))) if layer.sealed else layer
        for layer in spec.layers
    ]
    return replace(spec, layers=tuple(layers))


def masks_are_known(findings: Findings) -> bool:
    """Whether an earlier load has done `fit_masks`, which is one of the first tests of a load."""
    return findings.read(_WHAT, _VERSION) is not None


def fit_masks(module: Any, model: Any, findings: Findings = NOWHERE, pieces: Pieces = IN_ONE_PIECE) -> None:
    """Adds an axis for groups of heads to a batch's masks, if the model computes right batches only with it: its
    attention has that axis and adds masks itself, as in Gemma 2.

    Args:
        module: the module whose layers' code makes the masks.
        model: the model in the form that takes tokens and caches.
        findings: of this model, for any KV policy.
        pieces: a piece ends after each call of the model.
    """
    known = findings.read(_WHAT, _VERSION)
    if known == _AS_THEY_ARE:
        return
    change = rebound(module, _MASK, _by_group) or NO_CHANGE
    if known == _BY_GROUP:
        change.make()
    elif _try_batched(model, pieces).holds:
        findings.note(_WHAT, _VERSION, _AS_THEY_ARE)
    else:
        # In one piece, so that no request is served while masks are changed for the test.
        right = _try_batched(model, change=change).holds
        findings.note(_WHAT, _VERSION, _BY_GROUP if right else _AS_THEY_ARE)


def positions_leak(model: Any, far: int, pieces: Pieces = IN_ONE_PIECE) -> bool:
    """Whether a sequence gets other logits if another one of its batch is `far` tokens further on in its text. Some
    models take the first sequence's position for all; sequences that are short enough compute the same anyway."""

    def others(more: int) -> list[mx.array]:
        sequences = _begun_sequences(model, pieces)
        batch = merge(sequences)
        for cache in batch:
            if isinstance(offset := getattr(cache, "offset", None), mx.array):
                cache.offset = offset + mx.array([more] + [0] * (len(sequences) - 1))
        return list(model(mx.array([[1]] * len(sequences), mx.uint32), cache=batch)[1:, -1])

    return bool(try_change(lambda: others(0), lambda: others(far), unless_equal("positions leak")).reason)


def _by_group(plain: Callable[..., Any]) -> Callable[..., Any]:
    def create(*given: Any, **named: Any) -> Any:
        mask = plain(*given, **named)
        return mask[:, :, None] if isinstance(mask, mx.array) and mask.ndim == 4 else mask

    return create


def _begun_sequences(model: Any, pieces: Pieces = IN_ONE_PIECE) -> list[list[Any]]:
    """Returns the model's own caches of sequences of different lengths."""
    sequences = [make_prompt_cache(model) for _ in _LENGTHS]
    for caches, count in zip(sequences, _LENGTHS, strict=True):
        mx.eval(model(mx.array([list(range(count))], mx.uint32), cache=caches))
        pieces.pause()
    return sequences


def _try_batched(model: Any, pieces: Pieces = IN_ONE_PIECE, change: Change = NO_CHANGE) -> Verdict:
    """Tests whether a batched step of sequences computes what each computes alone, with the model's own caches.

    Args:
        change: is made before the batched step.
    """
    batch: list[Any] = []

    def alone() -> list[mx.array]:
        sequences, logits = _begun_sequences(model, pieces), []
        batch.extend(merge(sequences))
        for caches in sequences:
            logits.append(model(mx.array([[1]], mx.uint32), cache=caches)[0, -1])
            mx.eval(logits[-1])
            pieces.pause()
        return logits

    def together() -> list[mx.array]:
        return list(model(mx.array([[1]] * len(_LENGTHS), mx.uint32), cache=batch)[:, -1])

    return try_change(alone, together, unless_equal("sequences compute something else when batched"), change)
