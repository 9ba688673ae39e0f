"""What a figure depends on besides the code: the machine, and the versions of what computes."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

PACKAGES = ("satchel", "mlx", "mlx-lm", "mlx-vlm", "vllm-mlx", "ray", "transformers", "tokenizers", "uvicorn")
_ASK = (
    "import importlib.metadata as m, json, sys\n"
    "found = {}\n"
    "for name in sys.argv[1:]:\n"
    "    try: found[name] = m.version(name)\n"
    "    except m.PackageNotFoundError: pass\n"
    "print(json.dumps(found))"
)


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def processor() -> str:
    """The processor's own name."""
    if sys.platform == "darwin":
        return _output("sysctl", "-n", "machdep.cpu.brand_string") or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def versions(python: str, environment: dict[str, str] | None = None) -> dict[str, str]:
    """The versions of what computes, as this interpreter sees them in that environment; None is this process's."""
    said = subprocess.run([python, "-c", _ASK, *PACKAGES], capture_output=True, text=True, env=environment, timeout=60)
    return json.loads(said.stdout) if said.returncode == 0 else {}


def facts(device: str) -> dict[str, Any]:
    """The machine. `device` is what MLX computes on: `cpu` or `gpu`."""
    gpu = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader") if device == "gpu" else ""
    return {
        "device": device,
        "gpu": counted(gpu.splitlines()),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def counted(lines: list[str]) -> str:
    """Equal GPUs as one, with their number: `2 × NVIDIA H200, 580.95`."""
    counts = {line: lines.count(line) for line in lines}
    return "; ".join(line if count == 1 else f"{count} × {line}" for line, count in counts.items())


def name_of(machine: dict[str, Any]) -> str:
    """A name for files: the GPU or chip where MLX computes on one, else the number of cores."""
    if machine["device"] == "cpu":
        return f"cpu-{machine['cores']}-cores"
    return re.sub(r"[^a-z0-9]+", "-", (machine["gpu"].split(",")[0] or machine["processor"]).lower()).strip("-")
