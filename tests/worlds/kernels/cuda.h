// What our kernels use of CUDA, for a compiler for CPUs. A warp's product waits for all its lanes.
#pragma once
#include "numbers.h"
#include "threads.h"
#include <sched.h>
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static unsigned __byte_perm(unsigned low, unsigned high, unsigned order) {
  const unsigned long long both = (unsigned long long)high << 32 | low;
  unsigned out = 0;
  for (int i = 0; i < 4; i++) out |= (unsigned)(both >> 8 * (order >> 4 * i & 7) & 255) << 8 * i;
  return out;
}

static unsigned __float_as_uint(float x) { unsigned bits; memcpy(&bits, &x, 4); return bits; }
static float __uint_as_float(unsigned bits) { float x; memcpy(&x, &bits, 4); return x; }

static void __threadfence_system() { __sync_synchronize(); }
static void __nanosleep(unsigned) { sched_yield(); }

static float __shfl_sync(unsigned, float x, int lane) {
  static float exchanged[2][1024];
  // Two by turns: none gets to the next exchange but one before all have read from this one.
  float* numbers = exchanged[of_warps[running >> 5].round & 1];
  const int first = running & ~31;
  numbers[running] = x;
  wait_for_warp();
  return numbers[first | (lane & 31)];
}
static float __shfl_xor_sync(unsigned all, float x, int other) { return __shfl_sync(all, x, (running & 31) ^ other); }

struct Operands { unsigned a[4], b[2]; float c[4], d[4]; };
static Operands operands[32][32];

template <class H> static float half_of(unsigned pair, int which) {
  const unsigned short bits = pair >> 16 * which;
  H half;
  memcpy(&half, &bits, 2);
  return half;
}

// PTX, "Matrix Fragments for mma.m16n8k16 with floating point type".
template <class H> static void multiply_warp(Operands* lanes) {
  float a[16][16], b[16][8], c[16][8];
  for (int lane = 0; lane < 32; lane++) {
    const int group = lane >> 2, in_group = lane & 3;
    for (int i = 0; i < 8; i++) {
      const int row = (i < 2 || (4 <= i && i < 6)) ? group : group + 8;
      const int column = in_group * 2 + (i & 1) + (i < 4 ? 0 : 8);
      a[row][column] = half_of<H>(lanes[lane].a[i / 2], i & 1);
    }
    for (int i = 0; i < 4; i++) {
      const int row = in_group * 2 + (i & 1) + (i < 2 ? 0 : 8);
      b[row][group] = half_of<H>(lanes[lane].b[i / 2], i & 1);
    }
    for (int i = 0; i < 4; i++) c[i < 2 ? group : group + 8][in_group * 2 + (i & 1)] = lanes[lane].c[i];
  }
  for (int row = 0; row < 16; row++) for (int column = 0; column < 8; column++)
    for (int k = 0; k < 16; k++) c[row][column] += a[row][k] * b[k][column];
  for (int lane = 0; lane < 32; lane++) for (int i = 0; i < 4; i++)
    lanes[lane].d[i] = c[i < 2 ? lane >> 2 : (lane >> 2) + 8][(lane & 3) * 2 + (i & 1)];
}

template <class H> static void multiply(
    float* c, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  const int warp = running >> 5, lane = running & 31;
  operands[warp][lane] = {{a0, a1, a2, a3}, {b0, b1}, {c[0], c[1], c[2], c[3]}, {}};
  if (of_warps[warp].arrived == 31) multiply_warp<H>(operands[warp]);
  wait_for_warp();
  memcpy(c, operands[warp][lane].d, 16);
}
struct Rows { const void* at[32]; };
static Rows rows_of_warps[32][2];

// PTX, "ldmatrix", four matrices of 8 rows of 16 bytes: lanes 8i to 8i + 7 have the rows of matrix i.
static void load_matrices(unsigned* r, const void* row, bool turned) {
  const int warp = running >> 5, lane = running & 31;
  Rows& rows = rows_of_warps[warp][of_warps[warp].round & 1];
  rows.at[lane] = row;
  wait_for_warp();
  for (int i = 0; i < 4; i++) {
    unsigned short both[2];
    for (int j = 0; j < 2; j++) {
      const int one = lane >> 2, other = 2 * (lane & 3) + j;
      both[j] = ((const unsigned short*)rows.at[8 * i + (turned ? other : one)])[turned ? one : other];
    }
    memcpy(&r[i], both, 4);
  }
}
#define bf16 bfloat16
#define f16 float16
#define SHARED static
#define DEVICE
#define SYNC() wait_for_group()
#define SHARED_POINTER
#define SYNC_WARP() wait_for_warp()
#define XOR(x, o) __shfl_xor_sync(0xffffffffu, x, o)
#define EXP(x) __builtin_expf(x)
#define EXP2(x) __builtin_exp2f(x)
#define FMA(a, b, c) __builtin_fmaf(a, b, c)
#define MAX(a, b) __builtin_fmaxf(a, b)
#define MIN(a, b) __builtin_fminf(a, b)
#define ABS(x) __builtin_fabsf(x)
#define RINT(x) __builtin_rintf(x)
#define RSQRT(x) (1.f / __builtin_sqrtf(x))
#define COS(x) __builtin_cosf(x)
#define SIN(x) __builtin_sinf(x)
#define TANH(x) __builtin_tanhf(x)
