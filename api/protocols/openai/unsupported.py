"""Unsupported fields of OpenAI, vLLM and llama.cpp that would change the answer, each with its neutral values. Any
other value is refused, and the error names the field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ....cluster.errors import InvalidRequest
from ...requests.options import whole

NEUTRAL: dict[str, tuple[Any, ...]] = {
    # OpenAI's.
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    # vLLM's.
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "prompt_logprobs": (),
    "prompt_embeds": (),
    "logits_processors": ([],),
    "use_beam_search": (False,),
    "beam_width": (1,),
    "length_penalty": (1.0, 1),
    "early_stopping": (False,),
    "detokenize": (True,),
    "return_tokens_as_token_ids": (False,),
    "include_reasoning": (True,),
    "documents": ([],),
    # llama.cpp's and mlx-lm's.
    "typical_p": (1.0, 1),
    "mirostat": (0,),
    "dynatemp_range": (0.0, 0),
    "top_n_sigma": (-1.0, -1, 0.0, 0),
    "xtc_probability": (0.0, 0),
    "dry_multiplier": (0.0, 0),
    "adapters": (),
    # A template is a program, so only the one that came with the model is run.
    "chat_template": (),
}


def refuse_unsupported(fields: Mapping[str, Any], more: Mapping[str, tuple[Any, ...]]) -> None:
    """Checks a body's raw fields.

    Args:
        more: further fields that the route does not support, with their neutral values.

    Raises:
        InvalidRequest: a field has a value that is not neutral; `param` is its name.
    """
    for name, neutral in (*NEUTRAL.items(), *more.items()):
        value = whole(fields.get(name))
        # True equals 1 in Python, so types are compared too.
        if value is None or any(type(value) is type(whole(known)) and value == known for known in neutral):
            continue
        allowed = " or ".join(json.dumps(known) for known in neutral[:1]) or "null"
        raise InvalidRequest(f"{name}: only {allowed} is possible; other values are not supported", param=name)
