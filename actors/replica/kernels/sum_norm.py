"""A residual sum and the RMS norm of it as one kernel for GPUs.

A decode step has two of each in a layer. For few tokens, launching an operation takes the host longer than computing it
takes the GPU. Source of the norm: RMSNorm (Zhang and Sennrich 2019).
"""

from __future__ import annotations

import mlx.core as mx

from .gpu_kernels import kernel

WARPS_MOST = 32
_INPUTS, _OUTPUTS = ("x", "y", "weight", "epsilon"), ("total", "normed")

# Template: T, D (numbers in a row), W (warps). A group of threads has a row.
_BODY = """
  constexpr int THREADS = 32 * W, EACH = (D + THREADS - 1) / THREADS;
  SHARED float sums_s[W];
  const long row = (long)GROUP * D;
  float own[EACH], sum = 0.f;
  for (int i = 0; i < EACH; i++) {
    const int at = i * THREADS + THREAD;
    if (at < D) {
      const T both = static_cast<T>(static_cast<float>(x[row + at]) + static_cast<float>(y[row + at]));
      total[row + at] = both;
      own[i] = static_cast<float>(both);
      sum += own[i] * own[i];
    }
  }
  for (int o = 16; o; o >>= 1) sum += XOR(sum, o);
  if (LANE == 0) sums_s[WARP] = sum;
  SYNC();
  sum = 0.f;
  for (int w = 0; w < W; w++) sum += sums_s[w];
  const float scale = RSQRT(sum / D + epsilon[0]);
  for (int i = 0; i < EACH; i++) {
    const int at = i * THREADS + THREAD;
    if (at < D) normed[row + at] = static_cast<T>(own[i] * scale * weight[at]);
  }
"""


def sum_norm(x: mx.array, y: mx.array, weight: mx.array, epsilon: mx.array) -> list[mx.array]:
    """Adds two arrays, and norms the rows of the sum.

    Args:
        x, y: (..., dim), of one dtype.
        weight: (dim,) float32.
        epsilon: (1,) float32.

    Returns:
        `x + y` and its norm, both (..., dim), in the dtype of `x`.
    """
    dim = x.shape[-1]
    warps = min(WARPS_MOST, -(-dim // 128))
    return kernel("sum_norm", _INPUTS, _OUTPUTS, _BODY)(
        inputs=[x, y, weight, epsilon],
        template=[("T", x.dtype), ("D", dim), ("W", warps)],
        grid=(x.size // dim * 32 * warps, 1, 1),
        threadgroup=(32 * warps, 1, 1),
        output_shapes=[x.shape, x.shape],
        output_dtypes=[x.dtype, x.dtype],
    )
