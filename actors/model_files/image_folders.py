"""Folders of models that make images: a folder for each component, as diffusers lays them out."""

from __future__ import annotations

from pathlib import Path

from ...cluster.errors import ModelLoadError
from .source import WEIGHTS, files_in, is_model_folder
from .weights import WeightFile, read_weight_file

COMPONENT_WEIGHTS = "*/*.safetensors"
_READ = (".safetensors", ".json", ".jinja", ".txt", ".model", ".tiktoken")


def has_image_layout(folder: Path) -> bool:
    """Returns whether a folder has its weights in components' folders, as only models that make images have them."""
    return is_model_folder(folder) and not any(folder.glob(WEIGHTS)) and bool(files_in(folder, COMPONENT_WEIGHTS))


def image_files(folder: Path) -> dict[str, Path]:
    """Returns the files that identify a model that makes images, by name."""
    paths = [path for path in files_in(folder, "**/*") if path.suffix in _READ]
    return {f"model/{path.relative_to(folder).as_posix()}": path for path in paths}


def read_component_files(folder: Path) -> list[WeightFile]:
    """Reads the headers of all components' weights, and checks that every file is complete.

    Raises:
        ModelLoadError: there are none, or one is damaged.
    """
    paths = files_in(folder, COMPONENT_WEIGHTS)
    if not paths:
        raise ModelLoadError(f"{folder} cannot be loaded: it has no weights ({COMPONENT_WEIGHTS})")
    return [read_weight_file(path) for path in paths]
