"""The product of few rows with 4-bit weights as one CUDA kernel.

A decode step of some sequences consists of many small products. MLX's kernel for quantized weights reads the weights
once for each row. With dequantized weights products go through cuBLAS, which takes 25 us of the host for each. This
kernel reads 4-bit weights once for up to 32 rows, uses tensor cores, and is launched like other kernels.

When a model is loaded, tests decide whether the kernel is used, and for how many rows (`few_rows_check.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...patches import recast
from .gpu_kernels import kernel

ROWS_LEAST = 2
"""The fewest rows for the kernel: for one row MLX's kernel reads weights only once too."""

GROUPS_WANTED = 128
"""This many groups of threads, each with 16, 32 or 64 outputs, keep a large device busy."""

ROWS_MOST = 32
_BITS, _GROUP_SIZES = 4, (64, 128)

# Template: T, GS (weights a scale), NT (tiles of 8 rows), BIAS; and of a group of threads R (tiles of 16 outputs) and W
# (warps). `sizes` are the rows, outputs, inputs, and where each part of the outputs ends. PART is the array of a part,
# (rows, width).
#
# The warps share the inputs, 64 at a time. In a tensor core's product the left side is weights, (16 outputs, 16
# inputs), and the right side rows, (16 inputs, 8 rows). The order of inputs is free as long as both sides agree: lane
# 4g + q has inputs 16q to 16q+15 of outputs g and g+8 and of row g, and passes input p of eight together with input
# p+4, as they are in a word. A weight's code c is in the low bits of the number BASE + c. `sums`, which add up only the
# rows' inputs, are used to subtract BASE again, and for the weights' bias.
_BODY = """
  constexpr int OUTPUTS = 16 * R, WIDE = OUTPUTS + 4;
  constexpr unsigned int ONES = ONE_BITS, HIGH = BASE_BITS, LOW = 0x000f000fu;
  #define MULTIPLY(c, a0, a1, a2, a3, b0, b1) \\
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.KIND.KIND.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, " \\
        "{%0,%1,%2,%3};" \\
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) \\
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1))
  struct Weights { uint2 words[R][2]; T scales[R][2]; T biases[R][2]; };
  SHARED float sums_s[W * 8 * NT * WIDE];
  const int M = sizes[0], N = sizes[1], K = sizes[2], g = LANE >> 2, q = LANE & 3, first = GROUP * OUTPUTS;
  // An array may begin anywhere within another.
  const bool aligned = ((unsigned long long)x & 15) == 0;
  const unsigned int wide = K / 16, groups = K / GS;
  auto load = [&](Weights& to, unsigned int k) {
    #pragma unroll
    for (int r = 0; r < R; r++) for (int h = 0; h < 2; h++) {
      const unsigned int row = (first + 16 * r < N ? first + 16 * r : 0) + 8 * h + g, at = row * groups + k / GS;
      to.words[r][h] = ((const uint2*)words)[row * wide + k / 16 + q];
      to.scales[r][h] = scales[at];
      to.biases[r][h] = biases[at];
    }
  };
  auto eight = [&](const T* from) {
    if (aligned) return *(const uint4*)from;
    const unsigned short* one = (const unsigned short*)from;
    return make_uint4(one[0] | one[1] << 16, one[2] | one[3] << 16, one[4] | one[5] << 16, one[6] | one[7] << 16);
  };
  float total[R][NT][4];
  #pragma unroll
  for (int r = 0; r < R; r++) for (int n = 0; n < NT; n++) for (int j = 0; j < 4; j++) total[r][n][j] = 0.f;
  Weights now, next;
  if (WARP * 64 < K) load(now, WARP * 64);
  for (int k = WARP * 64; k < K; k += W * 64) {
    if (k + W * 64 < K) load(next, k + W * 64);
    unsigned int right[NT][8];
    float sums[NT][4];
    #pragma unroll
    for (int n = 0; n < NT; n++) {
      const int row = 8 * n + g;
      #pragma unroll
      for (int h = 0; h < 2; h++) {
        const uint4 v = row < M ? eight(x + (unsigned int)(row * K + k + 16 * q + 8 * h)) : make_uint4(0, 0, 0, 0);
        right[n][4 * h] = __byte_perm(v.x, v.z, 0x5410);
        right[n][4 * h + 1] = __byte_perm(v.x, v.z, 0x7632);
        right[n][4 * h + 2] = __byte_perm(v.y, v.w, 0x5410);
        right[n][4 * h + 3] = __byte_perm(v.y, v.w, 0x7632);
      }
      for (int j = 0; j < 4; j++) sums[n][j] = 0.f;
      #pragma unroll
      for (int i = 0; i < 4; i++) MULTIPLY(sums[n], ONES, ONES, ONES, ONES, right[n][2 * i], right[n][2 * i + 1]);
    }
    #pragma unroll
    for (int r = 0; r < R; r++) {
      unsigned int left[4][4];
      #pragma unroll
      for (int i = 0; i < 4; i++) for (int j = 0; j < 4; j++) {
        const uint2 pair = now.words[r][j & 1];
        left[i][j] = (((i < 2 ? pair.x : pair.y) >> (8 * (i & 1) + 4 * (j >> 1))) & LOW) | HIGH;
      }
      float scale[2], bias[2];
      for (int h = 0; h < 2; h++) {
        scale[h] = static_cast<float>(now.scales[r][h]);
        bias[h] = static_cast<float>(now.biases[r][h]) - BASE * scale[h];
      }
      #pragma unroll
      for (int n = 0; n < NT; n++) {
        float part[4] = {0.f, 0.f, 0.f, 0.f};
        #pragma unroll
        for (int i = 0; i < 4; i++)
          MULTIPLY(part, left[i][0], left[i][1], left[i][2], left[i][3], right[n][2 * i], right[n][2 * i + 1]);
        for (int j = 0; j < 4; j++) total[r][n][j] += scale[j >> 1] * part[j] + bias[j >> 1] * sums[n][j & 1];
      }
    }
    now = next;
  }
  // The warps' sums are added up in their order, so a product has the same bits every time.
  #pragma unroll
  for (int r = 0; r < R; r++) for (int n = 0; n < NT; n++) for (int j = 0; j < 4; j++)
    sums_s[(WARP * 8 * NT + 8 * n + 2 * q + (j & 1)) * WIDE + 16 * r + 8 * (j >> 1) + g] = total[r][n][j];
  SYNC();
  for (int i = THREAD; i < OUTPUTS * M; i += W * 32) {
    const int m = i / OUTPUTS, n = i % OUTPUTS, output = first + n;
    if (output >= N) continue;
    float sum = 0.f;
    for (int w = 0; w < W; w++) sum += sums_s[(w * 8 * NT + m) * WIDE + n];
    if (BIAS) sum += static_cast<float>(bias_of[output]);
    int begin = 0, part = 0;
    while (output >= sizes[3 + part]) begin = sizes[3 + part++];
    (PART)[(long)m * (sizes[3 + part] - begin) + output - begin] = static_cast<T>(sum);
  }
"""

_INPUTS = ("words", "scales", "biases", "bias_of", "x", "sizes")
KINDS = {
    mx.bfloat16: ("bf16", "0x3f803f80u", "0x43004300u", "128.f"),
    mx.float16: ("f16", "0x3c003c00u", "0x64006400u", "1024.f"),
}
"""By dtype: its name in PTX, two ones, and the number above which its lowest bits count by one, twice and once."""


def multiply(layer: Any, x: mx.array, widths: Sequence[int]) -> list[mx.array]:
    """Multiplies rows with a layer's transposed weights, and adds its bias if it has one.

    Args:
        layer: has `weight` `(outputs, inputs / 8)` uint32, and `scales` and `biases` `(outputs, inputs / group_size)`
            in the dtype of `x`; see `fits`.
        x: `(..., inputs)`, bfloat16 or float16, 1 to 32 rows.
        widths: the widths of the parts, which together are all outputs.

    Returns:
        The parts, each `(..., width)`, contiguous, in the dtype of `x`.
    """
    words, scales, bias = layer["weight"], layer["scales"], layer.get("bias")
    lead, inputs, outputs = x.shape[:-1], x.shape[-1], words.shape[0]
    rows, tiles, output_tiles = x.size // inputs, _tiles(x.size // inputs), _output_tiles(outputs)
    shape = tiles, output_tiles, _warps(tiles, output_tiles)
    plan = _plan(x.dtype, layer.group_size, *shape, bias is not None, len(widths))
    return plan.launch(
        inputs=[words, scales, layer["biases"], scales if bias is None else bias, x, _sizes(rows, inputs, *widths)],
        template=plan.template,
        grid=(-(-outputs // plan.outputs) * plan.threads, 1, 1),
        threadgroup=(plan.threads, 1, 1),
        output_shapes=[(*lead, width) for width in widths],
        output_dtypes=[x.dtype] * len(widths),
    )


def _tiles(rows: int) -> int:
    """Returns how many tiles of 8 rows there are: 1, 2 or 4, so that few kernels are compiled."""
    return 1 if rows <= 8 else 2 if rows <= 16 else 4


def _output_tiles(outputs: int) -> int:
    """Returns how many tiles of 16 outputs a group of threads has."""
    return next((each for each in (4, 2) if outputs >= GROUPS_WANTED * 16 * each), 1)


def _warps(tiles: int, output_tiles: int) -> int:
    """Returns how many warps a group of threads has: as many as there is room for their sums and registers."""
    return 4 if tiles * output_tiles > 8 else 8


@dataclass(frozen=True)
class _Plan:
    """The kernel for given shapes: a group has `threads` threads and computes `outputs` outputs."""

    launch: Any
    template: list[tuple[str, Any]]
    outputs: int
    threads: int


@cache
def _plan(dtype: mx.Dtype, group_size: int, tiles: int, output_tiles: int, warps: int, bias: bool, parts: int) -> _Plan:
    kind, ones, base_bits, base = KINDS[dtype]
    body = _BODY.replace("KIND", kind).replace("ONE_BITS", ones).replace("BASE_BITS", base_bits).replace("BASE", base)
    names = tuple(f"y{part}" for part in range(parts))
    chosen = names[-1]
    for part in reversed(range(parts - 1)):
        chosen = f"part == {part} ? {names[part]} : {chosen}"
    body = body.replace("PART", chosen)
    template = [("T", dtype), ("GS", group_size), ("NT", tiles), ("R", output_tiles), ("W", warps), ("BIAS", bias)]
    return _Plan(kernel(f"few_rows_{kind}_{parts}", _INPUTS, names, body), template, 16 * output_tiles, 32 * warps)


@lru_cache(1024)
def _sizes(rows: int, inputs: int, *widths: int) -> mx.array:
    ends = list(accumulate(widths))
    return mx.array([rows, ends[-1], inputs, *ends], mx.int32)


class FewRowsLinear(nn.QuantizedLinear):
    """A quantized layer that multiplies `ROWS_LEAST` to `rows_most` rows with the kernel."""

    rows_most: int

    def __call__(self, x: mx.array) -> mx.array:
        """Returns `(..., outputs)` for `x` `(..., inputs)`."""
        return multiply(self, x, (self.weight.shape[0],))[0] if takes(self, x) else super().__call__(x)


class FewRowsEmbedding(nn.QuantizedEmbedding):
    """The same for an embedding that is the output layer too."""

    rows_most: int

    def as_linear(self, x: mx.array) -> mx.array:
        """Returns logits `(..., vocabulary)` for `x` `(..., dim)`."""
        return multiply(self, x, (self.weight.shape[0],))[0] if takes(self, x) else super().as_linear(x)


_FORMS: dict[type[nn.Module], type[Any]] = {
    nn.QuantizedLinear: FewRowsLinear,
    nn.QuantizedEmbedding: FewRowsEmbedding,
}


def takes(layer: Any, x: mx.array) -> bool:
    """Whether a layer multiplies `x` `(..., inputs)` with the kernel."""
    if not isinstance(layer, FewRowsLinear | FewRowsEmbedding) or x.dtype != layer["scales"].dtype:
        return False
    return ROWS_LEAST <= x.size // x.shape[-1] <= layer.rows_most


def by_kernel(layer: Any, rows_most: int) -> Any:
    """Returns a quantized layer as one that multiplies up to `rows_most` rows with the kernel."""
    made = recast(copy.copy(layer), _FORMS[type(layer)])
    made.rows_most = rows_most
    return made


def fits(layer: Any) -> bool:
    """Whether the kernel can read a layer's weights."""
    if type(layer) not in _FORMS or layer.mode != "affine" or layer.bits != _BITS:
        return False
    outputs, words = layer.weight.shape
    of_16_bits = layer.scales.dtype in KINDS and layer.get("bias", layer.scales).dtype == layer.scales.dtype
    return of_16_bits and layer.group_size in _GROUP_SIZES and outputs % 16 == 0 and words * 8 % layer.group_size == 0
