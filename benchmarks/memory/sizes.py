"""What a token's KV takes: sealed blocks and whole caches, counted on real arrays."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from satchel.actors.protocol.block_ids import BLOCK_TOKENS
from satchel.actors.replica.kernels.sealing import POLICIES, sealed_token_bytes, value_group
from satchel.actors.replica.kv.paged_cache import PagedBatch, PagedKVCache
from satchel.actors.replica.kv.pool import BlockPool

from ..parts import ResultTable

GROUP_64_MAX, GROUP_32_MAX = 0.302, 0.32
WHOLE_TOKENS = (1_100, 4_000, 16_000)


@dataclass(frozen=True)
class KVShape:
    """Of a model's KV; with `counted` a layer of it is sealed, else it follows from that of the same head size."""

    name: str
    layers: int
    kv_heads: int
    dim: int
    counted: bool = True


SHAPES = (
    KVShape("one layer, 8 heads of 64", 1, 8, 64),
    KVShape("one layer, 8 heads of 96", 1, 8, 96),
    KVShape("one layer, 8 heads of 128", 1, 8, 128),
    KVShape("Qwen3-0.6B", 28, 8, 128),
    KVShape("Llama-3.1-8B", 32, 8, 128, counted=False),
)


def sizes() -> ResultTable:
    part = ResultTable("Bytes of KV a token")
    for shape in SHAPES:
        full = shape.layers * shape.kv_heads * shape.dim * 2 * 2
        for name, policy in POLICIES.items():
            formula = shape.layers * sealed_token_bytes(shape.kv_heads, shape.dim, shape.dim, policy)
            sealed = _counted(shape, name) if shape.counted else formula
            part.rows.append(_row(shape, name, sealed, full, formula))
            if name == "q4":
                most = GROUP_64_MAX if value_group(shape.dim) == 64 else GROUP_32_MAX
                part.at_most(f"{shape.name}: q4 blocks over fp16", sealed / full, most)
    part.notes.append(
        "A whole cache has its last, open block of up to 255 tokens in full precision: its share is of fp16 at that "
        "number of tokens. `formula` is what the scheduler reckons with."
    )
    return part


def _row(shape: KVShape, policy: str, sealed: float, full: int, formula: int) -> dict[str, str | int | float | None]:
    row: dict[str, str | int | float | None] = {
        "KV": shape.name,
        "policy": policy,
        "bytes a token": sealed,
        "formula": formula,
        "of fp16": sealed / full,
    }
    for tokens in WHOLE_TOKENS:
        opened = tokens % BLOCK_TOKENS
        row[f"whole cache, {tokens:,}"] = (sealed * (tokens - opened) + full * opened) / (full * tokens)
    return row


def _counted(shape: KVShape, name: str) -> float:
    """Returns the bytes a token of the blocks in the pool that a row of one layer fills."""
    pool = BlockPool([[0]])
    cache = PagedKVCache(0, POLICIES[name], batch=PagedBatch.of_sequences(pool, 1))
    tokens = 4 * BLOCK_TOKENS + 76
    keys = mx.random.normal((1, shape.kv_heads, tokens, shape.dim)).astype(mx.float16)
    cache.update_and_fetch(keys, keys)
    mx.eval(cache.state)
    return shape.layers * pool.groups[0].slot_bytes / BLOCK_TOKENS
