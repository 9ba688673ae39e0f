"""Processes of their own that decode callers' files, so that a crash or hang of a decoder fails only one request."""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack
import psutil

from ...cluster.environment import snapshot
from .pixels import Undecodable

START_S = 15.0
"""The time that a worker may take besides its own time limit."""

_LIBRARY_PATHS = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH")
_SANDBOX_EXEC = "/usr/bin/sandbox-exec"
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000


def run_worker(
    command: Sequence[str], data: bytes, timeout_s: float, variables: Mapping[str, str] | None = None
) -> Any:
    """Runs Python with `command` in a process of its own, which reads `data` and writes one msgpack value.

    Args:
        timeout_s: the worker's own time limit, which it normally enforces itself.
        variables: further environment variables. Of this process's none but library paths are passed, because they may
            contain keys.

    Returns:
        The value.

    Raises:
        Undecodable: the process ended without a value or took too long, or its value is a text: why it refuses the
            file.
    """
    environment = {name: value for name, value in snapshot().items() if name in _LIBRARY_PATHS}
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **(variables or {})}
    try:
        run = subprocess.run(
            [*_sandbox(), sys.executable, "-P", *command],
            input=data,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            cwd="/",
            timeout=timeout_s + START_S,
        )
        answer = msgpack.unpackb(run.stdout, max_bin_len=len(run.stdout))
    except (subprocess.TimeoutExpired, ValueError, msgpack.UnpackException):
        raise Undecodable("is damaged, or takes too much time or memory to decode") from None
    if isinstance(answer, str):
        raise Undecodable(answer)
    return answer


def _sandbox() -> list[str]:
    """Returns the command prefix that starts a process without a network on macOS. On Linux the worker leaves the
    network itself."""
    if sys.platform == "darwin" and os.access(_SANDBOX_EXEC, os.X_OK):
        return [_SANDBOX_EXEC, "-p", "(version 1)(allow default)(deny network*)"]
    return []


def leave_network() -> None:
    """In a worker: on Linux, moves this process into an empty network namespace. Call it before any thread starts: a
    process with several threads cannot change its user namespace."""
    if sys.platform == "linux":
        c = ctypes.CDLL(None, use_errno=True)
        # Without root, that needs a user namespace too. If the system allows neither, the network stays.
        if c.unshare(_CLONE_NEWNET) != 0:
            c.unshare(_CLONE_NEWUSER | _CLONE_NEWNET)


def limit_memory(further_bytes: int) -> None:
    """In a worker: limits how much more memory this process can allocate. macOS has no such limit."""
    if sys.platform == "linux":
        most = psutil.Process().memory_info().vms + further_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
