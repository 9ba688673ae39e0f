"""CUDA kernels on a CPU, from their own text: its threads take turns, and a warp's product waits for all its lanes.

It shows that the indices are right, of memory and of what a lane has of a tensor core's operands, which is written out
here as PTX documents it. It says nothing of time, of races or of the compiler.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

_NAMES = {
    mx.bfloat16: "bfloat16",
    mx.float16: "float16",
    mx.float32: "float",
    mx.uint32: "unsigned int",
    mx.int32: "int",
    mx.uint8: "unsigned char",
}

_PRELUDE = r"""
#include <cstring>
#include <ucontext.h>
#include <vector>
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static unsigned __byte_perm(unsigned low, unsigned high, unsigned order) {
  const unsigned long long both = (unsigned long long)high << 32 | low;
  unsigned out = 0;
  for (int i = 0; i < 4; i++) out |= (unsigned)(both >> 8 * (order >> 4 * i & 7) & 255) << 8 * i;
  return out;
}
struct bfloat16 {
  unsigned short bits;
  bfloat16() = default;
  explicit bfloat16(float x) {
    unsigned u;
    memcpy(&u, &x, 4);
    bits = (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
  }
  operator float() const {
    const unsigned u = (unsigned)bits << 16;
    float x;
    memcpy(&x, &u, 4);
    return x;
  }
};
struct float16 {
  _Float16 number;
  float16() = default;
  explicit float16(float x) : number(x) {}
  operator float() const { return number; }
};

struct Thread { ucontext_t place; bool done; };
static std::vector<Thread> threads;
static ucontext_t outside;
static int running, arrived_block, round_block;
static int arrived[32], rounds[32];
struct Operands { unsigned a[4], b[2]; float c[4], d[4]; };
static Operands operands[32][32];

static void wait_for(int& count, int& round, int all) {
  const int mine = round, self = running;
  if (++count == all) { count = 0; round++; return; }
  while (round == mine) swapcontext(&threads[self].place, &outside);
}

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
  if (arrived[warp] == 31) multiply_warp<H>(operands[warp]);
  wait_for(arrived[warp], rounds[warp], 32);
  memcpy(c, operands[warp][lane].d, 16);
}
#define bf16 bfloat16
#define f16 float16
#define SHARED static
#define DEVICE
#define SYNC() wait_for(arrived_block, round_block, (int)threads.size())
"""

_LAUNCH = r"""
static void** pointers;
static int group_now;
static void enter() {
  const int self = running;
  body(pointers, group_now, self);
  threads[self].done = true;
  while (true) swapcontext(&threads[self].place, &outside);
}
extern "C" void launch(void** given, int groups, int count) {
  constexpr int STACK = 1 << 16;
  static std::vector<char> stacks;
  stacks.resize((size_t)count * STACK);
  pointers = given;
  for (group_now = 0; group_now < groups; group_now++) {
    threads.assign(count, {});
    for (auto& thread : threads) {
      getcontext(&thread.place);
      thread.place.uc_stack.ss_sp = stacks.data() + (&thread - threads.data()) * STACK;
      thread.place.uc_stack.ss_size = STACK;
      makecontext(&thread.place, enter, 0);
    }
    for (bool left = true; left;) {
      left = false;
      for (running = 0; running < count; running++)
        if (!threads[running].done) { left = true; swapcontext(&outside, &threads[running].place); }
    }
  }
}
"""

_INDICES = "  const unsigned GROUP = group, THREAD = thread, LANE = thread & 31, WARP = thread >> 5;\n"
_PRODUCT = re.compile(r'asm volatile\("mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(b?f16)\..*?"r"\(b1\)\)', re.DOTALL)


def can_run() -> bool:
    """Whether this machine has what it takes."""
    return shutil.which("g++") is not None


def kernel(
    name: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    body: str,
    *,
    before: str = "",
    indices: str = _INDICES,
) -> Callable[..., list[mx.array]]:
    """Stands for `gpu_kernels.kernel`. What it changes in place is changed.

    Args:
        before: definitions that its text needs.
        indices: what its text begins with: where a thread is, of `thread` in `group`.
    """

    def run(
        *,
        inputs: Sequence[mx.array],
        template: Sequence[tuple[str, Any]],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
    ) -> list[mx.array]:
        dtypes = [*(array.dtype for array in inputs), *output_dtypes]
        library = _built(_text(names, dtypes, template, body, before, indices))
        mx.eval(list(inputs))
        given = [_plain(array) for array in inputs]
        made = [
            _plain(mx.zeros(shape, dtype)).copy() for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
        ]
        pointers = (ctypes.c_void_p * len(dtypes))(*(array.ctypes.data for array in (*given, *made)))
        library.launch(pointers, grid[0] // threadgroup[0], threadgroup[0])
        return [
            mx.array(array).view(dtype) if dtype == mx.bfloat16 else mx.array(array)
            for array, dtype in zip(made, output_dtypes, strict=True)
        ]

    names = (*inputs, *outputs)
    return run


def _plain(array: mx.array) -> np.ndarray:
    return np.ascontiguousarray(np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array, copy=False))


def _text(
    names: Sequence[str],
    dtypes: Sequence[mx.Dtype],
    template: Sequence[tuple[str, Any]],
    body: str,
    before: str,
    indices: str,
) -> str:
    constants = "".join(
        f"  using {name} = {_NAMES[value]};\n"
        if isinstance(value, mx.Dtype)
        else f"  constexpr int {name} = {int(value)};\n"
        for name, value in template
    )
    arguments = "".join(
        f"  {_NAMES[dtype]}* {name} = ({_NAMES[dtype]}*)given[{at}];\n"
        for at, (name, dtype) in enumerate(zip(names, dtypes, strict=True))
    )
    body = _PRODUCT.sub(r"multiply<\1>(c, a0, a1, a2, a3, b0, b1)", body)
    function = f"static void body(void** given, int group, int thread) {{\n{constants}{arguments}{indices}{body}}}\n"
    return _PRELUDE + before + function + _LAUNCH


@cache
def _built(text: str) -> ctypes.CDLL:
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / f"{name}.cpp", Path(folder) / f"{name}.so"
        source.write_text(text)
        command = ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", str(source), "-o", str(library)]
        subprocess.run(command, check=True, timeout=120)
        return ctypes.CDLL(str(library))
