"""Reads one audio file from standard input, in a separate process, and writes its samples to standard output.

A decoder in C reads files that callers made. Here it has a memory limit, no network if the system supports that, and no
other requests in its process.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgpack
import numpy as np

from .audio import RATES, AudioLimits, decoded_rate, format_of, longest
from .pixels import Undecodable
from .video import Deadline
from .worker_process import awaited_file, leave_network, limit_memory

_CHANNELS_MAX = 8
_BYTES_MAX = 128 * 2**20
_DAMAGED = "is damaged or cut off"
_UNKNOWN_BYTES = 0x7FFF0000
"""A WAV that was written while it was recorded states so many bytes or more."""


def read_audio(data: bytes, limits: AudioLimits) -> tuple[int, np.ndarray]:
    """Returns the samples a second of an audio file, and its samples, `(samples,) float32` from -1 to 1; channels are
    mixed into one.

    Raises:
        Undecodable: it cannot be read, is cut off, is too long, or takes too long.
    """
    import miniaudio

    reads = {
        "wav": miniaudio.wav_get_info,
        "mp3": miniaudio.mp3_get_info,
        "flac": miniaudio.flac_get_info,
        "ogg": miniaudio.vorbis_get_info,
    }
    deadline, most = Deadline(limits.timeout_s), longest(data, limits)
    limit_memory(_BYTES_MAX + 16 * most.samples)
    try:
        form = format_of(data)
        if form == "wav":
            if _misses_end(data):
                raise Undecodable(_DAMAGED)
            # Its decoder calls files with a higher rate damaged.
            _check_format(*_wav_format(data))
        # MP3 has no header with a length: all frames are read for it.
        info = reads[form](data)
        _check_format(info.nchannels, info.sample_rate)
        rate = decoded_rate(info.sample_rate)
        if form != "wav" and info.num_frames > limits.seconds_max * info.sample_rate:
            raise _too_long(limits)
        pieces, count = [], 0
        for piece in _pieces(data, info.nchannels, rate):
            deadline.check()
            count += piece.size
            if count > limits.seconds_max * rate:
                raise _too_long(limits)
            if count > most.samples:
                raise Undecodable(_DAMAGED)
            pieces.append(piece)
    except miniaudio.MiniaudioError:
        raise Undecodable(_DAMAGED) from None
    if form in ("flac", "ogg") and count + 1 < info.num_frames * rate // info.sample_rate:
        raise Undecodable(_DAMAGED)
    return rate, np.concatenate(pieces) if pieces else np.zeros(0, np.float32)


def _check_format(channels: int, rate: int) -> None:
    if not RATES[0] <= rate <= RATES[1] or not 1 <= channels <= _CHANNELS_MAX:
        raise Undecodable(f"has {channels} channels with {rate} samples a second")


def _wav_format(data: bytes) -> tuple[int, int]:
    """Returns the channels and the samples a second of a WAV."""
    if (at := data.find(b"fmt ", 12)) < 0 or len(data) < at + 16:
        raise Undecodable(_DAMAGED)
    channels, rate = struct.unpack_from("<HI", data, at + 10)
    return channels, rate


def _misses_end(data: bytes) -> bool:
    """Returns whether a WAV states a greater length than it has. Its decoder reads what is there."""
    (stated,) = struct.unpack_from("<I", data, 4)
    return stated < _UNKNOWN_BYTES and 8 + stated > len(data) + 1


def _pieces(data: bytes, channels: int, rate: int) -> Iterator[np.ndarray]:
    """Yields the samples of a file in order, about a second each, mixed into one channel."""
    import miniaudio

    frames = miniaudio.stream_memory(data, miniaudio.SampleFormat.SIGNED16, channels, rate, frames_to_read=rate)
    for frame in frames:
        yield (np.asarray(frame, np.int16).astype(np.float32) / 32768.0).reshape(-1, channels).mean(axis=1)


def _too_long(limits: AudioLimits) -> Undecodable:
    return Undecodable(f"is longer than {limits.seconds_max:g} s (media.audio_seconds_max)")


def main() -> None:
    leave_network()
    limits = AudioLimits(**json.loads(sys.argv[1]))
    with suppress(ImportError):
        # While it waits.
        import miniaudio  # noqa: F401
    data = awaited_file()
    try:
        rate, samples = read_audio(data, limits)
    except Undecodable as refusal:
        answer: Any = str(refusal)
    except ImportError:
        answer = "is audio, and miniaudio, which reads audio, does not load here"
    else:
        answer = (rate, samples.astype("<f4").tobytes())
    sys.stdout.buffer.write(msgpack.packb(answer) or b"")


if __name__ == "__main__":
    main()
