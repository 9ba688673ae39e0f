// Numbers of 16 bits, which are made of others explicitly only: as CUDA's of ours, and as Metal's bfloat.
#pragma once
#include <string.h>

struct bfloat16 {
  unsigned short bits;
  bfloat16() = default;
  explicit bfloat16(float x) {
    unsigned u;
    memcpy(&u, &x, 4);
    bits = (u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0 : (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
  }
  operator float() const {
    const unsigned u = (unsigned)bits << 16;
    float x;
    memcpy(&x, &u, 4);
    return x;
  }
};

#ifdef ONLY_CHECKED
// clang knows no numbers of 16 bits for x86.
struct float16 {
  unsigned short bits;
  float16() = default;
  explicit float16(float x);
  operator float() const;
};
#else
struct float16 {
  _Float16 number;
  float16() = default;
  explicit float16(float x) : number((_Float16)x) {}
  operator float() const { return number; }
};
#endif
