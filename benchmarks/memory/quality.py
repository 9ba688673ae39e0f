"""What quantizing does to the embedded model's next-token distributions, beside MLX's own 4-bit cache."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import QuantizedKVCache
from tokenizers import Tokenizer

from satchel.actors.replica.kernels.sealing import FULL_PRECISION, POLICIES
from satchel.actors.replica.loading import models
from satchel.actors.replica.proving.divergence import Scores, compare
from satchel.actors.replica.selftest.probe import caches_of, row_of, scored_spans, spec_of
from training.recall import data

from ..parts import Budget, ResultTable, Say

OURS = tuple(name for name, policy in POLICIES.items() if policy.quantizes)
MLX_4_BIT = "MLX's own, 4 bits"
KL_OF_MLX_MAX = 1 / 3
SEED = 11


def quality(lengths: Sequence[int], samples: int, budget: Budget, say: Say) -> ResultTable:
    """On conversations as the model was trained on; every cache reads the same tokens."""
    part = ResultTable("The embedded model's next-token distributions beside full precision")
    loaded = models.load(
        "embedded:recall",
        context_tokens_max=None,
        progress=lambda what, fraction: None,
        kv=FULL_PRECISION,
        warm=False,
    )
    lengths = sorted(length for length in lengths if length <= loaded.context_tokens)
    reference = caches_of(loaded, spec_of(loaded, FULL_PRECISION))
    others = {name: caches_of(loaded, spec_of(loaded, name)) for name in OURS}

    def mlx_caches() -> list[Any]:
        return [QuantizedKVCache(group_size=64, bits=4) for _ in loaded.model.layers]

    tokenizer = Tokenizer.from_file(str(loaded.folder / "tokenizer.json"))
    rng, spans = random.Random(SEED), scored_spans(lengths)
    others |= {MLX_4_BIT: mlx_caches} if (why := _refused(loaded.model, mlx_caches())) is None else {}
    if why is not None:
        part.notes.append(f"MLX's own 4-bit cache cannot be measured on this device: {why}")
    found: list[dict[str, list[Scores]]] = []
    for number in budget.rounds(samples):
        tokens = [int(token) for token in data.make_row(rng, tokenizer, lengths[-1]).tokens[: lengths[-1]]]
        found.append(compare(loaded.model, tokens, spans, reference, others))
        say(f"  conversation {number + 1} of {samples}")
    if not found:
        part.notes.append("There was no time for it.")
        return part
    for index, length in enumerate(lengths):
        rows = {name: row_of(name, length, [sample[name][index] for sample in found]) for name in found[0]}
        for name, row in rows.items():
            part.rows.append(
                {
                    "cache": name,
                    "tokens": length,
                    "KL mean, nats": row.kl_mean,
                    "KL p99": row.kl_p99,
                    "same likeliest": row.top1,
                    "places": row.places,
                    "KL over MLX's": None if why is not None else row.kl_mean / rows[MLX_4_BIT].kl_mean,
                }
            )
        if why is not None:
            continue
        share = rows["q4"].kl_mean / rows[MLX_4_BIT].kl_mean
        part.at_most(f"{length:,} tokens: KL of q4 over that of MLX's own", share, round(KL_OF_MLX_MAX, 3))
    part.notes.append("Teacher-forced, over the last 256 places before each length.")
    return part


def _refused(model: Any, caches: list[Any]) -> str | None:
    """Why the device has no kernels for these caches, if that is so."""
    try:
        logits = model(mx.array([[1, 2, 3]]), cache=caches)
        mx.eval(logits, model(mx.array([[4]]), cache=caches))
    except (RuntimeError, ValueError) as error:
        return str(error).splitlines()[0]
    return None
