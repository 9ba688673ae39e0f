"""Audio files that tests make."""

from __future__ import annotations

import base64
import io
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


def input_audio(file: bytes, form: str = "wav") -> dict[str, Any]:
    """A part of a message with audio, in OpenAI's form."""
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(file).decode(), "format": form}}


def audio_url(file: bytes) -> dict[str, Any]:
    """The same in vLLM's form."""
    return {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{base64.b64encode(file).decode()}"}}
