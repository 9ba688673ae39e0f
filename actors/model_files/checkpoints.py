"""Loads text checkpoints as they are published: with nulls for unset settings, and with a copy of an output layer that
is tied to the embeddings.

A null counts as absent if the model's code does not accept None. A copy that equals the embeddings is dropped. A copy
that differs is a separate output layer even if the config says that it is tied, as in transformers; if the model's code
has no place for one, the model is refused.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model as mlx_lm_load_model

from ...cluster.errors import ModelLoadError
from ..patches import classes_by_config, weights_read

logger = logging.getLogger(__name__)

_HEADS = ("lm_head", "output", "output_layer", "embed_out")
_EMBEDDINGS = (
    *("embed_tokens", "tok_embeddings", "wte", "embed_in", "word_embeddings", "embeddings", "embedding", "embed"),
    *("token_embd", "token_embeddings"),
)
_LEAVES = ("weight", "scales", "biases")
_TIED = "tie_word_embeddings"
_PARTS = ("text_config",)


class _OwnHead(Exception):
    """The output layer is not that of the embeddings; the message is its name."""


def load_checkpoint(folder: Path, *, trusted: bool) -> tuple[Any, dict[str, Any]]:
    """Loads a model of text with lazy weights, and its config.

    Args:
        trusted: whether code in the folder may run.

    Raises:
        ModelLoadError: it has an output layer of its own, and its code has no place for it.
        Exception: whatever mlx-lm raises.
    """
    try:
        return _load(folder, trusted=trusted, tied=True)
    except _OwnHead as error:
        name = str(error)
    logger.warning(
        "%s says that its output layer is tied, but %s is not its embeddings: it is used as a layer of its own",
        *(folder.name, name),
    )
    try:
        return _load(folder, trusted=trusted, tied=False)
    except _OwnHead:
        raise ModelLoadError(
            f"{folder.name} cannot be loaded: {name} is not its embeddings, and models of this type have no output "
            "layer of their own here"
        ) from None


def _load(folder: Path, *, trusted: bool, tied: bool) -> tuple[Any, dict[str, Any]]:
    changes = ExitStack()

    def classes(config: dict[str, Any]) -> Any:
        model_class, arguments = classes_by_config(config)
        drop_nulls(config, arguments)
        if not tied:
            for part in (config, *(config[name] for name in _PARTS if isinstance(config.get(name), dict))):
                part[_TIED] = False

        def make(given: Any) -> Any:
            model = model_class(given)
            sanitize = getattr(model, "sanitize", None)

            def read(weights: dict[str, mx.array]) -> dict[str, mx.array]:
                weights = _without_copies(weights, _names(model))
                if sanitize is not None:
                    weights = sanitize(weights)
                return _without_equals(weights, _names(model))

            changes.enter_context(weights_read(model, read).for_now())
            return model

        return make, arguments

    with changes:
        return mlx_lm_load_model(folder, lazy=True, trust_remote_code=trusted, get_model_classes=classes)


def _names(model: Any) -> set[str]:
    return {name for name, _ in tree_flatten(model.parameters())}


def _layer(name: str) -> tuple[str, str]:
    """Returns the last name of a tensor's layer, and the tensor's own."""
    path, _, leaf = name.rpartition(".")
    return path.rpartition(".")[2], leaf


def _without_copies(weights: dict[str, mx.array], places: set[str]) -> dict[str, mx.array]:
    """Returns a file's weights without the copy of a tied output layer.

    Args:
        places: names of the model's parameters.

    Raises:
        _OwnHead: it is no copy.
    """
    if any(_layer(name)[0] in _HEADS for name in places):
        return weights
    heads = [name for name in weights if _layer(name)[0] in _HEADS and _layer(name)[1] in _LEAVES and _is_last(name)]
    if not any(_layer(name)[1] == "weight" for name in heads):
        return weights
    embeddings = {
        _layer(name)[1]: value for name, value in weights.items() if _layer(name)[0] in _EMBEDDINGS and _is_last(name)
    }
    if "weight" not in embeddings:
        # Under another name: the model's own code may know it.
        return weights
    for name in heads:
        if not _equal(weights[name], embeddings.get(_layer(name)[1])):
            raise _OwnHead(name)
    return {name: value for name, value in weights.items() if name not in heads}


def _is_last(name: str) -> bool:
    """Whether a tensor is of no layer of attention or the like, which have outputs of their own."""
    return not any(step.isdecimal() for step in name.split("."))


def _without_equals(weights: dict[str, mx.array], places: set[str]) -> dict[str, mx.array]:
    """Returns the weights without those that equal the embeddings and have no place in the model."""
    for name in [name for name in weights if name not in places and _layer(name)[0] in _HEADS and _is_last(name)]:
        like = [value for known, value in weights.items() if known in places and _layer(known)[0] in _EMBEDDINGS]
        if any(_equal(weights[name], value) for value in like):
            weights = {known: value for known, value in weights.items() if known != name}
    return weights


def _equal(first: mx.array, second: mx.array | None) -> bool:
    if second is None or first.shape != second.shape or first.dtype != second.dtype:
        return False
    return bool(mx.array_equal(first, second).item())


def drop_nulls(config: dict[str, Any], arguments: Any) -> None:
    """Removes settings that are null in a config if the model's code does not accept None, also in the config's parts.
    Then the model's default counts.

    Args:
        arguments: the model's dataclass of settings; others of its module read parts of the config.
    """
    _drop(config, [arguments])
    parts = list(_arguments_near(arguments))
    for part in config.values():
        if isinstance(part, dict):
            _drop(part, parts)


def _drop(part: dict[str, Any], readers: list[Any]) -> None:
    for name in [name for name, value in part.items() if value is None]:
        fields = [(reader, field) for reader in readers if (field := _fields(reader).get(name)) is not None]
        if not any(_takes_none(*each) for each in fields):
            del part[name]


def _fields(reader: Any) -> Mapping[str, dataclasses.Field[Any]]:
    return getattr(reader, "__dataclass_fields__", {})


def _takes_none(reader: Any, field: dataclasses.Field[Any]) -> bool:
    if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
        # The key must be there nevertheless.
        return True
    if field.default is None or any(word in str(field.type) for word in ("None", "Optional", "Any")):
        return True
    # DeepSeek-V2-Lite has a `q_lora_rank` of null, which is declared as a number.
    return re.search(rf"\b{field.name} is (not )?None\b", _source_of(reader)) is not None


def _source_of(reader: Any) -> str:
    """The code of the module in which a dataclass is defined; empty if it cannot be read."""
    try:
        return inspect.getsource(sys.modules[reader.__module__])
    except (KeyError, OSError, TypeError):
        return ""


def _arguments_near(arguments: Any) -> Iterator[Any]:
    """The dataclasses that the module of a model's settings has, and those of the models that it is made of."""
    home = sys.modules.get(getattr(arguments, "__module__", ""))
    modules = [home, *(each for each in vars(home).values() if isinstance(each, ModuleType))] if home else []
    for module in modules:
        if module is not None and module.__name__.startswith("mlx_lm.models"):
            yield from (each for each in vars(module).values() if inspect.isclass(each) and _fields(each))
