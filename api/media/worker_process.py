"""Processes of their own that decode callers' files, so that a crash or hang of a decoder fails only one request.

Each decodes one file. The next one of its kind is started ahead and waits for its file: starting Python and a decoder
takes a quarter of a second.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

import msgpack
import psutil

from ...cluster.environment import snapshot
from .pixels import Undecodable

START_S = 15.0
"""The time that a worker may take besides its own time limit."""

WAIT_S = 600.0
"""So long a worker waits for a file, then it ends: it has 60 MB."""

_LIBRARY_PATHS = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH")
_SANDBOX_EXEC = "/usr/bin/sandbox-exec"
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000

_Command = tuple[tuple[str, ...], tuple[tuple[str, str], ...]]
"""What Python is given, and further environment variables."""


class WorkerAhead:
    """A process that waits for the next file of its kind. Any thread may use it."""

    def __init__(self) -> None:
        self._lock, self._closed = Lock(), False
        self._waiting: tuple[_Command, subprocess.Popen[bytes]] | None = None

    def take(self, command: _Command) -> subprocess.Popen[bytes] | None:
        """Returns the process if it is for this command; another one is ended."""
        with self._lock:
            waiting, self._waiting = self._waiting, None
        if waiting is None:
            return None
        known, process = waiting
        if known == command and process.poll() is None:
            return process
        _end(process)
        return None

    def start(self, command: _Command) -> None:
        """Starts it, unless one waits or this is closed."""
        with self._lock:
            if self._waiting is None and not self._closed:
                self._waiting = command, _start(command)

    def close(self) -> None:
        """Ends it, for good."""
        with self._lock:
            self._closed = True
            waiting, self._waiting = self._waiting, None
        if waiting is not None:
            _end(waiting[1])


def run_worker(
    command: Sequence[str],
    data: bytes,
    timeout_s: float,
    variables: Mapping[str, str] | None = None,
    ahead: WorkerAhead | None = None,
) -> Any:
    """Runs Python with `command` in a process of its own, which reads `data` (`awaited_file`) and writes one msgpack
    value.

    Args:
        timeout_s: the worker's own time limit, which it normally enforces itself.
        variables: further environment variables. Of this process's none but library paths are passed, because they may
            contain keys.
        ahead: what has the process, and gets the next one.

    Returns:
        The value.

    Raises:
        Undecodable: the process ended without a value or took too long, or its value is a text: why it refuses the
            file.
    """
    asked = tuple(command), tuple((variables or {}).items())
    waiting = ahead.take(asked) if ahead is not None else None
    try:
        written = _answer(waiting or _start(asked), data, timeout_s + START_S)
        if not written and waiting is not None:
            # It may have ended before the file came.
            written = _answer(_start(asked), data, timeout_s + START_S)
        answer = msgpack.unpackb(written, max_bin_len=len(written))
    except (subprocess.TimeoutExpired, ValueError, msgpack.UnpackException):
        raise Undecodable("is damaged, or takes too much time or memory to decode") from None
    if ahead is not None:
        ahead.start(asked)
    if isinstance(answer, str):
        raise Undecodable(answer)
    return answer


def _start(command: _Command) -> subprocess.Popen[bytes]:
    words, variables = command
    environment = {name: value for name, value in snapshot().items() if name in _LIBRARY_PATHS}
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **dict(variables)}
    return subprocess.Popen(
        [*_sandbox(), sys.executable, "-P", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        cwd="/",
    )


def _answer(process: subprocess.Popen[bytes], data: bytes, timeout_s: float) -> bytes:
    """Raises `subprocess.TimeoutExpired`."""
    try:
        return process.communicate(data, timeout_s)[0]
    except subprocess.TimeoutExpired:
        _end(process)
        raise


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def _sandbox() -> list[str]:
    """Returns the command prefix that starts a process without a network on macOS. On Linux the worker leaves the
    network itself."""
    if sys.platform == "darwin" and os.access(_SANDBOX_EXEC, os.X_OK):
        return [_SANDBOX_EXEC, "-p", "(version 1)(allow default)(deny network*)"]
    return []


def awaited_file(wait_s: float = WAIT_S) -> bytes:
    """In a worker: returns the file that it is to decode. If none comes, the process ends."""
    ready, _, _ = select.select([sys.stdin.buffer], [], [], wait_s)
    return (sys.stdin.buffer.read() if ready else b"") or sys.exit()


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
