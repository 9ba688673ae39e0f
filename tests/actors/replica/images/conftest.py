"""Tiny models that make images, loaded once."""

from __future__ import annotations

from pathlib import Path

import pytest

from satchel.actors.replica.images.pipeline import ImagePipeline
from tests.worlds.models.image_families import write_image_model


@pytest.fixture(scope="session")
def image_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("images")
    # The folders' names say nothing of the families, or something wrong.
    return {
        "z_image": write_image_model(root / "qwen-7b", "z_image"),
        "moss_image": write_image_model(root / "tiny", "moss_image"),
    }


@pytest.fixture(scope="session")
def pipelines(image_folders: dict[str, Path]) -> dict[str, ImagePipeline]:
    return {family: ImagePipeline.load(folder, family) for family, folder in image_folders.items()}
