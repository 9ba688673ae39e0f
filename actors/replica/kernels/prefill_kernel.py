"""Attention of prompts as one CUDA kernel: flash attention (Dao, "FlashAttention-2") with tensor cores.

MLX's own attention asks cuDNN, which makes a plan for every new shape, and needs a mask for what a prompt's tokens may
see: blocks before a token's own block as sealed, and in its own block the tokens before it as computed
(`paged_cache.py`). This kernel computes that from positions. It takes any lengths, windows, and sequences of different
lengths in one launch.

A group of four warps has a tile of consecutive queries of one head, all in one block, and goes over the columns (keys)
that the block's tokens see, 64 at a time. The next columns are copied into shared memory while these are multiplied.
Scores are kept in registers, as in `decode_kernel.py` with a running maximum, sum and output. If there are few groups,
several share the columns of a tile, and a second kernel adds up their parts.

Operands are those of `mma.m16n8k16` (PTX, "Matrix Fragments for mma.m16n8k16 with floating point type"); `ldmatrix`
loads them. Rows in shared memory have 16 bytes more than they need, so that eight rows lie in different banks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx

from .few_rows import KINDS
from .gpu_kernels import int_numbers, kernel

COLUMNS = 64
"""Columns that are multiplied at a time."""

WARPS = 4
GROUPS_WANTED = 264
"""As many groups as a large device runs at once."""

SPLITS_MOST = 16
SPLIT_COST = 0.05
"""What storing and adding up a part costs, as a share of the time of a tile with all its columns. Not measured yet."""

# Template: T, DK, DV, MT (tiles of 16 queries a warp), H heads, G of them a KV head, SINKS. `numbers` are the queries
# of each sequence (with padding), the columns, those of sealed blocks, the window (0 for none), whether sealed blocks
# are as computed, the tiles of a head, and into how many parts each tile's columns are divided; then of each sequence
# its length, its new tokens, and the first block of which it has columns. STORE: what is done with a query's `o`,
# `top` and `total`. Queries in the padding give zeros: NaN would spread, even if it is masked.
_BODY = """
  constexpr int ROWS = 64 * MT, KW = DK + 8, VW = DV + 8, KT = DK / 16, VT = DV / 16;
  constexpr int ROW_BYTES = 2 * KW, VALUE_BYTES = 2 * VW, STAGE = 64 * (ROW_BYTES + VALUE_BYTES);
  constexpr float LOW = -1e30f;
  #define MULTIPLY(c, a0, a1, a2, a3, b0, b1) \\
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.KIND.KIND.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, " \\
        "{%0,%1,%2,%3};" \\
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) \\
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1))
  #ifdef __CUDA_ARCH__
  extern __shared__ uint4 memory_s[];
  typedef unsigned int Place;
  #define PLACE_OF(pointer) (unsigned int)__cvta_generic_to_shared(pointer)
  #define LOAD_MATRICES(r, place) \\
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" \\
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(place))
  #define LOAD_TURNED(r, place) \\
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" \\
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(place))
  // Zeros if `bytes` is 0.
  #define COPY(place, from, bytes) \\
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" : : "r"(place), "l"(from), "r"(bytes))
  #define COPIED() asm volatile("cp.async.commit_group;")
  #define WAIT_FOR_COPIES(left) asm volatile("cp.async.wait_group %0;" : : "n"(left) : "memory")
  #define PAIR(to, low, high) asm("cvt.rn.KINDx2.f32 %0, %1, %2;" : "=r"(to) : "f"(high), "f"(low))
  #else
  static uint4 memory_s[(ROWS * ROW_BYTES + 2 * STAGE) / 16];
  typedef unsigned long long Place;
  #define PLACE_OF(pointer) (Place)(pointer)
  #define LOAD_MATRICES(r, place) load_matrices(r, (const void*)(place), false)
  #define LOAD_TURNED(r, place) load_matrices(r, (const void*)(place), true)
  #define COPY(place, from, bytes) if (bytes) memcpy((void*)(place), from, 16); else memset((void*)(place), 0, 16)
  #define COPIED()
  #define WAIT_FOR_COPIES(left)
  #define PAIR(to, low, high) { T both_[2] = {static_cast<T>(low), static_cast<T>(high)}; memcpy(&to, both_, 4); }
  #endif
  const int N = numbers[0], C = numbers[1], used = numbers[2], window = numbers[3], exact = numbers[4];
  const int tiles = numbers[5], splits = numbers[6];
  // The last tiles have the most columns, so they come first.
  const int split = GROUP % splits, head = GROUP / splits % H, t = tiles - 1 - GROUP / splits / H % tiles;
  const int s = GROUP / splits / H / tiles;
  const int* own = numbers + 8 + 3 * s;
  const int length = own[0], count = own[1], first = own[2], end = length + count;
  const int tile0 = (length / ROWS + t) * ROWS, kv = head / G;
  if (tile0 >= end) {
    #if WHOLE
    for (int i = THREAD; i < ROWS * DV; i += 128) {
      const int n = tile0 + i / DV - length;
      if (n < N) out[(((long)s * N + n) * H + head) * DV + i % DV] = static_cast<T>(0.f);
    }
    #endif
    return;
  }
  // Columns of blocks before `block` are sealed. Positions from there on are where they are as computed.
  const int last = (tile0 + ROWS < end ? tile0 + ROWS : end) - 1, block = exact ? length / 256 : tile0 / 256;
  const int before = (block - first) * 256, earliest = tile0 > length ? tile0 : length;
  const int hidden = window ? earliest - window + 1 - first * 256 : 0;
  const int begin = hidden > 0 ? (hidden < before ? hidden / 64 * 64 : before) : 0, sealed = (before - begin) / 64;
  const int inside0 = used + (block - length / 256) * 256, steps = sealed + (last - block * 256) / 64 + 1;
  const int from_step = steps * split / splits, to_step = steps * (split + 1) / splits;
  const Place queries_s = PLACE_OF(memory_s), stages = queries_s + ROWS * ROW_BYTES;
  for (int i = THREAD; i < ROWS * (DK / 8); i += 128) {
    const int row = i / (DK / 8), at = i % (DK / 8), n = tile0 + row - length;
    const bool there = n >= 0 && n < count;
    const T* from = queries + (((long)s * H + head) * N + (there ? n : 0)) * DK + at * 8;
    COPY(queries_s + row * ROW_BYTES + at * 16, from, there ? 16 : 0);
  }
  const T* all_keys = keys + ((long)s * (H / G) + kv) * C * DK;
  const T* all_values = values + ((long)s * (H / G) + kv) * C * DV;
  auto column_of = [&](int step) { return step < sealed ? begin + 64 * step : inside0 + 64 * (step - sealed); };
  // Rows of 64 columns lie one after another, and so do pieces of 16 bytes of a row.
  #define FETCH(to, from, D, BYTES) \
    _Pragma("unroll") \
    for (int i = 0; i < D / 16; i++) { \
      const int piece = i * 128 + THREAD; \
      COPY(128 % (D / 8) == 0 ? (to) + THREAD / (D / 8) * BYTES + THREAD % (D / 8) * 16 + i * (128 / (D / 8)) * BYTES \
                              : (to) + piece / (D / 8) * BYTES + piece % (D / 8) * 16, (from) + piece * 8, 16); \
    }
  auto fetch = [&](int step) {
    const int column = column_of(step);
    const Place to = stages + (step & 1) * STAGE;
    FETCH(to, all_keys + (long)column * DK, DK, ROW_BYTES)
    FETCH(to + 64 * ROW_BYTES, all_values + (long)column * DV, DV, VALUE_BYTES)
  };
  const int g = LANE >> 2, q = LANE & 3, row0 = WARP * 16 * MT;
  const float scale = constants[0] * 1.44269504f;
  float o[MT][2 * VT][4], top[MT][2], sum[MT][2];
  #pragma unroll
  for (int m = 0; m < MT; m++) {
    #pragma unroll
    for (int h = 0; h < 2; h++) { top[m][h] = LOW; sum[m][h] = 0.f; }
    #pragma unroll
    for (int v = 0; v < 2 * VT; v++) for (int j = 0; j < 4; j++) o[m][v][j] = 0.f;
  }
  const Place queries_at = queries_s + (row0 + (LANE & 15)) * ROW_BYTES + (LANE >> 4) * 16;
  const int key_at = ((LANE & 7) + (LANE >> 4) * 8) * ROW_BYTES + (LANE >> 3 & 1) * 16;
  const int value_at = 64 * ROW_BYTES + ((LANE & 7) + (LANE >> 3 & 1) * 8) * VALUE_BYTES + (LANE >> 4) * 16;
  if (from_step < to_step) fetch(from_step);
  COPIED();
  for (int step = from_step; step < to_step; step++) {
    if (step + 1 < to_step) fetch(step + 1);
    COPIED();
    WAIT_FOR_COPIES(1);
    SYNC();
    const Place stage = stages + (step & 1) * STAGE;
    float c[MT][8][4];
    #pragma unroll
    for (int m = 0; m < MT; m++) for (int n = 0; n < 8; n++) for (int j = 0; j < 4; j++) c[m][n][j] = 0.f;
    #pragma unroll
    for (int k = 0; k < KT; k++) {
      unsigned int a[MT][4];
      #pragma unroll
      for (int m = 0; m < MT; m++) LOAD_MATRICES(a[m], queries_at + m * 16 * ROW_BYTES + k * 32);
      #pragma unroll
      for (int n = 0; n < 4; n++) {
        unsigned int b[4];
        LOAD_MATRICES(b, stage + key_at + n * 16 * ROW_BYTES + k * 32);
        #pragma unroll
        for (int m = 0; m < MT; m++) {
          MULTIPLY(c[m][2 * n], a[m][0], a[m][1], a[m][2], a[m][3], b[0], b[1]);
          MULTIPLY(c[m][2 * n + 1], a[m][0], a[m][1], a[m][2], a[m][3], b[2], b[3]);
        }
      }
    }
    // Positions of the first column, and of a lane's first query.
    const int position = step < sealed ? first * 256 + begin + 64 * step : block * 256 + 64 * (step - sealed);
    const int asking = tile0 + row0 + g;
    const bool masked = step >= sealed || (window && position <= tile0 + ROWS - 1 - window);
    #pragma unroll
    for (int m = 0; m < MT; m++) {
      #pragma unroll
      for (int h = 0; h < 2; h++) {
        const int query = asking + 16 * m + 8 * h;
        float most = LOW;
        #pragma unroll
        for (int n = 0; n < 8; n++) for (int j = 0; j < 2; j++) {
          float x = c[m][n][2 * h + j] * scale;
          if (masked) {
            const int key = position + 8 * n + 2 * q + j;
            if (key > query || (window && key <= query - window)) x = LOW;
          }
          c[m][n][2 * h + j] = x;
          most = MAX(most, x);
        }
        most = MAX(most, XOR(most, 1));
        most = MAX(most, XOR(most, 2));
        const float now = MAX(top[m][h], most), fade = EXP2(top[m][h] - now);
        float total = 0.f;
        #pragma unroll
        for (int n = 0; n < 8; n++) for (int j = 0; j < 2; j++) {
          const float x = c[m][n][2 * h + j], p = masked && x <= LOW ? 0.f : EXP2(x - now);
          c[m][n][2 * h + j] = p;
          total += p;
        }
        sum[m][h] = sum[m][h] * fade + total;
        top[m][h] = now;
        #pragma unroll
        for (int v = 0; v < 2 * VT; v++) for (int j = 0; j < 2; j++) o[m][v][2 * h + j] *= fade;
      }
    }
    #pragma unroll
    for (int k = 0; k < 4; k++) {
      unsigned int a[MT][4];
      #pragma unroll
      for (int m = 0; m < MT; m++) {
        #pragma unroll
        for (int i = 0; i < 4; i++) {
          const float* from = c[m][2 * k + (i >> 1)] + 2 * (i & 1);
          PAIR(a[m][i], from[0], from[1]);
        }
      }
      #pragma unroll
      for (int v = 0; v < VT; v++) {
        unsigned int b[4];
        LOAD_TURNED(b, stage + value_at + k * 16 * VALUE_BYTES + v * 32);
        #pragma unroll
        for (int m = 0; m < MT; m++) {
          MULTIPLY(o[m][2 * v], a[m][0], a[m][1], a[m][2], a[m][3], b[0], b[1]);
          MULTIPLY(o[m][2 * v + 1], a[m][0], a[m][1], a[m][2], a[m][3], b[2], b[3]);
        }
      }
    }
    // The next copies go to where these columns were.
    SYNC();
  }
  #pragma unroll
  for (int m = 0; m < MT; m++) {
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      float total = sum[m][h];
      total += XOR(total, 1);
      total += XOR(total, 2);
      const int n = tile0 + row0 + 16 * m + 8 * h + g - length;
      if (n < 0 || n >= N) continue;
      const long row = ((long)s * N + n) * H + head;
      const bool there = n < count;
STORE    }
  }
"""

_STORE_WHOLE = """\
      float most = top[m][h];
      if (SINKS) {
        const float sink = sinks[head] * 1.44269504f;
        most = MAX(most, sink);
        total = total * EXP2(top[m][h] - most) + EXP2(sink - most);
      }
      const float factor = there ? EXP2(top[m][h] - most) / total : 0.f;
      #pragma unroll
      for (int v = 0; v < 2 * VT; v++) {
        unsigned int both;
        PAIR(both, o[m][v][2 * h] * factor, o[m][v][2 * h + 1] * factor);
        ((unsigned int*)out)[(row * DV + 8 * v + 2 * q) / 2] = both;
      }
"""

_STORE_PART = """\
      const long part = (long)split * numbers[7] + row;
      #pragma unroll
      for (int v = 0; v < 2 * VT; v++) for (int j = 0; j < 2; j++)
        if (there) parts[part * DV + 8 * v + 2 * q + j] = o[m][v][2 * h + j];
      if (there && q == 0) { tops[part] = top[m][h]; sums[part] = total; }
"""

# Template: T, DV, H heads, SINKS. A group of threads has a query's head.
_JOIN = """
  const int N = numbers[0], splits = numbers[6], d = THREAD, n = GROUP / H % N, s = GROUP / H / N;
  float most = -1e30f, total = 0.f, sum = 0.f;
  if (n >= numbers[9 + 3 * s]) {
    out[(long)GROUP * DV + d] = static_cast<T>(0.f);
    return;
  }
  for (int i = 0; i < splits; i++) most = MAX(most, tops[(long)i * numbers[7] + GROUP]);
  if (SINKS) most = MAX(most, sinks[GROUP % H] * 1.44269504f);
  for (int i = 0; i < splits; i++) {
    const long at = (long)i * numbers[7] + GROUP;
    const float e = EXP2(tops[at] - most);
    total += e * sums[at];
    sum += e * parts[at * DV + d];
  }
  if (SINKS) total += EXP2(sinks[GROUP % H] * 1.44269504f - most);
  out[(long)GROUP * DV + d] = static_cast<T>(sum / total);
"""


@dataclass(frozen=True)
class Chunk:
    """What a call of the model adds to its sequences.

    Attributes:
        lengths: of the sequences before it.
        new: how many tokens each gets; what its queries have more is padding.
        first: the first block of which each has columns.
        sealed: columns of sealed blocks, the same for all sequences. The others begin with the open blocks.
        exact: whether sealed blocks are as computed; then those that the call fills are not among them.
    """

    lengths: Sequence[int]
    new: Sequence[int]
    first: Sequence[int]
    sealed: int
    exact: bool


def fits(heads: tuple[int, int], dims: tuple[int, int], dtype: mx.Dtype) -> bool:
    """Whether there is a kernel for query and KV heads, for channels of keys and of values, and for a dtype."""
    whole = all(dim % 16 == 0 and dim <= 256 for dim in dims)
    return dtype in KINDS and whole and heads[0] % heads[1] == 0 and _bytes(dims) <= SHARED_BYTES_MOST


def attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    chunk: Chunk,
    scale: float,
    window: int = 0,
    sinks: mx.array | None = None,
    splits: int | None = None,
) -> mx.array:
    """Attention of a chunk's queries to their sequences' blocks and to each other. See `fits`.

    Args:
        queries: (sequences, heads, queries, key_dim), those after a sequence's `new` tokens being padding.
        keys: (sequences, kv_heads, columns, key_dim), of whole blocks.
        values: (sequences, kv_heads, columns, value_dim).
        window: how many of the last tokens a query attends to; 0 for all.
        sinks: (heads,), what every head adds to the softmax's sum; None for nothing.
        splits: into how many parts each tile's columns are divided; None for as many as are best.

    Returns:
        (sequences, heads, queries, value_dim), in the dtype of the queries, with the heads of a token together in
        memory; zeros for padding.
    """
    sequences, heads, count, key_dim = queries.shape
    kv_heads, columns, value_dim = keys.shape[1], keys.shape[2], values.shape[3]
    dtype, rows = queries.dtype, _rows(value_dim)
    tiles = max((length % rows + count + rows - 1) // rows for length in chunk.lengths)
    groups = sequences * heads * tiles
    if splits is None:
        splits = _splits(groups, max(chunk.lengths) + count)
    own = [number for each in zip(chunk.lengths, chunk.new, chunk.first, strict=True) for number in each]
    exact, all_rows = int(chunk.exact), sequences * count * heads
    numbers = int_numbers(count, columns, chunk.sealed, window, exact, tiles, splits, all_rows, *own)
    constants = _constant(scale)
    plan = _plan(dtype, key_dim, value_dim, heads, heads // kv_heads, sinks is not None)
    out, sink = (sequences, count, heads, value_dim), constants if sinks is None else sinks.astype(mx.float32)
    parts = (splits, *out)
    made = (plan.whole if splits == 1 else plan.parts)(
        inputs=[queries, keys, values, numbers, constants, sink],
        template=plan.template,
        grid=(groups * splits * 32 * WARPS, 1, 1),
        threadgroup=(32 * WARPS, 1, 1),
        output_shapes=[out] if splits == 1 else [parts, parts[:-1], parts[:-1]],
        output_dtypes=[dtype] if splits == 1 else [mx.float32] * 3,
        shared_memory=plan.shared_memory,
    )
    if splits > 1:
        made = plan.join(
            inputs=[*made, numbers, sink],
            template=plan.join_template,
            grid=(all_rows * value_dim, 1, 1),
            threadgroup=(value_dim, 1, 1),
            output_shapes=[out],
            output_dtypes=[dtype],
        )
    return made[0].transpose(0, 2, 1, 3)


SHARED_BYTES_MOST = 200 * 2**10
"""Of 227 KiB that a group may have on an H100; other devices have 99 or 163, and there large heads do not fit."""


def _rows(value_dim: int) -> int:
    """Returns the queries of a tile. A warp has room for the outputs of 32 queries, or of 16 if heads are large."""
    return 16 * WARPS * (2 if value_dim <= 128 else 1)


def _bytes(dims: tuple[int, int]) -> int:
    """Returns the shared memory of a group: its queries, and columns of two steps."""
    key_row, value_row = (2 * dim + 16 for dim in dims)
    return _rows(dims[1]) * key_row + 2 * COLUMNS * (key_row + value_row)


def _splits(groups: int, length: int) -> int:
    """Returns into how many parts each tile's columns are divided."""
    most = max(1, min(SPLITS_MOST, length // (4 * COLUMNS)))
    costs = {
        splits: -(-groups * splits // GROUPS_WANTED) / splits
        + (SPLIT_COST * splits * groups / GROUPS_WANTED if splits > 1 else 0)
        for splits in range(1, most + 1)
    }
    return min(costs, key=lambda splits: costs[splits])


@dataclass(frozen=True)
class _Kernels:
    """The kernels for some heads: for tiles with a group each, for tiles with several, and for joining their parts."""

    whole: Any
    parts: Any
    template: list[tuple[str, Any]]
    shared_memory: int
    join: Any
    join_template: list[tuple[str, Any]]


@cache
def _plan(dtype: mx.Dtype, key_dim: int, value_dim: int, heads: int, grouped: int, sinks: bool) -> _Kernels:
    kind = KINDS[dtype][0]
    body = _BODY.replace("KIND", kind)
    read = ("queries", "keys", "values", "numbers", "constants", "sinks")
    bounds = (32 * WARPS, 2 if value_dim <= 128 else 1)
    whole, parts = (
        kernel(f"prefill_{kind}_{name}", read, outputs, body.replace("STORE", store).replace("WHOLE", one), bounds)
        for name, outputs, store, one in (
            ("whole", ("out",), _STORE_WHOLE, "1"),
            ("parts", ("parts", "tops", "sums"), _STORE_PART, "0"),
        )
    )
    tiles = _rows(value_dim) // (16 * WARPS)
    template = [("T", dtype), ("DK", key_dim), ("DV", value_dim), ("MT", tiles), ("H", heads), ("G", grouped)]
    template.append(("SINKS", sinks))
    join = kernel("prefill_join", ("parts", "tops", "sums", "numbers", "sinks"), ("out",), _JOIN)
    joined = [("T", dtype), ("DV", value_dim), ("H", heads), ("SINKS", sinks)]
    return _Kernels(whole, parts, template, _bytes((key_dim, value_dim)), join, joined)


@cache
def _constant(scale: float) -> mx.array:
    return mx.array([scale], mx.float32)
