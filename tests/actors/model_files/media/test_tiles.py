"""A processor that cuts pictures into tiles, for an encoder that reads as many counts as there are tiles."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from satchel.actors.model_files.media.processors import PictureProcessor
from tests.worlds.models.vision_families import write_files
from tests.zoo.vision_types import TYPES


@pytest.mark.parametrize(("size", "tiles"), [((64, 64), 2), ((300, 900), 3)])
def test_behind_the_count_of_a_picture_come_rows_that_end_it(tmp_path: Path, size: tuple[int, int], tiles: int):
    write_files(tmp_path, "deepseek_vl_v2", TYPES["deepseek_vl_v2"])
    made = PictureProcessor.load(tmp_path).inputs([Image.new("RGB", size)], video=False)
    counts = np.array(made["images_spatial_crop"])
    assert counts.shape == (1, tiles, 2) and np.array(made["pixel_values"]).shape[1] == tiles
    assert int(counts[0, 0].prod()) == tiles - 1 and not counts[0, 1:].any()
