"""The vision models that are measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class VisionShape:
    """A Qwen3-VL of random weights; `pixels` are the least and the most of a picture, `frames_pixels` of a video."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    depth: int
    vision_hidden: int
    vision_intermediate: int
    vision_heads: int
    positions: int
    levels: tuple[int, ...]
    pixels: tuple[int, int] = (65_536, 16_777_216)
    frames_pixels: tuple[int, int] = (4096, 25_165_824)
    context: int = 32_768

    def config(self, base: dict[str, Any]) -> dict[str, Any]:
        """The config of a Qwen3-VL `base` in this shape."""
        side = self.head_dim * 5 // 32
        sections = [self.head_dim // 2 - 2 * side, side, side]
        text = {
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.context,
            "rope_theta": 5_000_000.0,
            "rope_scaling": {**base["text_config"]["rope_scaling"], "mrope_section": sections},
        }
        vision = {
            "depth": self.depth,
            "hidden_size": self.vision_hidden,
            "intermediate_size": self.vision_intermediate,
            "num_heads": self.vision_heads,
            "num_position_embeddings": self.positions,
            "deepstack_visual_indexes": list(self.levels),
            "out_hidden_size": self.hidden,
        }
        return {
            **base,
            "vocab_size": self.vocabulary,
            "text_config": {**base["text_config"], **text},
            "vision_config": {**base["vision_config"], **vision},
        }


EMBEDDED = "shapes"
VISION_SHAPES: dict[str, VisionShape | None] = {
    EMBEDDED: None,  # The model that ships with Satchel.
    "tiny": VisionShape(64, 2, 2, 1, 32, 128, 1024, 2, 64, 128, 2, 256, (1,), context=8192),
    "2b": VisionShape(2048, 28, 16, 8, 128, 6144, 151_936, 24, 1024, 4096, 16, 2304, (5, 11, 17)),
    "4b": VisionShape(2560, 36, 32, 8, 128, 9728, 151_936, 24, 1024, 4096, 16, 2304, (5, 11, 17)),
}
