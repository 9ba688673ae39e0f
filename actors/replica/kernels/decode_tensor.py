"""The part of the decode kernel that reads units, for tensor cores of CUDA: for blocks with 4-bit keys and values.

A warp multiplies a unit's key codes (64 tokens, 16 channels at a time) with the queries, and its value codes with the
softmax's probabilities. A code is exact in bfloat16. What it is multiplied with is a float32 number, a query or a
probability times the scale of the codes; it is passed as the sum of two bfloat16 numbers, so the products are almost as
exact as in float32. The instruction has eight columns: for keys four heads with both scales of a unit's tokens, for
values four heads with both of the two numbers.

It is `mma.m16n8k16` (PTX, "Matrix Fragments for mma.m16n8k16 with floating point type"). With g = LANE / 4 and
q = LANE % 4, a lane has rows g and g + 8 and columns 2q and 2q + 1 of the result. A row is a token for keys, and a
channel for values: of word g, rows g are the numbers 0 to 3 in turn and rows g + 8 the numbers 4 to 7. So a lane has
the scores of head q for the eight tokens of word g, and the outputs of head q for the channels of words g.
"""

from __future__ import annotations

import mlx.core as mx

from .gpu_kernels import MULTIPLY
from .sealing import Quantized, Sealed, value_group

HEADS_MOST = 4
"""Query heads of a group of threads: the product has two columns for each."""


def fits(kind: type[Sealed], types: tuple[mx.Dtype, mx.Dtype], dims: tuple[int, int], coded: tuple[int, int]) -> bool:
    """Whether units of these blocks are read with tensor cores.

    Args:
        types: of queries, and of scales.
        dims: the channels of a head, of keys and of values.
        coded: a key's bits, and how many tokens' keys share a scale.
    """
    whole = dims[0] % 16 == 0 and dims[1] % 64 == 0 and value_group(dims[1]) == 64
    return kind is Quantized and all(dtype.size == 2 for dtype in types) and whole and coded in ((4, 32), (4, 64))


MEMORY = """\
  SHARED float4 queries_s[(GC + FM) * DK / 4];
  SHARED float4 buf_s[NW * GC * BW / 4];
  SHARED float4 pairs_s[NW * DK / 2];
  float* const q_s = (float*)queries_s; float* const buf = (float*)buf_s;
"""
"""What the kernel shares, aligned to four numbers."""

_EARLY = """\
  const unsigned int* blocks = slots + begins[token];
  unsigned int slot_next = 0;
  // A warp's units are all the same quarters of blocks. Of each channel's keys it loads the scales of both halves of a
  // unit, and the biases, together, while it multiplies the unit before.
  uint2 pairs[(DK + 31) / 32];
  auto fetch = [&](unsigned int slot) {
    const long from = ((long)slot * KV + kvh) * DK * KS + WARP * 64 / KG;
    #pragma unroll
    for (int i = 0; i < (DK + 31) / 32; i++) {
      const int d = LANE + 32 * i;
      if (d >= DK) continue;
      if (KG == 32) {
        pairs[i].x = *(const unsigned int*)(key_scales + from + d * KS);
        pairs[i].y = *(const unsigned int*)(key_biases + from + d * KS);
      } else {
        pairs[i].x = *(const unsigned short*)(key_scales + from + d * KS) * 0x10001u;
        pairs[i].y = *(const unsigned short*)(key_biases + from + d * KS) * 0x10001u;
      }
    }
  };
  if (split * NW + (int)WARP < 4 * nb) {
    slot_next = blocks[split];
    fetch(slot_next);
  }
"""

_UNITS = """\
  constexpr int NV = PV / 64;
  // A code c in bits 3 to 6 of a bfloat16 number with these others is 16 + c.
  constexpr unsigned int CODE = 0x00780078u, HIGH = 0x41804180u, UPPER = 0xffff0000u;
  #define FROM(x, lane) __shfl_sync(0xffffffffu, x, lane)
  // The upper halves of two numbers, which are bfloat16 numbers; and what these lack, rounded if `half` is 0x8000, for
  // errors of one sign would add up.
  #define UPPERS(x, y) __byte_perm(__float_as_uint(x), __float_as_uint(y), 0x7632)
  #define REST(x, bits, half) \\
    __uint_as_float(__float_as_uint(x - __uint_as_float(__float_as_uint(x) & (bits))) + (half))
  #define CODES(x, i) (((i ? x >> (4 * i - (i > 0 ? 3 : 0)) : x << 3) & CODE) | HIGH)
  union Eight { uint4 words; T x[8]; };
  union Scales { uint4 words; P x[8]; };
  union Half { unsigned short bits; P x; };
  auto half_of = [](unsigned int pair, int which) {
    Half one;
    one.bits = pair >> (16 * which);
    return static_cast<float>(one.x);
  };
  #define HALF_OF(pair) half_of(pair, g & 1)
  const int g = LANE >> 2, q = LANE & 3;
  // The head of a lane's result, and that of the column that it fills.
  const int own = q < GC ? q : GC - 1, theirs = g / 2 < GC ? g / 2 : GC - 1;
  const unsigned int second = g & 1 ? UPPER : 0u, half = g & 1 ? 0x8000u : 0u;
  const int probs = WARP * GC * BW;
  const bool aligned =
      (((unsigned long long)tail_keys | (unsigned long long)tail_values | (unsigned long long)new_values) & 15) == 0;
  auto eight = [&](float* to, const T* from) {
    if (aligned) {
      Eight all;
      all.words = *(const uint4*)from;
      #pragma unroll
      for (int j = 0; j < 8; j++) to[j] = static_cast<float>(all.x[j]);
    } else {
      #pragma unroll
      for (int j = 0; j < 8; j++) to[j] = static_cast<float>(from[j]);
    }
  };
  float m = LOW, l = 0.f, acc[NV][4][4], shift[NV];
  #pragma unroll
  for (int v = 0; v < NV; v++) {
    shift[v] = 0.f;
    #pragma unroll
    for (int i = 0; i < 16; i++) acc[v][i >> 2][i & 3] = 0.f;
  }
  for (int u = split * NW + WARP; u < 4 * nb + tu; u += S * NW) {
    const bool sealed = u < 4 * nb;
    const int quarter = u & 3, column0 = (u - 4 * nb) * 32;
    const long base = (long)slot_next * KV + kvh;
    if (u + S * NW < 4 * nb) slot_next = blocks[(u + S * NW) >> 2];
    const long row0 = base * 256 + quarter * 64 + 4 * q;
    const unsigned int* values_from = value_codes + row0 * WD + g;
    float sc[8];
    if (sealed) {
      const unsigned int* codes = key_codes + base * DK * KW + 4 * q * KW + quarter * 8 + g;
      uint2* own_pairs = (uint2*)pairs_s + WARP * DK;
      #pragma unroll
      for (int i = 0; i < (DK + 31) / 32; i++) if (LANE + 32 * i < DK) own_pairs[LANE + 32 * i] = pairs[i];
      if (u + S * NW < 4 * nb) fetch(slot_next);
      SYNC_WARP();
      const uint4* pairs_from = (const uint4*)(own_pairs + 4 * q);
      const float4* from = queries_s + (theirs * DK >> 2) + q;
      float c[4][4], bias = 0.f;
      #pragma unroll
      for (int i = 0; i < 16; i++) c[i >> 2][i & 3] = 0.f;
      #pragma unroll 4
      for (int k = 0; k < DK / 16; k++) {
        unsigned int w[4];
        #pragma unroll
        for (int j = 0; j < 4; j++) w[j] = codes[(16 * k + j) * KW];
        const float4 four = from[4 * k];
        const float x[4] = {four.x, four.y, four.z, four.w};
        const uint4 one = pairs_from[8 * k], two = pairs_from[8 * k + 1];
        const unsigned int of_scales[4] = {one.x, one.z, two.x, two.z}, of_biases[4] = {one.y, one.w, two.y, two.w};
        float f[4], r[4];
        #pragma unroll
        for (int j = 0; j < 4; j++) {
          const float s = HALF_OF(of_scales[j]), b = HALF_OF(of_biases[j]);
          f[j] = x[j] * s;
          bias += x[j] * b - 16.f * f[j];
          r[j] = REST(f[j], UPPER, 0x8000u);
        }
        const unsigned int b0 = UPPERS(f[0], f[1]), b1 = UPPERS(f[2], f[3]);
        const unsigned int r0 = UPPERS(r[0], r[1]), r1 = UPPERS(r[2], r[3]);
        const unsigned int low0 = __byte_perm(w[0], w[1], 0x5410), high0 = __byte_perm(w[0], w[1], 0x7632);
        const unsigned int low1 = __byte_perm(w[2], w[3], 0x5410), high1 = __byte_perm(w[2], w[3], 0x7632);
        unsigned int a[4][4];
        #pragma unroll
        for (int i = 0; i < 4; i++) {
          a[i][0] = CODES(low0, i); a[i][1] = CODES(high0, i);
          a[i][2] = CODES(low1, i); a[i][3] = CODES(high1, i);
        }
        #pragma unroll
        for (int i = 0; i < 4; i++) MULTIPLY(c[i], a[i][0], a[i][1], a[i][2], a[i][3], b0, b1);
        #pragma unroll
        for (int i = 0; i < 4; i++) MULTIPLY(c[i], a[i][0], a[i][1], a[i][2], a[i][3], r0, r1);
      }
      bias += XOR(bias, 1);
      bias += XOR(bias, 2);
      const float offset = FROM(bias, 8 * q + (g & 4));
      const int first = (u >> 2) * 256 + quarter * 64 + 8 * g;
      #pragma unroll
      for (int j = 0; j < 8; j++) {
        const int at = j < 4 ? 0 : 2;
        const float x = (g & 4 ? c[j & 3][at + 1] : c[j & 3][at]) + offset;
        sc[j] = first + j < hide ? LOW : CAPPED(x);
      }
      // The block's first token, as computed.
      if (quarter == 0) {
        float x = 0.f;
        #pragma unroll 8
        for (int d = g; d < DK; d += 8) x += q_s[own * DK + d] * static_cast<float>(key_exact[base * DK + d]);
        for (int o = 16; o >= 4; o >>= 1) x += XOR(x, o);
        if (g == 0) sc[0] = first < hide ? LOW : CAPPED(x);
      }
    } else {
      // A lane has a token's keys for all heads.
      const int t = column0 + (int)LANE;
      float dot[GC];
      #pragma unroll
      for (int h = 0; h < GC; h++) dot[h] = LOW;
      if (t < tl && nb * 256 + t >= hide) {
        #pragma unroll
      for (int h = 0; h < GC; h++) dot[h] = 0.f;
        const bool fresh = t >= old;
        const T* keys = (const T*)tail_keys + (tail_at + t) * DK;
        const float* fresh_keys = k_s + (fresh ? t - old : 0) * DK;
        #pragma unroll 4
        for (int d = 0; d < DK; d += 8) {
          float k[8];
          if (fresh) {
            #pragma unroll
            for (int j = 0; j < 8; j++) k[j] = fresh_keys[d + j];
          } else {
            eight(k, keys + d);
          }
          #pragma unroll
          for (int h = 0; h < GC; h++) {
            const float4 one = queries_s[(h * DK + d) >> 2], two = queries_s[((h * DK + d) >> 2) + 1];
            dot[h] += one.x * k[0] + one.y * k[1] + one.z * k[2] + one.w * k[3];
            dot[h] += two.x * k[4] + two.y * k[5] + two.z * k[6] + two.w * k[7];
          }
        }
      }
      #pragma unroll
      for (int h = 0; h < GC; h++) buf[probs + h * BW + LANE] = dot[h] <= LOW ? LOW : CAPPED(dot[h]);
      SYNC_WARP();
      #pragma unroll
      for (int j = 0; j < 8; j++) sc[j] = j < 4 ? buf[probs + own * BW + 4 * g + (j & 3)] : LOW;
      SYNC_WARP();
    }
    float top = sc[0];
    #pragma unroll
    for (int j = 1; j < 8; j++) top = MAX(top, sc[j]);
    for (int o = 16; o >= 4; o >>= 1) top = MAX(top, XOR(top, o));
    const float now = MAX(m, top), fade = EXP(m - now);
    float p[8], sum = 0.f;
    #pragma unroll
    for (int j = 0; j < 8; j++) {
      p[j] = sc[j] <= LOW ? 0.f : EXP(sc[j] - now);
      sum += p[j];
    }
    if (q < GC) {
      float4* to = buf_s + ((probs + q * BW + (sealed ? 8 : 4) * g) >> 2);
      to[0] = make_float4(p[0], p[1], p[2], p[3]);
      if (sealed) to[1] = make_float4(p[4], p[5], p[6], p[7]);
    }
    l = l * fade + sum; m = now;
    const float fade_theirs = FROM(fade, (int)LANE >> 3);
    #pragma unroll
    for (int v = 0; v < NV; v++) {
      shift[v] *= fade_theirs;
      #pragma unroll
      for (int i = 0; i < 16; i++) acc[v][i >> 2][i & 3] *= fade;
    }
    SYNC_WARP();
    if (sealed) {
      const float4* from = buf_s + ((probs + theirs * BW) >> 2) + q;
      #pragma unroll 2
      for (int k = 0; k < 4; k++) {
        unsigned int w[NV][4];
        #pragma unroll
        for (int i = 0; i < 4 * NV; i++) {
          const int v = i >> 2, j = i & 3;
          w[v][j] = values_from[(16 * k + j) * WD + 8 * v];
        }
        const float4 four = from[4 * k];
        const float x[4] = {four.x, four.y, four.z, four.w};
        // Of four tokens, with NV scales each.
        Scales s[(NV + 1) / 2], b[(NV + 1) / 2];
        const P* scales = value_scales + (row0 + 16 * k) * NV; const P* biases = value_biases + (row0 + 16 * k) * NV;
        if (NV % 2 == 0) {
          #pragma unroll
          for (int i = 0; i < NV / 2; i++) {
            s[i].words = ((const uint4*)scales)[i];
            b[i].words = ((const uint4*)biases)[i];
          }
        } else {
          #pragma unroll
          for (int i = 0; i < 4 * NV; i++) { s[i / 8].x[i % 8] = scales[i]; b[i / 8].x[i % 8] = biases[i]; }
        }
        #pragma unroll
        for (int v = 0; v < NV; v++) {
          float r[4];
          #pragma unroll
          for (int j = 0; j < 4; j++) {
            const int at = j * NV + v;
            const float scale = static_cast<float>(s[at / 8].x[at % 8]);
            const float f = x[j] * scale;
            shift[v] += x[j] * (static_cast<float>(b[at / 8].x[at % 8]) - 16.f * scale);
            r[j] = REST(f, second, half);
          }
          const unsigned int b0 = UPPERS(r[0], r[1]), b1 = UPPERS(r[2], r[3]);
          const unsigned int low0 = __byte_perm(w[v][0], w[v][1], 0x5410);
          const unsigned int high0 = __byte_perm(w[v][0], w[v][1], 0x7632);
          const unsigned int low1 = __byte_perm(w[v][2], w[v][3], 0x5410);
          const unsigned int high1 = __byte_perm(w[v][2], w[v][3], 0x7632);
          #pragma unroll
          for (int i = 0; i < 4; i++)
            MULTIPLY(acc[v][i], CODES(low0, i), CODES(high0, i), CODES(low1, i), CODES(high1, i), b0, b1);
        }
      }
      // The codes of the first token's values are zeros.
      if (quarter == 0) {
        const float one = buf[probs + own * BW];
        #pragma unroll
        for (int i = 0; i < 8 * NV; i++) {
          const int channel = 64 * (i >> 3) + 8 * g + (i & 7);
          acc[i >> 3][i & 3][i & 4 ? 2 : 0] += one * static_cast<float>(value_exact[base * DV + channel]);
        }
      }
    } else {
      const int most = tl - column0 < 32 ? tl - column0 : 32;
      #pragma unroll 4
      for (int t = 0; t < most; t++) {
        const int column = column0 + t;
        const bool fresh = column >= old;
        const long row = fresh ? (long)(first_new + column - old) * KV + kvh : tail_at + column;
        const T* from = (fresh ? new_values : (const T*)tail_values) + row * DV + 8 * g;
        const float one = buf[probs + own * BW + t];
        #pragma unroll
        for (int v = 0; v < NV; v++) {
          float x[8];
          eight(x, from + 64 * v);
          #pragma unroll
          for (int i = 0; i < 8; i++) acc[v][i & 3][i < 4 ? 0 : 2] += one * x[i];
        }
      }
    }
    SYNC_WARP();
  }
  for (int o = 16; o >= 4; o >>= 1) l += XOR(l, o);
  #pragma unroll
  for (int v = 0; v < NV; v++) {
    shift[v] += XOR(shift[v], 1);
    shift[v] += XOR(shift[v], 2);
    const float add = FROM(shift[v], 8 * q);
    if (q < GC) {
      #pragma unroll
      for (int i = 0; i < 8; i++) {
        const int at = i < 4 ? 0 : 2;
        buf[probs + q * BW + 64 * v + 8 * g + i] = acc[v][i & 3][at] + acc[v][i & 3][at + 1] + add;
      }
    }
  }
  if (LANE < GC) { rm[WARP * GC + q] = m; rl[WARP * GC + q] = l; }
"""


def texts() -> dict[str, str]:
    """Returns what takes the places of the decode kernel's own text."""
    return {"MEMORY": MEMORY, "EARLY": _EARLY, "UNITS": MULTIPLY.replace("KIND", "bf16") + _UNITS}
