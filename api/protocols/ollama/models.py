"""The served models as Ollama's clients see them. Facts that a model's files do not give are left out or empty
strings."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from ....actors.model_files.source import WEIGHTS
from ....actors.model_files.weights import Tensor, read_weight_file
from ....cluster.errors import ModelLoadError
from ...requests.backend import ServedModel
from ...text.model import TextModel
from .answers import date

VERSION = "0.34.4"
"""The version of Ollama whose API this is. Clients check whether it is new enough for them."""

NEVER = "9999-12-31T23:59:59Z"
"""The expiry time of every model: far in the future, because models stay loaded."""

_FLOATS = ("BF16", "F16", "F32", "F64")
_SIZES = ((10**9, "B"), (10**6, "M"), (10**3, "K"))
_INFO = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "vocab_size": "vocab_size",
}
"""Fields of `model_info` below the architecture's name, with their names in a model's config."""


@dataclass(frozen=True)
class ModelFacts:
    """Facts from a model's files.

    Attributes:
        architecture: the config's `model_type`, "" if unknown.
        config: the part of the config that describes the language model.
        size: bytes of the weights.
        parameters: how many weights there are; None if unknown.
        quantization: the format of most weights, "" if unknown.
    """

    architecture: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    size: int = 0
    parameters: int | None = None
    quantization: str = ""


@lru_cache(maxsize=64)
def model_facts(folder: str, files_id: bytes) -> ModelFacts:
    """Reads the config and the headers of the weights. Takes milliseconds the first time.

    Args:
        files_id: of the files; if other files are in the same folder, they are read again.
    """
    try:
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        files = [read_weight_file(path) for path in sorted(Path(folder).glob(WEIGHTS))]
    except (OSError, ValueError, ModelLoadError):
        return ModelFacts()
    if not isinstance(config, dict):
        return ModelFacts()
    tensors = {name: tensor for file in files for name, tensor in file.tensors.items()}
    given, inner, kind = config.get("quantization"), config.get("text_config"), config.get("model_type")
    quantization = given if isinstance(given, dict) else {}
    return ModelFacts(
        kind if isinstance(kind, str) else "",
        inner if isinstance(inner, dict) else config,
        sum(file.size for file in files),
        parameters_of(tensors, quantization),
        level_of(tensors, quantization),
    )


def parameters_of(tensors: Mapping[str, Tensor], quantization: Mapping[str, Any]) -> int | None:
    """Counts the weights. MLX's quantized layers have packed weights, and scales beside them."""
    total = 0
    for name, tensor in tensors.items():
        layer, _, last = name.rpartition(".")
        packed = f"{layer}.scales" in tensors
        if packed and last == "weight" and tensor.dtype == "U32":
            own = quantization.get(layer)
            bits = (own if isinstance(own, dict) else quantization).get("bits")
            if not isinstance(bits, int) or bits < 1:
                return None
            total += 8 * tensor.nbytes // bits
        elif packed and last in ("scales", "biases"):
            continue
        elif tensor.dtype in _FLOATS:
            total += math.prod(tensor.shape)
        else:
            return None
    return total or None


def level_of(tensors: Mapping[str, Tensor], quantization: Mapping[str, Any]) -> str:
    bits, mode = quantization.get("bits"), quantization.get("mode", "affine")
    if isinstance(bits, int):
        return f"int{bits}" if mode == "affine" else str(mode)
    stored: Counter[str] = Counter()
    for tensor in tensors.values():
        stored[tensor.dtype] += tensor.nbytes
    kind = stored.most_common(1)[0][0] if stored else ""
    return kind if kind in _FLOATS else ""


def _details(facts: ModelFacts) -> dict[str, Any]:
    count, size = facts.parameters or 0, ""
    for unit, letter in _SIZES:
        if count >= unit:
            size = f"{count / unit:.1f}{letter}"
            break
    return {
        "parent_model": "",
        "format": "safetensors" if facts.size else "",
        "family": facts.architecture,
        "families": [facts.architecture] if facts.architecture else [],
        "parameter_size": size,
        "quantization_level": facts.quantization,
    }


def listed_body(model: ServedModel, facts: ModelFacts) -> dict[str, Any]:
    """Returns an entry of `/api/tags`."""
    info = model.info
    return {
        "name": info.name,
        "model": info.name,
        "modified_at": date(info.created),
        "size": facts.size,
        "digest": info.files_id.hex(),
        "details": _details(facts),
    }


def running_body(model: ServedModel, facts: ModelFacts) -> dict[str, Any]:
    """Returns an entry of `/api/ps`."""
    listed = listed_body(model, facts)
    del listed["modified_at"]
    return {**listed, "expires_at": NEVER, "context_length": model.info.context_tokens}


def shown_body(model: ServedModel, facts: ModelFacts, text: TextModel) -> dict[str, Any]:
    """Returns the body of `/api/show`."""
    info: dict[str, Any] = {"general.basename": model.info.name}
    if facts.parameters is not None:
        info["general.parameter_count"] = facts.parameters
    if kind := facts.architecture:
        info |= {"general.architecture": kind, f"{kind}.context_length": model.info.context_tokens}
        info |= {f"{kind}.{name}": facts.config[given] for name, given in _INFO.items() if given in facts.config}
    can = {
        "completion": True,
        # Always: if the template has no place for tools, the prompt describes them in text.
        "tools": text.calls.known or bool(text.template.source),
        "vision": model.info.pictures,
        "thinking": text.template.has_thinking or text.template.is_harmony,
        "insert": text.tokenizer.infill_marks is not None,
        "embedding": model.info.embedding.stated and not model.info.embedding.refusal,
    }
    return {
        "modified_at": date(model.info.created),
        "details": _details(facts),
        "model_info": info,
        "capabilities": [name for name, possible in can.items() if possible],
    }
