"""Kernels for GPUs. Their bodies are written once, in the common subset of CUDA and Metal; preludes define the rest.

For CUDA they are compiled by NVRTC without any header, which takes a tenth of the time of MLX's own way, and are stored
on disk: MLX compiles a custom kernel anew in every process, 2 to 4 s each. Other threads begin with those that are soon
needed (`prepare`, `only_preparing`). Without NVRTC MLX's way is used.

**Writes in place.** Some kernels write into arrays that they get as inputs: `block_kernels.write` and `write_records`
into slots of the pool, `decode_kernel.attend` into sequences' open blocks. MLX believes that inputs stay as they are.
CUDA runs kernels in the order of their launch. Metal runs kernels of one stream at the same time, unless one takes
another's output. So, all on the engine's thread and stream:

- Nobody needs what was at the place that is written: a slot is written before a sequence that uses it reads it, and a
  token's place in an open block lies behind all that was read of it.
- Who reads a slot takes an output of what wrote the pool: the zero that each write returns and takes from the write
  before it (`SlotGroup.written`). A kernel takes it as `order`; for MLX's own operations it is added to slot numbers.
- The next decode step takes tokens that were computed from the last step's output.
- Who takes no such output, or writes what a step in flight may still read, waits for the step's end first: the places
  with `mx.synchronize` in `BatchExecutor`.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, lru_cache, partial
from threading import Condition, Lock, Thread
from typing import Any

import mlx.core as mx

from ....cluster.environment import default_home, kernels_wanted
from .fat_binary import fat_binary

logger = logging.getLogger(__name__)

_CUDA = """
  const unsigned GROUP = blockIdx.x, THREAD = threadIdx.x, LANE = threadIdx.x & 31, WARP = threadIdx.x >> 5;
  #define SHARED __shared__
  #define SHARED_POINTER
  #define DEVICE
  #define SYNC() __syncthreads()
  #define SYNC_WARP() __syncwarp()
  #define XOR(x, o) __shfl_xor_sync(0xffffffffu, x, o)
  #define EXP(x) __expf(x)
  #define MAX(a, b) fmaxf(a, b)
  #define MIN(a, b) fminf(a, b)
  #define ABS(x) fabsf(x)
  #define RINT(x) rintf(x)
  #define RSQRT(x) rsqrtf(x)
  #define EXP2(x) exp2f(x)
  #define FMA(a, b, c) fmaf(a, b, c)
  #define COS(x) cosf(x)
  #define SIN(x) sinf(x)
  #define TANH(x) tanhf(x)
"""

_METAL = """
  const uint GROUP = threadgroup_position_in_grid.x, THREAD = thread_position_in_threadgroup.x;
  const uint LANE = thread_index_in_simdgroup, WARP = simdgroup_index_in_threadgroup;
  #define SHARED threadgroup
  #define SHARED_POINTER threadgroup
  #define DEVICE device
  #define SYNC() threadgroup_barrier(mem_flags::mem_threadgroup)
  #define SYNC_WARP() simdgroup_barrier(mem_flags::mem_threadgroup)
  #define XOR(x, o) simd_shuffle_xor(x, (ushort)(o))
  #define EXP(x) metal::exp(x)
  #define MAX(a, b) metal::max(a, b)
  #define MIN(a, b) metal::min(a, b)
  #define ABS(x) metal::fabs(x)
  #define RINT(x) metal::rint(x)
  #define RSQRT(x) metal::precise::rsqrt(x)
  // The same as in MLX's own rotations, whose angles are off by up to 0.01 at 131,072 tokens.
  #define EXP2(x) metal::exp2(x)
  #define FMA(a, b, c) metal::fma(a, b, c)
  #define COS(x) metal::fast::cos(x)
  #define SIN(x) metal::fast::sin(x)
  #define TANH(x) metal::precise::tanh(x)
"""

MULTIPLY = """
  #define MULTIPLY(c, a0, a1, a2, a3, b0, b1) \\
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.KIND.KIND.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, " \\
        "{%0,%1,%2,%3};" \\
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) \\
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1))
"""
"""Text for CUDA: a product of a warp's tensor cores, added to `c`. KIND is the type of the operands in PTX ("Matrix
Fragments for mma.m16n8k16 with floating point type")."""

# CUDA's own 16-bit types need headers.
_CUDA_TYPES = """
struct bfloat16 {
  unsigned short bits;
  bfloat16() = default;
  __device__ explicit bfloat16(float x) {
    const unsigned u = __float_as_uint(x);
    bits = (u & 0x7fffffffu) > 0x7f800000u ? 0x7fff : (unsigned short)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
  }
  __device__ operator float() const { return __uint_as_float((unsigned)bits << 16); }
};
struct float16 {
  unsigned short bits;
  float16() = default;
  __device__ explicit float16(float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
  __device__ operator float() const { float x; asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits)); return x; }
};
"""

_TYPE_NAMES = {
    mx.bfloat16: "bfloat16",
    mx.float16: "float16",
    mx.float32: "float",
    mx.uint32: "unsigned int",
    mx.int32: "int",
    mx.uint8: "unsigned char",
}

Template = Sequence[tuple[str, Any]]
"""Names and values of constants: integers, booleans, and types as dtypes."""


def units(name: str, dtype: mx.Dtype, dim: int) -> Template:
    """Returns constants for a kernel that copies rows of `dim` numbers: `U`, a type of four bytes if rows can be copied
    by them, and `D`, how many a row has. Both have `name` behind them."""
    if dim * dtype.size % 4:
        return [(f"U{name}", dtype), (f"D{name}", dim)]
    return [(f"U{name}", mx.uint32), (f"D{name}", dim * dtype.size // 4)]


@lru_cache(1024)
def int_numbers(*numbers: int) -> mx.array:
    """Returns `(n,) int32` numbers that a kernel is told. All layers of a call get the same array."""
    return mx.array(numbers, mx.int32)


def is_available() -> bool:
    """Whether this device runs kernels: the default device is a GPU that MLX has custom kernels for. SATCHEL_KERNELS=0
    says that it does not."""
    if kernels_wanted() is False:
        return False
    return mx.default_device() == mx.Device(mx.gpu) and (mx.metal.is_available() or mx.cuda.is_available())


def architecture() -> int:
    """Returns the compute capability of the device, as 90 for 9.0; 0 if it is none of CUDA."""
    info = mx.device_info()
    major, minor = (int(info.get(f"compute_capability_{part}", 0)) for part in ("major", "minor"))
    return 10 * major + minor


@cache
def kernel(
    name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], body: str, bounds: tuple[int, int] | None = None
) -> Any:
    """Returns a function that launches a kernel. It takes the arguments of `mx.fast.metal_kernel`'s result.

    Args:
        name: a unique name.
        body: the body of the kernel's function; `GROUP`, `THREAD` and the like are defined in the preludes.
        bounds: how many threads a group has, and for how many groups a multiprocessor must have registers. NVRTC uses
            fewer registers if it must.
    """
    if mx.metal.is_available():
        return mx.fast.metal_kernel(
            name=f"satchel_{name}", input_names=list(inputs), output_names=list(outputs), source=_METAL + body
        )
    if _nvrtc() is None:
        return mx.fast.cuda_kernel(
            name=f"satchel_{name}", input_names=list(inputs), output_names=list(outputs), source=_CUDA + body
        )
    return _CudaKernel(name, inputs, outputs, body, "" if bounds is None else f"__launch_bounds__{bounds} ")


def prepare(launch: Any, template: Template, inputs: Sequence[mx.Dtype], outputs: Sequence[mx.Dtype]) -> None:
    """Begins to compile a kernel on another thread, for a launch with these constants and dtypes. Only NVRTC does that;
    a launch waits for it.

    Args:
        launch: what `kernel` returned.
    """
    if isinstance(launch, _CudaKernel):
        _takes_compressed()
        launch.prepare(template, inputs, outputs)


_only_preparing: ContextVar[bool] = ContextVar("only_preparing", default=False)


@contextmanager
def only_preparing() -> Iterator[None]:
    """Lets launches on this thread launch nothing for now. With NVRTC they begin to compile their kernels, as
    `prepare`, and return zeros that stand for the results; nothing has to be evaluated."""
    token = _only_preparing.set(True)
    try:
        yield
    finally:
        _only_preparing.reset(token)


def has_nvrtc() -> bool:
    """Whether kernels are compiled by NVRTC. Only those may have all the shared memory of the device."""
    return mx.cuda.is_available() and _nvrtc() is not None


COMPILERS_MOST = 8

END_S = 10.0
"""A process that ends waits for kernels that are just being compiled, at most so long."""

WAIT_LOGGED_S = 0.5
"""A launch that waits longer for its kernel is logged."""

_Binary = tuple[str, bytes]
"""A kernel's name and what was compiled."""


class _Compilers:
    """Compiles kernels in the order in which they are submitted, on at most `most` threads, which end when nothing is
    left to do."""

    def __init__(self, most: int) -> None:
        self._most, self._running = most, 0
        self._waiting: deque[tuple[Future[_Binary], Callable[[], _Binary]]] = deque()
        self._changed = Condition()
        # NVRTC must not be unloaded while it compiles.
        atexit.register(self._end)

    def submit(self, work: Callable[[], _Binary]) -> Future[_Binary]:
        """Begins some work, unless the result is cancelled before."""
        future: Future[_Binary] = Future()
        with self._changed:
            self._waiting.append((future, work))
            if self._running < self._most:
                self._running += 1
                Thread(target=self._run, name="kernels", daemon=True).start()
        return future

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._running -= 1
                    self._changed.notify_all()
                    return
                future, work = self._waiting.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except Exception as error:
                    future.set_exception(error)

    def _end(self) -> None:
        with self._changed:
            self._waiting.clear()
            self._changed.wait_for(lambda: not self._running, END_S)


@cache
def _compilers() -> _Compilers:
    return _Compilers(max(1, min(COMPILERS_MOST, (os.cpu_count() or 2) // 2)))


class _CudaKernel:
    def __init__(self, name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], body: str, bounds: str) -> None:
        self._name, self._inputs, self._outputs, self._body, self._bounds = name, inputs, outputs, body, bounds
        # Those that a thread compiles or is to compile, too.
        self._compiled: dict[Any, _Binary | Future[_Binary]] = {}
        self._lock = Lock()

    def prepare(self, template: Template, inputs: Sequence[mx.Dtype], outputs: Sequence[mx.Dtype]) -> None:
        key = (*template, *inputs, *outputs)
        with self._lock:
            if key not in self._compiled:
                work = partial(self._compile, list(template), list(inputs), list(outputs))
                self._compiled[key] = _compilers().submit(work)

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array],
        template: Template,
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
        shared_memory: int = 0,
    ) -> list[mx.array]:
        dtypes = [array.dtype for array in inputs]
        if _only_preparing.get():
            prepare(self, template, dtypes, output_dtypes)
            return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]
        found = self._compiled.get((*template, *dtypes, *output_dtypes))
        name, binary = found if isinstance(found, tuple) else self._awaited(template, dtypes, output_dtypes)
        return mx.fast.precompiled_cuda_kernel(
            name=name,
            compiled_source=binary,
            inputs=inputs,
            output_shapes=output_shapes,
            output_dtypes=output_dtypes,
            scalars=[],
            grid=grid,
            threadgroup=threadgroup,
            shared_memory=shared_memory,
            ensure_row_contiguous=True,
        )

    def _awaited(self, template: Template, inputs: Sequence[mx.Dtype], outputs: Sequence[mx.Dtype]) -> _Binary:
        """Returns a kernel that another thread compiles; or compiles it, if none has begun or it failed there."""
        _takes_compressed()
        began, key = time.monotonic(), (*template, *inputs, *outputs)
        compiled = None
        while compiled is None:
            found, own = self._claimed(key)
            if own is not None:
                try:
                    own.set_result(self._compile(template, inputs, outputs))
                except BaseException as error:
                    own.set_exception(error)
                    raise
            if found.exception() is None:
                self._compiled[key] = compiled = found.result()
        if (took_s := time.monotonic() - began) > WAIT_LOGGED_S:
            logger.info("waited %.1f s for the kernel %s to be compiled", took_s, self._name)
        return compiled

    def _claimed(self, key: Any) -> tuple[Future[_Binary], Future[_Binary] | None]:
        """Returns the result for which to wait; and it again if the caller has to compute it."""
        with self._lock:
            found = self._compiled.get(key)
            own: Future[_Binary] = Future()
            if isinstance(found, tuple):
                own.set_result(found)
                return own, None
            if found is not None and not found.cancel() and (not found.done() or found.exception() is None):
                return found, None
            own.set_running_or_notify_cancel()
            self._compiled[key] = own
            return own, own

    def _compile(self, template: Template, inputs: Sequence[mx.Dtype], outputs: Sequence[mx.Dtype]) -> _Binary:
        parameters = [f"const {_TYPE_NAMES[t]}* {n}" for n, t in zip(self._inputs, inputs, strict=True)]
        parameters += [f"{_TYPE_NAMES[t]}* {n}" for n, t in zip(self._outputs, outputs, strict=True)]
        constants = "".join(
            f"  using {name} = {_TYPE_NAMES[value]};\n"
            if isinstance(value, mx.Dtype)
            else f"  constexpr int {name} = {int(value)};\n"
            for name, value in template
        )
        text = f"({', '.join(parameters)}) {{\n{constants}{_CUDA}{self._body}\n}}\n"
        # MLX identifies a kernel only by its name.
        name = f"satchel_{self._name}_{hashlib.sha256((self._bounds + text).encode()).hexdigest()[:16]}"
        return name, _kept(name, f'{_CUDA_TYPES}extern "C" __global__ void {self._bounds}{name}{text}')


def _kept(name: str, source: str) -> bytes:
    """Returns the kernel's binary for this device, from the disk if it is there."""
    library = _nvrtc()
    assert library is not None
    kind = "fatbin" if _takes_compressed() else "cubin"
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    path = default_home().kernels_folder / f"{name}-sm_{architecture()}-nvrtc-{major.value}.{minor.value}.{kind}"
    try:
        digest, binary = (content := path.read_bytes())[:32], content[32:]
        if hashlib.sha256(binary).digest() == digest:
            return binary
    except OSError:
        pass
    binary = _compiled(library, name, source)
    if kind == "fatbin":
        binary = fat_binary(binary, architecture())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f"{path.name}.{os.getpid()}")
        new.write_bytes(hashlib.sha256(binary).digest() + binary)
        new.rename(path)
    except OSError:
        # The next process compiles it again.
        pass
    return binary


@cache
def _takes_compressed() -> bool:
    """Whether the driver takes compressed binaries: one is tried. It is first called on a thread that computes."""
    if (library := _nvrtc()) is None:
        return False
    name = "satchel_takes_compressed"
    body = "{ y[threadIdx.x] = 3 * x[threadIdx.x]; }"
    source = f'extern "C" __global__ void {name}(const unsigned int* x, unsigned int* y) {body}'
    try:
        (out,) = mx.fast.precompiled_cuda_kernel(
            name=name,
            compiled_source=fat_binary(_compiled(library, name, source), architecture()),
            inputs=[mx.array([1, 5], mx.uint32)],
            output_shapes=[(2,)],
            output_dtypes=[mx.uint32],
            scalars=[],
            grid=(2, 1, 1),
            threadgroup=(2, 1, 1),
        )
        return out.tolist() == [3, 15]
    except (RuntimeError, ValueError) as error:
        logger.warning("CUDA's driver refuses compressed kernels, so decode steps take longer: %s", error)
        return False


def _compiled(library: ctypes.CDLL, name: str, source: str) -> bytes:
    """Compiles a kernel for this device.

    Raises:
        RuntimeError: NVRTC refuses it; the message has its log.
    """
    program, size = ctypes.c_void_p(), ctypes.c_size_t()

    def call(function: Any, *arguments: Any) -> None:
        if failed := function(*arguments):
            raise RuntimeError(f"{name}: NVRTC's {function.__name__} gave error {failed}")

    call(library.nvrtcCreateProgram, ctypes.byref(program), source.encode(), f"{name}.cu".encode(), 0, None, None)
    try:
        option = ctypes.c_char_p(f"--gpu-architecture=sm_{architecture()}".encode())
        if library.nvrtcCompileProgram(program, 1, ctypes.byref(option)):
            call(library.nvrtcGetProgramLogSize, program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            call(library.nvrtcGetProgramLog, program, log)
            raise RuntimeError(f"{name} cannot be compiled: {log.value.decode(errors='replace')}")
        call(library.nvrtcGetCUBINSize, program, ctypes.byref(size))
        binary = ctypes.create_string_buffer(size.value)
        call(library.nvrtcGetCUBIN, program, binary)
        return binary.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


@cache
def _nvrtc() -> ctypes.CDLL | None:
    """Returns NVRTC, which MLX has loaded; None if there is none."""
    for name in ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None
