"""A satchel's file is written as a whole or not at all, even without hard links, and replaces no file."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from satchel.api.agents.satchel_files import write_new
from satchel.cluster.errors import InvalidRequest, SatchelError


@pytest.fixture(params=[None, errno.EPERM, errno.ENOTSUP])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on a file system with hard links, and on ones that refuse them with different errors."""

    def refuse(*names: object) -> None:
        raise OSError(request.param, os.strerror(request.param))

    if request.param is not None:
        monkeypatch.setattr(os, "link", refuse)
    return tmp_path


def test_a_file_is_whole_and_its_users_alone(folder: Path):
    file = folder / "alice.satchel"
    write_new(file, [b"one", b"two"])
    assert file.read_bytes() == b"onetwo" and file.stat().st_mode & 0o777 == 0o600
    assert list(folder.iterdir()) == [file]


def test_a_file_that_came_meanwhile_stays(folder: Path):
    file = folder / "alice.satchel"

    def pieces() -> Iterator[bytes]:
        yield b"one"
        file.write_bytes(b"another's")

    with pytest.raises((InvalidRequest, SatchelError)):
        write_new(file, pieces())
    assert file.read_bytes() == b"another's" and list(folder.iterdir()) == [file]


def test_pieces_that_end_in_the_middle_leave_nothing(folder: Path):
    def pieces() -> Iterator[bytes]:
        yield b"one"
        raise SatchelError("the connection broke")

    with pytest.raises(SatchelError, match="the connection broke"):
        write_new(folder / "alice.satchel", pieces())
    assert not list(folder.iterdir())
