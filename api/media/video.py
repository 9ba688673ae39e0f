"""Decodes some frames of a video. Blocking: for worker threads.

Pillow reads animated pictures. OpenCV's FFmpeg reads video files in a separate process (`video_worker.py`), so that a
crash or hang fails only one request.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

from PIL import Image

from ...actors.protocol.media_ids import picture_hash
from .pixels import Shown, Undecodable, UnknownFormat, as_picture, check_size, opened, rgb
from .sources import Picture
from .worker_process import WorkerAhead, run_worker

T = TypeVar("T")

FRAMES_A_SECOND = 2.0
"""The default sampling rate, and the assumed rate of lists of frames."""
FRAME_PIXELS_MIN = 64 * 64
"""Fewer frames are taken if they would have fewer pixels than this: no model can use smaller ones."""
_ANIMATED = ("GIF", "WEBP", "PNG")
_KNOWN = "MP4, WebM, Matroska, AVI and animated GIF, WebP and PNG"
_USUAL_FRAME_S = 0.1
_ALMOST = 1e-6
_ONLY = "input_format;{0}|format_whitelist;{0}|protocol_whitelist;pipe"


@dataclass(frozen=True)
class FrameSampling:
    """How a video is sampled, and limits.

    Attributes:
        fps: frames per second of the video.
        frames_max: the most frames, evenly spaced.
        pixels_max: of a frame in the file, and of all frames held while reading.
        timeout_s: the time limit for decoding.
        shown_max, shown_min: pixels of a shown frame, if the caller asks for that.
    """

    fps: float
    frames_max: int
    pixels_max: int
    timeout_s: float
    shown_max: int | None = None
    shown_min: int | None = None

    def shown(self) -> Shown:
        """Returns the size limits of one frame. Up to `2 * frames_max` are held while reading."""
        most = max(1, self.pixels_max // (2 * self.frames_max))
        return Shown(None, min(self.shown_min or 1, most), min(self.shown_max or most, most))


class FrameSampler:
    """Samples evenly spaced frames from a stream of unknown length. Holds at most `2 * frames_max`."""

    def __init__(self, sampling: FrameSampling) -> None:
        self._step_s = 1 / sampling.fps
        self._frames_max = sampling.frames_max
        self._next_s = 0.0
        self._taken: list[Picture] = []

    def wants(self, seconds: float) -> bool:
        """Returns whether the frame at this time should be taken."""
        return seconds + _ALMOST >= self._next_s

    def take(self, frame: Picture) -> None:
        self._taken.append(frame)
        if len(self._taken) == 2 * self._frames_max:
            self._taken = self._taken[::2]
            self._step_s *= 2
        self._next_s = (math.floor((frame.seconds + _ALMOST) / self._step_s) + 1) * self._step_s

    def frames(self) -> list[Picture]:
        """Returns the sampled frames.

        Raises:
            Undecodable: there were none.
        """
        if not self._taken:
            raise Undecodable("has no frame that can be read")
        return evenly(self._taken, self._frames_max)


def evenly(items: Sequence[T], most: int) -> list[T]:
    """Returns at most `most` of `items`, evenly spaced from the first to the last."""
    if len(items) <= most:
        return list(items)
    if most == 1:
        return [items[0]]
    return [items[index * (len(items) - 1) // (most - 1)] for index in range(most)]


def decode_video(data: bytes, sampling: FrameSampling, ahead: WorkerAhead | None = None) -> list[Picture]:
    """Returns frames of a video, in order, each with its time.

    Args:
        ahead: what has the process for a file, if one waits.

    Raises:
        Undecodable: it is not a video, is damaged or too large, or takes longer than `timeout_s`.
    """
    try:
        return _film(data, sampling, ahead) if container(data) else _animation(data, sampling)
    except UnknownFormat:
        raise UnknownFormat(f"is no video that can be read; known are {_KNOWN}") from None


def container(data: bytes) -> str:
    """Returns FFmpeg's name of the demuxer for a video file, by its first bytes; "" if it is not one.

    FFmpeg must not choose the demuxer, because it also reads playlists and session descriptions, which name other files
    and hosts.
    """
    if data[4:8] == b"ftyp":
        return "mov"
    if data[:4] == b"\x1a\x45\xdf\xa3":
        return "matroska"
    return "avi" if data[:4] == b"RIFF" and data[8:12] == b"AVI " else ""


class Deadline:
    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s

    def check(self) -> None:
        """Checks the time.

        Raises:
            Undecodable: the deadline has passed.
        """
        if time.monotonic() > self._end:
            raise Undecodable(f"takes longer than {self._timeout_s:g} s to decode (media.timeout_s)")


def _animation(data: bytes, sampling: FrameSampling) -> list[Picture]:
    sampler, deadline = FrameSampler(sampling), Deadline(sampling.timeout_s)
    with opened(data, sampling.pixels_max) as image:
        if image.format not in _ANIMATED:
            raise UnknownFormat
        for seconds in _frame_times(image, sampling.pixels_max):
            deadline.check()
            if sampler.wants(seconds):
                sampler.take(as_picture(rgb(image.copy()), sampling.shown(), seconds))
    return sampler.frames()


def _frame_times(image: Image.Image, pixels_max: int) -> Iterator[float]:
    """Seeks through an animation, and yields for each frame the time in seconds at which it is shown."""
    seconds = 0.0
    for index in itertools.count():
        try:
            image.seek(index)
        except EOFError:
            return
        check_size(*image.size, pixels_max)
        image.load()
        if index == 0 and image.info.get("default_image"):
            # An animated PNG may have a fallback picture, which is not a frame.
            continue
        yield seconds
        seconds += (image.info.get("duration") or 0) / 1000 or _USUAL_FRAME_S


def _worker(sampling: FrameSampling) -> list[str]:
    return ["-m", "satchel.api.media.video_worker", json.dumps(asdict(sampling))]


def _film(data: bytes, sampling: FrameSampling, ahead: WorkerAhead | None) -> list[Picture]:
    variables = {"OPENCV_LOG_LEVEL": "SILENT", "OPENCV_FFMPEG_CAPTURE_OPTIONS": _ONLY.format(container(data))}
    frames = run_worker(_worker(sampling), data, sampling.timeout_s, variables, ahead)
    return [_frame(*frame) for frame in frames]


def _frame(width: int, height: int, pixels: bytes, seconds: float) -> Picture:
    return Picture(width, height, pixels, picture_hash(width, height, pixels), seconds)
