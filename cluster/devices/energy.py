"""The energy that this machine's own counters say its devices have taken. No MLX.

Three sources: NVML, for a CUDA card; RAPL, for the processors of a Linux machine and their memory; powermetrics, for
the chip of a Mac. On most systems only root may read the last two. What cannot be read is unknown: no figure is ever
estimated. A source counts all that its device does, for whomever, idle times too.
"""

from __future__ import annotations

import ctypes
import os
import plistlib
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol
from xml.parsers.expat import ExpatError

from ..environment import own_card
from .cards import nvml

NVML, RAPL, POWERMETRICS = "nvml", "rapl", "powermetrics"

RAPL_ROOT = Path("/sys/class/powercap")
_COUNTED = ("package", "dram")
"""Zones of RAPL. Cores and graphics are in the package's, and `psys` counts them all once more."""

POWERMETRICS_COMMAND = ("powermetrics", "--samplers", "cpu_power,gpu_power", "-i", "500", "-f", "plist")
_PLIST_END = b"\0"


class EnergySource(Protocol):
    """A counter of energy."""

    name: str

    def joules(self) -> float | None:
        """Returns the joules since some moment before the first call, which the counter never goes below; None if it
        cannot be read now."""
        ...


class Nvml:
    """A CUDA card's own counter, which cards since Volta have.

    Args:
        uuid: of the card; "" for the only one of the machine.
    """

    name = NVML

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid

    def joules(self) -> float | None:
        library = nvml()
        if library is None or (handle := self._handle(library)) is None:
            return None
        millijoules = ctypes.c_ulonglong()
        try:
            failed = library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules))
        except AttributeError:
            return None
        return None if failed else millijoules.value / 1e3

    def _handle(self, library: Any) -> ctypes.c_void_p | None:
        handle, count = ctypes.c_void_p(), ctypes.c_uint()
        if self._uuid:
            failed = library.nvmlDeviceGetHandleByUUID(self._uuid.encode(), ctypes.byref(handle))
            return None if failed else handle
        if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) or count.value != 1:
            # Nobody says which of several cards computes.
            return None
        return None if library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle)) else handle


class Rapl:
    """The counters of a Linux machine's processors, added up. They begin again at 0 after some kilojoules, so they must
    be read every few minutes at least.

    Args:
        root: where the kernel shows them.
    """

    name = RAPL

    def __init__(self, root: Path = RAPL_ROOT) -> None:
        self._zones = _zones(root)
        self._last: dict[Path, int] = {}
        self._total_uj = 0

    def joules(self) -> float | None:
        if not self._zones:
            return None
        try:
            now = {zone: int((zone / "energy_uj").read_text()) for zone in self._zones}
            for zone, value in now.items():
                last = self._last.get(zone, value)
                again = int((zone / "max_energy_range_uj").read_text()) if value < last else 0
                self._total_uj += value - last + again
        except (OSError, ValueError):
            return None
        self._last = now
        return self._total_uj / 1e6


def _zones(root: Path) -> list[Path]:
    """The zones that are counted, each once."""
    found = []
    # A zone within another one has a folder here too, and one inside its parent's.
    for zone in sorted(root.glob("intel-rapl:*")):
        try:
            name = (zone / "name").read_text().strip()
        except OSError:
            continue
        if name.startswith(_COUNTED):
            found.append(zone)
    return found


class Powermetrics:
    """The power of a Mac's chip as Apple's `powermetrics` samples it, added up by a thread. It runs as root only.

    Args:
        command: what is started.

    Raises:
        OSError: it cannot be started.
    """

    name = POWERMETRICS

    def __init__(self, command: Sequence[str] = POWERMETRICS_COMMAND) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._joules: float | None = None
        self._thread = threading.Thread(target=self._read, name="powermetrics", daemon=True)
        self._thread.start()

    def joules(self) -> float | None:
        return self._joules

    def close(self) -> None:
        """Ends the program."""
        self._process.terminate()
        self._process.wait()
        self._thread.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _read(self) -> None:
        """Adds samples up until there are no more, after which nothing is known."""
        assert self._process.stdout is not None
        waiting = b""
        while piece := os.read(self._process.stdout.fileno(), 65_536):
            *samples, waiting = (waiting + piece).split(_PLIST_END)
            for sample in samples:
                self._joules = (self._joules or 0.0) + (sampled_joules(sample) or 0.0)
        self._joules = None


def sampled_joules(sample: bytes) -> float | None:
    """Returns the joules of one sample of `powermetrics`, a property list; None if it does not say its power."""
    try:
        found = plistlib.loads(sample.strip())
        milliwatts = float(found["processor"]["combined_power"])
        return milliwatts / 1e3 * float(found["elapsed_ns"]) / 1e9
    except (ValueError, KeyError, TypeError, ExpatError):
        return None


class EnergyMeter:
    """The sources of a node that can be read. Used from any thread.

    Args:
        sources: those that might be there.
    """

    def __init__(self, sources: Sequence[EnergySource]) -> None:
        self._lock = threading.Lock()
        self._first: dict[str, float] = {}
        self._sources = [source for source in sources if source.joules() is not None or source.name == POWERMETRICS]

    def read(self) -> dict[str, float]:
        """Returns the joules by source since the first reading; a source that cannot be read now is left out."""
        with self._lock:
            now = {source.name: joules for source in self._sources if (joules := source.joules()) is not None}
            for name, joules in now.items():
                self._first.setdefault(name, joules)
            return {name: joules - self._first[name] for name, joules in now.items()}


@cache
def node_meter() -> EnergyMeter:
    """Returns the meter of the node to which this process belongs. `powermetrics` is started only as root."""
    sources: list[EnergySource] = [Nvml(own_card()), Rapl()]
    if sys.platform == "darwin" and os.geteuid() == 0:
        started = _started(Powermetrics)
        sources += [started] if started is not None else []
    return EnergyMeter(sources)


def _started(make: Callable[[], EnergySource]) -> EnergySource | None:
    try:
        return make()
    except OSError:
        return None


def spent(before: dict[str, float], after: dict[str, float]) -> float | None:
    """Returns the joules between two readings, of all sources together; None if there is none, or if not the same
    sources could be read."""
    if not before or before.keys() != after.keys():
        return None
    joules = sum(after[name] - before[name] for name in before)
    return joules if joules >= 0.0 else None
