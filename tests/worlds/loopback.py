"""Further addresses of this machine alone. Linux has them all; a Mac has 127.0.0.1, and others that are added."""

from __future__ import annotations

import socket

import pytest


def _is_here(address: str) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


NUMBERS = range(2, 6)

several_addresses = pytest.mark.skipif(
    not all(_is_here(f"127.0.0.{number}") for number in NUMBERS),
    reason=f"add addresses: for n in {' '.join(map(str, NUMBERS))}; do sudo ifconfig lo0 alias 127.0.0.$n; done",
)
