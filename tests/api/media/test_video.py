"""Which frames of a video are shown, and what is refused."""

from __future__ import annotations

import base64
import errno
import socket
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from satchel.api.media import video as video_decode
from satchel.api.media.fetch import PictureLoader
from satchel.api.media.pixels import Undecodable
from satchel.api.media.sources import Picture, PictureSource, VideoSource
from satchel.api.media.video import Deadline, FrameSampler, FrameSampling, decode_video, evenly
from satchel.api.media.video_worker import _check_whole
from satchel.api.media.worker_process import START_S
from satchel.cluster.bring_up.ports import free_port
from satchel.cluster.config.config import Media
from satchel.cluster.errors import InvalidRequest

from .test_pixels import packed

USUAL = FrameSampling(fps=2.0, frames_max=32, pixels_max=10**6, timeout_s=60.0)


def limited(**changes: Any) -> FrameSampling:
    return replace(USUAL, **changes)


def grey(value: int, width: int = 16, height: int = 8) -> Image.Image:
    return Image.new("RGB", (width, height), (value, value, value))


def animated(form: str, count: int, frame_ms: int, **options: Any) -> bytes:
    """`count` frames, each a little lighter than the one before."""
    frames = [grey(8 * index) for index in range(count)]
    if form == "WEBP":
        options["lossless"] = True
    return packed(frames[0], form, save_all=True, append_images=frames[1:], duration=frame_ms, **options)


def numbers(frames: list[Picture]) -> list[int]:
    return [frame.pixels[0] // 8 for frame in frames]


@settings(max_examples=100, deadline=None)
@given(
    times=st.lists(st.floats(0.0, 2.0), min_size=1, max_size=300),
    fps=st.floats(0.1, 60.0),
    frames_max=st.integers(1, 40),
)
def test_frames_are_in_order_and_never_too_many(times: list[float], fps: float, frames_max: int) -> None:
    sampler = FrameSampler(limited(fps=fps, frames_max=frames_max))
    seconds = np.cumsum([0.0, *times]).tolist()
    for second in seconds:
        if sampler.wants(second):
            sampler.take(Picture(1, 1, b"abc", b"", second))
            assert len(sampler._taken) < 2 * frames_max or frames_max == 1
    taken = [frame.seconds for frame in sampler.frames()]
    assert taken[0] == 0.0 and taken == sorted(taken)
    assert 1 <= len(taken) <= frames_max
    # No more frames per second than requested.
    assert len(taken) <= seconds[-1] * fps + 1 + 1e-3


def test_a_long_video_is_thinned_evenly_and_to_the_full_number() -> None:
    sampler = FrameSampler(limited(fps=2.0, frames_max=8))
    for index in range(25 * 60):
        if sampler.wants(index / 25):
            sampler.take(Picture(1, 1, b"abc", b"", index / 25))
    taken = [frame.seconds for frame in sampler.frames()]
    assert len(taken) == 8
    gaps = np.diff(taken)
    assert gaps.max() <= 2 * gaps.min() and taken[-1] > 50


def test_evenly_takes_the_first_and_the_last() -> None:
    assert evenly(range(10), 4) == [0, 3, 6, 9]
    assert evenly(range(3), 4) == [0, 1, 2]
    assert evenly(range(3), 1) == [0]


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_an_animations_frames_are_taken_by_their_times(form: str) -> None:
    frames = decode_video(animated(form, 12, 250), USUAL)
    assert [frame.seconds for frame in frames] == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
    assert numbers(frames) == [0, 2, 4, 6, 8, 10]
    assert numbers(decode_video(animated(form, 12, 250), limited(frames_max=3)))[0] == 0
    assert len(decode_video(animated(form, 12, 250), limited(frames_max=3))) == 3


def test_the_still_picture_of_an_animated_png_is_no_frame() -> None:
    frames = [grey(value) for value in (240, 0, 8)]
    data = packed(frames[0], "PNG", save_all=True, append_images=frames[1:], duration=500, default_image=True)
    assert numbers(decode_video(data, USUAL)) == [0, 1]


def test_frames_share_the_pixels_that_there_may_be() -> None:
    frames = [Image.new("RGB", (400, 200), colour) for colour in ("red", "green", "blue")]
    data = packed(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=500)
    shared = decode_video(data, limited(pixels_max=80_000, frames_max=4))
    assert [(frame.width, frame.height) for frame in shared] == [(141, 70)] * 3
    asked = decode_video(data, limited(shown_max=5000))
    assert [(frame.width, frame.height) for frame in asked] == [(100, 50)] * 3


def test_hostile_animations_are_refused() -> None:
    gif = animated("GIF", 4, 100)
    # A later frame that is larger than the canvas enlarges the canvas.
    second = gif.index(b"\x2c", gif.index(b"\x2c") + 1)
    grown = gif[: second + 5] + struct.pack("<HH", 3000, 3000) + gif[second + 9 :]
    still = packed(grey(1), "TIFF")
    thread = packed(grey(1, 201, 1), "GIF", save_all=True, append_images=[grey(2, 201, 1)])
    for data, reason in [
        (thread, "one side is more than 200 times"),
        (grown, r"media\.pixels_max"),
        (gif[: second + 12], "damaged"),
        (still, "no video that can be read; known are MP4"),
        (b"#EXTM3U\nhttp://127.0.0.1/", "no video"),
        (b"", "no video"),
    ]:
        with pytest.raises(Undecodable, match=reason):
            decode_video(data, USUAL)
    with pytest.raises(Undecodable, match=r"media\.timeout_s"):
        decode_video(gif, limited(timeout_s=-1.0))


def written(path: Path, codec: str, count: int) -> bytes:
    """Returns a video of `count` frames, ten per second, each lighter than the one before, with noise so that it is
    large."""
    import cv2

    noise = np.random.default_rng(0)
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*codec), 10, (64, 48))
    if not writer.isOpened():
        pytest.skip(f"OpenCV has no {codec} for {path.suffix} here")
    for index in range(count):
        frame = np.zeros((48, 64, 3), np.uint8)
        frame[..., 2] = 8 * index
        frame[16:, :, 1] = noise.integers(0, 256, (32, 64))
        writer.write(frame)
    writer.release()
    return path.read_bytes()


@pytest.fixture(scope="module")
def film(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Three seconds of MP4."""
    return written(tmp_path_factory.mktemp("film") / "film.mp4", "mp4v", 30)


def test_a_films_frames_are_taken_by_their_times(film: bytes) -> None:
    frames = decode_video(film, limited(frames_max=4))
    assert [(frame.width, frame.height) for frame in frames] == [(64, 48)] * 4
    assert [frame.seconds for frame in frames] == [0.0, 0.5, 1.5, 2.5]
    reds = [frame.pixels[0] for frame in frames]
    assert all(abs(red - 80 * frame.seconds) < 12 for red, frame in zip(reds, frames, strict=True)), reds
    assert all(frame.pixels[2] < 12 for frame in frames)


def test_a_film_that_is_damaged_too_large_or_too_slow_is_refused(film: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    for data, sampling, reason in [
        (film[:32], USUAL, "cannot be read"),
        (film, limited(pixels_max=3000), r"64 x 48 pixels: more than 3000"),
        (film, limited(timeout_s=-1.0), r"media\.timeout_s"),
    ]:
        with pytest.raises(Undecodable, match=reason):
            decode_video(data, sampling)
    # If the worker hangs or dies without an answer, only its request is refused.
    for command in ("import time; time.sleep(600)", "import os; os.abort()"):
        monkeypatch.setattr(video_decode, "_worker", lambda sampling, command=command: ["-c", command])
        with pytest.raises(Undecodable, match="too much time or memory"):
            decode_video(film, limited(timeout_s=0.5 - START_S))


PLAYLIST = b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nhttp://127.0.0.1:%d/x\n"
SESSION = b"v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\ns=x\r\nc=IN IP4 127.0.0.1\r\nt=0 0\r\nm=video %d RTP/AVP 26\r\n"


@pytest.mark.parametrize("head", [b"zzzzftypjp2 \n", b"\x1a\x45\xdf\xa3\n", b"RIFF0000AVI \n"])
@pytest.mark.parametrize("names_a_host", [PLAYLIST, SESSION], ids=["a playlist", "a session"])
def test_what_only_begins_like_a_film_is_read_as_nothing_else(
    monkeypatch: pytest.MonkeyPatch, head: bytes, names_a_host: bytes
) -> None:
    """FFmpeg read such a file as a session description, and opened ports for the host in it. It must not, even if the
    worker cannot leave the network."""
    stays = "from satchel.api.media import video_worker; video_worker.leave_network = lambda: None; video_worker.main()"
    usual = video_decode._worker
    monkeypatch.setattr(video_decode, "_worker", lambda sampling: ["-c", stays, usual(sampling)[-1]])
    opened: set[Any] = set()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(decode_video, head + names_a_host % free_port(), USUAL)
        while not reading.done():
            for worker in psutil.Process().children():
                with suppress(psutil.Error):
                    opened |= {each.laddr for each in worker.net_connections("inet")}
            time.sleep(0.02)
        with pytest.raises(Undecodable, match=r"cannot be read|cut off"):
            reading.result()
    assert not opened


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere sandbox-exec keeps it from the network, or nothing does")
def test_the_worker_reaches_nobody(tmp_path: Path) -> None:
    """Not even this machine. It also does not have its parent's environment."""
    program = """
import socket
from satchel.api.media.worker_process import leave_network
leave_network()
try:
    socket.create_connection(("127.0.0.1", {port}), timeout=20)
except OSError as error:
    print(type(error).__name__, error.errno)
"""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        run = subprocess.run(
            [sys.executable, "-c", program.format(port=port)], capture_output=True, text=True, check=True
        )
    if not run.stdout:
        pytest.skip("this system gives processes no network of their own")
    assert run.stdout == f"OSError {errno.ENETUNREACH}\n"


CUT_OFF = r"is a video that is cut off: \d+ bytes of at least \d+"


def unsized(film: bytes, *kinds: bytes) -> bytes:
    """Returns a Matroska file whose elements of these kinds have unknown size, as in a live recording."""
    for kind in kinds:
        at = film.index(kind) + len(kind)
        length = 9 - film[at].bit_length()
        film = film[:at] + (2 ** (7 * length + 1) - 1).to_bytes(length) + film[at + length :]
    return film


@pytest.mark.parametrize(
    ("form", "codec"),
    [
        ("mp4", "mp4v"),
        ("webm", "VP90"),
        ("mkv", "MJPG"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("avi", "XVID"), ("webm", "VP80"), ("mkv", "mp4v"), ("avi", "MJPG"))
        ),
    ],
)
def test_a_film_that_is_cut_off_is_refused_and_a_whole_one_is_not(tmp_path: Path, form: str, codec: str) -> None:
    for count in (1, 3, 30):
        data = written(tmp_path / f"{count}.{form}", codec, count)
        assert len(decode_video(data, limited(fps=10.0))) == count
        # Bytes after a complete file do no harm, and neither does a header that was counted twice.
        for same in (data + bytes(100), data[:-8] if form == "avi" else data):
            _check_whole(same, Deadline(60.0))
        for share in (0.5, 0.8, 0.95):
            with pytest.raises(Undecodable, match=CUT_OFF):
                _check_whole(data[: int(share * len(data))], Deadline(60.0))
    with pytest.raises(Undecodable, match=CUT_OFF):
        decode_video(data[: len(data) // 2], limited(fps=0.1, frames_max=1))


def test_a_film_whose_size_is_written_in_another_way_is_cut_off_all_the_same(tmp_path: Path, film: bytes) -> None:
    mdat = film.index(b"mdat")
    assert film[mdat - 12 : mdat - 4] == b"\0\0\0\x08free"
    (size,) = struct.unpack_from(">I", film, mdat - 4)
    large = film[: mdat - 12] + struct.pack(">I4sQ", 1, b"mdat", size + 8) + film[mdat + 4 :]
    live = unsized(written(tmp_path / "live.webm", "VP80", 30), b"\x18\x53\x80\x67", b"\x1f\x43\xb6\x75")
    for data in (large, live):
        assert len(decode_video(data, limited(fps=10.0))) == 30
        for share in (0.5, 0.8):
            with pytest.raises(Undecodable, match=CUT_OFF):
                _check_whole(data[: int(share * len(data))], Deadline(60.0))


def test_where_a_film_says_nothing_of_its_size_what_there_is_is_taken(tmp_path: Path) -> None:
    data = written(tmp_path / "live.avi", "MJPG", 30)
    # As FFmpeg writes it into a pipe.
    live = data[:4] + b"\xff\xff\xff\xff" + data[8:]
    for share in (0.5, 0.8, 1.0):
        assert decode_video(live[: int(share * len(live))], USUAL)


async def test_a_list_of_frames_is_a_video(tmp_path: Path) -> None:
    urls = [
        "data:," + "".join(f"%{byte:02x}" for byte in packed(grey(8 * index, 160, 80), "PNG")) for index in range(5)
    ]
    parts = tuple(PictureSource(f"here.video[{index}]", url) for index, url in enumerate(urls))
    loader = PictureLoader(Media(frames_max=4, pixels_max=4 * 128 * 64))
    try:
        frames = await loader.load_video(VideoSource("here", None, parts, fps=4.0))
        assert numbers(frames) == [0, 1, 2, 4]
        assert [frame.seconds for frame in frames] == [0.0, 0.25, 0.5, 1.0]
        # Four of these frames have at most `pixels_max` together.
        assert {(frame.width, frame.height) for frame in frames} == {(128, 64)}
        frames = await loader.load_video(VideoSource("here", None, parts, frames_max=1))
        assert numbers(frames) == [0] and (frames[0].width, frames[0].height) == (160, 80)
        broken = (*parts, PictureSource("here.video[5]", "data:,x"))
        with pytest.raises(InvalidRequest) as caught:
            await loader.load_video(VideoSource("here", None, broken))
        assert caught.value.param == "here.video[5]"
    finally:
        await loader.close()


async def test_a_video_is_loaded_as_a_picture_is() -> None:
    url = "data:video/gif;base64," + base64.b64encode(animated("GIF", 4, 500)).decode()
    loader = PictureLoader(Media())
    try:
        first, again = [await loader.load_video(VideoSource("here", url, fps=1.0)) for _ in range(2)]
        assert numbers(first) == [0, 2] and first is again
        assert numbers(await loader.load_video(VideoSource("here", url, frames_max=1))) == [0]
        with pytest.raises(InvalidRequest, match=r"^here is no video") as caught:
            await loader.load_video(VideoSource("here", "data:,x"))
        assert caught.value.param == "here"
    finally:
        await loader.close()


async def test_rather_fewer_frames_than_tiny_ones() -> None:
    data = packed(grey(0, 100, 100), "GIF", save_all=True, append_images=[grey(8 * n, 100, 100) for n in range(1, 8)])
    url = "data:image/gif;base64," + base64.b64encode(data).decode()
    files = VideoSource("here", url, fps=10.0)
    listed = VideoSource("here", None, tuple(PictureSource(f"here.video[{index}]", url) for index in range(8)))
    loader = PictureLoader(Media(frames_max=1000, pixels_max=8 * 64 * 64))
    try:
        for source, side in ((files, 64), (listed, 90)):
            frames = await loader.load_video(source)
            assert [(frame.width, frame.height) for frame in frames] == [(side, side)] * 4
    finally:
        await loader.close()
