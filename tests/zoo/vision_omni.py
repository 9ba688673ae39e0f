"""Vision types that take audio too."""

from __future__ import annotations

from typing import Any

from tests.worlds.models.vision_families import QWEN_IDS, QWEN_TOKENS, Family

from .vision_parts import EXPERTS, MERGING, QWEN_FILES, TEXT

_AXES_3 = {"type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True}
_TEXT: dict[str, Any] = {**TEXT, **EXPERTS, "rope_scaling": _AXES_3}

_WHISPER: dict[str, Any] = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 128,
    "chunk_length": 300,
    "return_attention_mask": True,
}

OMNI: dict[str, Family] = {
    "qwen3_omni_moe": Family(
        (*QWEN_TOKENS, "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>"),
        "<|vision_start|><|image_pad|><|vision_end|>",
        {
            "enable_audio_output": False,
            "thinker_config": {
                **QWEN_IDS,
                "audio_token_id": "<|audio_pad|>",
                "audio_start_token_id": "<|audio_start|>",
                "audio_end_token_id": "<|audio_end|>",
                "text_config": _TEXT,
                "vision_config": {
                    **MERGING,
                    "model_type": "qwen3_omni_moe_vision_encoder",
                    "num_position_embeddings": 64,
                    "deepstack_visual_indexes": [0, 1],
                },
                "audio_config": {
                    "d_model": 32,
                    "encoder_layers": 1,
                    "encoder_attention_heads": 2,
                    "encoder_ffn_dim": 64,
                    "num_hidden_layers": 1,
                    "output_dim": TEXT["hidden_size"],
                    "downsample_hidden_size": 16,
                },
            },
            "talker_config": {"text_config": {**_TEXT, "vocab_size": 64}},
        },
        {**QWEN_FILES, "preprocessor_config.json": {**QWEN_FILES["preprocessor_config.json"], **_WHISPER}},
        {
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
            "audio_token": "<|audio_pad|>",
            "vision_bos_token": "<|vision_start|>",
            "vision_eos_token": "<|vision_end|>",
            "audio_bos_token": "<|audio_start|>",
            "audio_eos_token": "<|audio_end|>",
        },
        video="<|vision_start|><|video_pad|><|vision_end|>",
        audio="<|audio_start|><|audio_pad|><|audio_end|>",
    ),
}
