"""The embedded vision model is trained on what mlx-vlm will give it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from mlx_vlm.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from satchel.actors.model_files.source import EMBEDDED
from training.shapes import data, drawing, scenes, talk

MODEL = EMBEDDED / "shapes"


@pytest.fixture(scope="module")
def processor() -> Any:
    return Qwen3VLProcessor.from_pretrained(str(MODEL))


def test_the_folder_is_small():
    assert sum(path.stat().st_size for path in MODEL.iterdir()) <= 16_000_000


def test_a_chat_is_the_beginning_of_its_continuation(processor: Any):
    rng = random.Random(3)
    for _ in range(20):
        messages = talk.any_chat(rng).messages
        render = processor.tokenizer.apply_chat_template
        whole = render(messages, tokenize=False)
        for place, message in enumerate(messages):
            if message["role"] == "assistant":
                asked = render(messages[:place], tokenize=False, add_generation_prompt=True)
                assert whole.startswith(f"{asked}{message['content']}<|im_end|>\n")


def test_media_stand_where_they_stand_in_the_message(processor: Any):
    content = [
        {"type": "text", "text": "A"},
        {"type": "image_url", "image_url": {"url": "data:,"}},
        {"type": "text", "text": "B"},
        {"type": "video"},
    ]
    said = processor.tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    image, video = (f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video"))
    assert said == f"<|im_start|>user\nA{image}B{video}<|im_end|>\n"


def test_training_sees_what_the_processor_gives(processor: Any):
    """The same tokens and, to the last bit of a byte, the same pixels; pictures and videos of every size."""
    rng, kinds = random.Random(5), set()
    for _ in range(25):
        chat = talk.any_chat(rng)
        row = data.row_of(chat, processor.tokenizer.backend_tokenizer)
        films = [medium for medium in chat.media if isinstance(medium, scenes.Film)]
        videos: dict[str, Any] = {}
        if films:
            videos["videos"] = [drawing.frames_of(film) for film in films]
            videos["video_metadata"] = [
                {"fps": 1 / film.times[1], "frames_indices": list(range(len(film.times)))} for film in films
            ]
        pictures = [drawing.shown(scene) for scene in chat.scenes]
        text = processor.tokenizer.apply_chat_template(chat.messages, tokenize=False)
        given = processor(text=text, images=pictures or None, **videos)
        assert np.array(given["input_ids"])[0].tolist() == row.tokens.tolist()
        for kind, name in (("image", "pixel_values"), ("video", "pixel_values_videos")):
            media = [medium for medium in row.media if medium.kind == kind]
            if media:
                kinds.add(kind)
                pixels = np.concatenate([_pixels(medium.patches) for medium in media])
                assert np.abs(np.array(given[name]) - (pixels / 255 - 0.5) / 0.5).max() < 1e-5
    assert kinds == {"image", "video"}


def _pixels(patches: np.ndarray) -> np.ndarray:
    """Patches (frames, patches, 3, 16, 16) as the model reads them: (pairs of frames x patches, 3 x 2 x 16 x 16)."""
    pairs = patches if len(patches) > 1 else np.repeat(patches, 2, axis=0)
    pairs = pairs.reshape(-1, 2, *pairs.shape[1:]).transpose(0, 2, 3, 1, 4, 5)
    return pairs.reshape(-1, 3 * 2 * 16 * 16).astype(np.float64)
