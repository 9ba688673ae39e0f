// What our kernels use of Metal, for a compiler for CPUs.
#pragma once
#include "numbers.h"
#include "threads.h"
#include <stdint.h>
#define device
#define constant
#define threadgroup static __attribute__((section("threadgroup_memory")))
typedef unsigned int uint;
typedef unsigned short ushort;
struct uint3 { uint x, y, z; };
struct uint4 { uint x, y, z, w; };

typedef bfloat16 bfloat16_t;
typedef float16 float16_t;

enum class mem_flags { mem_none, mem_device, mem_threadgroup };
static inline void threadgroup_barrier(mem_flags) { wait_for_group(); }
static inline void simdgroup_barrier(mem_flags) { wait_for_warp(); }
static inline float simd_shuffle_xor(float x, ushort other) {
  static float exchanged[2][1024];
  // Two by turns: none gets to the next exchange but one before all have read from this one.
  float* numbers = exchanged[of_warps[running >> 5].round & 1];
  const int self = running;
  numbers[self] = x;
  wait_for_warp();
  return numbers[self ^ other];
}

namespace metal {
inline float exp(float x) { return __builtin_expf(x); }
inline float exp2(float x) { return __builtin_exp2f(x); }
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float max(float a, float b) { return __builtin_fmaxf(a, b); }
inline float min(float a, float b) { return __builtin_fminf(a, b); }
inline float fabs(float x) { return __builtin_fabsf(x); }
inline float rint(float x) { return __builtin_rintf(x); }
namespace precise {
inline float rsqrt(float x) { return 1.f / __builtin_sqrtf(x); }
inline float tanh(float x) { return __builtin_tanhf(x); }
}
// As the chip does it: by the part of a turn, in float32.
namespace fast {
inline double turned(float x) {
  const float turns = x * 0.15915494309189535f;
  return (double)(turns - __builtin_floorf(turns)) * 6.283185307179586;
}
inline float cos(float x) { return (float)__builtin_cos(turned(x)); }
inline float sin(float x) { return (float)__builtin_sin(turned(x)); }
}
}

extern char __start_threadgroup_memory[] __attribute__((weak)), __stop_threadgroup_memory[] __attribute__((weak));
extern "C" long threadgroup_bytes() { return __stop_threadgroup_memory - __start_threadgroup_memory; }
