"""Decodes audio files to samples of one channel. Blocking: for worker threads.

miniaudio decodes them in a separate process (`audio_worker.py`), as it is done with videos. The samples are then
converted to the model's rate in the same way as mlx-vlm does it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import numpy as np

from ...actors.protocol.media_ids import audio_hash
from .pixels import Undecodable, UnknownFormat
from .sources import Audio
from .worker_process import run_worker

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


@dataclass(frozen=True)
class AudioLimits:
    """Limits of one piece of audio.

    Attributes:
        seconds_max: the longest one.
        timeout_s: the time limit for decoding.
    """

    seconds_max: float
    timeout_s: float


def decode_audio(data: bytes, rate: int, limits: AudioLimits) -> Audio:
    """Returns the audio in a file, at `rate` samples a second; several channels are mixed into one.

    Raises:
        Undecodable: it is not audio, is damaged, empty or too long, or takes too long.
    """
    form = format_of(data)
    if form not in FORMATS:
        what = f"is {_OTHERS[form]}, which is not decoded here" if form else "is no audio that can be read"
        raise UnknownFormat(f"{what}; known are {KNOWN}")
    own_rate, channel = run_worker(_worker(limits), data, limits.timeout_s)
    samples = np.frombuffer(channel, "<f4")
    if not samples.size:
        raise Undecodable("has no samples")
    if own_rate != rate:
        # Imported only now: SciPy takes a second.
        from mlx_audio.resample import resample_audio_array

        samples = resample_audio_array(samples, own_rate, rate)
    content = samples.astype("<f4").tobytes()
    return Audio(content, rate, audio_hash(rate, content))


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
