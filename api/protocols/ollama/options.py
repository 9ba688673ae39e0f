"""Ollama's `options`: each is used, ignored because it does not change the answer, or refused by name."""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

from ....cluster.errors import InvalidRequest
from ...requests.options import WHOLE, MinP, Penalty, RepetitionPenalty, Seed, Stop, Temperature, TopK, TopP

RANDOM_SEED = -1
PENALIZED_TOKENS = 64
"""Ollama's default of `repeat_last_n`; it counts as not set, because clients send it without meaning it."""

_UNDONE = MappingProxyType({"typical_p": 1, "tfs_z": 1, "mirostat": 0})
"""Unsupported sampling options, with the value that switches each off."""


def _number_or_switch(value: Any) -> Any:
    if not isinstance(value, int | float | None):
        raise ValueError("must be a number or a boolean")
    return value


Whole = Annotated[int, Field(ge=-(2**63), le=2**63 - 1), WHOLE]
Tolerated = Annotated[Any, PlainValidator(_number_or_switch), WithJsonSchema({"type": ["number", "boolean", "null"]})]


class ModelOptions(BaseModel):
    """The field `options`. None means the default, which is the model's own if its files have one. Unknown options are
    ignored, and named in the answer's headers."""

    model_config = ConfigDict(strict=True, extra="allow")

    num_predict: Whole | None = None
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None
    min_p: MinP | None = None
    repeat_penalty: RepetitionPenalty | None = None
    repeat_last_n: Annotated[int, Field(ge=-1, le=2**63 - 1), WHOLE] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Seed | None = None
    stop: Stop | None = None

    # These are refused unless they are off.
    typical_p: Tolerated = None
    tfs_z: Tolerated = None
    mirostat: Tolerated = None

    # How Ollama runs a model. Ignored: the context here is the model's, and it is never shifted.
    num_ctx: Tolerated = None
    num_batch: Tolerated = None
    num_gpu: Tolerated = None
    num_keep: Tolerated = None
    num_thread: Tolerated = None
    main_gpu: Tolerated = None
    low_vram: Tolerated = None
    numa: Tolerated = None
    f16_kv: Tolerated = None
    logits_all: Tolerated = None
    vocab_only: Tolerated = None
    use_mmap: Tolerated = None
    use_mlock: Tolerated = None
    embedding_only: Tolerated = None
    # Newer versions of Ollama do not know these either.
    mirostat_tau: Tolerated = None
    mirostat_eta: Tolerated = None
    penalize_newline: Tolerated = None

    def check(self) -> None:
        """Checks options against each other.

        Raises:
            InvalidRequest: one would change the answer in an unsupported way.
        """
        for name, off in _UNDONE.items():
            if getattr(self, name) not in (None, off):
                where = f"options.{name}"
                raise InvalidRequest(f"{where} is not supported; only {off} is possible", param=where)
        penalizes = (self.repeat_penalty or 1, self.presence_penalty or 0, self.frequency_penalty or 0) != (1, 0, 0)
        if penalizes and self.repeat_last_n not in (None, -1, 0, PENALIZED_TOKENS):
            where = "options.repeat_last_n"
            message = f"{where} is not supported: penalties count all tokens (-1), or are off (0)"
            raise InvalidRequest(message, param=where)

    @property
    def sampling(self) -> dict[str, Any]:
        """The options that are set, under the names of `Options`."""
        penalties: dict[str, Any] = {
            "repetition_penalty": self.repeat_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
        }
        if self.repeat_last_n == 0:
            penalties = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        given = {
            **penalties,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "seed": None if self.seed == RANDOM_SEED else self.seed,
            "stop": self.stop,
        }
        said = {name: value for name, value in given.items() if value is not None}
        return {"max_tokens": self.num_predict if (self.num_predict or 0) > 0 else None, **said}
