"""How much memory other programs leave on this machine, or on the card of this process's node.

On a Mac psutil counts inactive memory as available. That includes memory of programs that were not used for a while,
which macOS would have to compress or page out, and excludes files in its cache that were read lately, such as the
weights of a model that has just been unloaded. Activity Monitor counts neither so. Its "Memory Used" is the memory of
programs less what they let macOS take back, plus wired and compressed memory; the rest is available.
"""

from __future__ import annotations

import ctypes
import resource
from functools import cache
from typing import NamedTuple

import psutil

from ..environment import is_macos
from .cards import own_free_bytes

_HOST_VM_INFO64 = 4


class _VmStatistics(ctypes.Structure):
    """`struct vm_statistics64` of mach/vm_statistics.h, in pages."""

    _fields_ = [
        *((name, ctypes.c_uint32) for name in ("free", "active", "inactive", "wired")),
        *((f"counter_{number}", ctypes.c_uint64) for number in range(9)),
        *((name, ctypes.c_uint32) for name in ("purgeable", "speculative")),
        *((f"more_{number}", ctypes.c_uint64) for number in range(4)),
        *((name, ctypes.c_uint32) for name in ("compressor", "throttled", "file_backed", "anonymous")),
        ("in_compressor", ctypes.c_uint64),
    ]


class MacPages(NamedTuple):
    """Pages of a Mac's memory by what they hold."""

    wired: int
    compressor: int
    anonymous: int
    purgeable: int

    @property
    def used(self) -> int:
        """As Activity Monitor counts: purgeable pages are anonymous, and can be taken back at once."""
        return self.wired + self.compressor + max(0, self.anonymous - self.purgeable)


def available_bytes() -> int:
    """Returns how many bytes programs can get before the system pages out or compresses memory."""
    memory = psutil.virtual_memory()
    pages = _mac_pages() if is_macos() else None
    if pages is None:
        return memory.available
    return max(0, memory.total - pages.used * resource.getpagesize())


def node_available_bytes() -> int:
    """Returns how many bytes models of this process's node can get: of its card if it has one of its own, else as
    `available_bytes`."""
    free = own_free_bytes()
    return available_bytes() if free is None else free


def _mac_pages() -> MacPages | None:
    """Asks the kernel; None if it does not answer."""
    try:
        kernel, port = _kernel()
        found, count = _VmStatistics(), ctypes.c_uint32(ctypes.sizeof(_VmStatistics) // 4)
        failed = kernel.host_statistics64(port, _HOST_VM_INFO64, ctypes.byref(found), ctypes.byref(count))
    except (OSError, AttributeError):
        return None
    return None if failed else MacPages(found.wired, found.compressor, found.anonymous, found.purgeable)


@cache
def _kernel() -> tuple[ctypes.CDLL, int]:
    """Returns the C library, and the kernel's port: asked for once, because each is a right that counts."""
    library = ctypes.CDLL(None)
    library.mach_host_self.restype = ctypes.c_uint32
    library.host_statistics64.argtypes = [ctypes.c_uint32, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
    return library, library.mach_host_self()
