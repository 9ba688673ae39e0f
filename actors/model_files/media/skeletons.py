"""A model without weights, used to compute shapes only.

MLX computes only what is evaluated. So a model that is built from its config takes neither memory nor time, and the
shapes of its results are known.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PARTS = ("text", "vision", "perceiver", "projector", "audio")


class Skeleton:
    """A vision model as mlx-vlm builds it from its config."""

    def __init__(self, folder: Path) -> None:
        # Imported only now: it takes a second. So is MLX: most processes that know processors compute nothing.
        from mlx_vlm.utils import get_model_and_args, load_config, update_module_configs

        config = load_config(folder)
        classes, _ = get_model_and_args(config)
        for part in ("text_config", "vision_config", "audio_config"):
            config[part] = config.get(part) or {}
        arguments = classes.ModelConfig.from_dict(config)
        self._model = classes.Model(update_module_configs(arguments, classes, config, [*_PARTS]))

    def embeddings(self, ids: list[int], given: Mapping[str, Any]) -> int:
        """Returns how many embeddings it makes of a prompt.

        Args:
            given: the encoder's inputs, as its processor makes them, by name.
        """
        import mlx.core as mx

        inputs = {name: value if isinstance(value, mx.array) else mx.array(value) for name, value in given.items()}
        prompt = mx.array([ids])
        made = self._model.get_input_embeddings(
            prompt, inputs.pop("pixel_values", None), mask=mx.ones(prompt.shape, mx.int32), **inputs
        )
        return made.inputs_embeds.shape[1]
