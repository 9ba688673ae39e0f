"""Energy is what a machine's counters say, and unknown where they say nothing."""

from __future__ import annotations

import ctypes
import plistlib
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from satchel.cluster.devices import energy
from satchel.cluster.devices.energy import EnergyMeter, Nvml, Powermetrics, Rapl, sampled_joules, spent
from tests.worlds.fake_cards import UUIDS

RANGE_UJ = 1_000_000


def zone(root: Path, name: str, called: str, uj: int) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{called}\n")
    (folder / "max_energy_range_uj").write_text(f"{RANGE_UJ}\n")
    (folder / "energy_uj").write_text(f"{uj}\n")
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine of two processors, as the kernel shows it: zones within others have folders beside them too."""
    zone(tmp_path, "intel-rapl:0", "package-0", 500)
    zone(tmp_path, "intel-rapl:0:0", "core", 300)
    zone(tmp_path, "intel-rapl:0:1", "dram", 100)
    zone(tmp_path, "intel-rapl:1", "package-1", 900_000)
    zone(tmp_path, "intel-rapl:2", "psys", 7)
    (tmp_path / "dtpm").mkdir()
    return tmp_path


class TestRapl:
    def test_it_adds_up_packages_and_memory_each_once(self, root: Path):
        rapl = Rapl(root)
        assert rapl.joules() == 0.0
        for name, uj in (("intel-rapl:0", 2_500), ("intel-rapl:0:0", 99_300), ("intel-rapl:0:1", 600)):
            (root / name / "energy_uj").write_text(str(uj))
        (root / "intel-rapl:2" / "energy_uj").write_text("500000")
        assert rapl.joules() == pytest.approx(2_500e-6)

    def test_a_counter_that_begins_again_goes_on(self, root: Path):
        rapl = Rapl(root)
        rapl.joules()
        (root / "intel-rapl:1" / "energy_uj").write_text("50000")
        assert rapl.joules() == pytest.approx(0.15)
        (root / "intel-rapl:1" / "energy_uj").write_text("60000")
        assert rapl.joules() == pytest.approx(0.16)

    def test_what_only_root_may_read_is_unknown(self, root: Path):
        # Root may read what has no permissions, but no folder as a file.
        file = root / "intel-rapl:1" / "energy_uj"
        file.unlink()
        file.mkdir()
        assert Rapl(root).joules() is None
        assert EnergyMeter([Rapl(root)]).read() == {}

    def test_without_counters_it_is_unknown(self, tmp_path: Path):
        assert Rapl(tmp_path / "nothing").joules() is None


class Driver:
    """A driver's library with cards that have taken so many millijoules."""

    def __init__(self, **millijoules: int) -> None:
        self.millijoules = list(millijoules.items())

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self.millijoules)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:
        handle._obj.value = index + 1
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        handle._obj.value = UUIDS.index(uuid.decode()) + 1
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: ctypes.c_void_p, millijoules: Any) -> int:
        millijoules._obj.value = self.millijoules[(handle.value or 0) - 1][1]
        return 0


class Old(Driver):
    """A card of a kind that has no counter."""

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: ctypes.c_void_p, millijoules: Any) -> int:
        return 3


class TestNvml:
    def test_it_is_the_nodes_own_card(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(energy, "nvml", lambda: Driver(a=1_500, b=7_000))
        assert Nvml(UUIDS[1]).joules() == 7.0

    def test_without_a_card_of_its_own_only_a_single_one_is_counted(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(energy, "nvml", lambda: Driver(a=1_500))
        assert Nvml("").joules() == 1.5
        monkeypatch.setattr(energy, "nvml", lambda: Driver(a=1_500, b=7_000))
        assert Nvml("").joules() is None

    @pytest.mark.parametrize("driver", [None, Old(a=1_500)])
    def test_without_a_counter_it_is_unknown(self, monkeypatch: pytest.MonkeyPatch, driver: Driver | None):
        monkeypatch.setattr(energy, "nvml", lambda: driver)
        assert Nvml("").joules() is None


def sample(milliwatts: float, elapsed_ns: int) -> bytes:
    return plistlib.dumps({"elapsed_ns": elapsed_ns, "processor": {"combined_power": milliwatts}})


class TestPowermetrics:
    def test_samples_are_added_up_and_forgotten_when_it_ends(self, tmp_path: Path):
        samples = tmp_path / "samples"
        samples.write_bytes(sample(2_000, 500_000_000) + b"\0\n" + sample(4_000, 250_000_000) + b"\0\n")
        program = f"import sys, time; sys.stdout.buffer.write(open({str(samples)!r}, 'rb').read()); "
        source = Powermetrics([sys.executable, "-c", program + "sys.stdout.flush(); time.sleep(60)"])
        try:
            ends = time.monotonic() + 20
            while source.joules() != pytest.approx(2.0):
                assert time.monotonic() < ends
                time.sleep(0.02)
        finally:
            source.close()
        assert source.joules() is None

    def test_a_sample_without_power_says_nothing(self):
        assert sampled_joules(sample(1_000, 2_000_000_000)) == 2.0
        assert sampled_joules(plistlib.dumps({"elapsed_ns": 5})) is None
        assert sampled_joules(b"no list") is sampled_joules(sample(1_000, 9)[:-20]) is None


class Steps:
    """A source that gives one figure after the other."""

    def __init__(self, name: str, *figures: float | None) -> None:
        self.name, self.figures = name, list(figures)

    def joules(self) -> float | None:
        return self.figures.pop(0)


def test_a_meter_begins_at_its_first_reading_and_leaves_out_what_it_cannot_read():
    meter = EnergyMeter([Steps("nvml", 10.0, 12.0, 15.0, None), Steps("rapl", None)])
    assert [meter.read() for _ in range(3)] == [{"nvml": 0.0}, {"nvml": 3.0}, {}]


def test_joules_between_readings_are_known_only_of_the_same_sources():
    assert spent({"nvml": 1.0, "rapl": 2.0}, {"nvml": 4.0, "rapl": 2.5}) == 3.5
    assert spent({"nvml": 1.0}, {"nvml": 4.0, "rapl": 2.5}) is None
    assert spent({}, {}) is None
    assert spent({"nvml": 4.0}, {"nvml": 1.0}) is None, "a driver that was loaded again"
