"""Quantizes a model's weights with mlx-lm's own functions, into a folder that mlx-lm and Satchel can load.

A *recipe* says how many bits every layer's weights get. `8-4-4` gives eight to attention, four to the embedding (and to
a head of its own) and four to the feed-forward part: errors of attention reach every later token, and attention is the
smallest of the three, so the eight bits cost little.
"""

from __future__ import annotations

import inspect
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.convert import QUANT_RECIPES, mixed_quant_predicate_builder
from mlx_lm.utils import compute_bits_per_weight, quantize_model, save_config, save_model

from ...cluster.errors import ModelLoadError
from .checkpoints import load_checkpoint
from .foreign_code import refuse_model_file
from .media.processors import sees
from .source import INDEX, Progress, first_sentence, read_json, resolve
from .weights import read_weight_files

ATTENTION_8 = "8-4-4"
PLAIN = {"4": 4, "8": 8}
"""Recipes with the same number of bits everywhere."""

RECIPES = (ATTENTION_8, *PLAIN, *QUANT_RECIPES)

GROUP_SIZES = (64, 32)
"""Group sizes (weights that share a scale), the best first."""

_GIVEN = ("cache", "mask")
"""Arguments that a layer passes to its attention, and not to its feed-forward part."""

_NOT_KEPT = ("config.json", INDEX, "hf_quant_config.json")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
_ERRORS = (Exception, SystemExit)

Bits = Callable[[str, nn.Module], "dict[str, Any] | bool"]
"""Given a layer's path and the layer: how it is quantized, as `nn.quantize` wants it."""


@dataclass(frozen=True)
class Converted:
    """The result of a conversion.

    Attributes:
        layers: how many layers have these (bits, weights that share a scale).
        plain: paths of layers that no group size fits; they stay unquantized.
        bits_per_weight: of all weights, scales included.
        nbytes: of the weight files.
    """

    folder: Path
    layers: dict[tuple[int, int], int]
    plain: list[str]
    bits_per_weight: float
    nbytes: int


def convert(source: str, target: Path, recipe: str, dtype: str, progress: Progress) -> Converted:
    """Writes a model with quantized weights into a new folder. All other files of the model are copied as they are.

    Args:
        source: as for `resolve`.
        recipe: one of `RECIPES`.
        dtype: of unquantized weights and of scales; `auto` for the weights' own.

    Raises:
        ModelLoadError: there is no such model, it is quantized already, the recipe does not suit it, or the folder
            exists or cannot be written.
    """
    if target.exists():
        raise ModelLoadError(f"{target} exists already: name another folder with --to, or remove it")
    folder = resolve(source, progress)
    progress(f"reading {source}", None)
    config = read_json(folder / "config.json")
    refuse_model_file(source, config, trusted=False)
    read_weight_files(folder)
    seeing = sees(folder)
    model = lazy_model(source, folder, seeing=seeing)
    _refuse_quantized(source, model)
    if dtype != "auto":
        _cast(model, getattr(mx, dtype))
    chosen = bits_of_layers(source, model, recipe, seeing=seeing)
    progress(f"converting {source}", None)
    partial = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        # On GPUs `mx.quantize` takes the range of a group of one sign to reach to 0.
        with redirect_stdout(StringIO()), mx.stream(mx.cpu):
            model, config = quantize_model(model, config, chosen.group_size, 4, quant_predicate=chosen)
        per_weight = compute_bits_per_weight(model)
        save_model(partial, model, donate_model=True)
        save_config(config, partial / "config.json", keep_vision_config=seeing)
        _copy_others(folder, partial)
        partial.chmod(0o777 & ~_umask())
        partial.rename(target)
    except _ERRORS as error:
        raise ModelLoadError(f"{target} cannot be written: {first_sentence(error)}") from error
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)
    size = sum(path.stat().st_size for path in target.glob("*.safetensors"))
    return Converted(target, dict(chosen.layers), chosen.plain, per_weight, size)


def bits_of_layers(source: str, model: Any, recipe: str, *, seeing: bool) -> LayerBits:
    """Returns how a recipe quantizes each layer of a model.

    Raises:
        ModelLoadError: the recipe does not suit the model.
    """
    return LayerBits(model, _bits_of(source, model, recipe, seeing=seeing), seeing=seeing)


def recipe_bytes(source: str, model: Any, recipe: str, *, seeing: bool) -> int:
    """Returns the bytes that a model's weights would have after a recipe. Nothing is computed.

    Args:
        model: with lazy weights.

    Raises:
        ModelLoadError: it is quantized already, or the recipe does not suit it.
    """
    _refuse_quantized(source, model)
    chosen = bits_of_layers(source, model, recipe, seeing=seeing)
    parameters: Any = tree_flatten(model.parameters())
    total = sum(array.nbytes for _, array in parameters)
    for path, layer in model.named_modules():
        if isinstance(how := chosen(path, layer), dict):
            weight: mx.array = layer.weight
            # A group has a scale and a bias in the weights' precision.
            total += int(weight.size * (how["bits"] / 8 + 2 * weight.itemsize / how["group_size"])) - weight.nbytes
    return total


def _refuse_quantized(source: str, model: Any) -> None:
    """
    Raises:
        ModelLoadError: the model is quantized already.
    """
    if any("scales" in module for _, module in model.named_modules()):
        raise ModelLoadError(f"{source} is quantized already: convert the model of which it was made, in 16 bits")


def attention_layers(model: Any) -> set[int]:
    """Returns the ids of all modules inside a model's attention, or inside what replaces attention: linear attention,
    state spaces, convolutions.

    No family's names are needed: a layer passes its cache or a mask only to its attention. So, from a layer inwards,
    the first modules whose call takes one of these are its attention. A feed-forward part that keeps a state counts as
    attention too.
    """
    return {id(part) for layer in _layers_of(model) for mixer in _mixers(layer) for _, part in mixer.named_modules()}


def _layers_of(model: Any) -> list[Any]:
    inner = getattr(model, "language_model", model)
    layers = getattr(model, "layers", None) or getattr(inner, "layers", None) or getattr(inner.model, "layers", [])
    return [layer for layer in layers if isinstance(layer, nn.Module)]


def _mixers(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children().values():
        for part in _modules_in(child):
            if any(name in inspect.signature(type(part).__call__).parameters for name in _GIVEN):
                yield part
            else:
                yield from _mixers(part)


def _modules_in(child: Any) -> Iterator[nn.Module]:
    if isinstance(child, nn.Module):
        yield child
    elif isinstance(child, list | tuple | dict):
        for each in child.values() if isinstance(child, dict) else child:
            yield from _modules_in(each)


def _bits_of(source: str, model: Any, recipe: str, *, seeing: bool) -> Bits:
    """Raises `ModelLoadError` if the recipe does not suit the model."""
    if recipe in PLAIN:
        return lambda path, layer: {"bits": PLAIN[recipe]}
    if recipe == ATTENTION_8:
        attention = attention_layers(model)
        if not any(id(layer) in attention and hasattr(layer, "to_quantized") for _, layer in model.named_modules()):
            raise ModelLoadError(
                f"{source} has no attention layers that can be quantized separately: use another recipe than 8-4-4"
            )
        return lambda path, layer: {"bits": 8 if id(layer) in attention else 4}
    try:
        if seeing:
            from mlx_vlm.convert import mixed_quant_predicate_builder as mixed

            return mixed(recipe, model)
        return mixed_quant_predicate_builder(recipe, model)  # type: ignore[return-value]
    except _ERRORS as error:
        raise ModelLoadError(f"{recipe} does not suit {source}: {first_sentence(error)}") from error


class LayerBits:
    """Decides how each layer is quantized: as the model's own code says, which keeps routers precise, else by the
    recipe, in groups that divide its inputs. In a vision model only the language part is quantized.

    Attributes:
        group_size: the largest that fits all layers that any group size fits.
        layers, plain: as in `Converted`.
    """

    def __init__(self, model: Any, bits: Bits, *, seeing: bool) -> None:
        self.layers: Counter[tuple[int, int]] = Counter()
        self._own = getattr(model, "quant_predicate", None)
        self._bits = bits
        self._seeing = seeing
        meant = [each for each in model.named_modules() if self._asked(*each) is not False]
        sizes = {path: _fitting(layer, GROUP_SIZES) for path, layer in meant}
        self.plain = sorted(path for path, size in sizes.items() if not size)
        self.group_size = min(filter(None, sizes.values()), default=GROUP_SIZES[0])

    def __call__(self, path: str, layer: Any) -> dict[str, Any] | bool:
        asked = self._asked(path, layer)
        if asked is False:
            return False
        given = {"bits": 4} if asked is True else asked
        bits, size = given["bits"], _fitting(layer, (given.get("group_size", GROUP_SIZES[0]), *GROUP_SIZES))
        self.layers[bits, size] += 1
        # Without a mode, which some layers do not take.
        return {"group_size": size, "bits": bits}

    def _asked(self, path: str, layer: Any) -> dict[str, Any] | bool:
        if not hasattr(layer, "to_quantized"):
            return False
        if self._seeing and not path.startswith("language_model."):
            return False
        own = self._own(path, layer) if self._own is not None else True
        return self._bits(path, layer) if own is True else own


def _fitting(layer: Any, sizes: Sequence[int]) -> int:
    """The first of these sizes that divides the layer's inputs, 0 for none."""
    return next((size for size in sizes if layer.weight.shape[-1] % size == 0), 0)


def lazy_model(source: str, folder: Path, *, seeing: bool) -> Any:
    """Returns the model in a folder with lazy weights.

    Raises:
        ModelLoadError: it cannot be loaded.
    """
    try:
        if seeing:
            from mlx_vlm.utils import load_model

            return load_model(folder, lazy=True)
        return load_checkpoint(folder, trusted=False)[0]
    except _ERRORS as error:
        raise ModelLoadError(f"{source} cannot be loaded: {first_sentence(error)}") from error


def _cast(model: Any, dtype: mx.Dtype) -> None:
    casts = getattr(model, "cast_predicate", lambda path: True)

    def cast(path: str, array: mx.array) -> mx.array:
        return array.astype(dtype) if casts(path) and mx.issubdtype(array.dtype, mx.floating) else array

    model.update(tree_map_with_path(cast, model.parameters()))


def _copy_others(folder: Path, target: Path) -> None:
    """Copies tokenizer, templates, processors and all other files without weights. Files of the Hub's cache are
    links."""
    for path in sorted(folder.rglob("*")):
        place = path.relative_to(folder)
        hidden = any(part.startswith(".") for part in place.parts)
        weights = path.suffix in _WEIGHT_SUFFIXES or path.name.endswith(".index.json") or str(place) in _NOT_KEPT
        if path.is_file() and not hidden and not weights:
            (target / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target / place)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
