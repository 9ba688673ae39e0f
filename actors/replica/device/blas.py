"""The BLAS that multiplies float32 matrices on a CPU: MLX's own, or OpenBLAS, if SATCHEL_OPENBLAS is 1 and it computes
the same as MLX's own.

MLX's wheel for Linux is linked with the reference BLAS, which takes six times as long as OpenBLAS. opencv-python, which
mlx-vlm needs, brings OpenBLAS. OpenBLAS is optional, because machine code is needed to choose between the two for every
product, and because OpenCV's own factorizations then end the process. OpenBLAS's fastest kernels break the position
law: what they compute for a row depends on how many rows there are. The kernel for Nehalem processors (SSE, which every
x86-64 has) adds up the products of each number one after another, as the reference does, with these exceptions:

    If a sum has more than 512 products, it is added up in parts, and the last two parts depend on how many products
    there are. So attention would depend on how many masked keys follow the visible ones. Therefore parts are made long
    (`_SIZES`), and longer sums, of more than 131,072 keys, are left to the reference.
    If the number of columns is odd, the last column depends on the number of rows. Such products are left to the
    reference. Caches have even numbers of columns, so attention is not among them (`kv/steps.py`).
    If sums begin with other numbers, such as a bias, OpenBLAS adds these at the end. Such products are OpenBLAS's for
    any number of rows; layers add their bias after the product (`prepare.py`).

Products of one row are left to the reference too: it reads weights once, but OpenBLAS copies them first. Both compute
the same bits, so a row in a batch equals the row alone.

MLX calls `cblas_sgemm` through an address in a table of its library that the system's linker filled. This address is
replaced by that of `_FORK`, a few instructions that jump to one of the two; but only if the address is the reference's,
and if some test products of OpenBLAS equal the sums in order to the last bit. MLX's factorizations stay its own:
OpenBLAS's for float32 (Cholesky, LU, inverses) end the process with these sizes. OpenCV calls them for matrices of 100
rows and more, but nothing in a replica asks it to.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import random
import sys
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from struct import unpack_from

from ....cluster.environment import set_during, wants_openblas
from .device import on_gpu

_CORE = "Nehalem"
_VERSION = "OpenBLAS 0.3.15"
_SIZES_AT = 4
_USUAL_SIZES = [504, 512, 65008, 4, 8]
_SIZES = [64, 131_072, 160]
"""Where OpenBLAS's table of kernels has the sizes for float32, and these sizes: of a part in outputs, products and
rows, and of a kernel's step in outputs and rows. OpenBLAS's buffer has room for the first times the second and the
second times the third, 128 MiB together, and a product touches only what it needs; with the sizes here it is not
larger. Prefill takes a few percent longer with them."""

_PRODUCTS = ((2, 2), (5, 4), (13, 10))
"""Rows and columns of the test products; each number is a sum of this many products:"""
_SUMMED = 1100

_FORK = (
    b"\xf3\x0f\x1e\xfa"  # endbr64
    b"\x0f\x57\xd2\x0f\x2e\xca\x75\x14"  # xorps xmm2, xmm2; ucomiss xmm1, xmm2; jne openblas: beta is not 0
    b"\x83\xf9\x01\x74\x1b"  # cmp ecx, 1; je reference: one row
    b"\x41\xf6\xc0\x01\x75\x15"  # test r8b, 1; jne reference: an odd number of columns
    b"\x41\x81\xf9%b\x7f\x0c"  # cmp r9d, _SIZES[1]; jg reference: more products than a part has
    b"\x48\xb8%b\xff\xe0"  # openblas: movabs rax, ...; jmp rax
    b"\x48\xb8%b\xff\xe0"  # reference: movabs rax, ...; jmp rax
)
"""Jumps to OpenBLAS's or the reference's `cblas_sgemm`, with all arguments in place: in x86-64's calling convention the
rows are in ecx, the columns in r8d, the products of a sum in r9d, and beta in xmm1."""

_ROW_MAJOR, _AS_IT_IS, _TRANSPOSED = 101, 111, 112
_SYMBOLS, _RELOCATIONS, _JUMP_SLOT = 11, 4, 7
"""In ELF, the types of two sections and of a relocation."""


@dataclass(frozen=True)
class Blas:
    """What multiplies on a CPU: OpenBLAS by its `name`, or MLX's own, and the `reason`. `meant` says whether OpenBLAS
    is asked for, on a machine that can have it."""

    name: str = ""
    reason: str = ""
    meant: bool = True

    @property
    def is_fallback(self) -> bool:
        """Whether OpenBLAS should be used but is not."""
        return self.meant and not self.name

    def describe(self) -> str:
        """Returns it as text, such as `with OpenBLAS 0.3.15 (Nehalem)`."""
        return f"with {self.name}" if self.name else f"with MLX's own BLAS ({self.reason})"


class _Unfit(Exception):
    """Why OpenBLAS is not used."""


@cache
def chosen() -> Blas:
    """Makes MLX multiply with OpenBLAS in this process if that is possible; only the first call does anything."""
    if on_gpu():
        return Blas(reason="a GPU multiplies", meant=False)
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return Blas(reason="OpenBLAS is for Linux on x86-64", meant=False)
    if not wants_openblas():
        return Blas(reason="SATCHEL_OPENBLAS is not 1", meant=False)
    try:
        library = _load(_bundled())
        _lengthen(library)
        _redirect(library)
    except _Unfit as unfit:
        return Blas(reason=str(unfit))
    return Blas(f"{_VERSION} ({_CORE})")


def _bundled() -> Path:
    """Returns the OpenBLAS that opencv-python brings."""
    spec = find_spec("cv2")
    folder = Path(spec.origin).parent.parent if spec is not None and spec.origin else Path()
    if found := sorted(folder.glob("opencv_python*.libs/libopenblas*.so*")):
        return found[0]
    raise _Unfit("opencv-python brings no OpenBLAS here")


def _load(path: Path) -> ctypes.CDLL:
    # It reads them while it is loaded. Threads of its own would take processors from the other replicas.
    with set_during(OPENBLAS_CORETYPE=_CORE, OPENBLAS_NUM_THREADS="1"):
        try:
            library = ctypes.CDLL(str(path))
            library.openblas_get_config.restype = library.openblas_get_corename.restype = ctypes.c_char_p
            version = library.openblas_get_config().decode()
            core, threads = library.openblas_get_corename().decode(), library.openblas_get_num_threads()
        except (OSError, AttributeError) as error:
            raise _Unfit(f"OpenBLAS cannot be loaded: {error}") from None
    if not version.startswith(f"{_VERSION} "):
        raise _Unfit(f"{version} is not {_VERSION}")
    if (core, threads) != (_CORE, 1):
        raise _Unfit(f"OpenBLAS was loaded before, for {core} and {threads} threads")
    return library


def _lengthen(library: ctypes.CDLL) -> None:
    """Makes the parts long in which products are added up, and tests some products."""
    try:
        table = ctypes.POINTER(ctypes.c_int).in_dll(library, "gotoblas")
    except ValueError as error:
        raise _Unfit(f"OpenBLAS is built differently: {error}") from None
    sizes = [table[_SIZES_AT + at] for at in range(len(_USUAL_SIZES))]
    if sizes != _USUAL_SIZES:
        raise _Unfit(f"OpenBLAS is built differently: its sizes are {sizes}")
    for at, size in enumerate(_SIZES):
        table[_SIZES_AT + at] = size
    if not _adds_in_order(library):
        for at in range(len(_SIZES)):
            table[_SIZES_AT + at] = _USUAL_SIZES[at]
        raise _Unfit("OpenBLAS adds up in another order than it is meant to")


def _adds_in_order(library: ctypes.CDLL) -> bool:
    """Whether numbers of some products equal sums that are added up one after another, to the last bit."""
    multiply = library.cblas_sgemm
    scalar, pointer, number = ctypes.c_float, ctypes.c_void_p, ctypes.c_int
    kinds = [number] * 6 + [scalar, pointer, number, pointer, number, scalar, pointer, number]
    multiply.argtypes, multiply.restype = kinds, None
    chance = random.Random(0)
    for (rows, columns), transposed in product(_PRODUCTS, (False, True)):
        left, right = (array("f", [chance.gauss(0, 1) for _ in range(n * _SUMMED)]) for n in (rows, columns))
        out = array("f", bytes(4 * rows * columns))
        how, width = (_TRANSPOSED, _SUMMED) if transposed else (_AS_IT_IS, columns)
        places = [each.buffer_info()[0] for each in (left, right, out)]
        sizes = (rows, columns, _SUMMED, 1.0)
        multiply(_ROW_MAJOR, _AS_IT_IS, how, *sizes, places[0], _SUMMED, places[1], width, 0.0, places[2], columns)
        # The first and the last number: these cover rows computed with others and alone.
        for row, column in ((0, 0), (rows - 1, columns - 1)):
            ours = left[row * _SUMMED : (row + 1) * _SUMMED]
            theirs = right[column * _SUMMED : (column + 1) * _SUMMED] if transposed else right[column::columns]
            total = scalar(0.0)
            for one, other in zip(ours, theirs, strict=True):
                total.value += scalar(one * other).value
            if out[row * columns + column] != total.value:
                return False
    return True


def _redirect(library: ctypes.CDLL) -> None:
    """Makes MLX's library call OpenBLAS's function for products."""
    spans = [span for span in _spans() if span.path.name == "libmlx.so"]
    if not spans:
        raise _Unfit("MLX is built differently: it has no library of its own")
    place = spans[0].start + _slot(spans[0].path, b"cblas_sgemm")
    if not any(span.start <= place < span.stop and span.writable for span in spans):
        raise _Unfit("MLX is built differently: its calls cannot be redirected")
    slot = ctypes.c_void_p.from_address(place)
    callee = slot.value or 0
    owner = next((span.path.name for span in _spans() if span.start <= callee < span.stop), "nothing")
    if not owner.startswith("libblas"):
        raise _Unfit(f"MLX is built differently: it multiplies with {owner}")
    slot.value = _fork(ctypes.cast(library.cblas_sgemm, ctypes.c_void_p).value or 0, callee)


def _fork(openblas: int, reference: int) -> int:
    """Returns the address of `_FORK`, which stays for as long as this process."""
    code = _FORK % (_SIZES[1].to_bytes(4, "little"), openblas.to_bytes(8, "little"), reference.to_bytes(8, "little"))
    try:
        usage, flags = mmap.PROT_READ | mmap.PROT_EXEC, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        page = mmap.mmap(-1, mmap.PAGESIZE, flags, usage | mmap.PROT_WRITE)
    except OSError as error:
        raise _Unfit(f"this system lets no process add code ({error.strerror})") from None
    page.write(code)
    at = ctypes.c_char.from_buffer(page)
    # Memory cannot be unmapped while an object refers to it; this object lives for ever.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(at))
    place = ctypes.addressof(at)
    ctypes.CDLL(None).mprotect(ctypes.c_void_p(place), ctypes.c_size_t(mmap.PAGESIZE), usage)
    return place


@dataclass(frozen=True)
class _Span:
    """Addresses [start, stop) of this process at which a file is mapped."""

    start: int
    stop: int
    writable: bool
    path: Path


def _spans() -> Iterator[_Span]:
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, *_, path = line.split(maxsplit=5)
        if path.startswith("/"):
            start, stop = (int(address, 16) for address in addresses.split("-"))
            yield _Span(start, stop, "w" in access, Path(path))


def _slot(path: Path, name: bytes) -> int:
    """Returns where a library stores the address of an external function, as an offset from its begin."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        (at,), (size, count) = unpack_from("<Q", data, 0x28), unpack_from("<HH", data, 0x3A)
        # Name, type, flags, address, offset, size, link, info, alignment, size of an entry.
        sections = [unpack_from("<IIQQQQIIQQ", data, at + number * size) for number in range(count)]
        for _, kind, _, _, begin, length, link, _, _, entry in sections:
            if kind != _RELOCATIONS or sections[link][1] != _SYMBOLS:
                continue
            symbols, names = sections[link][4], sections[sections[link][6]][4]
            for place in range(begin, begin + length, entry):
                offset, info = unpack_from("<QQ", data, place)
                (start,) = unpack_from("<I", data, symbols + 24 * (info >> 32))
                named = data[names + start : names + start + len(name) + 1]
                if info & 0xFFFFFFFF == _JUMP_SLOT and named == name + b"\0":
                    return offset
    raise _Unfit("MLX is built differently: it does not call for products by name")
