"""What replicas on a Mac may use and keep resident, on one that only says that it is one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import pytest

from satchel.actors.replica.device.device import device_bytes, device_kind, device_name, has_tensor_units
from satchel.actors.replica.memory import replica_memory
from satchel.actors.replica.memory.replica_memory import ReplicaMemory
from satchel.cluster.config.config import Scheduling
from satchel.cluster.config.nodes import Node
from satchel.cluster.devices import available_memory
from satchel.cluster.devices.available_memory import MacPages
from tests.worlds.fake_mac import GIB, FakeMac, fake_gpu, fake_mac, other_values

PAGES_A_GIB = GIB // 16_384


@pytest.fixture
def apple(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMac:
    mac = fake_mac(tmp_path / "tools", monkeypatch)
    fake_gpu(mac, monkeypatch)
    monkeypatch.setattr(replica_memory, "POLL_S", 0.01)
    monkeypatch.setattr(available_memory.resource, "getpagesize", lambda: 16_384)
    monkeypatch.setattr(available_memory.psutil, "virtual_memory", lambda: Memory)
    monkeypatch.setattr(available_memory, "_mac_pages", lambda: MacPages(*(4 * [2 * PAGES_A_GIB])))
    return mac


class Memory:
    total, available = 64 * GIB, 30 * GIB


def replica(folder: Path, name: str) -> ReplicaMemory:
    return ReplicaMemory(folder / "claims", name, Node(name="mac0"), Scheduling())


@contextmanager
def watched(memory: ReplicaMemory, times: int = 2) -> Iterator[list[tuple[int, int, int]]]:
    """The memory that an engine is told, so many times."""
    told: list[tuple[int, int, int]] = []
    enough = threading.Event()

    def resize(*sizes: int) -> None:
        told.append(sizes)  # type: ignore[arg-type]
        if len(told) >= times:
            enough.set()

    thread = threading.Thread(target=memory.watch, args=(lambda: GIB, resize))
    thread.start()
    try:
        assert enough.wait(10)
        yield told
    finally:
        memory.withdraw()
        thread.join(10)


def test_it_is_a_mac(apple: FakeMac):
    assert (device_kind(), device_name(), has_tensor_units()) == ("metal", "Apple M4", False)
    assert device_bytes() == 64 * GIB and device_bytes(free=True) == (64 - 2 - 2) * GIB


@pytest.mark.parametrize(("limit_mb", "usable"), [(0, 48 * GIB), (57_344, 56 * GIB)])
def test_replicas_use_a_part_of_what_the_gpu_may_use(apple: FakeMac, tmp_path: Path, limit_mb: int, usable: int):
    other_values(apple, {"iogpu.wired_limit_mb": limit_mb})
    memory = replica(tmp_path, "m-0")
    memory.note(20 * GIB, 2 * GIB)
    assert memory.share_bytes() == int(0.9 * usable) - 22 * GIB


def test_after_its_load_a_model_and_its_kv_stay_resident(apple: FakeMac, tmp_path: Path):
    memory = replica(tmp_path, "m-0")
    assert apple.wired == [], "nothing is loaded yet"
    memory.note(20 * GIB)
    with watched(memory) as told:
        share = int(0.9 * 48 * GIB) - 21 * GIB
        assert told[-1] == (share, 60 * GIB + mx.get_cache_memory(), 64 * GIB)
        assert apple.wired == [20 * GIB + share]


def test_what_is_resident_gives_way_to_another_model(apple: FakeMac, tmp_path: Path):
    first = replica(tmp_path, "m-0")
    first.note(20 * GIB)
    with watched(first):
        alone = apple.wired[-1]
        second = replica(tmp_path, "n-0")
        second.note(8 * GIB)
        with watched(second, 5):
            wanted = [20 * GIB + first.share_bytes(), 8 * GIB + second.share_bytes()]
            ends = time.monotonic() + 10
            while not {*wanted} <= {*apple.wired} and time.monotonic() < ends:
                time.sleep(0.01)
            assert {*wanted} <= {*apple.wired} and wanted[0] < alone
            assert sum(wanted) <= 48 * GIB, "both together are within the limit"


def test_a_model_that_is_larger_than_the_limit_is_wired_as_far_as_macos_allows(apple: FakeMac, tmp_path: Path):
    memory = replica(tmp_path, "m-0")
    memory.note(70 * GIB)
    with watched(memory):
        assert apple.wired == [48 * GIB - 48 * GIB // 32]
