"""Whether a disk answers."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from satchel.actors.kv_store.disk import disk_check as disk_probe
from satchel.actors.kv_store.disk.disk_check import DiskProbe


def test_a_disk_that_keeps_a_byte_answers_and_keeps_nothing(tmp_path: Path):
    assert DiskProbe(tmp_path).answers() and not list(tmp_path.iterdir())


def test_a_disk_that_refuses_answers(tmp_path: Path):
    assert DiskProbe(tmp_path / "nowhere").answers()


def test_a_disk_that_hangs_does_not_answer_and_holds_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    released, begun = threading.Event(), []

    def fsync(descriptor: int) -> None:
        begun.append(descriptor)
        released.wait(10)

    monkeypatch.setattr(disk_probe.os, "fsync", fsync)
    probe = DiskProbe(tmp_path)
    assert not probe.answers(0.05) and not probe.answers(0.05) and len(begun) == 1
    released.set()
    assert probe.answers(5.0)
