"""A CPU that compiles kernels as CUDA does, but to nothing: which kernels a model needs, with all their constants and
dtypes, which their names tell apart. The fake kernels compute."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import pytest

from satchel.actors.replica.kernels import (
    block_kernels,
    decode_kernel,
    gpu_kernels,
    prefill_kernel,
    seal_kernel,
)
from satchel.actors.replica.kernels.decode_views import KernelView
from satchel.actors.replica.kv import attention
from satchel.actors.replica.loading.warming import kernels_ahead
from satchel.actors.replica.loading.ways import decode_ways

from . import fake_kernels

_CALLED = [
    (decode_kernel, "attend"),
    (prefill_kernel, "attend"),
    (seal_kernel, "seal"),
    (seal_kernel, "seal_into"),
    *((block_kernels, name) for name in ("write", "write_records", "read_records", "unseal", "append", "stack")),
]


@dataclass
class Compiled:
    """Names of kernels.

    Attributes:
        ahead: what other threads have compiled.
        awaited: what a launch had to compile itself.
        launched: what was launched.
    """

    ahead: set[str] = field(default_factory=set)
    awaited: set[str] = field(default_factory=set)
    launched: set[str] = field(default_factory=set)

    def settle(self) -> None:
        """Waits until the threads have ended."""
        compilers = gpu_kernels._compilers()
        with compilers._changed:
            assert compilers._changed.wait_for(lambda: not compilers._running, 60)


def kind_of(name: str) -> str:
    """The kind of a kernel: its name without the digest."""
    return name.removeprefix("satchel_").rpartition("_")[0]


@contextmanager
def world() -> Iterator[Compiled]:
    """This device has kernels for CUDA, and tensor cores."""
    compiled = Compiled()

    def kept(name: str, source: str) -> bytes:
        own = threading.current_thread().name == "kernels"
        (compiled.ahead if own else compiled.awaited).add(name)
        return b"binary"

    def launch(*, name: str, output_shapes: Any, output_dtypes: Any, **how: Any) -> list[mx.array]:
        compiled.launched.add(name)
        return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]

    real = [getattr(module, name) for module, name in _CALLED]
    _forget()
    with fake_kernels.kernels(), pytest.MonkeyPatch.context() as patch:
        for (module, name), own in zip(_CALLED, real, strict=True):
            fake = fake_kernels.attend_prompts if module is prefill_kernel else getattr(module, name)
            patch.setattr(module, name, _both(own, fake))
        patch.setattr(mx.metal, "is_available", lambda: False)
        patch.setattr(mx.fast, "precompiled_cuda_kernel", launch)
        patch.setattr(gpu_kernels, "_kept", kept)
        patch.setattr(gpu_kernels, "_nvrtc", lambda: object())
        patch.setattr(gpu_kernels, "_takes_compressed", lambda: True)
        patch.setattr(gpu_kernels, "has_nvrtc", lambda: True)
        patch.setattr(decode_kernel, "has_tensor_cores", lambda: True)
        # With random weights 16 bits differ by more than they may.
        patch.setattr(decode_ways, "agree", lambda *_: True)
        patch.setattr(kernels_ahead, "on_cuda", lambda: True)
        patch.setattr(attention, "on_cuda", lambda: True)
        try:
            yield compiled
        finally:
            compiled.settle()
            decode_kernel.use_tensor_cores(False)
            _forget()


def _both(real: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """What makes the real launch, and returns what the fake one computes."""

    def call(*given: Any, **named: Any) -> Any:
        if gpu_kernels._only_preparing.get():
            return real(*given, **named)
        if len(given) > 1 and isinstance(view := given[1], KernelView):
            # A model is only asked once for what it leaves to the kernel.
            transform = view.transform(given[0].shape[3])
            given = (given[0], replace(view, transform=lambda dim: transform), *given[2:])
        real(*given, **named)
        return fake(*given, **named)

    return call


def _forget() -> None:
    for kept in (
        gpu_kernels.kernel,
        decode_kernel._plan,
        decode_kernel._prepare,
        prefill_kernel._plan,
        attention.prefill_kernel_works,
    ):
        kept.cache_clear()
