"""The outputs of mlx-vlm's `get_input_embeddings`: which are used, and checks of them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

_PER_TOKEN = {"inputs_embeds", "visual_pos_masks", "deepstack_visual_embeds", "per_layer_inputs"}
"""Outputs that are used. Positions are computed for the whole prompt instead."""

_IGNORED = {"position_ids", "rope_deltas", "attention_mask", "attention_mask_4d"}
"""Outputs that are ignored: the caches make the masks."""

SPARE_BYTES_MAX = 1 << 30
"""Bytes of freed buffers that a picture or audio may leave in MLX's cache: only the encoder needs buffers of its
sizes."""


def check_outputs(made: dict[str, Any], tokens: int, medium: str) -> None:
    """Checks the outputs for `tokens` tokens of a medium.

    Args:
        medium: what it is called in errors.

    Raises:
        ValueError: the language part wants other inputs too, or there is another number of embeddings.
    """
    unknown = {name for name, value in made.items() if value is not None} - _PER_TOKEN - _IGNORED
    if unknown:
        raise ValueError(f"the model also wants {', '.join(sorted(unknown))}")
    if (count := made["inputs_embeds"].shape[1]) != tokens:
        raise ValueError(f"mlx-vlm makes {count} embeddings of {medium} for which its processor writes {tokens} tokens")


def check_seen(model: Any, ids: mx.array, made: dict[str, Any], places: mx.array, ignored: str, medium: str) -> None:
    """Checks the outputs for the tokens `ids`, `(1, tokens)`, of which those at `places` stand for media.

    Args:
        ignored: the error for media that change nothing.
        medium: what it is called in other errors.

    Raises:
        ValueError: those at `places` have the embeddings of ordinary tokens, or other inputs of the layers depend on
            the medium.
    """
    plain = model.get_input_embeddings(ids, None)
    if bool(mx.array_equal(plain.inputs_embeds[0, places], made["inputs_embeds"][0, places])):
        raise ValueError(ignored)
    of_layers, of_text = made["per_layer_inputs"], plain.per_layer_inputs
    if of_layers is not None and (of_text is None or not mx.array_equal(of_layers, of_text)):
        raise ValueError(f"inputs of its layers depend on {medium}")


def evaluate_modules(model: Any) -> None:
    """Evaluates all arrays of the model's modules: no other thread could evaluate what this one leaves lazy."""
    held = (value for module in model.modules() for value in (*module.values(), *vars(module).values()))
    mx.eval([value for value in held if isinstance(value, mx.array)])
