"""Makes the binaries of CUDA kernels smaller, because MLX 0.32 computes a hash over the whole binary of a kernel each
time it launches it. That took a fifth of the host's time for a decode step: a launch with 21 KB took 8 us, and with the
same binary in 9 KB 5 us (H200).

CUDA's driver takes fat binaries whose contents are compressed. The container is what NVIDIA's `fatbinary
--compress-all --compress-mode=speed` writes (CUDA 13.0), and the contents are a block of LZ4 ("LZ4 Block Format
Description").
"""

from __future__ import annotations

import struct

_LEAST, _LAST_LITERALS, _LAST_MATCH, _FARTHEST = 4, 5, 12, 0xFFFF
"""LZ4: a match has at least so many bytes and ends so far before the end, the last one begins so far before it, and a
match refers so far back at most."""

_KEYS = (8, _LEAST)
"""A match is looked up by so many bytes. The first that is found is taken: longer ones are mostly found by more."""

_CUBIN, _COMPRESSED_BY_LZ4 = 2, 0x2011


def fat_binary(cubin: bytes, architecture: int) -> bytes:
    """Returns a fat binary with one compressed cubin.

    Args:
        architecture: of the device, as 90 for compute capability 9.0.
    """
    block = compressed(cubin)
    padding = -len(block) % 8
    # The version of the cubin's format is in its own header (EI_ABIVERSION).
    header = struct.pack("<HHIQQHHI", _CUBIN, 0x101, 64, len(block) + padding, len(block), cubin[8], 1, architecture)
    header += struct.pack("<QQQQ", 0, _COMPRESSED_BY_LZ4, 0, len(cubin))
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(header) + len(block) + padding) + header + block + bytes(padding)


def compressed(data: bytes) -> bytes:
    """Returns data as a block of LZ4. Takes about 1 ms for 2 KB."""
    block, places = bytearray(), [dict[bytes, int]() for _ in _KEYS]
    at = start = 0
    while at < len(data) - _LAST_MATCH:
        found, length = _match(data, at, places)
        if length < _LEAST:
            at += 1
            continue
        _add(block, data[start:at], at - found, length)
        for inside in range(at + 1, min(at + length, len(data) - _LAST_MATCH)):
            for size, table in zip(_KEYS, places, strict=True):
                table[data[inside : inside + size]] = inside
        at = start = at + length
    _add(block, data[start:])
    return bytes(block)


def _match(data: bytes, at: int, places: list[dict[bytes, int]]) -> tuple[int, int]:
    """Returns where data before `at` begins like what comes there, and for how many bytes; notes this place."""
    found, length = 0, 0
    for size, table in zip(_KEYS, places, strict=True):
        key = data[at : at + size]
        place = table.get(key)
        table[key] = at
        if not length and place is not None and at - place <= _FARTHEST:
            found, length = place, size
    if length:
        most = len(data) - _LAST_LITERALS - at
        while length < most and data[found + length] == data[at + length]:
            length += 1
        length = min(length, most)
    return found, length


def _add(block: bytearray, literals: bytes, back: int = 0, length: int = 0) -> None:
    """Adds literals and, unless they are the last, a match of `length` bytes that begins `back` bytes before."""
    more = length - _LEAST if length else 0
    block.append(min(len(literals), 15) << 4 | min(more, 15))
    _add_rest(block, len(literals))
    block += literals
    if length:
        block += back.to_bytes(2, "little")
        _add_rest(block, more)


def _add_rest(block: bytearray, count: int) -> None:
    """Adds what of a number has no room in four bits."""
    if count >= 15:
        block += b"\xff" * ((count - 15) // 255)
        block.append((count - 15) % 255)
