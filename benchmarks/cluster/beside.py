"""Modules of other folders, which are no packages: the other benchmarks, and the hosts that the tests make."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parents[1]
HOSTS = BENCHMARKS.parent / "tests" / "system" / "hosts.py"


def neighbour(folder: str, name: str) -> Any:
    """The module `name` of benchmarks/`folder`; "" is benchmarks itself."""
    path = str(BENCHMARKS / folder)
    if path not in sys.path:
        # Last: it must not stand before anything of this folder.
        sys.path.append(path)
    return importlib.import_module(name)


def hosts_module() -> Any:
    """Hosts on this machine as network namespaces, by way of the tests."""
    if (known := sys.modules.get("cluster_hosts")) is not None:
        return known
    spec = importlib.util.spec_from_file_location("cluster_hosts", HOSTS)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Its dataclasses look for themselves there.
    sys.modules["cluster_hosts"] = module
    spec.loader.exec_module(module)
    return module
