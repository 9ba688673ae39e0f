"""What this machine is: its system, processor, memory, limits, packages and links. Asks no program twice, starts
nothing, and knows no MLX."""

from __future__ import annotations

import importlib.metadata
import ipaddress
import platform
import re
import resource
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import psutil
from packaging.requirements import Requirement

from ..devices.available_memory import available_bytes
from ..environment import is_macos
from ..home import Home
from . import mac

_SYSCTL = (
    "machdep.cpu.brand_string",
    "hw.model",
    "hw.memsize",
    "hw.pagesize",
    "hw.perflevel0.physicalcpu",
    "hw.perflevel1.physicalcpu",
    "iogpu.wired_limit_mb",
    "iogpu.wired_lwm_mb",
    "kern.maxfilesperproc",
    "kern.memorystatus_vm_pressure_level",
    "kern.osversion",
    "sysctl.proc_translated",
    "vm.swapusage",
)
_IP = (socket.AF_INET, socket.AF_INET6)
_POWER = ("sleep", "lowpowermode", "powermode", "powernap", "womp", "tcpkeepalive", "disablesleep")


def machine_facts(home: Home) -> dict[str, Any]:
    """Returns facts of this machine, as JSON values: none of its addresses, names and serial numbers."""
    facts: dict[str, Any] = {
        "system": _system(),
        "memory": _memory(),
        "limits": {"open_files": list(resource.getrlimit(resource.RLIMIT_NOFILE))},
        "disk_free_bytes": shutil.disk_usage(existing(home.root)).free,
        "packages": packages(),
        "links": _links(),
    }
    if is_macos():
        facts["mac"] = {
            "sysctl": {name: said for name in _SYSCTL if (said := mac.asked("sysctl", "-n", name).strip())},
            "power": _power(),
            "vm_stat": mac.asked("vm_stat").splitlines(),
        }
    return facts


def _system() -> dict[str, Any]:
    return {
        "system": platform.system(),
        "version": platform.mac_ver()[0] if is_macos() else platform.release(),
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": psutil.cpu_count(logical=False),
        "threads": psutil.cpu_count(),
        "python": sys.version.split()[0],
        "python_build": platform.python_compiler(),
    }


def _processor() -> str:
    if is_macos():
        return mac.asked("sysctl", "-n", "machdep.cpu.brand_string").strip()
    try:
        found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(errors="replace"), re.MULTILINE)
    except OSError:
        return ""
    return found[1] if found else ""


def _memory() -> dict[str, int]:
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    return {
        "total_bytes": memory.total,
        "available_bytes": available_bytes(),
        "swap_total_bytes": swap.total,
        "swap_used_bytes": swap.used,
    }


def packages() -> dict[str, str]:
    """Returns the versions of Satchel and of what it asks for, "" for a package that is not installed."""
    wanted = [Requirement(text) for text in importlib.metadata.requires("satchel") or []]
    names = [each.name for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})]
    found = {}
    for name in ["satchel", *sorted({*names, "mlx-metal"})]:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found


def _links() -> list[dict[str, Any]]:
    """Returns this machine's network interfaces that are up, without their addresses."""
    ports = {device: name for name, device in mac.hardware_ports()} if is_macos() else {}
    addresses, links = psutil.net_if_addrs(), []
    for name, stats in sorted(psutil.net_if_stats().items()):
        kinds = {_kind(each.address) for each in addresses.get(name, []) if each.family in _IP}
        if stats.isup and kinds:
            link = {"name": name, "port": ports.get(name, ""), "mbit_per_s": stats.speed, "mtu": stats.mtu}
            links.append(link | {"addresses": sorted(kinds)})
    return links


def _kind(address: str) -> str:
    found = ipaddress.ip_address(address.partition("%")[0])
    kind = next((kind for kind in ("loopback", "link_local", "private") if getattr(found, f"is_{kind}")), "public")
    return f"IPv{found.version} {'self-assigned' if kind == 'link_local' else kind}"


def _power() -> dict[str, str]:
    said = dict(re.findall(r"^\s*(\w+)\s+(\d+)", mac.asked("pmset", "-g"), re.MULTILINE))
    source = re.search(r"drawing from '([^']+)'", mac.asked("pmset", "-g", "batt"))
    return {name: said[name] for name in _POWER if name in said} | {"source": source[1] if source else ""}


def existing(folder: Path) -> Path:
    """Returns the folder, or the nearest one above it that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder
