"""What a model will need, from the headers of its files, if they are on this machine."""

from __future__ import annotations

from pathlib import Path

from ...cluster.config.config import Drafting, Model
from ...cluster.errors import ModelLoadError
from ..model_files.image_folders import has_image_layout, read_component_files
from ..model_files.source import ADAPTER_WEIGHTS, found_here
from ..model_files.speech_folders import read_speech_weights, speech_folder
from ..model_files.weights import WeightFile, bytes_in_memory, read_weight_file, read_weight_files


def _adapters(model: Model) -> list[WeightFile]:
    """Returns the files of the model's adapters that are in folders here."""
    folders = [Path(source).expanduser() for source in model.adapters.values()]
    return [read_weight_file(folder / ADAPTER_WEIGHTS) for folder in folders if (folder / ADAPTER_WEIGHTS).is_file()]


def _drafting(model: Model) -> list[WeightFile]:
    """Returns the files of the model that drafts for it, if they are here. Damaged ones count nothing: the model is
    served without them."""
    try:
        folder = found_here(model.drafts.model) if isinstance(model.drafts, Drafting) else None
        return read_weight_files(folder) if folder is not None else []
    except ModelLoadError:
        return []


def weights_bytes(model: Model) -> int:
    """Returns a lower bound of what a model's weights take in memory, in bytes; 0 if its files are not here, or are
    damaged, which its replica reports. Reads a few files."""
    try:
        folder = found_here(model.source)
        if folder is not None and has_image_layout(folder):
            return bytes_in_memory(read_component_files(folder), None)
        if folder is not None and speech_folder(folder) is not None:
            return bytes_in_memory(read_speech_weights(folder), None)
        files = [*read_weight_files(folder), *_adapters(model), *_drafting(model)] if folder is not None else []
    except ModelLoadError:
        return 0
    # Floats may be stored in a larger type than they are computed in, or in a smaller one.
    float_bytes = 4 if model.dtype == "float32" else 2
    stored = bytes_in_memory(files, None)
    return bytes_in_memory(files, float_bytes) if model.dtype != "auto" else min(stored, bytes_in_memory(files, 2))
