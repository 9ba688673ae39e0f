"""A GPU kernel that ends the process is not tried for ever, and SATCHEL_KERNELS has the last word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from satchel.actors.replica.execution.decode_way import DecodeWay
from satchel.actors.replica.kernels import gpu_kernels
from satchel.actors.replica.kv.paged_cache import Reads
from satchel.actors.replica.loading.ways import decode_ways
from satchel.actors.replica.proving.findings import Findings

WITH_KERNEL = DecodeWay(Reads.KERNEL, compiled=True)
NOBODY: Any = None


class Crash(BaseException):
    """The process ends."""


@pytest.fixture
def findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Findings:
    """Of a model on a device that has kernels."""
    monkeypatch.delenv("SATCHEL_KERNELS", raising=False)
    monkeypatch.setattr(gpu_kernels, "is_available", lambda: True)
    return Findings(tmp_path / "trials.json", bytes(32))


def start(findings: Findings, monkeypatch: pytest.MonkeyPatch, *, crashes: bool) -> DecodeWay:
    def found(*_: Any, **how: bool) -> DecodeWay:
        if crashes:
            raise Crash
        return WITH_KERNEL

    monkeypatch.setattr(decode_ways, "_found", found)
    return decode_ways.fastest(NOBODY, NOBODY, 4096, findings)


def test_after_two_crashes_it_serves_without(findings: Findings, monkeypatch: pytest.MonkeyPatch):
    for _ in range(2):
        with pytest.raises(Crash):
            start(findings, monkeypatch, crashes=True)
    for _ in range(2):
        way = start(findings, monkeypatch, crashes=True)
        assert way.reads is Reads.DEQUANTIZED and "SATCHEL_KERNELS=1" in way.reason
    monkeypatch.setenv("SATCHEL_KERNELS", "1")
    assert start(findings, monkeypatch, crashes=False) == WITH_KERNEL
    monkeypatch.delenv("SATCHEL_KERNELS")
    assert start(findings, monkeypatch, crashes=True) == WITH_KERNEL, "what was found is kept"


def test_one_process_that_was_stopped_is_no_crash(findings: Findings, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(Crash):
        start(findings, monkeypatch, crashes=True)
    assert start(findings, monkeypatch, crashes=False) == WITH_KERNEL
    assert decode_ways._tries(findings) == 0


@pytest.mark.parametrize(("says", "available"), [("0", False), ("1", True), ("", True), ("no", True)])
def test_the_variable_says_that_there_are_none(monkeypatch: pytest.MonkeyPatch, says: str, available: bool):
    monkeypatch.setenv("SATCHEL_KERNELS", says)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    assert gpu_kernels.is_available() is available


def test_without_kernels_is_for_as_long_as_the_variable_says_so(findings: Findings, monkeypatch: pytest.MonkeyPatch):
    """Whatever an earlier load found, and later loads find it again."""
    monkeypatch.setattr(decode_ways, "on_gpu", lambda: True)
    for before in (False, True):
        monkeypatch.setenv("SATCHEL_KERNELS", "0")
        way = start(findings, monkeypatch, crashes=before)
        assert way.reads is Reads.DEQUANTIZED and "SATCHEL_KERNELS" in way.reason
        monkeypatch.delenv("SATCHEL_KERNELS")
        assert start(findings, monkeypatch, crashes=before) == WITH_KERNEL
