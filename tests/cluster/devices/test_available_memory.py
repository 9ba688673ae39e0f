"""Which memory counts as available: on a Mac as in Activity Monitor, elsewhere as psutil says."""

from __future__ import annotations

import ctypes
import re
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from satchel.cluster.devices import available_memory
from satchel.cluster.devices.available_memory import available_bytes
from tests.worlds.fake_mac import GIB, VM_STAT, fake_mac

PAGE_BYTES = 16_384


class Kernel:
    """Answers `host_statistics64` with what `vm_stat` prints."""

    def __init__(self, failed: int = 0) -> None:
        self.failed = failed
        self.host_statistics64 = self._statistics

    def _statistics(self, port: int, flavour: int, found: Any, count: Any) -> int:
        assert (port, flavour) == (7, 4)
        # As the kernel does, it writes as many 32-bit words as it is told that there are.
        assert count._obj.value == 38, "HOST_VM_INFO64_COUNT of macOS 11 and later"
        words = (ctypes.c_uint32 * 38).from_buffer(found._obj)
        pages = {name: int(pages) for name, pages in re.findall(r'^"?([^":]+)"?: +(\d+)\.$', VM_STAT, re.MULTILINE)}
        # The words of mach/vm_statistics.h.
        words[0], words[1] = pages["Pages free"], pages["Pages active"]
        words[2], words[3] = pages["Pages inactive"], pages["Pages wired down"]
        words[22], words[23] = pages["Pages purgeable"], pages["Pages speculative"]
        words[32], words[34] = pages["Pages occupied by compressor"], pages["File-backed pages"]
        words[35] = pages["Anonymous pages"]
        return self.failed


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    fake_mac(tmp_path / "tools", monkeypatch)
    found = Kernel()
    monkeypatch.setattr(available_memory, "_kernel", lambda: (found, 7))
    monkeypatch.setattr(resource, "getpagesize", lambda: PAGE_BYTES)
    memory = SimpleNamespace(total=64 * GIB, available=15 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    return found


def test_on_a_mac_it_is_what_activity_monitor_does_not_call_used(kernel: Kernel):
    # 8 GiB wired, 10 in the compressor, and programs have 19 of which 2 may be taken back.
    assert available_bytes() == (64 - 8 - 10 - (19 - 2)) * GIB


def test_a_mac_whose_kernel_does_not_answer_says_what_psutil_does(kernel: Kernel, monkeypatch: pytest.MonkeyPatch):
    kernel.failed = 4
    assert available_bytes() == 15 * GIB

    def no_such_function() -> None:
        raise AttributeError

    monkeypatch.setattr(available_memory, "_kernel", no_such_function)
    assert available_bytes() == 15 * GIB


def test_elsewhere_it_is_what_psutil_says(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * GIB, available=15 * GIB))
    assert available_bytes() == 15 * GIB
