"""Kernels that are compiled ahead on other threads."""

from __future__ import annotations

import threading
from typing import Any

import mlx.core as mx
import pytest

from satchel.actors.replica.kernels import gpu_kernels

ARGUMENTS: dict[str, Any] = {
    "template": [("N", 3)],
    "grid": (32, 1, 1),
    "threadgroup": (32, 1, 1),
    "output_shapes": [(4,)],
    "output_dtypes": [mx.float32],
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What MLX was asked to launch."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", lambda **given: asked.append(given) or [])
    return asked


def test_a_launch_waits_for_a_kernel_that_is_being_compiled(
    launched: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
):
    go, compiled = threading.Event(), list[str]()

    def kept(name: str, source: str) -> bytes:
        compiled.append(threading.current_thread().name)
        assert "constexpr int N = 3;" in source
        assert go.wait(20)
        return b"binary"

    monkeypatch.setattr(gpu_kernels, "_kept", kept)
    kernel = gpu_kernels._CudaKernel("a", ("x",), ("y",), "  y[0] = x[0] + N;", "")
    for _ in range(2):
        gpu_kernels.prepare(kernel, [("N", 3)], [mx.float32], [mx.float32])
    threading.Timer(0.05, go.set).start()
    for _ in range(2):
        kernel(inputs=[mx.zeros((4,))], **ARGUMENTS)
    assert [each["compiled_source"] for each in launched] == [b"binary"] * 2
    assert len(compiled) == 1
    assert compiled[0].startswith("kernels")


def test_a_launch_says_why_a_kernel_was_not_compiled(launched: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch):
    def kept(name: str, source: str) -> bytes:
        raise RuntimeError("no such architecture")

    monkeypatch.setattr(gpu_kernels, "_kept", kept)
    kernel = gpu_kernels._CudaKernel("a", ("x",), ("y",), "", "")
    gpu_kernels.prepare(kernel, [("N", 3)], [mx.float32], [mx.float32])
    with pytest.raises(RuntimeError, match="no such architecture"):
        kernel(inputs=[mx.zeros((4,))], **ARGUMENTS)
    assert not launched


def test_a_kernel_that_could_not_be_compiled_once_is_compiled_at_the_next_launch(
    launched: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
):
    tries: list[str] = []

    def kept(name: str, source: str) -> bytes:
        tries.append(name)
        if len(tries) < 3:
            raise RuntimeError("no memory")
        return b"binary"

    monkeypatch.setattr(gpu_kernels, "_kept", kept)
    kernel = gpu_kernels._CudaKernel("a", ("x",), ("y",), "", "")
    gpu_kernels.prepare(kernel, [("N", 3)], [mx.float32], [mx.float32])
    with pytest.raises(RuntimeError, match="no memory"):
        kernel(inputs=[mx.zeros((4,))], **ARGUMENTS)
    kernel(inputs=[mx.zeros((4,))], **ARGUMENTS)
    assert len(launched) == 1


def test_kernels_that_mlx_compiles_are_left_to_it():
    asked: list[dict[str, Any]] = []
    gpu_kernels.prepare(lambda **given: asked.append(given), [], [], [])
    assert not asked
