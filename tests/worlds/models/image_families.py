"""Tiny models that make images, of several families, written the way real ones lie on disk: a folder a component.

The weights are random but seeded; the tokenizer is the embedded model's.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from satchel.actors.replica.loading.models import EMBEDDED

BASE = EMBEDDED / "recall"
VOCABULARY = 3072
CHANNELS = (32, 32, 32, 32)


def write_image_model(folder: Path, family: str, seed: int = 0) -> Path:
    """Writes a model of a family, `z_image` or `moss_image`, and returns its folder."""
    folder.mkdir(parents=True)
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(BASE / name, tokenizer / name)
    WRITERS[family](folder, seed)
    return folder


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))


def _write_weights(folder: Path, model: Any, seed: int) -> None:
    key = mx.random.key(seed)
    weights = {}
    parameters: Any = tree_flatten(model.parameters())
    for name, value in parameters:
        key, own = mx.random.split(key)
        random = mx.random.normal(value.shape, key=own) * (0.3 if value.ndim < 4 else 0.1)
        # Scales of norms are about 1, and variances positive.
        weights[name] = mx.abs(random) + 1.0 if value.ndim == 1 and name.endswith(("weight", "var")) else random
    folder.mkdir(exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)


def _write_z_image(folder: Path, seed: int) -> None:
    from mlx_vlm.models.z_image.config import ZImageConfig
    from mlx_vlm.models.z_image.text_encoder import ZImageTextEncoder
    from mlx_vlm.models.z_image.transformer import ZImageTransformer
    from mlx_vlm.models.z_image.vae import ZImageVAE

    _write_json(folder / "model_index.json", {"_class_name": "ZImagePipeline"})
    _write_json(folder / "scheduler" / "scheduler_config.json", {"shift": 6.0})
    transformer = {"dim": 64, "n_heads": 2, "n_kv_heads": 2, "n_layers": 2, "n_refiner_layers": 1, "cap_feat_dim": 64}
    rotated = {"axes_dims": [8, 12, 12], "_class_name": "ZImageTransformer2DModel"}
    _write_json(folder / "transformer" / "config.json", {**transformer, **rotated})
    text = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    more = {"num_key_value_heads": 1, "intermediate_size": 128, "head_dim": 32, "max_position_embeddings": 4096}
    _write_json(folder / "text_encoder" / "config.json", {**text, **more})
    vae = {"block_out_channels": CHANNELS, "layers_per_block": 1, "_class_name": "AutoencoderKL"}
    _write_json(folder / "vae" / "config.json", vae)
    config = ZImageConfig.from_model_path(folder)
    _write_weights(folder / "transformer", ZImageTransformer(config.transformer), seed)
    _write_weights(folder / "text_encoder", ZImageTextEncoder(config.text_encoder), seed + 1)
    # Weights in MLX's own layout.
    _write_json(folder / "vae" / "model.safetensors.index.json", {"metadata": {"mlx_vlm_format": "z_image"}})
    _write_weights(folder / "vae", ZImageVAE(config.vae), seed + 2)


def _write_moss_image(folder: Path, seed: int) -> None:
    from mlx_vlm.models.flux2.vae import Flux2VAE
    from mlx_vlm.models.moss_image.config import MOSSImageTransformerConfig
    from mlx_vlm.models.moss_image.transformer import MOSSImageTransformer
    from mlx_vlm.models.qwen3_5.config import TextConfig
    from mlx_vlm.models.qwen3_5.language import Qwen3_5Model

    _write_json(folder / "model_index.json", {"_class_name": "MOSSImagePipeline"})
    _write_json(folder / "scheduler" / "scheduler_config.json", {"num_train_timesteps": 1000, "shift": 3.0})
    shape = {"dim": 64, "ffn_dim": 128, "num_heads": 2, "num_layers": 24, "text_dim": 64}
    shape |= {"freq_dim": 32, "latent_channels": 128}
    _write_json(folder / "transformer" / "config.json", shape)
    text = {
        "model_type": "qwen3_5_text",
        "hidden_size": 64,
        "intermediate_size": 128,
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "rope_parameters": {
            "type": "default",
            "mrope_section": [1, 1, 2],
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
        },
    }
    layout = {"mlx_vlm_format": "moss_image"}
    _write_json(folder / "text_encoder" / "config.json", {"text_config": text, **layout})
    _write_json(folder / "vae" / "config.json", {"decoder_block_out_channels": CHANNELS, **layout})
    _write_weights(folder / "text_encoder", Qwen3_5Model(TextConfig.from_dict(text)), seed)
    _write_weights(folder / "transformer", MOSSImageTransformer(MOSSImageTransformerConfig.from_dict(shape)), seed + 1)
    _write_weights(folder / "vae", Flux2VAE(decoder_block_out_channels=CHANNELS), seed + 2)


WRITERS: dict[str, Callable[[Path, int], None]] = {"z_image": _write_z_image, "moss_image": _write_moss_image}
