"""Joins layers that get the same input into one product: queries, keys and values, or a gate and its up projection.

On a GPU a decode step takes as long as the host takes to launch its kernels, so fewer and larger products are faster.
Layers are not found by their names: the model runs on a few tokens, and layers of one module are joined if they get the
very same array. If the model then computes something else, the layers are put back.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.models.cache import make_prompt_cache

from ...model_files.source import first_sentence
from ...patches import Change
from ..device.device import multiplies_exactly
from ..kernels import few_rows
from ..kernels.many_rows import StoredLinear
from ..proving.agreement import MODEL_ERRORS, Logits, agree, try_change
from ..proving.findings import NOWHERE, Findings
from .prepare import LinearByRows

logger = logging.getLogger(__name__)

KINDS = (nn.Linear, nn.QuantizedLinear, StoredLinear, LinearByRows)
"""Kinds of layers that are joined. Other kinds, such as one with an adapter, may do more than multiply."""

LAST_BITS = 4
"""How far outputs of a product may be off, relative to the largest, in units of the last bit."""

TF32_EPS = 2.0**-10
"""The last bit of a float32 as most GPUs multiply it."""

_RUNS = ([0, 1], [1])
"""Tokens of a prompt and of a decode step: some models compute the two differently."""


_WHAT, _VERSION = "joined", 2
"""Increased whenever the way of joining layers changes."""


def join(module: nn.Module, model: Any, findings: Findings = NOWHERE) -> int:
    """Joins the layers of a model with weights in memory that can be joined, or that an earlier load joined. If layers
    are not joined, the reason is logged.

    Args:
        module: has the layers.
        model: is called, as mlx-lm's models are; `module` itself, or a wrapper of it.
        findings: of this model before it is joined.

    Returns:
        The number of joined products.
    """
    if (known := _known(findings.read(_WHAT, _VERSION), module)) is not None:
        _joining(module, known).make()
        return len(known)
    try:
        before, groups = _record(module, model)
    except MODEL_ERRORS as error:
        logger.warning("products are not joined: recording fails: %s", first_sentence(error))
        return 0

    def why_not(expected: Logits, logits: Logits) -> str:
        same = _are_the_same(module, model, groups, expected, logits)
        return "" if same else "the model computes something else"

    verdict = try_change(lambda: before, lambda: _run(model), why_not, _joining(module, groups))
    if verdict.error is not None:
        logger.warning("products are not joined: the model needs its layers: %s", first_sentence(verdict.error))
        # Not stored: memory may have been short.
        return 0
    if verdict.reason:
        logger.warning("products are not joined: %s", verdict.reason)
        groups = []
    findings.note(_WHAT, _VERSION, groups)
    return len(groups)


def _joining(module: nn.Module, groups: Sequence[Sequence[str]]) -> Change:
    """Joins layers of a module, each group into one product."""

    def replace(make: Callable[[list[Any]], Sequence[nn.Module]]) -> None:
        for names in groups:
            _replace(module, names, make)

    return Change(lambda: replace(_joined), lambda: replace(_separate))


def _known(found: Any, module: nn.Module) -> list[list[str]] | None:
    """Returns the groups of names that an earlier load joined; None if they are not layers of this module."""
    layers = {name for name, layer in module.named_modules() if type(layer) in KINDS}
    if not isinstance(found, list) or not all(isinstance(names, list) and len(names) > 1 for names in found):
        return None
    return found if all(name in layers for names in found for name in names) else None


class Joined(nn.Module):
    """A product of several layers.

    Attributes:
        layer: the layer that has all their weights.
        widths: each one's outputs.
    """

    def __init__(self, layer: Any, widths: Sequence[int]) -> None:
        super().__init__()
        self.layer = layer
        self.widths = tuple(widths)
        self._pending = _Pending()

    def take(self, x: mx.array, index: int) -> mx.array:
        """Returns the outputs `(..., width)` of the layer at `index` for `x` `(..., inputs)`. The first call computes
        the outputs of all layers, which are kept until each was taken once or another `x` comes.

        `x` must not be written to between the calls of the layers.
        """
        pending = self._pending
        # While `x` is kept alive, no other array can be the same object.
        if pending.x is not x or pending.outputs[index] is None:
            pending.x, pending.outputs = x, self._multiply(x)
        output, pending.outputs[index] = pending.outputs[index], None
        if all(other is None for other in pending.outputs):
            pending.x, pending.outputs = None, []
        assert output is not None
        return output

    def _multiply(self, x: mx.array) -> list[mx.array | None]:
        stored = getattr(self.layer, "stored", self.layer)
        if few_rows.takes(stored, x):
            return [*stored.parts(x, self.widths)]
        return [*mx.split(self.layer(x), [*accumulate(self.widths[:-1])], axis=-1)]


class _Pending:
    """Outputs that were computed and not taken yet. Not an `nn.Module`, because a module's arrays count as weights."""

    def __init__(self) -> None:
        self.x: mx.array | None = None
        self.outputs: list[mx.array | None] = []


class Part(nn.Module):
    """Takes the place of a joined layer. Only the first part has the product as a child, so weights are counted once.

    Args:
        index: the layer's number in the product.
    """

    def __init__(self, product: Joined, index: int) -> None:
        super().__init__()
        if index == 0:
            self.product = product
        self._take, self._index = product.take, index

    def __call__(self, x: mx.array) -> mx.array:
        """Returns `(..., width)` for `x` `(..., inputs)`."""
        return self._take(x, self._index)


class _Recorder(nn.Module):
    """A layer that notes its inputs."""

    def __init__(self, layer: nn.Module, given: list[mx.array]) -> None:
        super().__init__()
        self.layer = layer
        self._note = given.append

    def __call__(self, x: mx.array) -> mx.array:
        self._note(x)
        return self["layer"](x)

    def __getattr__(self, key: str) -> Any:
        layer = self.get("layer")
        return super().__getattr__(key) if layer is None or key == "layer" else getattr(layer, key)


class _Beside(nn.Module):
    """Calls a product's part and the original layer, and returns the layer's outputs. It notes whether the part's
    outputs are the same except for the last bits."""

    def __init__(self, part: Part, layer: nn.Module, same: list[mx.array]) -> None:
        super().__init__()
        self.part, self.layer = part, layer
        self._note = same.append

    def __call__(self, x: mx.array) -> mx.array:
        output = self["layer"](x)
        exact = output.dtype != mx.float32 or multiplies_exactly(output.dtype)
        allowed = LAST_BITS * (mx.finfo(output.dtype).eps if exact else TF32_EPS)
        off = mx.abs(self["part"](x).astype(mx.float32) - output.astype(mx.float32))
        self._note(off.max() <= allowed * mx.abs(output).max().astype(mx.float32))
        return output


def _record(module: nn.Module, model: Any) -> tuple[list[mx.array], list[list[str]]]:
    """Returns the logits of all runs, and the names of layers that can be joined, in groups."""
    found = {name: layer for name, layer in reversed(module.named_modules()) if type(layer) in KINDS and name}
    places = Counter(id(layer) for layer in found.values())
    # Without layers that are used in two places, which cannot be replaced in one, and without a layer's other form.
    layers = {name: layer for name, layer in found.items() if places[id(layer)] == 1 and _parent(name) not in found}
    given: dict[str, list[mx.array]] = {name: [] for name in layers}
    counts: list[list[int]] = []
    recorders = {name: _Recorder(layer, given[name]) for name, layer in layers.items()}
    with _in_place(module, layers, recorders).for_now():
        logits = _run(model, lambda: counts.append([len(inputs) for inputs in given.values()]))
    groups: dict[Any, list[str]] = {}
    for name, *seen in zip(layers, *counts, strict=True):
        if seen == [*range(1, len(_RUNS) + 1)]:
            # The arrays are kept alive, so no two have the same id.
            key = (_parent(name), _kind(layers[name]), *map(id, given[name]))
            groups.setdefault(key, []).append(name)
    return logits, [names for names in groups.values() if len(names) > 1]


def _in_place(module: nn.Module, layers: dict[str, Any], others: dict[str, Any]) -> Change:
    """Puts others in the place of layers, by name."""

    def put(these: dict[str, Any]) -> None:
        module.update_modules(tree_unflatten(list(these.items())))

    return Change(lambda: put(others), lambda: put(layers))


def _are_the_same(
    module: nn.Module, model: Any, groups: Sequence[Sequence[str]], before: Logits, logits: Logits
) -> bool:
    """Whether the joined model computes what it did before, as closely as logits usually agree. Some models amplify
    differences in the last bit. For these each product is compared with its layers in place, and the model continues
    with the layers' outputs."""
    if agree(before, logits):
        return True
    parts = {name: _at(module, name) for names in groups for name in names}
    layers = {
        name: layer for names in groups for name, layer in zip(names, _separate([*map(parts.get, names)]), strict=True)
    }
    same: list[mx.array] = []
    beside = {name: _Beside(part, layers[name], same) for name, part in parts.items()}
    with _in_place(module, parts, beside).for_now():
        told = _run(model)
    return agree(before, told) and all(one.item() for one in same)


def _run(model: Any, after: Callable[[], None] = lambda: None) -> list[mx.array]:
    caches, logits = make_prompt_cache(model), []
    for tokens in _RUNS:
        logits.append(model(mx.array([tokens], mx.uint32), cache=caches))
        mx.eval(logits[-1], [cache.state for cache in caches])
        after()
    return logits


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _kind(layer: nn.Module) -> Any:
    """Returns what layers of one product must have in common: all but the number of outputs, which is the first axis of
    all their arrays."""
    numbers = tuple(getattr(layer, name, None) for name in ("bits", "group_size", "mode"))
    parts = []
    for name, value in sorted(layer.items()):
        if isinstance(value, nn.Module):
            parts.append((name, _kind(value)))
        elif isinstance(value, mx.array):
            parts.append((name, value.dtype, value.shape[1:] if value.ndim else id(value)))
    return type(layer), numbers, tuple(parts)


def _replace(module: nn.Module, names: Sequence[str], make: Callable[[list[Any]], Sequence[nn.Module]]) -> None:
    """Replaces layers, one group at a time, so that old weights are freed before the next are made."""
    made = make([_at(module, name) for name in names])
    mx.eval([layer.parameters() for layer in made])
    module.update_modules(tree_unflatten(list(zip(names, made, strict=True))))


def _at(module: nn.Module, name: str) -> Any:
    place: Any = module
    for key in name.split("."):
        place = place[int(key)] if isinstance(place, list) else place[key]
    return place


def _joined(layers: list[Any]) -> list[Part]:
    product = Joined(concatenated(layers), [layer.weight.shape[0] for layer in layers])
    return [Part(product, index) for index in range(len(layers))]


def _separate(parts: list[Any]) -> list[nn.Module]:
    product: Joined = parts[0].product
    return [_cut(product.layer, start, end) for start, end in pairwise([0, *accumulate(product.widths)])]


def concatenated(layers: Sequence[Any]) -> Any:
    """Returns a layer with the outputs of several, one after the other."""
    made = copy.copy(layers[0])
    for name, value in layers[0].items():
        values = [layer[name] for layer in layers]
        if isinstance(value, nn.Module):
            made[name] = concatenated(values)
        elif isinstance(value, mx.array):
            made[name] = mx.concatenate(values)
    return made


def _cut(layer: Any, start: int, end: int) -> Any:
    """Returns a layer with some of another layer's outputs; it shares the weights' memory."""
    made = copy.copy(layer)
    for name, value in layer.items():
        if isinstance(value, nn.Module):
            made[name] = _cut(value, start, end)
        elif isinstance(value, mx.array):
            made[name] = value[start:end]
    return made
