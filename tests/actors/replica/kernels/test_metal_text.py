"""What MLX gives Metal's compiler of our kernels is what a strict compiler takes, in every shape."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import sys
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest

from satchel.actors.replica import kernels
from satchel.actors.replica.kernels import (
    block_kernels,
    decode_kernel,
    few_rows,
    gpu_kernels,
    prefill_kernel,
    seal_kernel,
)
from satchel.actors.replica.kernels.head_transform import HeadTransform
from satchel.actors.replica.selftest.kernel_check import HEAD_SIZES
from tests.worlds.kernels import metal_source, shapes, strict
from tests.worlds.kernels.faults import fault
from tests.worlds.kernels.metal_source import BUFFERS_MAX, Source

pytestmark = pytest.mark.skipif(mx.metal.is_available(), reason="Metal's own compiler takes them")
strictly = pytest.mark.skipif(strict.lacks() is not None, reason=str(strict.lacks()))

KINDS = (("q4", mx.bfloat16, (128, 128)), ("fp16", mx.bfloat16, (80, 80)))
"""A shape of quantized blocks, and one of blocks as computed."""

FAULTS: dict[str, tuple[ModuleType, str, str]] = {
    "a pointer without an address space": (decode_kernel, "const DEVICE T* from =", "const T* from ="),
    "a pointer to shared memory without one": (decode_kernel, "SHARED_POINTER float* k_s", "float* k_s"),
    "the device's pointer to shared memory": (
        *(decode_kernel, "SHARED_POINTER float* k_s = q_s"),
        "DEVICE float* k_s = (DEVICE float*)q_s",
    ),
    "the device's pointer to few numbers": (
        *(block_kernels, "const int used = sizes[0]"),
        "const DEVICE int* few = sizes; const int used = few[0]",
    ),
    "a struct that is copied from the device": (
        *(decode_kernel, "READ(eight, keys + d * 32 * EW)"),
        "struct Other { P x[8]; }; const Other eight = ((const DEVICE Other*)keys)[d * 32];",
    ),
    "a number that nothing converts to 16 bits": (
        *(decode_kernel, "static_cast<T>(k_s[(news - 1) * DK + i])"),
        "k_s[(news - 1) * DK + i]",
    ),
    "a function that Metal does not have": (seal_kernel, "RINT(", "rintf("),
}


def sources_of_kinds() -> dict[str, Source]:
    found: dict[str, Source] = {}
    with metal_source.kernels(metal_source.recorded(found)):
        for kind in KINDS:
            shapes.launch(*kind)
    return found


@strictly
@pytest.mark.parametrize(
    "sizes", [HEAD_SIZES, pytest.param(shapes.OTHER_SIZES, marks=pytest.mark.metal)], ids=["models'", "others"]
)
def test_a_strict_compiler_takes_every_kernel_in_every_shape(sizes: list[tuple[int, int]]):
    sources = shapes.sources(sizes).values()
    assert all(len(source.buffers) <= BUFFERS_MAX for source in sources)
    assert strict.refused(sources) == []


@strictly
@pytest.mark.parametrize("name", FAULTS)
def test_what_metal_would_refuse_is_noticed(name: str):
    with fault(*FAULTS[name]):
        assert strict.refused(sources_of_kinds().values())


@strictly
def test_constants_that_are_too_few_for_the_devices_memory_are_noticed(monkeypatch: pytest.MonkeyPatch):
    """A rotation of few channels has few, and the kernel's pointers go into them."""
    padded = HeadTransform.__dict__["constants"]
    few = property(lambda transform: padded.func(transform)[:6])
    monkeypatch.setattr(HeadTransform, "constants", few)
    assert strict.refused(sources_of_kinds().values())


def test_every_kernel_is_checked(monkeypatch: pytest.MonkeyPatch):
    """Wherever a kernel is made, also one of tomorrow, that line is reached, or it is for CUDA only."""
    made: set[tuple[str, int]] = set()

    def kernel(*given: Any) -> Any:
        frame = sys._getframe(1)
        made.add((frame.f_globals["__name__"], frame.f_lineno))
        return gpu_kernels.kernel(*given)

    wanted: set[tuple[str, int]] = set()
    for found in pkgutil.iter_modules(kernels.__path__, f"{kernels.__name__}."):
        module = importlib.import_module(found.name)
        if (
            module in (few_rows, prefill_kernel, gpu_kernels)
            or getattr(module, "kernel", None) is not gpu_kernels.kernel
        ):
            continue
        monkeypatch.setattr(module, "kernel", kernel)
        calls = [node for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.Call)]
        wanted |= {
            (module.__name__, call.lineno)
            for call in calls
            if isinstance(call.func, ast.Name) and call.func.id == "kernel"
        }
    sources = sources_of_kinds().values()
    assert wanted == made != set()
    assert all(source.text.isascii() for source in sources), "MLX gives it to Metal as ASCII"
