"""How macOS accepts connections, on Linux (XNU's `accept_nocancel`)."""

from __future__ import annotations

import os
import socket
import struct
import time
from typing import Any

import pytest

_accept = socket.socket.accept


def accepts_as_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a connection blocks only if its listener does, and has no address if its peer has reset it."""

    def accept(listener: socket.socket) -> tuple[socket.socket, Any]:
        sock, address = _accept(listener)
        # Python undoes that for listeners with a time limit.
        if not listener.gettimeout():
            os.set_blocking(sock.fileno(), os.get_blocking(listener.fileno()))
        try:
            sock.getpeername()
        except OSError:
            address = None
        return sock, address

    monkeypatch.setattr(socket.socket, "accept", accept)


def reset(address: tuple[str, int]) -> None:
    """Connects, and resets the connection."""
    with socket.create_connection(address) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    time.sleep(0.01)
