"""A file with a passphrase gives what it holds, or nothing that was changed, cut or put together otherwise."""

from __future__ import annotations

import io

import pytest

from satchel.cluster.errors import InvalidSatchel
from satchel.cluster.trust import locked


@pytest.fixture(autouse=True)
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locked, "_COST", (4, 1, 1))
    monkeypatch.setattr(locked, "CHUNK_BYTES", 16)


def opened(data: bytes, passphrase: bytes = b"x") -> bytes:
    return b"".join(locked.unlock(io.BytesIO(data), passphrase))


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 32, 100])
def test_what_is_locked_is_unlocked(size: int) -> None:
    plain = bytes(range(size))
    data = b"".join(locked.lock([plain[:5], plain[5:]], b"x"))
    assert opened(data) == plain
    assert locked.locked_size(size) == len(data) and locked.unlocked_size(len(data)) == size


def test_nothing_of_what_is_locked_is_readable() -> None:
    plain = bytes(range(100))
    data = b"".join(locked.lock([plain], b"x"))
    assert not any(plain[at : at + 9] in data for at in range(len(plain) - 8))


def test_whatever_else_is_refused() -> None:
    data = b"".join(locked.lock([bytes(40)], b"x"))
    head, chunks = data[: locked._HEAD_BYTES], data[locked._HEAD_BYTES :]
    first, second = chunks[:32], chunks[32:64]
    for at in range(len(data)):
        with pytest.raises(InvalidSatchel):
            opened(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(InvalidSatchel):
            opened(data[:at])
    for other in (data + b"\0", head + second + first + chunks[64:], head + first + chunks[64:], b"PK" + data):
        with pytest.raises(InvalidSatchel):
            opened(other)
    with pytest.raises(InvalidSatchel, match="passphrase"):
        opened(data, b"y")
    with pytest.raises(InvalidSatchel, match="newer"):
        opened(data[:8] + (2).to_bytes(4, "little") + data[12:])
    with pytest.raises(InvalidSatchel, match="memory"):
        opened(data[:12] + bytes([24, 255, 1]) + data[15:])
