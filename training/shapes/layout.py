"""The vision model's shape and its folder in the Hugging Face layout, apart from weights and tokenizer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VOCABULARY = 1024
CONTEXT = 4096
CONTROLS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MEDIA = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
MARKS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
_SPECIAL = [*CONTROLS, *MEDIA, *MARKS]
ID_OF = {text: VOCABULARY - len(_SPECIAL) + index for index, text in enumerate(_SPECIAL)}

PATCH, MERGE, FRAMES = 16, 2, 2  # pixels a patch, patches a token (each way), frames a patch
FACTOR = PATCH * MERGE
PICTURE_PIXELS = (128 * 128, 320 * 320)  # least and most after resizing: 16 to 100 tokens
VIDEO_PIXELS = (4 * 96 * 96, 16 * 160 * 160)  # of all frames together: at most 200 tokens
FRAMES_PER_SECOND, FRAMES_LEAST, FRAMES_MOST = 2.0, 4, 16


@dataclass(frozen=True, slots=True)
class PictureModelShape:
    """Qwen3-VL's sizes; about 7.5 million parameters as they stand."""

    vocabulary: int = VOCABULARY
    hidden: int = 256
    intermediate: int = 512
    layers: int = 6
    heads: int = 4
    key_value_heads: int = 2
    head: int = 64
    sections: tuple[int, int, int] = (12, 10, 10)
    rope_theta: float = 1e6
    epsilon: float = 1e-6
    context: int = CONTEXT
    vision_hidden: int = 192
    vision_intermediate: int = 384
    vision_layers: int = 6
    vision_heads: int = 3
    deepstack: tuple[int, ...] = (2,)
    places: int = 256  # learned positions of patches, 16 by 16, interpolated to a picture's grid

    @property
    def patch_values(self) -> int:
        """Numbers in one patch: colours x frames x rows x columns."""
        return 3 * FRAMES * PATCH * PATCH


def _text_config(shape: PictureModelShape) -> dict[str, Any]:
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "dtype": "bfloat16",
        "eos_token_id": ID_OF["<|im_end|>"],
        "head_dim": shape.head,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": shape.context,
        "model_type": "qwen3_vl_text",
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.key_value_heads,
        "pad_token_id": ID_OF["<|endoftext|>"],
        "rms_norm_eps": shape.epsilon,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": list(shape.sections), "rope_type": "default"},
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": shape.vocabulary,
    }


def _vision_config(shape: PictureModelShape) -> dict[str, Any]:
    return {
        "deepstack_visual_indexes": list(shape.deepstack),
        "depth": shape.vision_layers,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": shape.vision_hidden,
        "in_channels": 3,
        "initializer_range": 0.02,
        "intermediate_size": shape.vision_intermediate,
        "model_type": "qwen3_vl",
        "num_heads": shape.vision_heads,
        "num_position_embeddings": shape.places,
        "out_hidden_size": shape.hidden,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": FRAMES,
    }


def config(shape: PictureModelShape) -> dict[str, Any]:
    """config.json's content."""
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "dtype": "bfloat16",
        "eos_token_id": ID_OF["<|im_end|>"],
        "image_token_id": ID_OF["<|image_pad|>"],
        "model_type": "qwen3_vl",
        "pad_token_id": ID_OF["<|endoftext|>"],
        "text_config": _text_config(shape),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "video_token_id": ID_OF["<|video_pad|>"],
        "vision_config": _vision_config(shape),
        "vision_end_token_id": ID_OF["<|vision_end|>"],
        "vision_start_token_id": ID_OF["<|vision_start|>"],
        "vocab_size": shape.vocabulary,
    }


def _processor(pixels: tuple[int, int], kind: str) -> dict[str, Any]:
    return {
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "merge_size": MERGE,
        "patch_size": PATCH,
        "processor_class": "Qwen3VLProcessor",
        "rescale_factor": 1 / 255,
        "size": {"shortest_edge": pixels[0], "longest_edge": pixels[1]},
        "temporal_patch_size": FRAMES,
        **({"video_processor_type": kind} if "Video" in kind else {"image_processor_type": kind}),
    }


def write_configs(folder: Path, shape: PictureModelShape) -> None:
    """Writes the configuration of the model, of its generation, and of its two processors."""
    folder.mkdir(parents=True, exist_ok=True)
    end, pad = ID_OF["<|im_end|>"], ID_OF["<|endoftext|>"]
    sampling = {"fps": FRAMES_PER_SECOND, "min_frames": FRAMES_LEAST, "max_frames": FRAMES_MOST}
    files = {
        "config.json": config(shape),
        "generation_config.json": {"do_sample": False, "eos_token_id": end, "pad_token_id": pad},
        "preprocessor_config.json": _processor(PICTURE_PIXELS, "Qwen2VLImageProcessorFast"),
        "video_preprocessor_config.json": _processor(VIDEO_PIXELS, "Qwen3VLVideoProcessor") | sampling,
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
