"""Tiny checkpoints of types that take audio, beside the one that `vision_omni` has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.worlds.models import vision_families
from tests.worlds.models.vision_families import Family

from .vision_types import TYPES


def _with_audio(name: str, placeholder: str, tokens: tuple[str, ...] = (), **config: Any) -> Family:
    """The type of this name with an encoder of audio.

    Args:
        placeholder: what the chat template writes for audio.
        tokens: further special tokens.
        config: what the config has besides.
    """
    kind = TYPES[name]
    return Family(
        (*kind.tokens, *tokens),
        kind.placeholder,
        {**kind.config, "model_type": name, **config},
        kind.files,
        kind.names,
        kind.video,
        kind.sizes,
        kind.ids,
        placeholder,
    )


AUDIO: dict[str, Family] = {
    "gemma4": _with_audio(
        "gemma4",
        "<audio_soft_token>",
        audio_config={
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "output_proj_dims": 48,
            "subsampling_conv_channels": [16, 8],
        },
    ),
    "gemma4_unified": _with_audio("gemma4_unified", "<audio_soft_token>"),
    "nemotron_h_nano_omni": _with_audio(
        "nemotron_h_nano_omni",
        "<so_embedding>",
        ("<so_embedding>", "<so_start>", "<so_end>"),
        sound_context_token_id="<so_embedding>",
        sound_config={
            "hidden_size": 32,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "intermediate_size": 64,
            "subsampling_conv_channels": 16,
            "projection_hidden_size": 32,
        },
    ),
}


def write(folder: Path, name: str) -> Path:
    """Write a checkpoint of one type into `folder`."""
    return vision_families.write(folder, name, AUDIO[name])
