"""A Mac, as far as programs ask: macOS's own tools as scripts on the path, and what Python says of the system."""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import psutil
import pytest

GIB = 2**30

LAUNCHD = Path(__file__).with_name("fake_launchd.py")

VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               65536.
Pages active:                           1048576.
Pages inactive:                          917504.
Pages speculative:                        65536.
Pages throttled:                              0.
Pages wired down:                        524288.
Pages purgeable:                         131072.
"Translation faults":                 917530001.
Pages copy-on-write:                   60000001.
File-backed pages:                       786432.
Anonymous pages:                        1245184.
Pages stored in compressor:             2000000.
Pages occupied by compressor:            655360.
"""

MEMORY = {"hw.memsize": 64 * GIB, "iogpu.wired_limit_mb": 0, "machdep.cpu.brand_string": "Apple M4"}


@dataclass
class FakeMac:
    """What its tools print. `tell` after a change.

    Attributes:
        folder: has the tools, and for each that was called a file `NAME.calls` with the arguments, a line a call.
        sysctl: values by name; others are unknown.
        vm_stat: what `vm_stat` prints.
        pmset: what `pmset -g` prints.
        ports: its network ports and their devices.
        addresses: IPv4 addresses by device.
        allowed: what `socketfilterfw --getappblocked` prints.
        wired: what MLX was told to keep resident (`fake_gpu`), the latest last.
        firewall: what `socketfilterfw --getglobalstate` prints.
    """

    folder: Path
    sysctl: dict[str, int | str] = field(default_factory=lambda: dict(MEMORY))
    vm_stat: str = VM_STAT
    pmset: str = "System-wide power settings:\nCurrently in use:\n sleep                1\n displaysleep         10\n"
    ports: dict[str, str] = field(default_factory=lambda: {"Wi-Fi": "en0", "Thunderbolt Bridge": "bridge0"})
    addresses: dict[str, str] = field(default_factory=lambda: {"en0": "192.168.1.10"})
    wired: list[int] = field(default_factory=list)
    allowed: str = "The application is not part of the firewall"
    firewall: str = "Firewall is disabled. (State = 0)\n"

    def tell(self) -> None:
        """Writes the tools."""
        cases = "".join(f"{name}) echo '{value}';;\n" for name, value in self.sysctl.items())
        self._tool("sysctl", f'case "$2" in\n{cases}*) echo "unknown oid" >&2; exit 1;;\nesac')
        self._tool("pmset", f"cat <<'END'\n{self.pmset}END")
        allowed = f'[ "$1" = --getappblocked ] && echo "{self.allowed}" && exit'
        self._tool("socketfilterfw", f"{allowed}\ncat <<'END'\n{self.firewall}END")
        ports = "".join(f"Hardware Port: {name}\nDevice: {device}\n\n" for name, device in self.ports.items())
        self._tool("networksetup", f"cat <<'END'\n\n{ports}END")
        self._tool("vm_stat", f"cat <<'END'\n{self.vm_stat}END")
        # Of a Python of its own: this one may be told what runs it by the environment that launchd does not pass on.
        self._tool("launchctl", f'exec "{sys.executable}" -I "{LAUNCHD}" "{self.folder}" "$@"')
        # As macOS's: it lives as long as the process of `-w`.
        self._tool("caffeinate", 'while kill -0 "$3" 2>/dev/null; do sleep 0.05; done')

    def interfaces(self) -> dict[str, list[SimpleNamespace]]:
        """As `psutil.net_if_addrs` returns them."""
        own = {"lo0": "127.0.0.1", **self.addresses}
        return {name: [SimpleNamespace(family=socket.AF_INET, address=own[name])] for name in own}

    def calls(self, tool: str) -> list[str]:
        """The arguments of a tool's calls so far."""
        path = self.folder / f"{tool}.calls"
        return path.read_text().splitlines() if path.exists() else []

    def _tool(self, name: str, script: str) -> None:
        path = self.folder / name
        path.write_text(f'#!/bin/sh\necho "$@" >> "{self.folder}/{name}.calls"\n{script}\n')
        path.chmod(0o755)


def fake_mac(folder: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMac:
    """Makes this process believe that it runs on a Mac with Apple silicon and macOS 15."""
    folder.mkdir(exist_ok=True)
    mac = FakeMac(folder)
    mac.tell()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    monkeypatch.setattr(platform, "mac_ver", lambda *_: ("15.1", ("", "", ""), "arm64"))
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: mac.interfaces())
    monkeypatch.setattr("satchel.cluster.bring_up.mac.FIREWALL", str(folder / "socketfilterfw"))
    return mac


def fake_gpu(mac: FakeMac, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes MLX in this process say that it computes on the Mac's GPU, which keeps resident what it is told."""

    def recommended() -> int:
        memory, limit = int(mac.sysctl["hw.memsize"]), int(mac.sysctl["iogpu.wired_limit_mb"]) * 2**20
        return limit or int(memory * (2 / 3 if memory <= 36 * GIB else 3 / 4))

    def device_info(*_: object) -> dict[str, int | str]:
        memory = int(mac.sysctl["hw.memsize"])
        sizes = {"memory_size": memory, "max_recommended_working_set_size": recommended()}
        return {"device_name": "Apple M4", "architecture": "applegpu_g16s", **sizes}

    def set_wired_limit(limit: int) -> int:
        if limit > recommended():
            raise ValueError("[metal::set_wired_limit] Setting a wired limit larger than the maximum working set size")
        mac.wired.append(limit)
        return 0

    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", device_info)
    monkeypatch.setattr(mx, "set_wired_limit", set_wired_limit)


def other_values(mac: FakeMac, values: Mapping[str, int | str]) -> None:
    """Lets `sysctl` say something else from now on."""
    mac.sysctl |= values
    mac.tell()
