"""Loads one stage of a model: only its layers' weights are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ....cluster.config import Model
from ....cluster.environment import default_home
from ....cluster.errors import ModelLoadError, NoRoom
from ....cluster.stages import Stage as PlannedStage
from ...model_files.checkpoints import load_checkpoint
from ...model_files.context import context_length
from ...model_files.digests import check_unchanged, digest_files
from ...model_files.end_tokens import end_tokens
from ...model_files.foreign_code import refuse_model_file
from ...model_files.layer_ranges import LayerRange, identity_of
from ...model_files.model_identity import ModelIdentity
from ...model_files.processors import sees
from ...model_files.source import Progress, first_sentence, read_json, resolve
from ...model_files.weights import read_weight_files
from ..device import blas
from ..device.device import device_bytes, on_cuda, on_gpu
from ..execution.loaded_model import LoadedModel
from ..execution.padding import PIECE_TOKENS, PIECE_TOKENS_ELSEWHERE
from ..kernels.sealing import FULL_PRECISION, POLICIES
from ..kv import attention
from ..kv.caches import ModelCacheSpec, joins, new_pool, read_spec
from ..loading.model_id import computing, files_of, order_of_weights, refuse_elsewhere
from ..loading.models import pick_dtype
from ..loading.prepare import prepare_weights
from ..loading.quirks import with_windows
from .needs import policy_of
from .pipeline import PipelinedStage
from .stages import Stage, find_chain

_GIB = 2**30


def load_stage(
    source: str,
    start: int,
    stop: int,
    *,
    dtype: str = "auto",
    weights: str = "stored",
    kv: str = "q4",
    context_tokens_max: int | None = None,
    digests: Path | None = None,
    progress: Progress = lambda what, fraction: None,
    claim: Callable[[int], None] = lambda nbytes: None,
) -> LoadedModel:
    """Loads layers [start, stop) of a model of text. Its model is a `PipelinedStage`, which computes with zeros until
    it is connected.

    Args:
        dtype: `auto`, or the name of an MLX float type.
        weights: `stored`, `dequantized` or `both`, the same for all stages; see `prepare_weights`.
        kv: how KV is kept, one of `POLICIES`.
        digests: a file for the digests of the model's files.
        claim: called with the bytes of the stage's weights before they are read.

    Raises:
        ModelLoadError: it cannot be loaded or divided; the message says why in one sentence.
    """
    # Before any library takes OpenBLAS for itself.
    blas.chosen()
    folder = resolve(source, progress)
    config = read_json(folder / "config.json")
    refuse_model_file(source, config, trusted=False)
    refuse_elsewhere(source, config)
    if sees(folder):
        raise ModelLoadError(f"{source} takes pictures: only models of text can be divided among processes")
    files = read_weight_files(folder)
    paths = files_of(folder)
    digested = digest_files(paths, digests, lambda fraction: progress(f"checking the files of {source}", fraction))
    try:
        whole, config = load_checkpoint(folder, trusted=False)
        stage = _stage_of(whole, start, stop, pick_dtype(dtype))
        _check_memory(stage, claim)
        kept = prepare_weights(whole, None, weights, lambda fraction: progress(f"loading {source}", fraction))
        model = PipelinedStage(stage)
        caches = model.make_cache()
        states = model(mx.array([[0, 0]], mx.uint32), cache=caches)
        mx.eval(states, [cache.state for cache in caches])
    except NoRoom:
        raise
    except (Exception, SystemExit) as error:
        why = error.message if isinstance(error, ModelLoadError) else first_sentence(error)
        raise ModelLoadError(f"layers {start} to {stop} of {source} cannot be loaded: {why}") from error
    check_unchanged(digested, paths)
    spec = with_windows(model, read_spec(caches, 2, POLICIES[kv]))
    attention.install(whole)
    seen = str(states.dtype).removeprefix("mlx.core.")
    whole_identity = ModelIdentity(
        files={name: each.digest.hex() for name, each in digested.items()} | order_of_weights(folder, files),
        # As of a model that is not divided.
        computing=_computing(seen if pick_dtype(dtype) is not None else f"{seen}, own", kept, spec),
    )
    layers = LayerRange(start, stop)
    identity = identity_of(whole_identity, layers, stage.count)
    context = context_length(config, getattr(whole, "args", None)).tokens
    return LoadedModel(
        model=model,
        folder=folder,
        identity=identity,
        spec=spec,
        context_tokens=min(context, context_tokens_max or context),
        vocabulary_size=int(states.shape[-1]) if model.stage.last else 0,
        eos_token_ids=end_tokens(folder, source, trusted=False),
        dtype=seen,
        weights=kept,
        multiplying="" if on_gpu() else blas.chosen().describe(),
        pool=new_pool(spec),
        unbatched=not all(map(joins, caches)),
        hidden="its layers are divided among processes",
        # Recurrent layers' scans of other lengths round otherwise.
        layers=(layers, stage.count) if stage.joins and spec.joinable else None,
        piece_tokens=None if spec.recurrent else PIECE_TOKENS if on_cuda() else PIECE_TOKENS_ELSEWHERE,
    )


def load_planned(model: Model, stage: PlannedStage, progress: Progress, claim: Callable[[int], None]) -> LoadedModel:
    """Loads a stage as the config says, the same in all processes of a group. Errors as for `load_stage`."""
    return load_stage(
        model.source,
        stage.start,
        stage.stop,
        dtype=model.dtype,
        weights="stored" if model.weights == "auto" else model.weights,
        kv=policy_of(model.kv),
        context_tokens_max=model.context_tokens_max,
        digests=default_home().digests_file,
        progress=progress,
        claim=claim,
    )


def _stage_of(whole: Any, start: int, stop: int, dtype: mx.Dtype | None) -> Stage:
    """Returns a stage of a model, both with lazy weights."""
    if dtype is not None:
        # Before it is divided, so that what stands in for other stages has the same type.
        whole.set_dtype(dtype)
    return Stage(find_chain(whole), start, stop)


def _computing(dtype: str, weights: str, spec: ModelCacheSpec) -> dict[str, str]:
    """Returns how a stage computes, as in a model's identity; chips of one kind may differ within a group."""
    kv = f"{FULL_PRECISION}.1" if spec.policy is None else spec.policy.format
    return computing(dtype=dtype, weights=weights, kv=kv, numerics="fast", seeing=False)


def _check_memory(stage: Stage, claim: Callable[[int], None]) -> None:
    arrays: list[Any] = [array for _, array in tree_flatten(stage.model.parameters())]
    needed = sum(array.nbytes for array in arrays)
    claim(needed)
    free = device_bytes(free=True)
    if needed > free:
        raise NoRoom(
            f"its weights need {needed / _GIB:.2f} GiB of memory, and {free / _GIB:.2f} GiB are free: give this node "
            "fewer layers, or end other programs"
        )
