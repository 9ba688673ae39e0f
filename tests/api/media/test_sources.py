"""The forms in which callers name pictures and videos."""

from __future__ import annotations

from typing import Any

import pytest

from satchel.api.media.sources import AudioSource, MediaSource, Picture, PictureSource, VideoSource, check_urls
from satchel.api.protocols.openai.messages import media_part
from satchel.cluster.errors import InvalidRequest

HERE = "messages[2].content[0]"
URL = "https://example.com/cat.png"

MP3 = "data:audio/mp3;base64,AA=="


def read(part: dict[str, Any]) -> MediaSource | None:
    source = media_part(part, HERE)
    if source is not None:
        check_urls(source)
    return source


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ({"type": "image_url", "image_url": {"url": URL}}, PictureSource(HERE, URL)),
        ({"type": "image_url", "image_url": {"url": URL, "detail": "low"}}, PictureSource(HERE, URL, "low")),
        ({"type": "image_url", "image_url": URL}, PictureSource(HERE, URL)),
        ({"type": "input_image", "image_url": URL, "detail": "high"}, PictureSource(HERE, URL, "high")),
        ({"type": "image_url", "image_url": {"url": URL, "detail": "original"}}, PictureSource(HERE, URL, "high")),
        ({"type": "input_image", "image_url": URL, "detail": "xhigh"}, PictureSource(HERE, URL, "auto")),
        ({"type": "image", "image": "/pictures/cat.png"}, PictureSource(HERE, "/pictures/cat.png")),
        ({"type": "image", "url": "file:///cat.png"}, PictureSource(HERE, "file:///cat.png")),
        ({"type": "image", "image": "DATA:,x", "min_pixels": 9}, PictureSource(HERE, "DATA:,x", "auto", 9)),
        (
            {"type": "image_url", "image_url": {"url": URL, "max_pixels": 7}, "min_pixels": 5},
            PictureSource(HERE, URL, "auto", 5, 7),
        ),
        ({"type": "image_url", "image_url": {"url": URL, "format": "image/png"}}, PictureSource(HERE, URL)),
        (
            {"type": "image_url", "image_url": {"url": URL}, "cache_control": {"type": "ephemeral"}, "detail": "low"},
            PictureSource(HERE, URL, "low"),
        ),
        (
            {"type": "image_url", "image_url": {"url": URL, "detail": None, "invented": None}, "text": None},
            PictureSource(HERE, URL),
        ),
        ({"type": "video_url", "video_url": {"url": URL}}, VideoSource(HERE, URL)),
        ({"type": "video", "video": URL, "nframes": None, "cache_control": {}}, VideoSource(HERE, URL)),
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
        (
            {"type": "input_audio", "input_audio": {"data": "AA==", "format": "mp3"}},
            AudioSource(HERE, "data:;base64,AA==", "mp3"),
        ),
        ({"type": "audio_url", "audio_url": {"url": MP3}}, AudioSource(HERE, MP3)),
        ({"type": "audio", "audio": {"url": MP3, "format": "mp3"}}, AudioSource(HERE, MP3)),
        ({"type": ["image"]}, None),
        ({}, None),
    ],
)
def test_every_form_names_its_source(part: dict[str, Any], source: MediaSource | None) -> None:
    assert read(part) == source


@pytest.mark.parametrize(
    ("part", "place"),
    [
        ({"type": "image_url"}, "image_url"),
        ({"type": "image_url", "image_url": {}}, "image_url.url"),
        ({"type": "image_url", "image_url": 7}, "image_url"),
        ({"type": "image_url", "image_url": "cat.png"}, "image_url"),
        ({"type": "image_url", "image_url": "ftp://example.com/cat.png"}, "image_url"),
        ({"type": "image_url", "image_url": {"url": "javascript:alert(1)"}}, "image_url.url"),
        ({"type": "image_url", "image_url": {"url": URL, "detail": 5}}, "detail"),
        ({"type": "image_url", "image_url": {"url": URL, "detail": ["low"]}}, "detail"),
        ({"type": "image", "image": URL, "max_pixels": 0}, "max_pixels"),
        ({"type": "image", "image": URL, "max_pixels": True}, "max_pixels"),
        ({"type": "image", "image": URL, "max_pixels": 1.5}, "max_pixels"),
        ({"type": "image", "image": URL, "min_pixels": 10**30}, "min_pixels"),
        ({"type": "image", "image": URL, "min_pixels": 9, "max_pixels": 8}, "min_pixels"),
        ({"type": "image", "image": [URL]}, "image"),
        ({"type": "video", "video": []}, "video"),
        ({"type": "video", "video": [URL, 3]}, "video[1]"),
        ({"type": "video", "video": [URL, "ftp://example.com/cat.png"]}, "video[1]"),
        ({"type": "video", "video": [URL, {"url": "ftp://example.com/cat.png"}]}, "video[1].url"),
        ({"type": "video", "video": URL, "fps": 0}, "fps"),
        ({"type": "video", "video": URL, "fps": float("nan")}, "fps"),
        ({"type": "video", "video": URL, "fps": "2"}, "fps"),
        ({"type": "video", "video": URL, "max_frames": -1}, "max_frames"),
        ({"type": "image_url", "image_url": {"url": URL}, "uuid": "a"}, "uuid"),
        ({"type": "image_url", "image_url": {"url": URL}, "format": "image/png"}, "format"),
        ({"type": "image_url", "image_url": {"url": URL, "max_dynamic_patch": 4}}, "image_url.max_dynamic_patch"),
        ({"type": "image_url", "image_url": {"url": URL, "type": "png"}}, "image_url.type"),
        ({"type": "image", "image": URL, "resized_height": 0}, "resized_height"),
        ({"type": "image", "image": URL, "fps": 1}, "fps"),
        ({"type": "video", "video": URL, "nframes": 4}, "nframes"),
        ({"type": "video", "video": URL, "video_start": False}, "video_start"),
        ({"type": "video", "video": [URL], "total_pixels": 9}, "total_pixels"),
        ({"type": "video", "video": URL, "detail": "low"}, "detail"),
        ({"type": "video", "video": [URL, {"image": URL, "fps": 1}]}, "video[1].fps"),
        ({"type": "video_url", "video_url": {"url": URL, "nframes": 4}}, "video_url.nframes"),
        ({"type": "video_url", "video_url": {"url": URL, "format": "video/mp4"}}, "video_url.format"),
    ],
)
def test_a_wrong_form_is_named_by_its_place(part: dict[str, Any], place: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(part)
    assert caught.value.param == f"{HERE}.{place}"
    assert caught.value.message.startswith(f"{HERE}.{place} ")


def test_an_unknown_option_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(InvalidRequest) as caught:
        read({"type": "video_url", "video_url": {"url": URL, "nframes": 4}})
    assert caught.value.message == (
        f"{HERE}.video_url.nframes is not supported; possible are fps, max_frames, min_pixels, max_pixels"
    )


def test_contents_stay_out_of_logs() -> None:
    secret = "data:,secret"
    for shown in (PictureSource(HERE, secret), VideoSource(HERE, secret), Picture(1, 1, b"secret", b"")):
        assert "secret" not in repr(shown)
