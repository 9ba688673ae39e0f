"""A processor that marks a picture's place with a number outside the vocabulary, as if that were a token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from satchel.actors.model_files.media.processors import PictureProcessor
from tests.worlds.models.vision_families import write_files
from tests.zoo.vision_types import TYPES

SIZE, OTHER = (224, 168), (300, 300)


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> PictureProcessor:
    folder: Path = tmp_path_factory.mktemp("marked")
    write_files(folder, "phi4mm", TYPES["phi4mm"])
    return PictureProcessor.load(folder)


def test_a_mark_is_as_many_tokens_as_the_model_makes_embeddings(processor: PictureProcessor):
    laid = processor.layout(*SIZE)
    assert set(laid.span.tokens) == {processor.token}
    assert len(laid.span.tokens) > 1
    assert processor.tokens(laid.text) == [*laid.span.tokens]


def test_the_model_gets_the_mark(processor: PictureProcessor):
    text, pictures = f"one{processor.placeholder}two", [Image.new("RGB", SIZE)]
    tokens = np.array(processor.read(text, pictures)["input_ids"]).reshape(-1).tolist()
    marked = processor.marked(tokens)
    assert [number for number in marked if number < 0] == [-200]
    assert [number for number in marked if number >= 0] == [each for each in tokens if each != processor.token]


def test_pictures_of_other_sizes_have_their_own_numbers_of_tokens(processor: PictureProcessor):
    text, pictures = processor.placeholder * 2, [Image.new("RGB", size) for size in (SIZE, OTHER)]
    tokens = np.array(processor.read(text, pictures)["input_ids"]).reshape(-1).tolist()
    assert tokens.count(processor.token) == sum(len(processor.layout(*size).span.places) for size in (SIZE, OTHER))
