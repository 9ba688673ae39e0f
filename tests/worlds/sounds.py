"""Audio files that tests make."""

from __future__ import annotations

import base64
import io
import struct
import wave
from typing import Any

import numpy as np


def tone(hertz: float, seconds: float, rate: int = 16_000) -> np.ndarray:
    """A tone, `(samples,) int16`."""
    return (12_000 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)).astype("<i2")


def wav(samples: np.ndarray, rate: int = 16_000, channels: int = 1) -> bytes:
    """A WAV file of samples, `(samples,)` or `(samples, channels) int16`."""
    written = io.BytesIO()
    with wave.open(written, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.ascontiguousarray(samples, "<i2").tobytes())
    return written.getvalue()


def silent_flac(blocks: int, stated: int | None = None) -> bytes:
    """A FLAC file of silence with 16,000 samples a second, 16 bits and one channel, in blocks of 4096 samples.

    Args:
        stated: how many samples it states; its real number by default.
    """
    samples = 4096 * blocks if stated is None else stated
    info = struct.pack(">HH6xQ16x", 4096, 4096, 16_000 << 44 | 15 << 36 | samples)
    file = bytearray(b"fLaC" + bytes([0x80, 0, 0, len(info)]) + info)
    for number in range(blocks):
        # Fixed block size, the number as in UTF-8, and a subframe with one value for all samples.
        head = b"\xff\xf8\xc5\x08" + chr(number).encode()
        frame = head + bytes([_crc(head, 8, 0x07), 0, 0, 0])
        file += frame + struct.pack(">H", _crc(frame, 16, 0x8005))
    return bytes(file)


def _crc(data: bytes, bits: int, polynomial: int) -> int:
    value = 0
    for byte in data:
        value ^= byte << (bits - 8)
        for _ in range(8):
            value = value << 1 ^ (polynomial if value >> (bits - 1) else 0)
            value &= (1 << bits) - 1
    return value


def input_audio(file: bytes, form: str = "wav") -> dict[str, Any]:
    """A part of a message with audio, in OpenAI's form."""
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(file).decode(), "format": form}}


def audio_url(file: bytes) -> dict[str, Any]:
    """The same in vLLM's form."""
    return {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{base64.b64encode(file).decode()}"}}
