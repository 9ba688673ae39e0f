"""Does a strict compiler take a kernel's text for Metal? clang reads it twice, and compiles nothing.

As OpenCL C++ without generic pointers every pointer has an address space, as in Metal, and what lies in another space
than a pointer, a reference or a constructor wants is an error (`spaces.h`). As C++ numbers of 16 bits are made of
others explicitly only, as bfloat16 in Metal (`metal.h`); whether that is so depends on the types among a template's
arguments, not on the numbers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from .emulator import HERE
from .metal_source import Source

TOGETHER = 100
"""Kernels that are given to the compiler at once."""

_CLANG = ("clang++", "-fsyntax-only", "-w", "-ferror-limit=1", "-fno-caret-diagnostics", f"-I{HERE}")
_GENERIC = ("generic_address_space", "pipes", "device_enqueue", "program_scope_global_variables")
_SPACES = (
    *_CLANG,
    *("-x", "cl", "-cl-std=clc++2021", "-target", "spir64"),
    *("-Xclang", "-cl-ext=" + ",".join(f"-__opencl_c_{name}" for name in _GENERIC)),
)
_CONVERSIONS = (*_CLANG, "-x", "c++", "-std=c++17", "-DONLY_CHECKED")


@cache
def lacks() -> str | None:
    """Returns what this machine lacks for it, None for nothing."""
    if shutil.which("clang++") is None:
        return "kernels for Metal are checked by clang++, which is not installed"
    for command, header in ((_SPACES, "spaces.h"), (_CONVERSIONS, "metal.h")):
        if said := _said(command, f'#include "{header}"\n'):
            return f"this clang++ cannot check kernels for Metal: {said[:200]}"
    return None


def refused(sources: Iterable[Source]) -> list[str]:
    """Returns what the compiler says of kernels that it refuses, with their names; of many only some."""
    whole = list(sources)
    of_types = list({source.types: source for source in whole}.values())
    parts = [
        (command, f'#include "{header}"\n' + "".join(map(text, some[at : at + TOGETHER])))
        for command, header, text, some in (
            (_SPACES, "spaces.h", _as_opencl, whole),
            (_CONVERSIONS, "metal.h", _as_cpp, of_types),
        )
        for at in range(0, len(some), TOGETHER)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [said for said in pool.map(lambda part: _said(*part), parts) if said]


def _as_opencl(source: Source) -> str:
    return f'#line 1 "{source.name}"\n' + source.plain.replace("[[kernel]] void", "kernel void", 1)


def _as_cpp(source: Source) -> str:
    return f'#line 1 "{source.name}"\n{source.instance}'


def _said(command: Sequence[str], text: str) -> str:
    ran = subprocess.run([*command, "-"], input=text, capture_output=True, text=True, timeout=300)
    return ran.stderr or f"clang++ ended with {ran.returncode}" if ran.returncode else ""
