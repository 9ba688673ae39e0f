"""Kernels that are compiled ahead on other threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import mlx.core as mx
import pytest

from satchel.actors.replica.kernels import gpu_kernels, prefill_kernel

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


def settled() -> None:
    """Waits for the end of the threads that compile."""
    for thread in threading.enumerate():
        if thread.name == "kernels":
            thread.join(20)


def test_a_launch_waits_for_a_kernel_that_is_being_compiled(
    launched: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
):
    go, began, compiled = threading.Event(), threading.Event(), list[str]()

    def kept(name: str, source: str) -> bytes:
        compiled.append(threading.current_thread().name)
        began.set()
        assert "constexpr int N = 3;" in source
        assert go.wait(20)
        return b"binary"

    monkeypatch.setattr(gpu_kernels, "_kept", kept)
    kernel = gpu_kernels._CudaKernel("a", ("x",), ("y",), "  y[0] = x[0] + N;", "")
    for _ in range(2):
        gpu_kernels.prepare(kernel, [("N", 3)], [mx.float32], [mx.float32])
    assert began.wait(20)
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
    settled()
    with pytest.raises(RuntimeError, match="no memory"):
        kernel(inputs=[mx.zeros((4,))], **ARGUMENTS)
    kernel(inputs=[mx.zeros((4,))], **ARGUMENTS)
    assert len(launched) == 1


def test_two_launches_at_once_compile_a_kernel_once(launched: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch):
    began, go, compiled = threading.Event(), threading.Event(), list[str]()

    def kept(name: str, source: str) -> bytes:
        compiled.append(name)
        began.set()
        assert go.wait(20)
        return b"binary"

    monkeypatch.setattr(gpu_kernels, "_kept", kept)
    kernel = gpu_kernels._CudaKernel("a", ("x",), ("y",), "", "")
    x = mx.zeros((4,))
    with ThreadPoolExecutor(3) as pool:
        launches = [pool.submit(kernel, inputs=[x], **ARGUMENTS) for _ in range(3)]
        assert began.wait(20)
        gpu_kernels.prepare(kernel, [("N", 3)], [mx.float32], [mx.float32])
        go.set()
    assert [each.result() for each in launches] == [[]] * 3
    assert len(compiled) == 1 and len(launched) == 3


def test_who_waits_for_a_kernel_that_fails_compiles_it(launched: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch):
    began, go, tries = threading.Event(), threading.Event(), list[str]()

    def kept(name: str, source: str) -> bytes:
        tries.append(threading.current_thread().name)
        if len(tries) == 1:
            began.set()
            assert go.wait(20)
            raise RuntimeError("no memory")
        return b"binary"

    monkeypatch.setattr(gpu_kernels, "_kept", kept)
    kernel = gpu_kernels._CudaKernel("a", ("x",), ("y",), "", "")
    gpu_kernels.prepare(kernel, [("N", 3)], [mx.float32], [mx.float32])
    assert began.wait(20)
    threading.Timer(0.05, go.set).start()
    kernel(inputs=[mx.zeros((4,))], **ARGUMENTS)
    assert tries == ["kernels", threading.current_thread().name]
    assert len(launched) == 1


def test_a_launch_does_not_wait_for_other_kernels(launched: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu_kernels, "_compilers", cache(lambda: gpu_kernels._Compilers(1)))
    began, go, compiled = threading.Event(), threading.Event(), list[str]()

    def kept(name: str, source: str) -> bytes:
        compiled.append(threading.current_thread().name)
        if len(compiled) == 1:
            began.set()
            assert go.wait(20)
        return b"binary"

    monkeypatch.setattr(gpu_kernels, "_kept", kept)
    first, second = (gpu_kernels._CudaKernel(name, ("x",), ("y",), "", "") for name in "ab")
    for kernel in (first, second):
        gpu_kernels.prepare(kernel, [("N", 3)], [mx.float32], [mx.float32])
    assert began.wait(20)
    second(inputs=[mx.zeros((4,))], **ARGUMENTS)
    assert len(launched) == 1
    go.set()
    first(inputs=[mx.zeros((4,))], **ARGUMENTS)
    assert compiled == ["kernels", threading.current_thread().name]
    settled()
    assert not [thread for thread in threading.enumerate() if thread.name == "kernels"]


def test_a_process_that_ends_waits_only_for_kernels_that_are_being_compiled():
    began, go, done = threading.Event(), threading.Event(), list[str]()
    compilers = gpu_kernels._Compilers(1)

    def work(name: str) -> tuple[str, bytes]:
        began.set()
        assert go.wait(20)
        done.append(name)
        return name, b""

    for name in "ab":
        compilers.submit(partial(work, name))
    assert began.wait(20)
    threading.Timer(0.05, go.set).start()
    compilers._end()
    assert done == ["a"]
    settled()
    assert done == ["a"]


def test_a_long_wait_is_logged(
    launched: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO")
    monkeypatch.setattr(gpu_kernels, "_kept", lambda name, source: b"binary")
    gpu_kernels._CudaKernel("quick", ("x",), ("y",), "", "")(inputs=[mx.zeros((4,))], **ARGUMENTS)
    monkeypatch.setattr(gpu_kernels, "WAIT_LOGGED_S", -1.0)
    kernel = gpu_kernels._CudaKernel("slow", ("x",), ("y",), "", "")
    for _ in range(2):
        kernel(inputs=[mx.zeros((4,))], **ARGUMENTS)
    assert [record.getMessage() for record in caplog.records] == ["waited 0.0 s for the kernel slow to be compiled"]


def test_what_is_only_prepared_launches_nothing(launched: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch):
    compiled: list[str] = []
    monkeypatch.setattr(gpu_kernels, "_kept", lambda name, source: compiled.append(name) or b"binary")
    kernel = gpu_kernels._CudaKernel("a", ("x",), ("y",), "", "")
    with gpu_kernels.only_preparing():
        (out,) = kernel(inputs=[mx.zeros((4,))], **ARGUMENTS)
    assert (out.shape, out.dtype) == ((4,), mx.float32)
    settled()
    assert len(compiled) == 1 and not launched
    kernel(inputs=[mx.zeros((4,))], **ARGUMENTS)
    assert len(compiled) == len(launched) == 1


def test_kernels_that_mlx_compiles_are_left_to_it():
    asked: list[dict[str, Any]] = []
    gpu_kernels.prepare(lambda **given: asked.append(given), [], [], [])
    assert not asked


@pytest.mark.parametrize(
    ("capability", "number", "kib"), [((9, 0), 90, 227), ((10, 3), 103, 227), ((8, 9), 89, 99), (None, 0, 227)]
)
def test_the_device_says_what_it_is(
    capability: tuple[int, int] | None, number: int, kib: int, monkeypatch: pytest.MonkeyPatch
):
    names = ("compute_capability_major", "compute_capability_minor")
    info = {} if capability is None else dict(zip(names, capability, strict=True))
    monkeypatch.setattr(mx, "device_info", lambda: info)
    assert gpu_kernels.architecture() == number
    assert prefill_kernel.shared_bytes.__wrapped__() == kib * 1024
