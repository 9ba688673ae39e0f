"""CUDA's driver is given what LZ4 and NVIDIA's own tool would have written."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from satchel.actors.replica.kernels import fat_binary

HEADER = bytes.fromhex(
    "50ed55ba010010006022000000000000020001014000000020220000000000001922000000000000"
    "080001005a0000000000000000000000112000000000000000000000000000002851000000000000"
)
"""Of a cubin of 20,776 bytes, whose block has 8,729, as `fatbinary --compress-all --compress-mode=speed` of CUDA 13.0
writes it."""


def decompressed(block: bytes) -> bytes:
    """As "LZ4 Block Format Description" says."""
    out, at = bytearray(), 0

    def more(count: int) -> int:
        nonlocal at
        while count >= 15:
            count, at = count + block[at], at + 1
            if block[at - 1] < 255:
                break
        return count

    while True:
        token, at = block[at], at + 1
        literals = more(token >> 4)
        out, at = out + block[at : at + literals], at + literals
        if at == len(block):
            return bytes(out)
        back, at = int.from_bytes(block[at : at + 2], "little"), at + 2
        assert 0 < back <= len(out)
        for _ in range(more(token & 15) + 4):
            out.append(out[-back])


def code(size: int) -> bytes:
    """Something like a kernel: instructions of 16 bytes, of which most are like another."""
    rng = random.Random(size)
    known = [rng.randbytes(16) for _ in range(40)]
    made = (rng.choice(known)[:12] + rng.choice(known)[12:] for _ in range(size // 16))
    return b"".join(made) + rng.randbytes(size % 16)


@pytest.mark.parametrize("size", [0, 1, 4, 12, 13, 17, 300, 5000, 70_001, 200_000])
def test_what_was_compressed_comes_back_and_is_smaller(size: int):
    for data in (code(size), bytes(size)):
        block = fat_binary.compressed(data)
        assert decompressed(block) == data
        assert size < 1000 or len(block) < 0.7 * size


@given(st.lists(st.binary(max_size=20), max_size=8), st.lists(st.integers(0, 7), max_size=60))
def test_any_data_comes_back(parts: list[bytes], order: list[int]):
    data = b"".join(parts[at] for at in order if at < len(parts))
    assert decompressed(fat_binary.compressed(data)) == data


def test_the_last_bytes_are_literals():
    """LZ4 demands it: the last five, and no match begins within the last twelve."""
    block = fat_binary.compressed(bytes(100))
    assert block[-6:] == bytes([5 << 4, 0, 0, 0, 0, 0])


def test_the_container_is_that_of_nvidia(monkeypatch: pytest.MonkeyPatch):
    cubin = bytes.fromhex("7f454c46020101410800") + bytes(20_776 - 10)
    monkeypatch.setattr(fat_binary, "compressed", lambda data: bytes([7]) * 8729)
    made = fat_binary.fat_binary(cubin, 90)
    assert made[:80] == HEADER and made[80:] == bytes([7]) * 8729 + bytes(7)
