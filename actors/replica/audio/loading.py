"""Loads a model of mlx-audio from its folder alone: its own code is not run, and nothing is fetched."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn import Module
from mlx.utils import tree_flatten

from ....cluster.errors import ModelLoadError
from ...model_files.foreign_code import own_code_only, refuse_model_file, refuse_processor_code
from ...model_files.source import first_sentence, read_json
from ...model_files.speech_folders import SpeechFolder, refuse_other_places, speech_folder
from ...patches import hub_closed
from ..device.device import on_gpu

logger = logging.getLogger(__name__)

LOAD_ERRORS = (Exception, SystemExit)
_HALVES = (mx.float16, mx.bfloat16)


def load_speech_model(folder: Path, source: str) -> tuple[Any, SpeechFolder]:
    """Returns mlx-audio's model, with all weights in memory. From now on this process asks the Hub for nothing.

    Raises:
        ModelLoadError: it is none, a file is damaged or missing, or it needs code, packages or other repositories.
    """
    found = speech_folder(folder)
    if found is None:
        raise ModelLoadError(f"{source} cannot be loaded: its config.json is not that of a model of mlx-audio")
    refuse_model_file(source, read_json(folder / "config.json"), trusted=False)
    refuse_processor_code(source, folder, trusted=False)
    refuse_other_places(source, folder)
    hub_closed().make()
    with own_code_only(source, folder, trusted=False):
        try:
            code = import_module(f"mlx_audio.{found.kind}.utils")
            # Without the parts of the folder's name, which mlx-audio would trust before its config.
            model = code.load_model(folder, model_type=found.type, model_name_parts=[])
            _refuse_incomplete(model, folder)
            if not on_gpu():
                compute_in_float32(model)
        except ModelLoadError:
            raise
        except LOAD_ERRORS as error:
            raise ModelLoadError(f"{source} cannot be loaded: {what_it_lacks(error)}") from error
    mx.clear_cache()
    return model, found


def compute_in_float32(model: Any) -> None:
    """Turns a model's arrays of 16 bits into float32: a CPU multiplies these as fast, and with OpenBLAS five times as
    fast. What the model itself takes for its dtype changes too."""
    for _, module in model.named_modules() if isinstance(model, Module) else ():
        for name, array in module.items():
            if isinstance(array, mx.array) and array.dtype in _HALVES:
                module[name] = array.astype(mx.float32)
        if isinstance(dtype := getattr(module, "dtype", None), mx.Dtype) and dtype in _HALVES:
            module.dtype = mx.float32


def _refuse_incomplete(model: Any, folder: Path) -> None:
    """Refuses a model with layers for whose parameters the files have no values: mlx-audio leaves them as they are
    drawn. Arrays of the families' own classes may be computed, and are not looked at.

    Raises:
        ModelLoadError: with the name of one.
    """
    if not isinstance(model, Module) or hasattr(import_module(family_package(model)), "prepare_model_path"):
        return
    from mlx_audio.utils import load_weights

    try:
        weights = load_weights(folder)
        sanitize: Any = getattr(model, "sanitize", None)
        weights = weights if sanitize is None else sanitize(weights)
    except LOAD_ERRORS as error:
        # Some change themselves while they are loaded.
        logger.info("the names of the weights are not known: %s", error)
        return
    layers = {name for name, each in model.named_modules() if type(each).__module__.startswith("mlx.nn.")}
    parameters: Any = tree_flatten(model.parameters())
    missing = sorted({name for name, _ in parameters if name.rpartition(".")[0] in layers} - weights.keys())
    if missing:
        raise ModelLoadError(f"{folder} is incomplete: its weights lack {missing[0]} ({len(missing)} in all)")


def family_package(model: Any) -> str:
    """Returns the name of the package with a model's family, such as `mlx_audio.stt.models.whisper`."""
    return ".".join(type(model).__module__.split(".")[:4])


def what_it_lacks(error: BaseException) -> str:
    """Returns why a model does not load or run, as a part of a sentence."""
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    for each in _causes(error):
        if isinstance(each, ModuleNotFoundError) and each.name:
            package = each.name.partition(".")[0]
            return f"it needs the Python package {package}, which is not installed here"
        if isinstance(each, LocalEntryNotFoundError | OfflineModeIsEnabled):
            repository = _repository(each)
            of = f" of {repository}" if repository else " of another repository"
            return f"it needs files{of} on the Hub, and models of speech are loaded from their own folder alone"
    return first_sentence(error)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error and those that it came from."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _repository(error: BaseException) -> str:
    """Returns the repository that the Hub's client was asked for, "" if that is not known. Its message has no name."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if isinstance(name := frame.f_locals.get("repo_id"), str):
            return name
    return ""
