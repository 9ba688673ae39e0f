"""The forms in which callers name pictures and videos."""

from __future__ import annotations

from typing import Any

import pytest

from satchel.api.picture_sources import Picture, PictureSource, VideoSource, media_part
from satchel.cluster.errors import InvalidRequest

HERE = "messages[2].content[0]"
URL = "https://example.com/cat.png"


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ({"type": "image_url", "image_url": {"url": URL}}, PictureSource(HERE, URL)),
        ({"type": "image_url", "image_url": {"url": URL, "detail": "low"}}, PictureSource(HERE, URL, "low")),
        ({"type": "image_url", "image_url": URL}, PictureSource(HERE, URL)),
        ({"type": "input_image", "image_url": URL, "detail": "high"}, PictureSource(HERE, URL, "high")),
        ({"type": "image", "image": "/pictures/cat.png"}, PictureSource(HERE, "/pictures/cat.png")),
        ({"type": "image", "url": "file:///cat.png"}, PictureSource(HERE, "file:///cat.png")),
        ({"type": "image", "image": "DATA:,x", "min_pixels": 9}, PictureSource(HERE, "DATA:,x", "auto", 9)),
        (
            {"type": "image_url", "image_url": {"url": URL, "max_pixels": 7}, "min_pixels": 5},
            PictureSource(HERE, URL, "auto", 5, 7),
        ),
        ({"type": "video_url", "video_url": {"url": URL}}, VideoSource(HERE, URL)),
        ({"type": "video_url", "video_url": {"url": URL, "fps": 1}}, VideoSource(HERE, URL, (), 1.0)),
        ({"type": "video", "video": URL, "max_frames": 3}, VideoSource(HERE, URL, (), None, 3)),
        (
            {"type": "video", "video": [URL, {"image_url": {"url": "/b"}}], "fps": 0.5, "max_pixels": 9},
            VideoSource(
                HERE,
                None,
                (
                    PictureSource(f"{HERE}.video[0]", URL, "auto", None, 9),
                    PictureSource(f"{HERE}.video[1]", "/b", "auto", None, 9),
                ),
                0.5,
                pixels_max=9,
            ),
        ),
        ({"type": "text", "text": "hi"}, None),
        ({"type": "input_audio"}, None),
        ({"type": ["image"]}, None),
        ({}, None),
    ],
)
def test_every_form_names_its_source(part: dict[str, Any], source: PictureSource | VideoSource | None) -> None:
    assert media_part(part, HERE) == source


@pytest.mark.parametrize(
    ("part", "place"),
    [
        ({"type": "image_url"}, "image_url"),
        ({"type": "image_url", "image_url": {}}, "image_url.url"),
        ({"type": "image_url", "image_url": 7}, "image_url"),
        ({"type": "image_url", "image_url": "cat.png"}, "image_url"),
        ({"type": "image_url", "image_url": "ftp://example.com/cat.png"}, "image_url"),
        ({"type": "image_url", "image_url": {"url": "javascript:alert(1)"}}, "image_url.url"),
        ({"type": "image_url", "image_url": {"url": URL, "detail": "huge"}}, "detail"),
        ({"type": "image_url", "image_url": {"url": URL, "detail": ["low"]}}, "detail"),
        ({"type": "image", "image": URL, "max_pixels": 0}, "max_pixels"),
        ({"type": "image", "image": URL, "max_pixels": True}, "max_pixels"),
        ({"type": "image", "image": URL, "max_pixels": 1.5}, "max_pixels"),
        ({"type": "image", "image": URL, "min_pixels": 10**30}, "min_pixels"),
        ({"type": "image", "image": URL, "min_pixels": 9, "max_pixels": 8}, "min_pixels"),
        ({"type": "image", "image": [URL]}, "image"),
        ({"type": "video", "video": []}, "video"),
        ({"type": "video", "video": [URL, 3]}, "video[1]"),
        ({"type": "video", "video": URL, "fps": 0}, "fps"),
        ({"type": "video", "video": URL, "fps": float("nan")}, "fps"),
        ({"type": "video", "video": URL, "fps": "2"}, "fps"),
        ({"type": "video", "video": URL, "max_frames": -1}, "max_frames"),
    ],
)
def test_a_wrong_form_is_named_by_its_place(part: dict[str, Any], place: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        media_part(part, HERE)
    assert caught.value.param == f"{HERE}.{place}"
    assert caught.value.message.startswith(f"{HERE}.{place} ")


def test_contents_stay_out_of_logs() -> None:
    secret = "data:,secret"
    for shown in (PictureSource(HERE, secret), VideoSource(HERE, secret), Picture(1, 1, b"secret", b"")):
        assert "secret" not in repr(shown)
