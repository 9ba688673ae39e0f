"""Folders of models that make images: a folder for each component, as diffusers lays them out."""

from __future__ import annotations

from pathlib import Path

from ...cluster.errors import ModelLoadError
from .source import WEIGHTS, is_model_folder
from .weights import WeightFile, read_weight_file

COMPONENT_WEIGHTS = "*/*.safetensors"
_READ = (".safetensors", ".json", ".jinja", ".txt", ".model", ".tiktoken")


def has_image_layout(folder: Path) -> bool:
    """Returns whether a folder has its weights in components' folders, as only models that make images have them."""
    return is_model_folder(folder) and not any(folder.glob(WEIGHTS)) and any(folder.glob(COMPONENT_WEIGHTS))


def image_files(folder: Path) -> dict[str, Path]:
    """Returns the files that identify a model that makes images, by name."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix in _READ)
    return {f"model/{path.relative_to(folder).as_posix()}": path for path in paths}


def read_component_files(folder: Path) -> list[WeightFile]:
    """Reads the headers of all components' weights, and checks that every file is complete.

    Raises:
        ModelLoadError: there are none, or one is damaged.
    """
    paths = [path for path in sorted(folder.glob(COMPONENT_WEIGHTS)) if not path.name.startswith("._")]
    if not paths:
        raise ModelLoadError(f"{folder} cannot be loaded: it has no weights ({COMPONENT_WEIGHTS})")
    return [read_weight_file(path) for path in paths]
