"""The config of media in messages."""

from __future__ import annotations

from ipaddress import ip_network
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic.dataclasses import dataclass as validated

from .units import STRICT, AbsolutePath, Bytes, Count, Seconds

_AUDIO_BYTES_A_SECOND = 8 * 16_000
"""Audio of 16,000 samples a second, as it is decoded and as the model gets it."""


def _checked_host(value: str) -> str:
    if "/" in value:
        ip_network(value, strict=False)
    elif not value or value != value.strip() or "://" in value:
        raise ValueError("must be a host's name, an address or a network such as 10.0.0.0/8")
    return value.lower()


@validated(frozen=True, config=STRICT)
class Media:
    """Pictures, videos and audio in messages: allowed sources and limits."""

    allowed_hosts: tuple[Annotated[str, AfterValidator(_checked_host)], ...] = ()
    """Hosts with private addresses from which media may be fetched: names, addresses, networks (10.0.0.0/8)."""
    file_roots: tuple[AbsolutePath, ...] = ()
    """Folders whose files a message may name; empty means none."""
    source_bytes_max: Bytes = 32 * 2**20
    """The largest picture, video or audio, as sent."""
    timeout_s: Seconds = 15.0
    """The time to fetch one picture, video or audio, again to decode a video or audio, and again to convert audio to
    the model's rate."""
    redirects_max: Annotated[int, Field(ge=0, le=20)] = 3
    """How many redirects are followed for one picture, video or audio."""
    pixels_max: Annotated[int, Field(gt=0, le=150_000_000)] = 50_000_000
    """The most pixels of one picture, of all frames of a video together, and of everything that is decoded at the same
    time."""
    pictures_max: Count = 64
    """The most pictures in one request; a video and a piece of audio count as one."""
    frames_max: Count = 32
    """The most frames of one video, and never more than `pixels_max` / 8192; a longer video is sampled evenly."""
    audio_seconds_max: Seconds = 600.0
    """The longest audio. A model's processor may take less. `held_bytes_max` must have room for it, 128 kB a second."""
    held_bytes_max: Bytes = 2**30
    """Decoded pictures and audio of all requests, 3 bytes a pixel and 4 bytes a sample."""

    @model_validator(mode="after")
    def _holds_audio(self) -> Self:
        if (least := round(self.audio_seconds_max * _AUDIO_BYTES_A_SECOND)) > self.held_bytes_max:
            raise ValueError(
                f"audio_seconds_max of {self.audio_seconds_max:g} s needs a held_bytes_max of at least {least} bytes"
            )
        return self
