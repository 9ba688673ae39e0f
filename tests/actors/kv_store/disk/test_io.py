"""How bytes become durable on macOS, where fsync leaves them in the drive's cache."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from satchel.actors.kv_store.disk.io import DiskIO

FULL = 51


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was called, on macOS; `F_FULLFSYNC` succeeds."""
    calls: list[str] = []
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", FULL, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", lambda descriptor, what, *_: calls.append(f"fcntl {what}"))
    monkeypatch.setattr(os, "fsync", lambda descriptor: calls.append("fsync"))
    return calls


def test_a_drives_cache_is_written_too(mac: list[str], tmp_path: Path):
    DiskIO().sync(7, tmp_path)
    assert mac == [f"fcntl {FULL}"]


@pytest.mark.parametrize("refusal", [errno.ENOTSUP, errno.ENOTTY, errno.EINVAL])
def test_a_drive_that_does_not_support_it_gets_an_fsync(
    mac: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, refusal: int
):
    """As disks of other machines do."""

    def refuse(*_: Any) -> None:
        raise OSError(refusal, os.strerror(refusal))

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    DiskIO().sync(7, tmp_path)
    assert mac == ["fsync"]


def test_a_broken_drive_is_an_error(mac: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "fcntl", fail)
    with pytest.raises(OSError, match="Input/output"):
        DiskIO().sync(7, tmp_path)
    assert not mac
