"""Attention of prompts as one CUDA kernel: flash attention (Dao, "FlashAttention-2") with tensor cores.

MLX's own attention asks cuDNN, which makes a plan for every new shape, and needs a mask for what a prompt's tokens may
see: blocks before a token's own block as sealed, and in its own block the tokens before it as computed
(`paged_cache.py`). This kernel computes that from positions. It takes any lengths, windows, and sequences of different
lengths in one launch.

A group of four warps has a tile of consecutive queries of one head, all in one block, and goes over the columns (keys)
that the block's tokens see, 64 at a time. The next columns are copied into shared memory while these are multiplied.
Scores are kept in registers, as in `decode_kernel.py` with a running maximum, sum and output. Dividing a tile's columns
among groups took longer even for 64 queries behind 30,000 tokens, on an H200.

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
from .gpu_kernels import MULTIPLY, architecture, int_numbers, kernel

COLUMNS = 64
"""Columns that are multiplied at a time."""

WARPS = 4
SMALL_GAIN = 0.75
"""Tiles of 64 queries are taken instead of 128 if they need at most this share of the rows, with padding."""

# Template: T, DK, DV, MT (tiles of 16 queries a warp), H heads, G of them a KV head, SINKS. `numbers` are the queries
# of each sequence (with padding), the columns, those of sealed blocks, the window (0 for none), whether sealed blocks
# are as computed, and the tiles of a head; then of each sequence its length, its new tokens, and the first block of
# which it has columns. Queries in the padding give zeros: NaN would spread, even if it is masked.
_BODY = """
  constexpr int ROWS = 64 * MT, KW = DK + 8, VW = DV + 8, KT = DK / 16, VT = DV / 16;
  constexpr int ROW_BYTES = 2 * KW, VALUE_BYTES = 2 * VW, STAGE = 64 * (ROW_BYTES + VALUE_BYTES);
  constexpr float LOW = -1e30f;
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
  // 2 to the power of x; 0 for very small ones.
  auto power = [](float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; };
  #define POWER(x) power(x)
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
  #define POWER(x) EXP2(x)
  #define PAIR(to, low, high) { T both_[2] = {static_cast<T>(low), static_cast<T>(high)}; memcpy(&to, both_, 4); }
  #endif
  const int N = numbers[0], C = numbers[1], used = numbers[2], window = numbers[3], exact = numbers[4];
  // The last tiles have the most columns, so they come first.
  const int tiles = numbers[5], head = GROUP % H, t = tiles - 1 - GROUP / H % tiles, s = GROUP / H / tiles;
  const int* own = numbers + 6 + 3 * s;
  const int length = own[0], count = own[1], first = own[2], end = length + count;
  const int tile0 = (length / ROWS + t) * ROWS, kv = head / G;
  if (tile0 >= end) {
    for (int i = THREAD; i < ROWS * DV; i += 128) {
      const int n = tile0 + i / DV - length;
      if (n < N) out[(((long)s * N + n) * H + head) * DV + i % DV] = static_cast<T>(0.f);
    }
    return;
  }
  // Columns of blocks before `block` are sealed. Positions from there on are where they are as computed.
  const int last = (tile0 + ROWS < end ? tile0 + ROWS : end) - 1, block = exact ? length / 256 : tile0 / 256;
  const int before = (block - first) * 256, earliest = tile0 > length ? tile0 : length;
  const int hidden = window ? earliest - window + 1 - first * 256 : 0;
  const int begin = hidden > 0 ? (hidden < before ? hidden / 64 * 64 : before) : 0, sealed = (before - begin) / 64;
  const int inside0 = used + (block - length / 256) * 256, steps = sealed + (last - block * 256) / 64 + 1;
  const Place queries_s = PLACE_OF(memory_s), stages = queries_s + ROWS * ROW_BYTES;
  for (int i = THREAD; i < ROWS * (DK / 8); i += 128) {
    const int row = i / (DK / 8), at = i % (DK / 8), n = tile0 + row - length;
    const bool there = n >= 0 && n < count;
    const T* from = queries + (((long)s * H + head) * N + (there ? n : 0)) * DK + at * 8;
    COPY(queries_s + row * ROW_BYTES + at * 16, from, there ? 16 : 0);
  }
  const T* all_keys = keys + ((long)s * (H / G) + kv) * C * DK;
  const T* all_values = values + ((long)s * (H / G) + kv) * C * DV;
  // What the loop seldom needs is kept in shared memory: registers are full.
  enum { SEALED, BEGIN, INSIDE, FIRST, OWN, LAST };
  SHARED int told_s[6];
  if (THREAD == 0) {
    told_s[SEALED] = sealed; told_s[BEGIN] = begin; told_s[INSIDE] = inside0 - 64 * sealed;
    told_s[FIRST] = first * 256 + begin; told_s[OWN] = block * 256 - 64 * sealed;
    told_s[LAST] = tile0 + ROWS - 1 - window;
  }
  SYNC();
  // Rows of 64 columns lie one after another, and so do pieces of 16 bytes of a row.
  #define FETCH(to, from, D, BYTES) \
    _Pragma("unroll") \
    for (int i = 0; i < D / 16; i++) { \
      const int piece = i * 128 + THREAD; \
      COPY(128 % (D / 8) == 0 ? (to) + THREAD / (D / 8) * BYTES + THREAD % (D / 8) * 16 + i * (128 / (D / 8)) * BYTES \
                              : (to) + piece / (D / 8) * BYTES + piece % (D / 8) * 16, (from) + piece * 8, 16); \
    }
  auto fetch = [&](int step) {
    const int column = told_s[step < told_s[SEALED] ? BEGIN : INSIDE] + 64 * step;
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
  fetch(0);
  COPIED();
  for (int step = 0; step < steps; step++) {
    if (step + 1 < steps) fetch(step + 1);
    COPIED();
    WAIT_FOR_COPIES(1);
    SYNC();
    const Place stage = stages + (step & 1) * STAGE;
    float c[MT][8][4];
    #pragma unroll
    for (int m = 0; m < MT; m++) for (int n = 0; n < 8; n++) for (int j = 0; j < 4; j++) c[m][n][j] = 0.f;
    #pragma unroll 2
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
    const bool inside = step >= told_s[SEALED];
    const int position = told_s[inside ? OWN : FIRST] + 64 * step, asking = tile0 + row0 + g;
    if (inside || (window && position <= told_s[LAST])) {
      #pragma unroll
      for (int m = 0; m < MT; m++) for (int n = 0; n < 8; n++) for (int j = 0; j < 4; j++) {
        const int key = position + 8 * n + 2 * q + (j & 1), query = asking + 16 * m + 4 * (j & 2);
        if (key > query || (window && key <= query - window)) c[m][n][j] = LOW;
      }
    }
    #pragma unroll
    for (int m = 0; m < MT; m++) {
      #pragma unroll
      for (int h = 0; h < 2; h++) {
        float most = LOW;
        #pragma unroll
        for (int n = 0; n < 8; n++) for (int j = 0; j < 2; j++) most = MAX(most, c[m][n][2 * h + j]);
        most = MAX(most, XOR(most, 1));
        most = MAX(most, XOR(most, 2));
        // If a query sees none of the columns so far, what is added up here is multiplied by zero later.
        const float now = MAX(top[m][h], most * scale), fade = POWER(top[m][h] - now);
        float total = 0.f;
        #pragma unroll
        for (int n = 0; n < 8; n++) for (int j = 0; j < 2; j++) {
          const float p = POWER(c[m][n][2 * h + j] * scale - now);
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
      float most = top[m][h];
      if (SINKS) {
        const float sink = sinks[head] * 1.44269504f;
        most = MAX(most, sink);
        total = total * EXP2(top[m][h] - most) + EXP2(sink - most);
      }
      const float factor = EXP2(top[m][h] - most) / total;
      #pragma unroll
      for (int v = 0; v < 2 * VT; v++) {
        unsigned int both;
        // Not a product with zero, which may be NaN.
        const float one = there ? o[m][v][2 * h] * factor : 0.f, two = there ? o[m][v][2 * h + 1] * factor : 0.f;
        PAIR(both, one, two);
        ((unsigned int*)out)[(row * DV + 8 * v + 2 * q) / 2] = both;
      }
    }
  }
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
    return dtype in KINDS and whole and heads[0] % heads[1] == 0 and _rows_most(dims, shared_bytes()) > 0


def attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    chunk: Chunk,
    scale: float,
    window: int = 0,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attention of a chunk's queries to their sequences' blocks and to each other. See `fits`.

    Args:
        queries: (sequences, heads, queries, key_dim), those after a sequence's `new` tokens being padding.
        keys: (sequences, kv_heads, columns, key_dim), a multiple of `COLUMNS` columns.
        values: (sequences, kv_heads, columns, value_dim).
        window: how many of the last tokens a query attends to; 0 for all.
        sinks: (heads,), what every head adds to the softmax's sum; None for nothing.

    Returns:
        (sequences, heads, queries, value_dim), in the dtype of the queries, with the heads of a token together in
        memory; zeros for padding.
    """
    sequences, heads, count, key_dim = queries.shape
    kv_heads, columns, value_dim = keys.shape[1], keys.shape[2], values.shape[3]
    rows, tiles = _tiling(chunk.lengths, count, _rows_most((key_dim, value_dim), shared_bytes()))
    own = [number for each in zip(chunk.lengths, chunk.new, chunk.first, strict=True) for number in each]
    plan = _plan(queries.dtype, key_dim, value_dim, rows, heads, heads // kv_heads, sinks is not None)
    constants = _constant(scale)
    (out,) = plan.launch(
        inputs=[
            *(queries, keys, values),
            int_numbers(count, columns, chunk.sealed, window, int(chunk.exact), tiles, *own),
            *(constants, constants if sinks is None else sinks.astype(mx.float32)),
        ],
        template=plan.template,
        grid=(sequences * heads * tiles * 32 * WARPS, 1, 1),
        threadgroup=(32 * WARPS, 1, 1),
        output_shapes=[(sequences, count, heads, value_dim)],
        output_dtypes=[queries.dtype],
        shared_memory=plan.shared_memory,
    )
    return out.transpose(0, 2, 1, 3)


_SHARED_KIB = {80: 163, 87: 163, 90: 227, 100: 227, 103: 227, 110: 227}
_SHARED_KIB_ELSE = 99
"""The shared memory that a group of threads may have, by `architecture` (CUDA's programming guide)."""


@cache
def shared_bytes() -> int:
    """Returns the shared memory that a group of threads may have on this device; on a CPU, which only stands for one,
    the most of any."""
    device = architecture()
    return (_SHARED_KIB.get(device, _SHARED_KIB_ELSE) if device else max(_SHARED_KIB.values())) * 2**10


def _rows_most(dims: tuple[int, int], shared: int) -> int:
    """Returns the most queries of a tile for heads with these channels, 128 or 64; 0 if there is no room for them."""
    found = (rows for rows in (128, 64) if _bytes(dims, rows) <= shared)
    return next((rows for rows in found if rows == 64 or dims[1] <= LARGE_DIM), 0)


def _tiling(lengths: Sequence[int], count: int, rows_most: int) -> tuple[int, int]:
    """Returns the queries of a tile, at most `rows_most`, and the tiles of a head."""
    found = {rows: max(-(-(length % rows + count) // rows) for length in lengths) for rows in (128, 64)}
    few = found[64] * 64 <= SMALL_GAIN * found[128] * 128
    rows = 64 if few else rows_most
    return rows, found[rows]


LARGE_DIM = 128
"""With more channels a warp has no room for the outputs of 32 queries, but for those of 16."""


def _bytes(dims: tuple[int, int], rows: int) -> int:
    """Returns the shared memory of a group: its queries, and columns of two steps."""
    key_row, value_row = (2 * dim + 16 for dim in dims)
    return rows * key_row + 2 * COLUMNS * (key_row + value_row)


@dataclass(frozen=True)
class _Plan:
    """The kernel for some heads."""

    launch: Any
    template: list[tuple[str, Any]]
    shared_memory: int


@cache
def _plan(dtype: mx.Dtype, key_dim: int, value_dim: int, rows: int, heads: int, grouped: int, sinks: bool) -> _Plan:
    kind = KINDS[dtype][0]
    read = ("queries", "keys", "values", "numbers", "constants", "sinks")
    bounds = (32 * WARPS, 2 if value_dim <= LARGE_DIM else 1)
    launch = kernel(f"prefill_{kind}", read, ("out",), (MULTIPLY + _BODY).replace("KIND", kind), bounds)
    template = [("T", dtype), ("DK", key_dim), ("DV", value_dim), ("MT", rows // (16 * WARPS))]
    template += [("H", heads), ("G", grouped), ("SINKS", sinks)]
    return _Plan(launch, template, _bytes((key_dim, value_dim), rows))


@cache
def _constant(scale: float) -> mx.array:
    return mx.array([scale], mx.float32)
