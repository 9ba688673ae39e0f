"""Sealing as one kernel for GPUs. It computes the same numbers as `sealing.seal` does in some thirty operations.

A device's division may differ from IEEE 754 in the last bit. Then a number in the middle between two codes may get the
other one. The kernel is used only if it agreed with the plain operations (`paged_cache.writes`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from ...protocol.block_ids import BLOCK_TOKENS
from .gpu_kernels import int_numbers, kernel

PARTS = 8
"""Groups of threads for a block of a sequence's KV head: the first half seals keys, the other half values."""

# Template: T, P (type of scales), DK, DV, PV (padded value channels), KG and VG (numbers in a group), KB and VB (bits
# of a code), HALF (whether scales are float16). A thread has a group of keys, or eight values of a token, whose group
# its neighbours share.
_BODY = """
  const float EPSILON = HALF ? 9.765625e-4f : 7.8125e-3f;
  #define ROUNDED(x) static_cast<float>(static_cast<P>(x))
  #define SCALE(last) \\
    float bias = ROUNDED(least); \\
    if (bias > least) bias = ROUNDED(least - ABS(least) * EPSILON); \\
    const float scale = ROUNDED((most - bias) / last) + wrong;
  #define CODED(x, last) static_cast<unsigned int>(MAX(MIN(RINT((x - bias) / scale), last), 0.f))
  #define CODE(x, last) (scale > 0.f && scale < 3.4e38f ? CODED(x, last) : 0u)
  PLACE
  if (part < PARTS / 2) {
    constexpr int NG = 256 / KG, EACH = NG / (PARTS / 2), WORDS = KG * KB / 32;
    constexpr float LAST = static_cast<float>((1 << KB) - 1);
    for (int i = THREAD; i < DK * EACH; i += 256) {
      const int d = i % DK, g = part * EACH + i / DK;
      const DEVICE T* from = keys + ((long)rk * columns + block * 256 + g * KG) * DK + d;
      float least = 3.4e38f, most = -3.4e38f, wrong = 0.f;
      for (int t = g == 0; t < KG; t++) {
        const float x = static_cast<float>(from[t * DK]);
        least = MIN(least, x); most = MAX(most, x); wrong += x * 0.f;
      }
      SCALE(LAST)
      DEVICE unsigned int* to = (DEVICE unsigned int*)key_codes + KEY_CODES + g * WORDS;
      unsigned int word = 0; int filled = 0;
      for (int t = 0; t < KG; t++) {
        const float x = static_cast<float>(from[(g == 0 && t == 0 ? 1 : t) * DK]);
        const unsigned int code = CODE(x, LAST);
        word |= code << filled; filled += KB;
        if (filled >= 32) { *to++ = word; filled -= 32; word = code >> (KB - filled); }
      }
      const long at = KEY_SCALES + g;
      ((DEVICE P*)key_scales)[at] = static_cast<P>(scale); ((DEVICE P*)key_biases)[at] = static_cast<P>(bias);
      if (g == 0) ((DEVICE T*)key_exact)[KEY_EXACT] = from[0];
    }
  } else {
    constexpr int PW = PV / 8, LANES = VG / 8, SPAN = 256 / (PARTS / 2);
    constexpr float LAST = static_cast<float>((1 << VB) - 1);
    const int first = (part - PARTS / 2) * SPAN;
    const long token0 = VALUE_TOKENS + first, from0 = (long)rk * columns + block * 256 + first;
    for (int i = THREAD; i < SPAN * PW; i += 256) {
      const int t = i / PW, w = i % PW;
      const bool coded = first + t > 0;
      float x[8], least = 3.4e38f, most = -3.4e38f, wrong = 0.f;
      for (int j = 0; j < 8; j++) {
        x[j] = coded && w * 8 + j < DV ? static_cast<float>(values[(from0 + t) * DV + w * 8 + j]) : 0.f;
        least = MIN(least, x[j]); most = MAX(most, x[j]); wrong += x[j] * 0.f;
      }
      for (int o = LANES / 2; o; o >>= 1) {
        const float low = XOR(least, o), high = XOR(most, o);
        least = MIN(least, low); most = MAX(most, high); wrong += XOR(wrong, o);
      }
      SCALE(LAST)
      unsigned int word = 0;
      for (int j = 0; j < 8; j++) word |= CODE(x[j], LAST) << (VB * j);
      ((DEVICE unsigned int*)value_codes)[(token0 + t) * PW + w] = word;
      if (w % LANES == 0) {
        const long at = (token0 + t) * (PV / VG) + w / LANES;
        ((DEVICE P*)value_scales)[at] = static_cast<P>(scale); ((DEVICE P*)value_biases)[at] = static_cast<P>(bias);
      }
    }
    if (first == 0) {
      for (int d = THREAD; d < DV; d += 256) ((DEVICE T*)value_exact)[VALUE_EXACT + d] = values[from0 * DV + d];
    }
  }
"""

# Where a group of threads finds its block, and where its results go: into arrays of all sequences, or into slots.
_IN_ARRAYS = {
    "PLACE": """const int tokens = sizes[0], columns = sizes[1], blocks = tokens / 256;
  const int part = GROUP % PARTS, block = GROUP / PARTS % blocks, rk = GROUP / PARTS / blocks;""",
    "KEY_CODES": "((long)rk * DK + d) * (tokens * KB / 32) + block * 8 * KB",
    "KEY_SCALES": "((long)rk * DK + d) * (tokens / KG) + block * NG",
    "KEY_EXACT": "((long)rk * DK + d) * blocks + block",
    "VALUE_TOKENS": "(long)rk * tokens + block * 256",
    "VALUE_EXACT": "((long)rk * blocks + block) * DV",
}
_IN_SLOTS = {
    "PLACE": """const int part = GROUP % PARTS, n = GROUP / PARTS / KV, kv = GROUP / PARTS % KV;
  const int columns = places[0], rk = places[1 + 2 * n] * KV + kv, block = places[2 + 2 * n];
  const long slot = (long)slots[n] * KV + kv;
  if (GROUP == 0 && THREAD == 0) done[0] = 0;""",
    "KEY_CODES": "(slot * DK + d) * 8 * KB",
    "KEY_SCALES": "(slot * DK + d) * NG",
    "KEY_EXACT": "slot * DK + d",
    "VALUE_TOKENS": "slot * 256",
    "VALUE_EXACT": "slot * DV",
}


def _body(places: Mapping[str, str]) -> str:
    text = _BODY
    for name, code in places.items():
        text = text.replace(name, code)
    return text


_FIELDS = (
    *("key_codes", "key_scales", "key_biases", "key_exact"),
    *("value_codes", "value_scales", "value_biases", "value_exact"),
)


def seal(
    keys: mx.array,
    values: mx.array,
    blocks: int,
    bits: tuple[int, int],
    groups: tuple[int, int],
    padded: int,
    scale: mx.Dtype,
) -> list[mx.array]:
    """Seals the first `blocks` blocks of sequences.

    Args:
        keys, values: (sequences, kv_heads, columns, dim), at least 256 * blocks columns.
        bits, groups: of keys and of values, which have 4 bits.
        padded: value channels, with padding.
        scale: dtype of scales.

    Returns:
        The fields of `sealing.Quantized`.
    """
    sequences, kv_heads, columns, key_dim = keys.shape
    value_dim, tokens = values.shape[3], blocks * BLOCK_TOKENS
    heads = sequences, kv_heads
    return kernel("seal", ("keys", "values", "sizes"), _FIELDS, _body(_IN_ARRAYS))(
        inputs=[keys, values, int_numbers(tokens, columns)],
        template=_template(keys, values, bits, groups, padded, scale),
        grid=(sequences * kv_heads * blocks * PARTS * 256, 1, 1),
        threadgroup=(256, 1, 1),
        output_shapes=[
            (*heads, key_dim, tokens * bits[0] // 32),
            *[(*heads, key_dim, tokens // groups[0])] * 2,
            (*heads, key_dim, blocks),
            (*heads, tokens, padded * bits[1] // 32),
            *[(*heads, tokens, padded // groups[1])] * 2,
            (*heads, blocks, value_dim),
        ],
        output_dtypes=[mx.uint32, scale, scale, keys.dtype, mx.uint32, scale, scale, values.dtype],
    )


def seal_into(
    pool: Sequence[mx.array],
    slots: mx.array,
    keys: mx.array,
    values: mx.array,
    places: Sequence[tuple[int, int]],
    bits: tuple[int, int],
    groups: tuple[int, int],
    order: mx.array,
) -> mx.array:
    """Seals blocks into slots, in place (`gpu_kernels.py`). Nothing may read these slots yet.

    Args:
        pool: the fields of `sealing.Quantized`, of all slots.
        slots: (n,) uint32.
        keys, values: (sequences, kv_heads, columns, dim).
        places: n pairs of a sequence, and the number of a block among its columns.
        bits, groups: as for `seal`.
        order: (1,) uint32; the kernel runs after this is computed.

    Returns:
        (1,) uint32, a zero that is computed once the blocks are written.
    """
    kv_heads, padded, scale = keys.shape[1], pool[4].shape[3] * 32 // bits[1], pool[1].dtype
    told = int_numbers(keys.shape[2], *(number for place in places for number in place))
    names = (*_FIELDS, "keys", "values", "places", "slots", "order")
    return kernel(f"write_sealed_{len(_FIELDS)}", names, ("done",), _body(_IN_SLOTS))(
        inputs=[*pool, keys, values, told, slots, order],
        template=[*_template(keys, values, bits, groups, padded, scale), ("KV", kv_heads)],
        grid=(len(places) * kv_heads * PARTS * 256, 1, 1),
        threadgroup=(256, 1, 1),
        output_shapes=[(1,)],
        output_dtypes=[mx.uint32],
    )[0]


def _template(
    keys: mx.array,
    values: mx.array,
    bits: tuple[int, int],
    groups: tuple[int, int],
    padded: int,
    scale: mx.Dtype,
) -> list[tuple[str, Any]]:
    return [
        *(("T", keys.dtype), ("P", scale), ("DK", keys.shape[3]), ("DV", values.shape[3]), ("PV", padded)),
        *(("KG", groups[0]), ("VG", groups[1]), ("KB", bits[0]), ("VB", bits[1])),
        *(("HALF", scale == mx.float16), ("PARTS", PARTS)),
    ]
