"""Decodes audio files to samples of one channel. Blocking: for worker threads.

miniaudio decodes them in a separate process (`audio_worker.py`), as it is done with videos. The samples are then
converted to the model's rate in the same way as mlx-vlm does it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np

from ...actors.protocol.media_ids import audio_hash
from .pixels import Undecodable, UnknownFormat
from .sources import Audio
from .video import Deadline
from .worker_process import WorkerAhead, run_worker

RATES = (4_000, 384_000)
"""The fewest and the most samples a second of files that are decoded; miniaudio has this limit."""

RATE_MAX = 96_000
"""Audio with more samples a second is converted to so many while it is decoded."""

KNOWN = "WAV, MP3, FLAC and Ogg Vorbis"
_OTHERS = {
    "aac": "AAC",
    "aiff": "AIFF",
    "caf": "CAF",
    "m4a": "MPEG-4 (M4A)",
    "opus": "Ogg Opus",
    "webm": "WebM or Matroska",
}
"""Formats that are recognized, and not decoded."""

FORMATS = ("wav", "mp3", "flac", "ogg")
"""Names of formats in requests, as of files' endings."""

_PER_BYTE = {"wav": (1 / 2_000, 2), "mp3": (1 / 1_000, 64)}
"""The most seconds and samples of a byte: WAV has at least 4 bits a sample, and MP3 at least 8 kbit a second."""

_USUAL_RATES = 25
"""Usual rates are multiples of this."""


@dataclass(frozen=True)
class AudioLimits:
    """Limits of one piece of audio.

    Attributes:
        seconds_max: the longest one.
        timeout_s: the time limit for decoding.
    """

    seconds_max: float
    timeout_s: float


@dataclass(frozen=True)
class Longest:
    """The most that a file may have.

    Attributes:
        seconds: its length.
        samples: how many samples it has when it is decoded.
    """

    seconds: float
    samples: int

    def bytes_at(self, rate: int) -> int:
        """Returns the bytes of its samples as they are decoded, and of those at `rate` samples a second."""
        return 4 * (self.samples + math.ceil(self.seconds * rate))


def longest(data: bytes, limits: AudioLimits) -> Longest:
    """Returns the most that a file may have. A decoder refuses a file with more than it states.

    A FLAC or Vorbis file states its length, and silence of any length takes hardly any bytes. In the other formats a
    sample takes at least so many bits.
    """
    form = format_of(data)
    if form not in FORMATS:
        return Longest(0.0, 0)
    if form in _PER_BYTE:
        seconds, samples = _PER_BYTE[form]
        seconds, samples = seconds * len(data), samples * len(data)
    else:
        rate, samples = _stated_length(data, form)
        # Streams that were written while they were recorded state no length.
        seconds = samples / rate if rate and samples else math.inf
    seconds = min(seconds, limits.seconds_max)
    most = math.ceil(seconds * RATE_MAX)
    return Longest(seconds, min(most, samples) if samples else most)


def decoded_rate(rate: int) -> int:
    """Returns the samples a second to which a file with `rate` is decoded: the same for usual ones. Converting others
    exactly would take a filter of millions of values."""
    return min(rate - rate % _USUAL_RATES, RATE_MAX)


def decode_audio(data: bytes, rate: int, limits: AudioLimits, ahead: WorkerAhead | None = None) -> Audio:
    """Returns the audio in a file, at `rate` samples a second; several channels are mixed into one.

    Args:
        ahead: what has the process for a file, if one waits.

    Raises:
        Undecodable: it is not audio, is damaged, empty or too long, or takes too long.
    """
    form = format_of(data)
    if form not in FORMATS:
        what = f"is {_OTHERS[form]}, which is not decoded here" if form else "is no audio that can be read"
        raise UnknownFormat(f"{what}; known are {KNOWN}")
    own_rate, channel = run_worker(_worker(limits), data, limits.timeout_s, ahead=ahead)
    samples = np.frombuffer(channel, "<f4")
    if not samples.size:
        raise Undecodable("has no samples")
    if own_rate != rate:
        samples = _converted(samples, own_rate, rate, Deadline(limits.timeout_s))
    content = samples.astype("<f4").tobytes()
    return Audio(content, rate, audio_hash(rate, content))


def _converted(samples: np.ndarray, own_rate: int, rate: int, deadline: Deadline) -> np.ndarray:
    """Returns samples, `(samples,) float32`, at another rate.

    Raises:
        Undecodable: the deadline has passed.
    """
    # Imported only now: SciPy takes a second.
    from mlx_audio.resample import resample_audio_chunks

    def pieces() -> Iterator[np.ndarray]:
        for start in range(0, samples.size, own_rate):
            deadline.check()
            yield samples[start : start + own_rate]

    return resample_audio_chunks(pieces(), own_rate, rate, samples.size)


def _stated_length(data: bytes, form: str) -> tuple[int, int]:
    """Returns the samples a second of a FLAC or Ogg Vorbis file and the number of samples of a channel, as its headers
    state them; 0 for what they do not."""
    if form == "flac":
        # STREAMINFO, the first block: 20 bits of rate, 8 of channels and sample sizes, 36 of the length.
        word = int.from_bytes(data[18:26], "big") if len(data) >= 26 else 0
        return word >> 44, word & (1 << 36) - 1
    last = data.rfind(b"OggS")
    if len(data) < 44 or len(data) < last + 14:
        return 0, 0
    rate, samples = int.from_bytes(data[40:44], "little"), int.from_bytes(data[last + 6 : last + 14], "little")
    return (rate, samples) if samples < 1 << 48 else (0, 0)


def format_of(data: bytes) -> str:
    """Returns the format of an audio file by its first bytes: one of `FORMATS`, the name of another one, or "" if it is
    none that is known."""
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        return "wav"
    if data[:4] == b"fLaC":
        return "flac"
    if data[:4] == b"OggS":
        return "opus" if b"OpusHead" in data[:64] else "ogg"
    if data[:4] == b"FORM" and data[8:12] in (b"AIFF", b"AIFC"):
        return "aiff"
    if data[4:8] == b"ftyp":
        return "m4a"
    if data[:4] == b"\x1a\x45\xdf\xa3":
        return "webm"
    if data[:4] == b"caff":
        return "caf"
    if data[:3] == b"ID3":
        return "mp3"
    if len(data) >= 2 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0:
        # The frame sync of MPEG audio; AAC has the same, with layer 0.
        return "aac" if data[1] & 0x06 == 0 else "mp3"
    return ""


def _worker(limits: AudioLimits) -> list[str]:
    return ["-m", "satchel.api.media.audio_worker", json.dumps(asdict(limits))]
