"""The engine's thread of a replica whose model makes images."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from ...model_files.image_folders import image_files, read_component_files
from ...model_files.weights import WeightFile
from ..jobs.serving import JobServing, Loaded
from .engine import ImageEngine
from .pipeline import ImagePipeline


class ImageServing(JobServing):
    """Loads and serves a model that makes images."""

    library, does = "mlx-vlm", "makes images"

    def files_of(self, folder: Path) -> tuple[dict[str, Path], list[WeightFile]]:
        return image_files(folder), read_component_files(folder)

    def load(self, folder: Path, source: str) -> Loaded:
        pipeline = ImagePipeline.load(folder, source)
        return Loaded(partial(ImageEngine, pipeline), pipeline.info.edits)
