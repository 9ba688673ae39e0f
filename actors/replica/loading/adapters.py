"""Reads LoRA adapters by request, as mlx-lm writes them, and puts them into a loaded model.

An adapter must fit the model: each of its tensors belongs to a linear layer or an embedding and has that layer's shape.
Once the adapters are in place, the model runs a few tokens with each of them. Every layer of an adapter must be called,
and a row with the adapter must compute the same beside a row without it. What a model calls in another way, such as
experts, cannot have adapters by request.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from ....cluster.errors import ModelLoadError
from ...model_files.identity.digests import FileDigest
from ...model_files.source import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    Progress,
    first_sentence,
    read_json,
    resolve_adapter,
)
from ...model_files.weights import WeightFile, read_weight_file
from ..adapters.adapters import Adapter, Adapters
from ..adapters.layers import Matrices, Stack, adapt
from ..adapters.rows import Rows
from ..device.device import on_gpu
from ..proving.agreement import MODEL_ERRORS, agree, try_change, unless_equal

logger = logging.getLogger(__name__)

ROWS_TRIED = 7
"""With so many adapters at most gathered rows are tried."""

_TOKENS = ([0, 1, 2], [3, 1, 0])
"""The texts of the rows with which adapters are tested."""

_A, _B = "lora_a", "lora_b"

Shapes = dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
"""(inputs, rank) and (rank, outputs) by the layer's name."""


@dataclass(frozen=True)
class AdapterFiles:
    """The files of an adapter on this machine, whose headers and config were read.

    Attributes:
        name: what clients call it.
        shapes: of its matrices.
    """

    name: str
    folder: Path
    rank: int
    scale: float
    shapes: Shapes

    @property
    def paths(self) -> dict[str, Path]:
        """The files that identify it, by names that no file of a model has."""
        return {f"{self.name}/{file}": self.folder / file for file in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)}


def find_adapters(sources: Mapping[str, str], progress: Progress) -> list[AdapterFiles]:
    """Returns the files of adapters, downloaded if needed.

    Args:
        sources: folders or Hub ids by the adapters' names.

    Raises:
        ModelLoadError: one is not there, or is no LoRA adapter of mlx-lm; the message names it.
    """
    return [_read(name, resolve_adapter(source, progress)) for name, source in sources.items()]


def adapters_bytes(adapters: list[AdapterFiles], float_bytes: int) -> int:
    """Returns about how many bytes the matrices of adapters take in memory, with this many a number."""
    layers: dict[str, list[tuple[int, int, int]]] = {}
    for adapter in adapters:
        for name, ((inputs, rank), (_, outputs)) in adapter.shapes.items():
            layers.setdefault(name, []).append((inputs, rank, outputs))
    stacks = len(adapters) + 1 if on_gpu() else 0
    numbers = 0
    for each in layers.values():
        if stacks:
            numbers += stacks * max((inputs + outputs) * rank for inputs, rank, outputs in each)
        else:
            numbers += sum((inputs + outputs) * rank for inputs, rank, outputs in each)
    return numbers * float_bytes


def _read(name: str, folder: Path) -> AdapterFiles:
    what = f"the adapter {name!r} ({folder})"
    config = read_json(folder / ADAPTER_CONFIG)
    if "peft_type" in config:
        raise ModelLoadError(f"{what} is PEFT's; only those that mlx-lm wrote are read")
    if (kind := config.get("fine_tune_type", "lora")) != "lora":
        raise ModelLoadError(f"{what} is of the type {kind!r}: by request there is only lora; use `adapter` for it")
    match config.get("lora_parameters"):
        case {"rank": int(rank), "scale": int(scale) | float(scale)} if rank > 0:
            pass
        case _:
            raise ModelLoadError(f"{what} has no rank and scale in lora_parameters of its {ADAPTER_CONFIG}")
    return AdapterFiles(
        name, folder, rank, float(scale), _shapes(what, rank, read_weight_file(folder / ADAPTER_WEIGHTS))
    )


def _shapes(what: str, rank: int, file: WeightFile) -> Shapes:
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, tensor in file.tensors.items():
        layer, _, leaf = name.rpartition(".")
        if leaf not in (_A, _B) or not layer:
            raise ModelLoadError(f"{what} does not fit: {name} is no tensor of a LoRA adapter")
        found.setdefault(layer, {})[leaf] = tensor.shape
    if not found:
        raise ModelLoadError(f"{what} is incomplete: it lacks all tensors")
    shapes: Shapes = {}
    for layer, leaves in found.items():
        if missing := {_A, _B} - leaves.keys():
            raise ModelLoadError(f"{what} is incomplete: it lacks {layer}.{missing.pop()}")
        a, b = leaves[_A], leaves[_B]
        if len(a) != 2 or len(b) != 2:
            raise ModelLoadError(f"{what} changes experts ({layer}), which have no adapter by request; use `adapter`")
        if (a[1], b[0]) != (rank, rank):
            raise ModelLoadError(f"{what} does not fit its own config: {layer} has {a} and {b}, and the rank is {rank}")
        shapes[layer] = (a, b)
    return shapes


def check_fit(model: nn.Module, adapters: list[AdapterFiles]) -> None:
    """Checks that adapters are of this model.

    Args:
        model: with its own layers.

    Raises:
        ModelLoadError: one has a tensor for which the model has no place, or a layer of another kind or shape.
    """
    modules = dict(model.named_modules())
    for adapter in adapters:
        what = f"the adapter {adapter.name!r} ({adapter.folder}) does not fit the model"
        for name, (a, b) in adapter.shapes.items():
            layer = modules.get(name)
            if layer is None:
                raise ModelLoadError(f"{what}: the model has no layer {name}; it is an adapter of another model")
            if (wanted := _dims(layer)) is None:
                kind = type(layer).__name__
                raise ModelLoadError(f"{what}: {name} is a {kind}, which has no adapter by request; use `adapter`")
            if (a[0], b[1]) != wanted:
                inputs, outputs = wanted
                raise ModelLoadError(
                    f"{what}: {name} has adapter shapes {a} and {b}, and takes {inputs} to {outputs}; "
                    "it is an adapter of another model"
                )


def _dims(layer: Any) -> tuple[int, int] | None:
    """Returns the inputs (of an embedding: ids) and outputs of a layer that may have adapters; None for others."""
    if isinstance(layer, nn.Linear):
        return layer.weight.shape[1], layer.weight.shape[0]
    if isinstance(layer, nn.QuantizedLinear):
        return layer.weight.shape[1] * 32 // layer.bits, layer.weight.shape[0]
    if isinstance(layer, nn.Embedding):
        return layer.weight.shape[0], layer.weight.shape[1]
    if isinstance(layer, nn.QuantizedEmbedding):
        return layer.weight.shape[0], layer.weight.shape[1] * 32 // layer.bits
    return None


def described(
    files: list[AdapterFiles], digested: Mapping[str, FileDigest], *, gathers: bool | None = None
) -> Adapters:
    """Returns adapters without their matrices, which `install` reads.

    Args:
        digested: of their files, by `AdapterFiles.paths`.
        gathers: see `Adapted`; None takes what is right for this device.
    """
    found = []
    for each in files:
        digests = {name.rpartition("/")[2]: digested[name].digest.hex() for name in each.paths}
        found.append(Adapter(each.name, digests, each.rank))
    return Adapters(found, gathers=on_gpu() if gathers is None else gathers)


def install(model: nn.Module, called: Any, files: list[AdapterFiles], adapters: Adapters) -> None:
    """Reads adapters and puts them into a model.

    Args:
        model: has the layers, which may be joined.
        called: is called, as mlx-lm's models are.
        adapters: what `described` returned for the files.

    Raises:
        ModelLoadError: a file cannot be read, or the model cannot compute with an adapter.
    """
    modules = dict(model.named_modules())
    before = _run(called, [list(each) for each in _TOKENS])
    layers, dtype = dict[str, dict[int, Matrices]](), _dtype(model)
    for number, adapter in enumerate(files, 1):
        for name, matrices in _matrices(adapter, dtype).items():
            layers.setdefault(name, {})[number] = matrices
    for name in list(layers):
        # The files' own arrays are freed layer by layer.
        stack = Stack(layers.pop(name), len(files), stacked=adapters.adapted.gathers)
        adapt(modules[name], stack, adapters.adapted)
        adapters.nbytes += stack.nbytes
    _check(called, modules, files, adapters, before)
    if adapters.adapted.gathers and (why := _why_in_groups(called, len(files), adapters)):
        logger.warning("sequences with adapters are computed adapter by adapter: %s", why)
        adapters.adapted.group_always()


def _dtype(model: nn.Module) -> mx.Dtype:
    """Returns the dtype of most of a model's floats: it computes in this one, though its logits may have another."""
    sizes = Counter[mx.Dtype]()
    parameters: Any = tree_flatten(model.parameters())
    for _, array in parameters:
        if mx.issubdtype(array.dtype, mx.floating):
            sizes[array.dtype] += array.size
    return max(sizes, key=lambda dtype: sizes[dtype])


def _matrices(adapter: AdapterFiles, dtype: mx.Dtype) -> dict[str, Matrices]:
    try:
        tensors: Any = mx.load(str(adapter.folder / ADAPTER_WEIGHTS))
        tensors = {name: tensor.astype(dtype) for name, tensor in tensors.items()}
        mx.eval(tensors)
    except (RuntimeError, ValueError) as error:
        raise ModelLoadError(f"the adapter {adapter.name!r} cannot be read: {first_sentence(error)}") from error
    return {name: Matrices(tensors[f"{name}.{_A}"], tensors[f"{name}.{_B}"], adapter.scale) for name in adapter.shapes}


def _check(
    called: Any, modules: Mapping[str, Any], files: list[AdapterFiles], adapters: Adapters, before: mx.array
) -> None:
    """Runs each adapter alone and beside a row without one; see the module.

    Args:
        before: the logits of both rows before the adapters were there.
    """
    first, second = (list(each) for each in _TOKENS)
    for number, adapter in enumerate(files, 1):
        what = f"the model cannot be served with the adapter {adapter.name!r} by request"
        for name in adapter.shapes:
            modules[name].called = False
        try:
            with adapters.adapted.calling([number]):
                alone = _run(called, [first])
            with adapters.adapted.calling([number, 0]):
                beside = _run(called, [first, second])
        except MODEL_ERRORS as error:
            raise ModelLoadError(f"{what}: {first_sentence(error)}; use `adapter` for it") from error
        if idle := [name for name in adapter.shapes if not modules[name].called]:
            raise ModelLoadError(f"{what}: the model never calls {idle[0]} as a layer; use `adapter` for it")
        if not agree([alone[0], before[1]], [beside[0], beside[1]]):
            raise ModelLoadError(f"{what}: beside others it computes something else; use `adapter` for it")


def _why_in_groups(called: Any, count: int, adapters: Adapters) -> str:
    """Returns why rows are not gathered on this device; empty if that gives the same as in groups."""
    numbers = [*range(min(count, ROWS_TRIED) + 1)]
    texts, adapted = [list(_TOKENS[0])] * len(numbers), adapters.adapted

    def logits(rows: Rows) -> list[mx.array]:
        with adapted.using(rows):
            return [_run(called, texts)]

    verdict = try_change(
        lambda: logits(Rows(numbers, gathers=False)),
        lambda: logits(Rows(mx.array(numbers, mx.uint32), copies=adapted.copies)),
        unless_equal("gathered they are computed otherwise"),
    )
    return verdict.reason if verdict.error is None else first_sentence(verdict.error)


def _run(called: Any, texts: list[list[int]]) -> mx.array:
    """Returns the logits `(texts, tokens, vocabulary)` of texts of equal lengths."""
    caches = make_prompt_cache(called)
    logits = called(mx.array(texts, mx.uint32), cache=caches)
    mx.eval(logits, [cache.state for cache in caches])
    return logits
