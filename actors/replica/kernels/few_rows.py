"""The product of few rows with 4-bit weights as one CUDA kernel.

A decode step of some sequences consists of many small products. MLX's kernel for quantized weights reads the weights
once for each row. With dequantized weights products go through cuBLAS, which takes 25 us of the host for each. This
kernel reads 4-bit weights from memory once, uses tensor cores, and is launched like other kernels.

When a model is loaded, tests decide whether the kernel is used, and for how many rows (`few_rows_check.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...patches import recast
from .gpu_kernels import MULTIPLY, int_numbers, kernel, prepare

ROWS_LEAST = 2
"""The fewest rows for the kernel, unless it was measured for one: there MLX's kernel reads weights only once too."""

ROWS_MOST = 128
_BITS, _GROUP_SIZES = 4, (64, 128)

# Template: T, GS (weights a scale), NT (tiles of 8 rows), BIAS, GATED; and of a group of threads R (tiles of 16
# outputs), W (warps), RUN and TURN. `sizes` are the rows, outputs, inputs, whether `more` is added, and where each part
# of the outputs ends. PART is the array of a part, (rows, width). If GATED, the first half of the outputs are gates,
# and half of a group's tiles are the outputs in the other half that belong to its gates.
#
# The warps share the inputs, a turn of TURN steps at a time; a step multiplies 64. While a warp multiplies a run of RUN
# steps, it loads the next one, so that memory always has enough to do; a run's scales are loaded together. In a tensor
# core's product the left side is weights, (16 outputs, 16 inputs), and the right side rows, (16 inputs, 8 rows). The
# order of inputs is free as long as both sides agree: lane 4g + q has inputs 16q to 16q+15 of outputs g and g+8 and of
# row g, and passes input p of eight together with input p+4, as they are in a word. A weight's code c is in the low
# bits of the number BASE + c. `sums`, which add up only the rows' inputs, are used to subtract BASE again, and for the
# weights' bias.
_BODY = """
  constexpr int OWN = GATED ? R / 2 : R, OUTPUTS = 16 * OWN, WIDE = 16 * R + 4, PER = TURN / RUN;
  constexpr int SN = RUN * 64 / GS > 1 ? RUN * 64 / GS : 1;
  constexpr unsigned int ONES = ONE_BITS, HIGH = BASE_BITS, LOW = 0x000f000fu;
  // Weights are read once, a line of the cache by four loads in turn.
  #ifdef __CUDA_ARCH__
  #define READ_WORDS(to, from) \\
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0,%1}, [%2];" : "=r"(to.x), "=r"(to.y) : "l"(from))
  #else
  #define READ_WORDS(to, from) to = *(from)
  #endif
  union Scales {
    uint2 four; unsigned int two; unsigned short one;
    T x[4];
  };
  SHARED float sums_s[W * 8 * NT * WIDE];
  const int N = sizes[1], K = sizes[2], g = LANE >> 2, q = LANE & 3;
  // Groups one after another have the same outputs, so weights are read from memory once.
  const int turns = (sizes[0] + 8 * NT - 1) / (8 * NT), begin_row = GROUP % turns * 8 * NT;
  const int M = sizes[0] - begin_row < 8 * NT ? sizes[0] - begin_row : 8 * NT;
  const int first = GROUP / turns * OUTPUTS, width = GATED ? N / 2 : N;
  // An array may begin anywhere within another.
  const bool aligned = ((unsigned long long)x & 15) == 0;
  const unsigned int wide = K / 16, groups = K / GS;
  uint2 ahead[RUN][R][2];
  uint4 rows[RUN][NT][2];
  Scales scales_now[R][2], biases_now[R][2], scales_next[R][2], biases_next[R][2];
  auto row_of = [&](int r, int h) {
    const int output = first + 16 * (r % OWN);
    return (unsigned int)((output < width ? output : 0) + r / OWN * width + 8 * h + g);
  };
  auto few = [&](Scales& to, const T* from) {
    if (SN == 4) to.four = *(const uint2*)from;
    else if (SN == 2) to.two = *(const unsigned int*)from;
    else to.one = *(const unsigned short*)from;
  };
  auto load_scales = [&](int run) {
    #pragma unroll
    for (int r = 0; r < R; r++) for (int h = 0; h < 2; h++) {
      const unsigned int at = row_of(r, h) * groups + (unsigned int)(run * RUN * 64) / GS;
      few(scales_next[r][h], scales + at);
      few(biases_next[r][h], biases + at);
    }
  };
  auto eight = [&](const T* from) {
    if (aligned) return *(const uint4*)from;
    const unsigned short* one = (const unsigned short*)from;
    return make_uint4(one[0] | one[1] << 16, one[2] | one[3] << 16, one[4] | one[5] << 16, one[6] | one[7] << 16);
  };
  auto load = [&](int run, int step) {
    const unsigned int k = (run * RUN + step) * 64;
    #pragma unroll
    for (int r = 0; r < R; r++) for (int h = 0; h < 2; h++)
      READ_WORDS(ahead[step][r][h], (const uint2*)words + row_of(r, h) * wide + k / 16 + q);
    #pragma unroll
    for (int n = 0; n < NT; n++) for (int h = 0; h < 2; h++) {
      const int row = 8 * n + g;
      const T* from = x + (unsigned int)((begin_row + row) * K + k + 16 * q + 8 * h);
      rows[step][n][h] = row < M ? eight(from) : make_uint4(0, 0, 0, 0);
    }
  };
  float total[R][NT][4];
  #pragma unroll
  for (int r = 0; r < R; r++) for (int n = 0; n < NT; n++) for (int j = 0; j < 4; j++) total[r][n][j] = 0.f;
  const int all = K / (64 * TURN), mine = (all - (int)WARP + W - 1) / W * PER;
  auto run_of = [&](int i) { return (i / PER * W + (int)WARP) * PER + i % PER; };
  if (mine > 0) {
    load_scales(run_of(0));
    #pragma unroll
    for (int step = 0; step < RUN; step++) load(run_of(0), step);
  }
  for (int i = 0; i < mine; i++) {
    const bool more = i + 1 < mine;
    const int next = run_of(i + 1);
    #pragma unroll
    for (int r = 0; r < R; r++) for (int h = 0; h < 2; h++) {
      scales_now[r][h] = scales_next[r][h];
      biases_now[r][h] = biases_next[r][h];
    }
    if (more) load_scales(next);
    #pragma unroll
    for (int step = 0; step < RUN; step++) {
      uint2 now[R][2];
      #pragma unroll
      for (int r = 0; r < R; r++) for (int h = 0; h < 2; h++) now[r][h] = ahead[step][r][h];
      unsigned int right[NT][8];
      #pragma unroll
      for (int n = 0; n < NT; n++) for (int h = 0; h < 2; h++) {
        const uint4 v = rows[step][n][h];
        right[n][4 * h] = __byte_perm(v.x, v.z, 0x5410);
        right[n][4 * h + 1] = __byte_perm(v.x, v.z, 0x7632);
        right[n][4 * h + 2] = __byte_perm(v.y, v.w, 0x5410);
        right[n][4 * h + 3] = __byte_perm(v.y, v.w, 0x7632);
      }
      if (more) load(next, step);
      float sums[NT][4];
      #pragma unroll
      for (int n = 0; n < NT; n++) {
        for (int j = 0; j < 4; j++) sums[n][j] = 0.f;
        #pragma unroll
        for (int i = 0; i < 4; i++) MULTIPLY(sums[n], ONES, ONES, ONES, ONES, right[n][2 * i], right[n][2 * i + 1]);
      }
      #pragma unroll
      for (int r = 0; r < R; r++) {
        unsigned int left[4][4];
        #pragma unroll
        for (int i = 0; i < 4; i++) for (int j = 0; j < 4; j++) {
          const uint2 pair = now[r][j & 1];
          left[i][j] = (((i < 2 ? pair.x : pair.y) >> (8 * (i & 1) + 4 * (j >> 1))) & LOW) | HIGH;
        }
        float scale[2], bias[2];
        for (int h = 0; h < 2; h++) {
          scale[h] = static_cast<float>(scales_now[r][h].x[step * 64 / GS]);
          bias[h] = static_cast<float>(biases_now[r][h].x[step * 64 / GS]) - BASE * scale[h];
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
    }
  }
  auto rounded = [](float number) { return static_cast<float>(static_cast<T>(number)); };
  // The warps' sums are added up in their order, so a product has the same bits every time.
  #pragma unroll
  for (int r = 0; r < R; r++) for (int n = 0; n < NT; n++) for (int j = 0; j < 4; j++)
    sums_s[(WARP * 8 * NT + 8 * n + 2 * q + (j & 1)) * WIDE + 16 * r + 8 * (j >> 1) + g] = total[r][n][j];
  SYNC();
  for (int i = THREAD; i < OUTPUTS * M; i += W * 32) {
    const int m = i / OUTPUTS, n = i % OUTPUTS, output = first + n;
    if (output >= width) continue;
    auto product = [&](int half) {
      float sum = 0.f;
      for (int w = 0; w < W; w++) sum += sums_s[(w * 8 * NT + m) * WIDE + half * OUTPUTS + n];
      if (BIAS) sum += static_cast<float>(bias_of[half * width + output]);
      return rounded(sum);
    };
    float y = product(0);
    if (GATED) {
      const float part = rounded(1.f / rounded(1.f + rounded(EXP(ABS(y)))));
      y = rounded(rounded(y * (y < 0.f ? part : rounded(1.f - part))) * product(1));
    }
    if (sizes[3]) y += static_cast<float>(more[(begin_row + m) * N + output]);
    int begin = 0, part = 0;
    while (output >= sizes[4 + part]) begin = sizes[4 + part++];
    (PART)[(long)(begin_row + m) * (sizes[4 + part] - begin) + output - begin] = static_cast<T>(y);
  }
"""

_INPUTS = ("words", "scales", "biases", "bias_of", "more", "x", "sizes")
KINDS = {
    mx.bfloat16: ("bf16", "0x3f803f80u", "0x43004300u", "128.f"),
    mx.float16: ("f16", "0x3c003c00u", "0x64006400u", "1024.f"),
}
"""By dtype: its name in PTX, two ones, and the number above which its lowest bits count by one, twice and once."""


def multiply(layer: Any, x: mx.array, widths: Sequence[int], add: mx.array | None = None) -> list[mx.array]:
    """Multiplies rows with a layer's transposed weights, and adds its bias if it has one.

    Args:
        layer: has `weight` `(outputs, inputs / 8)` uint32, and `scales` and `biases` `(outputs, inputs / group_size)`
            in the dtype of `x`; see `fits`.
        x: `(..., inputs)`, bfloat16 or float16, 1 to 128 rows.
        widths: the widths of the parts, which together are all outputs.
        add: `(..., outputs)` in the dtype of `x`, which is added to a product of one part after that was rounded, and
            the sum is rounded again; None for nothing.

    Returns:
        The parts, each `(..., width)`, contiguous, in the dtype of `x`.
    """
    assert add is None or (len(widths) == 1 and add.dtype == x.dtype and add.shape == (*x.shape[:-1], *widths))
    return _launch(layer, x, widths, add)


def multiply_gated(layer: Any, x: mx.array) -> mx.array:
    """Multiplies rows with a layer of which the first half of the outputs are gates, and the second half what they let
    through; see `gates`. Each number is rounded as MLX rounds it in `silu(gate) * up`: products, exponential, sigmoid,
    and what is computed with it.

    Args:
        layer, x: as for `multiply`.

    Returns:
        `(..., outputs / 2)`, contiguous, in the dtype of `x`.
    """
    return _launch(layer, x, (layer["weight"].shape[0] // 2,), gated=True)[0]


def gates(widths: Sequence[int]) -> bool:
    """Whether `multiply_gated` computes a layer with parts of these widths."""
    return len(widths) == 2 and widths[0] == widths[1] and widths[0] % 16 == 0


def _launch(
    layer: Any, x: mx.array, widths: Sequence[int], add: mx.array | None = None, *, gated: bool = False
) -> list[mx.array]:
    words, scales, bias = layer["weight"], layer["scales"], layer.get("bias")
    lead, inputs, outputs = x.shape[:-1], x.shape[-1], words.shape[0]
    rows, tiles = x.size // inputs, _tiles(x.size // inputs)
    shape = _shape(tiles, outputs, inputs, gated)
    plan = _plan(x.dtype, layer.group_size, tiles, *shape, bias is not None, gated, len(widths))
    # What is not read must be an array too.
    other = [scales if array is None else array for array in (bias, add)]
    sizes = int_numbers(rows, outputs, inputs, int(add is not None), *accumulate(widths))
    return plan.launch(
        inputs=[words, scales, layer["biases"], *other, x, sizes],
        template=plan.template,
        grid=(-(-sum(widths) // plan.outputs) * -(-rows // (8 * tiles)) * plan.threads, 1, 1),
        threadgroup=(plan.threads, 1, 1),
        output_shapes=[(*lead, width) for width in widths],
        output_dtypes=[x.dtype] * len(widths),
    )


def prepare_products(layer: Any, widths: Sequence[int]) -> None:
    """Begins to compile all that `multiply`, and `multiply_gated` if `gates`, need for a layer, on other threads.

    Args:
        layer, widths: as for `multiply`.
    """
    dtype, outputs, bias = layer["scales"].dtype, layer["weight"].shape[0], layer.get("bias") is not None
    inputs = [mx.uint32, *[dtype] * (len(_INPUTS) - 2), mx.int32]
    for gated in (False, True) if gates(widths) else (False,):
        parts = 1 if gated else len(widths)
        for tiles in _SHAPES:
            shape = _shape(tiles, outputs, layer["weight"].shape[1] * 8, gated)
            plan = _plan(dtype, layer.group_size, tiles, *shape, bias, gated, parts)
            prepare(plan.launch, plan.template, inputs, [dtype] * parts)


def _tiles(rows: int) -> int:
    """Returns how many tiles of 8 rows a group has: 1, 2 or 4, so that few kernels are compiled."""
    return 1 if rows <= 8 else 2 if rows <= 16 else 4


_ORDERS = {65536: (4, 2), 8192: (4, 4), 0: (8, 4)}
_ORDER_GATED = 4, 4
"""By the least outputs: a group's warps, and the most steps of a turn. They decide in which order numbers are added up.
So they do not depend on the number of rows, and a row's product has the same bits beside any others."""

_SHAPES = {1: {65536: (2, 2), 0: (1, 4)}, 2: {4096: (2, 2), 0: (1, 4)}, 4: {0: (2, 2)}}
_SHAPES_GATED = {1: (2, 4), 2: (2, 4), 4: (2, 2)}
"""By tiles of rows, and the least outputs: a group's tiles of outputs, and the most steps of a run. Beside the orders,
these are the fastest on an H200 for products of models of 0.6B, 1.5B and 8B, as far as the outputs decide it."""


def _shape(tiles: int, outputs: int, inputs: int, gated: bool = False) -> tuple[int, int, int, int]:
    """Returns tiles of outputs and warps of a group, and steps of a run and of a turn. All warps have a turn if there
    are enough inputs, and a run's scales can be loaded together."""
    warps, longest = _ORDER_GATED if gated else _of(_ORDERS, outputs)
    output_tiles, most = _SHAPES_GATED[tiles] if gated else _of(_SHAPES[tiles], outputs)
    turns = [turn for turn in (4, 2) if turn <= longest and inputs % (64 * turn) == 0 and inputs >= 64 * turn * warps]
    # With few inputs it matters that all warps have as many turns.
    even = [turn for turn in turns if gated and inputs % (64 * turn * warps) == 0]
    turn = next(iter([*even, *turns, 1]))
    return output_tiles, warps, min(turn, most), turn


def _of(by_outputs: dict[int, tuple[int, int]], outputs: int) -> tuple[int, int]:
    return next(found for least, found in by_outputs.items() if outputs >= least)


@dataclass(frozen=True)
class _Plan:
    """The kernel for given shapes: a group has `threads` threads and computes `outputs` outputs."""

    launch: Any
    template: list[tuple[str, Any]]
    outputs: int
    threads: int


@cache
def _plan(
    dtype: mx.Dtype,
    group_size: int,
    tiles: int,
    output_tiles: int,
    warps: int,
    run: int,
    turn: int,
    bias: bool,
    gated: bool,
    parts: int,
) -> _Plan:
    kind, ones, base_bits, base = KINDS[dtype]
    body = (
        (MULTIPLY + _BODY)
        .replace("KIND", kind)
        .replace("ONE_BITS", ones)
        .replace("BASE_BITS", base_bits)
        .replace("BASE", base)
    )
    names = tuple(f"y{part}" for part in range(parts))
    chosen = names[-1]
    for part in reversed(range(parts - 1)):
        chosen = f"part == {part} ? {names[part]} : {chosen}"
    body = body.replace("PART", chosen)
    template = [("T", dtype), ("GS", group_size), ("NT", tiles), ("BIAS", bias), ("GATED", gated)]
    template += [("R", output_tiles), ("W", warps), ("RUN", run), ("TURN", turn)]
    launch = kernel(f"few_rows_{kind}_{parts}", _INPUTS, names, body)
    return _Plan(launch, template, 16 * output_tiles // (2 if gated else 1), 32 * warps)


@dataclass(frozen=True, eq=False)
class Product:
    """What a layer has multiplied with the kernel: `outputs` are the parts that `multiply` returned."""

    layer: Any
    x: mx.array
    outputs: list[mx.array]


class FewRowsLinear(nn.QuantizedLinear):
    """A quantized layer that multiplies `rows_least` to `rows_most` rows with the kernel.

    Attributes:
        note: is told each product of the kernel; None for nobody.
    """

    rows_most: int
    rows_least: int = ROWS_LEAST
    note: Callable[[Product], None] | None = None

    def __call__(self, x: mx.array) -> mx.array:
        """Returns `(..., outputs)` for `x` `(..., inputs)`."""
        return self.parts(x, (self.weight.shape[0],))[0] if takes(self, x) else super().__call__(x)

    def parts(self, x: mx.array, widths: Sequence[int]) -> list[mx.array]:
        """As `multiply`, with this layer, which `takes` the rows."""
        outputs = multiply(self, x, widths)
        if self.note is not None:
            self.note(Product(self, x, outputs))
        return outputs


class FewRowsEmbedding(nn.QuantizedEmbedding):
    """The same for an embedding that is the output layer too."""

    rows_most: int
    rows_least: int = ROWS_LEAST

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
    return layer.rows_least <= x.size // x.shape[-1] <= layer.rows_most


def rows_alike(model: nn.Module) -> int:
    """Returns up to how many rows those layers of a model that use the kernel multiply with it, 0 if one of them leaves
    one row to MLX; `ROWS_MOST` if none uses it."""
    layers = [each for _, each in model.named_modules() if isinstance(each, FewRowsLinear | FewRowsEmbedding)]
    return min((layer.rows_most if layer.rows_least == 1 else 0 for layer in layers), default=ROWS_MOST)


def by_kernel(layer: Any, rows_most: int, rows_least: int = ROWS_LEAST) -> Any:
    """Returns a quantized layer as one that multiplies `rows_least` to `rows_most` rows with the kernel."""
    made = recast(copy.copy(layer), _form(layer) or type(layer))
    made.rows_most, made.rows_least = rows_most, rows_least
    return made


def _form(layer: Any) -> type[Any] | None:
    """Returns the class of a layer that uses the kernel; None for other layers."""
    return type(layer) if isinstance(layer, FewRowsLinear | FewRowsEmbedding) else _FORMS.get(type(layer))


def fits(layer: Any) -> bool:
    """Whether the kernel can read a layer's weights."""
    if _form(layer) is None or layer.mode != "affine" or layer.bits != _BITS:
        return False
    outputs, words = layer.weight.shape
    of_16_bits = layer.scales.dtype in KINDS and layer.get("bias", layer.scales).dtype == layer.scales.dtype
    return of_16_bits and layer.group_size in _GROUP_SIZES and outputs % 16 == 0 and words * 8 % layer.group_size == 0
