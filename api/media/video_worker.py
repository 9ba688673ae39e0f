"""Reads one video file from standard input, in a separate process, and writes some of its frames to standard output.

FFmpeg trusts a file's metadata, and has had many bugs. Here it has a memory limit, no access to other files, only the
demuxer for the file's format, no network if the system supports that (Linux with namespaces, macOS), and no other
requests in its process.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import struct
import sys
from contextlib import suppress
from typing import Any

import msgpack
from PIL import Image

from .pixels import Undecodable, as_picture, check_size
from .sources import Picture
from .video import Deadline, FrameSampler, FrameSampling
from .worker_process import awaited_file, leave_network, limit_memory

_BYTES_MAX = 256 * 2**20
_BYTES_A_PIXEL = 40
"""Further bytes per pixel of the largest frame, for the decoder's reference frames and the sampled ones."""
_THREADS = 2
_DAMAGED = "is a video that cannot be read, or is damaged"
_FRAMES_A_SECOND = 25.0
_HEAD_BYTES = 16
"""How many of a file's last bytes are not parsed. As many may be missing, because some tools count a header twice."""
_FIRST_BOXES = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")
_MATROSKA = b"\x1a\x45\xdf\xa3"
_HOLDS_FRAMES = frozenset(
    (b"moov", b"moof", b"mdat", b"RIFF", b"\x18\x53\x80\x67", b"\x1f\x43\xb6\x75", b"\xa0", b"\xa3")
)
"""MP4's boxes, AVI's RIFF chunk, and Matroska's segment, cluster, block group and simple block."""


def read_film(data: bytes, sampling: FrameSampling) -> list[Picture]:
    """Returns sampled frames of a video file.

    Raises:
        Undecodable: it cannot be read, is cut off, is too large, or takes too long.
    """
    import cv2

    deadline, sampler = Deadline(sampling.timeout_s), FrameSampler(sampling)
    _check_whole(data, deadline)
    limit_memory(_BYTES_MAX + _BYTES_A_PIXEL * sampling.pixels_max)
    stream: Any = io.BytesIO(data)
    video = cv2.VideoCapture(stream, cv2.CAP_FFMPEG, [cv2.CAP_PROP_N_THREADS, _THREADS])
    if not video.isOpened():
        raise Undecodable(_DAMAGED)
    width, height = video.get(cv2.CAP_PROP_FRAME_WIDTH), video.get(cv2.CAP_PROP_FRAME_HEIGHT)
    check_size(int(width), int(height), sampling.pixels_max)
    rate = video.get(cv2.CAP_PROP_FPS)
    rate = rate if math.isfinite(rate) and rate > 0 else _FRAMES_A_SECOND
    seconds = 0.0
    for index in itertools.count():
        if not video.grab():
            break
        deadline.check()
        stated = video.get(cv2.CAP_PROP_POS_MSEC) / 1000
        # Some files have no timestamps, or wrong ones.
        seconds = stated if math.isfinite(stated) and stated > seconds else max(seconds, index / rate)
        if sampler.wants(seconds):
            sampler.take(_picture(video.retrieve(), sampling, seconds))
    return sampler.frames()


def _check_whole(data: bytes, deadline: Deadline) -> None:
    """Checks that a file is complete, because FFmpeg reads a truncated file without an error.

    Looks for a part that extends past the end: a container's frame count and duration are often only estimates. Misses
    a cut between two parts of a file without a total size (fragmented MP4, live WebM), and an AVI without sizes.

    Raises:
        Undecodable: bytes are missing at its end.
    """
    if data[4:8] in _FIRST_BOXES:
        ends = _box
    elif data[:4] == b"RIFF":
        ends = _chunk
    elif data[:4] == _MATROSKA:
        ends = _element
    else:
        return
    at = 0
    while at + _HEAD_BYTES <= len(data):
        deadline.check()
        kind, at = ends(data, at)
        if kind in _HOLDS_FRAMES and at > len(data) + _HEAD_BYTES:
            raise Undecodable(f"is a video that is cut off: {len(data)} bytes of at least {at}")


def _box(data: bytes, at: int) -> tuple[bytes, int]:
    """Returns the kind of the MP4 box that begins at `at`, and where it ends."""
    size, kind = struct.unpack_from(">I4s", data, at)
    if size == 1:
        (size,) = struct.unpack_from(">Q", data, at + 8)
    return kind, at + size if size >= 8 else len(data)


def _chunk(data: bytes, at: int) -> tuple[bytes, int]:
    """Returns the kind of the AVI chunk that begins at `at`, and where it ends."""
    kind, size = struct.unpack_from("<4sI", data, at)
    return kind, at + 8 + size + size % 2 if 0 < size < 2**32 - 1 else len(data)


def _element(data: bytes, at: int) -> tuple[bytes, int]:
    """Returns the kind of the Matroska element that begins at `at`, and where it ends; of unknown size, where its
    first child begins."""
    size_at = at + 9 - data[at].bit_length()
    body = size_at + 9 - data[size_at].bit_length()
    unknown = 2 ** (7 * (body - size_at)) - 1
    size = int.from_bytes(data[size_at:body]) & unknown
    return data[at:size_at], body + size if size != unknown else body


def _picture(retrieved: tuple[bool, Any], sampling: FrameSampling, seconds: float) -> Picture:
    worked, frame = retrieved
    if not worked or frame.ndim != 3:
        raise Undecodable(_DAMAGED)
    check_size(frame.shape[1], frame.shape[0], sampling.pixels_max)
    # OpenCV's channels are blue, green, red.
    return as_picture(Image.fromarray(frame[..., ::-1].copy()), sampling.shown(), seconds)


def main() -> None:
    leave_network()
    sampling = FrameSampling(**json.loads(sys.argv[1]))
    with suppress(ImportError):
        # While it waits.
        import cv2  # noqa: F401
    data = awaited_file()
    try:
        frames = read_film(data, sampling)
    except Undecodable as refusal:
        answer: Any = str(refusal)
    except ImportError:
        answer = "is a video, and OpenCV, which reads videos, does not load here"
    else:
        answer = [(frame.width, frame.height, frame.pixels, frame.seconds) for frame in frames]
    sys.stdout.buffer.write(msgpack.packb(answer) or b"")


if __name__ == "__main__":
    main()
