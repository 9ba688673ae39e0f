"""Decode attention over blocks in the pool as one GPU kernel: flash decoding, in which every sequence reads its own
blocks.

`attention.attend` is the reference in plain MLX operations. The kernel is used for a model only if both agree.

A step may have several new tokens of a sequence: its next one and a draft after it. Each attends to the blocks, to the
open block as it was before the step, and to the new tokens before it, which it takes from the step's own arrays.

A group of four warps takes a part of one new token's units for some query heads of one KV head. A unit is a quarter of
a sealed block, 64 tokens, or 32 tokens of the open block. Each warp keeps a running maximum, sum and output (Milakov
and Gimelshein, "Online normalizer calculation for softmax"). The parts are added up at the end; if a token has several
groups, a second kernel does that. The kernel also computes the norms and rotations of new queries and keys that the
model left to it (`head_transform.py`). It writes the new tokens' keys and values into the sequences' open blocks in
place; MLX would copy the array, because the step in flight still reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx

from . import decode_tensor
from .decode_views import NEW_MOST, WARPS, KernelView
from .gpu_kernels import architecture, kernel, prepare
from .head_transform import NOTHING, HeadTransform
from .sealing import Plain, Sealed, SealPolicy, value_group

SHARED_BYTES_MAX = 30 * 2**10
"""Bytes of shared memory that a group may use: Metal has 32 KiB."""

# Template: T, P (type of sealed values, or of their scales), DK, DV, PV (padded value channels), VG (their group), KV
# heads, G queries a KV head, GC of them a group of threads, KB key bits, KG (tokens whose keys share a scale), SINKS,
# QN and KN (whether queries and keys are normed), ROPE (channels that are rotated), NEXT (whether pairs of them are
# neighbours), POWERS (whether frequencies are exponents of 2, which the device raises as MLX does), CAP (whether
# scores are soft-capped), FM (the most new tokens of a sequence). Groups whose token is -1 are padding. PLAIN: sealed
# blocks are as computed, and read eight numbers at a time.
_BODY = """
  constexpr int NW = 4, WD = PV / 8, BW = PV > 64 ? PV : 64, KW = 8 * KB, KS = 256 / KG;
  constexpr int LPT = WD <= 4 ? 4 : WD <= 8 ? 8 : WD <= 16 ? 16 : 32, STEP = 32 / LPT, CH = G / GC;
  constexpr float LOW = -1e30f;
  #define ROUND(x) static_cast<float>(static_cast<T>(x))
  #if PLAIN
  // Read by words: a strict compiler copies no struct from the device's memory.
  constexpr int EW = sizeof(P) / 2;
  union Eight { uint4 words[EW]; P x[8]; };
  #define READ(eight, from) Eight eight; for (int i = 0; i < EW; i++) eight.words[i] = (from)[i];
  #endif
MEMORY
  SHARED float rm[NW * GC];
  SHARED float rl[NW * GC];
  const int tokens = numbers[0];
  const DEVICE int* opened = numbers + 1; const DEVICE int* hidden = opened + tokens;
  const DEVICE int* lengths = hidden + tokens; const DEVICE int* owners = lengths + tokens;
  const DEVICE int* counts = owners + tokens; const DEVICE int* begins = counts + tokens;
  const DEVICE int* ends = begins + tokens; const DEVICE int* jobs = ends + tokens;
  const DEVICE int* job_tokens = jobs + tokens + 1;
  const int job = GROUP / (CH * KV), kvh = GROUP / CH % KV, chunk = GROUP % CH;
  const int token = job_tokens[job], rk = token * KV + kvh;
  if (token < 0) return;
  const int split = job - jobs[token], S = jobs[token + 1] - jobs[token];
  const int nb = ends[token] - begins[token], tl = opened[token], tu = (tl + 31) / 32;
  // The sequence's new tokens up to this one, of which the first is in this column of the open block.
  const int news = counts[token], old = tl - news, first_new = token - news + 1;
  const int hide = hidden[token];
  const long head0 = (long)rk * G + chunk * GC;
EARLY
  // The queries, and the new keys behind them, rounded as the model's own operations round.
  SHARED_POINTER float* k_s = q_s + GC * DK;
  for (int h = WARP; h < GC + news; h += NW) {
    const long head = h < GC ? head0 + h : (long)(first_new + h - GC) * KV + kvh;
    const DEVICE T* from = (h < GC ? queries : new_keys) + head * DK;
    const bool normed = h < GC ? QN : KN;
    const DEVICE float* weights = constants + 5 + (h < GC ? 0 : QN * DK);
    float factor = 0.f;
    if (normed) {
      for (int d = LANE; d < DK; d += 32) { const float x = static_cast<float>(from[d]); factor += x * x; }
      for (int o = 16; o; o >>= 1) factor += XOR(factor, o);
      factor = RSQRT(factor / DK + constants[h < GC ? 2 : 3]);
    }
    for (int d = LANE; d < DK; d += 32) {
      const float x = static_cast<float>(from[d]);
      q_s[h * DK + d] = normed ? ROUND(weights[d] * ROUND(x * factor)) : x;
    }
  }
  SYNC();
  if (ROPE) {
    const DEVICE float* frequencies = constants + 5 + (QN + KN) * DK;
    for (int i = THREAD; i < (GC + news) * (ROPE / 2); i += NW * 32) {
      const int h = i / (ROPE / 2 + !ROPE), j = i % (ROPE / 2 + !ROPE);
      const float place = constants[4] * static_cast<float>(lengths[token] - (h < GC ? 0 : GC + news - 1 - h));
      const float angle = place * (POWERS ? EXP2(frequencies[j]) : frequencies[j]), c = COS(angle), s = SIN(angle);
      const int a = h * DK + (NEXT ? 2 * j : j), b = NEXT ? a + 1 : a + ROPE / 2;
      const float x = q_s[a], y = q_s[b];
      q_s[a] = ROUND(x * c - y * s); q_s[b] = ROUND(x * s + y * c);
    }
    SYNC();
  }
  for (int i = THREAD; i < GC * DK; i += NW * 32) q_s[i] *= constants[0];
  #define CAPPED(x) (CAP ? constants[1] * TANH((x) / constants[1]) : (x))
  const long tail_at = ((long)owners[token] * KV + kvh) * 256;
  if (chunk == 0 && split == 0) {
    DEVICE T* to_keys = (DEVICE T*)tail_keys; DEVICE T* to_values = (DEVICE T*)tail_values;
    const long to = tail_at + tl - 1;
    for (int i = THREAD; i < DK; i += NW * 32) to_keys[to * DK + i] = static_cast<T>(k_s[(news - 1) * DK + i]);
    for (int i = THREAD; i < DV; i += NW * 32) to_values[to * DV + i] = new_values[(long)rk * DV + i];
  }
  SYNC();
UNITS
  SYNC();
  for (int i = THREAD; i < GC * DV; i += NW * 32) {
    const int g = i / DV, d = i % DV;
    float top = LOW;
    for (int w = 0; w < NW; w++) top = MAX(top, rm[w * GC + g]);
    float o = 0.f, total = 0.f;
    for (int w = 0; w < NW; w++) {
      const float e = EXP(rm[w * GC + g] - top);
      o += e * buf[(w * GC + g) * BW + d]; total += e * rl[w * GC + g];
    }
    const long head = head0 + g;
    FINISH
  }
"""

_MEMORY = """\
  SHARED float q_s[(GC + FM) * DK];
  SHARED float buf[NW * GC * BW];
"""

_UNITS = """\
  float m[GC], l[GC], acc[GC][8];
  for (int g = 0; g < GC; g++) { m[g] = LOW; l[g] = 0.f; for (int j = 0; j < 8; j++) acc[g][j] = 0.f; }
  const int word = LANE % LPT, half_ = LANE / LPT;
  const int probs = WARP * GC * BW;
  for (int u = split * NW + WARP; u < 4 * nb + tu; u += S * NW) {
    const bool sealed = u < 4 * nb;
    const int quarter = u & 3, column0 = (u - 4 * nb) * 32;
    const long base = sealed ? (long)slots[begins[token] + (u >> 2)] * KV + kvh : 0;
    float sc[GC][8];
    for (int g = 0; g < GC; g++) for (int j = 0; j < 8; j++) sc[g][j] = sealed ? 0.f : LOW;
    if (sealed) {
      // Eight lanes have eight tokens each, and the four groups of lanes every fourth channel.
      const int piece = LANE & 7;
      float bias[GC];
      for (int g = 0; g < GC; g++) bias[g] = 0.f;
      #if PLAIN
      const DEVICE uint4* keys = (const DEVICE uint4*)block_keys + (base * DK * 32 + quarter * 8 + piece) * EW;
      #else
      const long codes_at = base * DK * KW, scales_at = base * DK * KS + (quarter * 64 + piece * 8) / KG;
      #endif
      #pragma unroll 4
      for (int d = LANE >> 3; d < DK; d += 4) {
        float k[8];
        #if PLAIN
        READ(eight, keys + d * 32 * EW)
        for (int j = 0; j < 8; j++) k[j] = static_cast<float>(eight.x[j]);
        #else
        const float s = static_cast<float>(key_scales[scales_at + d * KS]);
        const float b = static_cast<float>(key_biases[scales_at + d * KS]);
        if (KB == 6) {
          const DEVICE unsigned short* c = (const DEVICE unsigned short*)(key_codes + codes_at + d * KW);
          c += quarter * 24 + piece * 3;
          const unsigned int low = c[0] | (unsigned int)c[1] << 16, high = c[2];
          for (int j = 0; j < 5; j++) k[j] = static_cast<float>((low >> (6 * j)) & 63u);
          k[5] = static_cast<float>(low >> 30 | (high & 15u) << 2);
          for (int j = 0; j < 2; j++) k[6 + j] = static_cast<float>((high >> (4 + 6 * j)) & 63u);
        } else if (KB == 4) {
          const unsigned int c = key_codes[codes_at + d * KW + quarter * 8 + piece];
          for (int j = 0; j < 8; j++) k[j] = static_cast<float>((c >> (4 * j)) & 15u);
        } else {
          const unsigned int c = key_codes[codes_at + d * KW + quarter * 16 + 2 * piece];
          const unsigned int e = key_codes[codes_at + d * KW + quarter * 16 + 2 * piece + 1];
          for (int j = 0; j < 4; j++) k[j] = static_cast<float>((c >> (8 * j)) & 255u);
          for (int j = 0; j < 4; j++) k[4 + j] = static_cast<float>((e >> (8 * j)) & 255u);
        }
        #endif
        #pragma unroll
        for (int g = 0; g < GC; g++) {
          #if PLAIN
          const float qs = q_s[g * DK + d];
          #else
          const float q = q_s[g * DK + d], qs = q * s;
          bias[g] += q * b;
          #endif
          #pragma unroll
          for (int j = 0; j < 8; j++) sc[g][j] += qs * k[j];
        }
      }
      const int first = (u >> 2) * 256 + quarter * 64 + piece * 8;
      for (int g = 0; g < GC; g++) for (int j = 0; j < 8; j++) {
        float x = sc[g][j] + bias[g];
        x += XOR(x, 8);
        x += XOR(x, 16);
        sc[g][j] = first + j < hide ? LOW : CAPPED(x);
      }
      #if !PLAIN
      // The block's first token, as computed.
      if (quarter == 0) for (int g = 0; g < GC; g++) {
        float x = 0.f;
        for (int d = LANE; d < DK; d += 32) x += q_s[g * DK + d] * static_cast<float>(key_exact[base * DK + d]);
        for (int o = 16; o; o >>= 1) x += XOR(x, o);
        if (piece == 0) sc[g][0] = first < hide ? LOW : CAPPED(x);
      }
      #endif
    } else {
      const int t = column0 + LANE;
      if (t < tl && nb * 256 + t >= hide) {
        const bool fresh = t >= old;
        const long at = (tail_at + t) * DK;
        const int own = (fresh ? t - old : 0) * DK;
        float dot[GC];
        for (int g = 0; g < GC; g++) dot[g] = 0.f;
        #pragma unroll 8
        for (int d = 0; d < DK; d++) {
          const float k = fresh ? k_s[own + d] : static_cast<float>(tail_keys[at + d]);
          for (int g = 0; g < GC; g++) dot[g] += q_s[g * DK + d] * k;
        }
        for (int g = 0; g < GC; g++) sc[g][0] = CAPPED(dot[g]);
      }
    }
    #pragma unroll
    for (int g = 0; g < GC; g++) {
      float top = sc[g][0];
      for (int j = 1; j < 8; j++) top = MAX(top, sc[g][j]);
      for (int o = 16; o; o >>= 1) top = MAX(top, XOR(top, o));
      const float now = MAX(m[g], top), fade = EXP(m[g] - now);
      float sum = 0.f;
      for (int j = 0; j < 8; j++) {
        const float p = sc[g][j] <= LOW ? 0.f : EXP(sc[g][j] - now);
        sum += p;
        if (sealed && LANE < 8) buf[probs + g * BW + LANE * 8 + j] = p;
        if (!sealed && j == 0) buf[probs + g * BW + LANE] = p;
      }
      for (int o = 16; o; o >>= 1) sum += XOR(sum, o);
      if (sealed) sum *= 0.25f;
      l[g] = l[g] * fade + sum; m[g] = now;
      for (int j = 0; j < 8; j++) acc[g][j] *= fade;
    }
    SYNC_WARP();
    if (word < WD) {
      if (sealed) {
        #pragma unroll 4
        for (int t = half_; t < 64; t += STEP) {
          const long at = base * 256 + quarter * 64 + t;
          float v[8];
          #if PLAIN
          READ(eight, (const DEVICE uint4*)block_values + (at * WD + word) * EW)
          for (int j = 0; j < 8; j++) v[j] = static_cast<float>(eight.x[j]);
          #else
          const unsigned int c = value_codes[at * WD + word];
          const float s = static_cast<float>(value_scales[at * (PV / VG) + word * 8 / VG]);
          const float b = static_cast<float>(value_biases[at * (PV / VG) + word * 8 / VG]);
          for (int j = 0; j < 8; j++) v[j] = s * static_cast<float>((c >> (4 * j)) & 15u) + b;
          #endif
          #pragma unroll
          for (int g = 0; g < GC; g++) {
            const float p = buf[probs + g * BW + t];
            #pragma unroll
            for (int j = 0; j < 8; j++) acc[g][j] += p * v[j];
          }
        }
        #if !PLAIN
        // The codes of the first token's values are zeros.
        if (quarter == 0 && half_ == 0) for (int j = 0; j < 8 && word * 8 + j < DV; j++) {
          const float v = static_cast<float>(value_exact[base * DV + word * 8 + j]);
          for (int g = 0; g < GC; g++) acc[g][j] += buf[probs + g * BW] * v;
        }
        #endif
      } else {
        const int most = tl - column0 < 32 ? tl - column0 : 32;
        for (int t = half_; t < most; t += STEP) {
          const int column = column0 + t;
          const bool fresh = column >= old;
          const long row = fresh ? (long)(first_new + column - old) * KV + kvh : tail_at + column;
          const long at = row * DV + word * 8;
          for (int j = 0; j < 8; j++) {
            if (word * 8 + j >= DV) break;
            const float v = static_cast<float>(fresh ? new_values[at + j] : tail_values[at + j]);
            for (int g = 0; g < GC; g++) acc[g][j] += buf[probs + g * BW + t] * v;
          }
        }
      }
    }
    SYNC_WARP();
  }
  for (int g = 0; g < GC; g++) {
    for (int j = 0; j < 8; j++) for (int o = LPT; o < 32; o <<= 1) acc[g][j] += XOR(acc[g][j], o);
    if (half_ == 0 && word < WD) for (int j = 0; j < 8; j++) buf[probs + g * BW + word * 8 + j] = acc[g][j];
    if (LANE == 0) { rm[WARP * GC + g] = m[g]; rl[WARP * GC + g] = l[g]; }
  }
"""

_FINISH_ONE = """
    if (SINKS) {
      // As _JOIN adds up a single part: the compiler must not round in another way here.
      const float sink = static_cast<float>(sinks[kvh * G + chunk * GC + g]), all = MAX(top, sink);
      const float e = EXP(top - all);
      o *= e; total = FMA(e, total, EXP(sink - all));
    }
    out[head * DV + d] = static_cast<T>(o / total);
"""

_FINISH_PART = """
    const long part = ((long)job * KV + kvh) * G + chunk * GC + g;
    parts[part * DV + d] = o;
    if (d == 0) { tops[part] = top; sums[part] = total; }
"""

_JOIN = """
  const int token = GROUP / HEADS, head = GROUP % HEADS, d = THREAD;
  const DEVICE int* jobs = numbers + 1 + 7 * numbers[0];
  float top = -1e30f, o = 0.f, total = 0.f;
  for (int job = jobs[token]; job < jobs[token + 1]; job++) top = MAX(top, tops[(long)job * HEADS + head]);
  if (SINKS) { const float sink = static_cast<float>(sinks[head]); top = MAX(top, sink); total = EXP(sink - top); }
  for (int job = jobs[token]; job < jobs[token + 1]; job++) {
    const long part = (long)job * HEADS + head;
    const float e = EXP(tops[part] - top);
    o = FMA(e, parts[part * DV + d], o); total = FMA(e, sums[part], total);
  }
  out[(long)GROUP * DV + d] = static_cast<T>(o / total);
"""

_PARTS = ("parts", "tops", "sums")
_Left = tuple[bool, bool, int, bool, bool, bool]
_tensor_cores = False


def use_tensor_cores(wanted: bool) -> None:
    """Says whether tensor cores read the units of blocks that fit (`decode_tensor.py`), in kernels that this process
    launches or records from now on. At first they do not."""
    global _tensor_cores
    _tensor_cores = wanted


@contextmanager
def tensor_cores(wanted: bool) -> Iterator[None]:
    """Does `use_tensor_cores` for now."""
    before = _tensor_cores
    use_tensor_cores(wanted)
    try:
        yield
    finally:
        use_tensor_cores(before)


def has_tensor_cores() -> bool:
    """Whether the device is one of CUDA that multiplies bfloat16 numbers."""
    return mx.cuda.is_available() and architecture() >= 80


_ROWS = ["queries", "new_keys", "new_values"], ["tail_keys", "tail_values"]
_NUMBERS = ["slots", "numbers", "constants", "sinks", "order"]


def attend(
    queries: mx.array,
    view: KernelView,
    policy: SealPolicy,
    scale: float,
    sinks: mx.array | None = None,
    *,
    cap: float = 0.0,
) -> mx.array:
    """Attention of new tokens to their sequences' blocks and open blocks, and to new tokens before them.

    Args:
        queries: (tokens, heads, 1, key_dim).
        sinks: (heads,), what every head adds to the softmax's sum; None for nothing.
        cap: of scores, which become `cap * tanh(score / cap)`; 0 for none.

    Returns:
        (tokens, heads, 1, value_dim), in the dtype of the queries.
    """
    step = view.step
    read, tails = step.read, step.tails
    count, heads, _, key_dim = queries.shape
    kv_heads, value_dim = tails[0].shape[1], tails[1].shape[3]
    grouped, kind = heads // kv_heads, type(step.pool)
    pool = step.pool
    types = queries.dtype, pool.block_values.dtype if isinstance(pool, Plain) else pool.value_scales.dtype
    transform = view.transform(key_dim)
    shape = key_dim, value_dim, kv_heads, grouped
    coded = policy.key_bits, policy.key_group
    tensor = _tensor_cores and has_tensor_cores()
    left, sunk = _left(transform, capped=bool(cap)), sinks is not None
    plan = _plan(kind, types, shape, coded, left, read.most, sinks=sunk, tensor=tensor)
    one = read.count == count
    constants = _unchanged(scale, cap) if transform is NOTHING else _constants(transform, scale, cap)
    sink = constants if sinks is None else sinks
    out, dtype = (count, heads, 1, value_dim), queries.dtype
    inputs = [
        *(queries, view.keys, view.values, *pool, *tails),
        read.slots,
        read.numbers,
        constants,
        sink,
        step.written,
    ]
    _prepare(kind, types, shape, coded, left, tuple(array.dtype for array in inputs), sinks=sunk)
    made = (plan.one if one else plan.parts)(
        inputs=inputs,
        template=plan.template,
        grid=(read.count * kv_heads * plan.chunks * WARPS * 32, 1, 1),
        threadgroup=(WARPS * 32, 1, 1),
        output_shapes=[out] if one else [(read.count, heads, value_dim), *[(read.count, heads)] * 2],
        output_dtypes=[dtype] if one else [mx.float32] * 3,
    )
    if one:
        return made[0]
    return plan.join(
        inputs=[*made, read.numbers, sink],
        template=plan.join_template,
        grid=(count * heads * value_dim, 1, 1),
        threadgroup=(value_dim, 1, 1),
        output_shapes=[out],
        output_dtypes=[dtype],
    )[0]


@dataclass(frozen=True)
class _Kernels:
    """The kernels for the shapes of a layer: for tokens with one group of threads each, for tokens with several, and
    for joining the parts of several. `chunks` groups share the query heads of a KV head."""

    chunks: int
    one: Any
    parts: Any
    template: list[tuple[str, Any]]
    join: Any
    join_template: list[tuple[str, Any]]


@cache
def _plan(
    kind: type[Sealed],
    types: tuple[mx.Dtype, mx.Dtype],
    shape: tuple[int, int, int, int],
    coded: tuple[int, int],
    left: _Left,
    most: int,
    *,
    sinks: bool,
    tensor: bool,
) -> _Kernels:
    key_dim, value_dim, kv_heads, grouped = shape
    plain = kind is Plain
    if plain and value_dim % 8:
        raise ValueError(f"the kernel needs a multiple of eight value channels per head, not {value_dim}")
    dtype, padded = types[0], value_dim if plain else -(-value_dim // 32) * 32
    tensor = tensor and decode_tensor.fits(kind, types, (key_dim, value_dim), coded)
    together = _together(grouped, key_dim, padded, most)
    if tensor:
        fewer = _together(grouped, key_dim, padded, most, decode_tensor.HEADS_MOST)
        # A single head of several wastes columns.
        tensor, together = (True, fewer) if fewer > 1 or together == 1 else (False, together)
    if not together:
        raise ValueError(f"heads of {key_dim} channels are too large for {most} new tokens of a sequence")
    template = [
        ("T", dtype),
        ("P", types[1]),
        ("DK", key_dim),
        ("DV", value_dim),
        ("PV", padded),
        ("VG", value_group(value_dim)),
    ]
    template += [("KV", kv_heads), ("G", grouped), ("GC", together), ("FM", most)]
    template += [*zip(("KB", "KG"), coded, strict=True), ("SINKS", sinks)]
    template += zip(("QN", "KN", "ROPE", "NEXT", "POWERS", "CAP"), left, strict=True)
    name, texts = f"{kind.__name__.lower()}_decode", {"MEMORY": _MEMORY, "EARLY": "", "UNITS": _UNITS}
    if tensor:
        name, texts = f"{name}_tensor", decode_tensor.texts()
    body = f"  #define PLAIN {int(plain)}\n{_BODY}"
    for place, text in texts.items():
        body = body.replace(f"{place}\n", text)
    read = (*_ROWS[0], *kind._fields, *_ROWS[1], *_NUMBERS)
    one = kernel(f"{name}_one", read, ("out",), body.replace("FINISH", _FINISH_ONE))
    parts = kernel(f"{name}_parts", read, _PARTS, body.replace("FINISH", _FINISH_PART))
    join = kernel("decode_join", (*_PARTS, "numbers", "sinks"), ("out",), _JOIN)
    joined = [("T", dtype), ("DV", value_dim), ("HEADS", kv_heads * grouped), ("SINKS", sinks)]
    return _Kernels(grouped // together, one, parts, template, join, joined)


@cache
def _prepare(
    kind: type[Sealed],
    types: tuple[mx.Dtype, mx.Dtype],
    shape: tuple[int, int, int, int],
    coded: tuple[int, int],
    left: _Left,
    inputs: tuple[mx.Dtype, ...],
    *,
    sinks: bool,
) -> None:
    """Begins to compile what steps of a model need, once: with and without drafts and tensor cores.

    Args:
        inputs: of a launch; the last but one is that of the sinks.
    """
    dtype = types[0]
    for tensor in (False, True) if has_tensor_cores() else (False,):
        for most in (1, NEW_MOST) if takes_drafts(shape[:2]) else (1,):
            plan = _plan(kind, types, shape, coded, left, most, sinks=sinks, tensor=tensor)
            prepare(plan.parts, plan.template, inputs, [mx.float32] * 3)
            prepare(plan.one, plan.template, inputs, [dtype])
            prepare(plan.join, plan.join_template, [*[mx.float32] * 3, mx.int32, inputs[-2]], [dtype])


def takes_drafts(dims: tuple[int, int]) -> bool:
    """Whether the kernel has room for `NEW_MOST` new tokens of a sequence with heads of these channels, of keys and of
    values."""
    return _together(1, dims[0], -(-dims[1] // 32) * 32, NEW_MOST) > 0


def _together(grouped: int, key_dim: int, padded: int, new: int, most: int = 8) -> int:
    """Returns how many query heads of a KV head share a group of threads: as many as fit into its memory beside `new`
    keys, at most `most`; 0 if none does."""
    each = 4 * (key_dim + WARPS * max(64, padded) + 2 * WARPS)
    most = min(most, (SHARED_BYTES_MAX - 4 * key_dim * new) // each)
    return next((count for count in range(min(most, grouped), 0, -1) if grouped % count == 0), 0)


@cache
def _unchanged(scale: float, cap: float) -> mx.array:
    """Returns the kernel's constants if the model leaves nothing to it."""
    return _constants(NOTHING, scale, cap)


def _constants(transform: HeadTransform, scale: float, cap: float) -> mx.array:
    return mx.array([scale, cap, *transform.constants], mx.float32)


def _left(transform: HeadTransform, *, capped: bool) -> _Left:
    """Returns what the kernel must do with queries, keys and scores, as constants of the template."""
    normed = transform.query_norm is not None, transform.key_norm is not None
    if (rotation := transform.rotation) is None:
        return *normed, 0, False, False, capped
    return *normed, rotation.dims, rotation.traditional, rotation.exponents is not None, capped
