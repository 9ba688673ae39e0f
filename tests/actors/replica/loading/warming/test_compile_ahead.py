"""Kernels of MLX are compiled in processes of their own and moved into the folder; on a CPU the work itself runs."""

from __future__ import annotations

import io
import re
import subprocess
import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.activations import swiglu

from satchel.actors.replica.loading.warming import compile_ahead


@pytest.mark.parametrize("kind", [mx.bfloat16, mx.float16])
def test_every_work_computes_something(kind: mx.Dtype):
    for name, work in compile_ahead.works(kind).items():
        assert mx.isfinite(work()).all(), name


def test_the_activation_is_mlx_lm_s():
    """The compiled kernel's name says its operations."""

    def operations(activation: Any) -> list[str]:
        told = io.StringIO()
        mx.export_to_dot(told, activation(mx.ones((4, 64)), mx.zeros((4, 64))))
        return re.findall('label ="(\\w+)"', told.getvalue())

    assert operations(compile_ahead._gate) == operations(swiglu)


def test_files_come_whole_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What belongs to a module is there before the module."""
    folder, asked, order = tmp_path / "kernels", list[str](), list[str]()

    def run(command: list[str], *, env: dict[str, str], **_: Any) -> None:
        asked.append(command[3])
        for suffix in (".ptx", ".txt"):
            (Path(env["MLX_PTX_CACHE_DIR"]) / f"{command[3]}{suffix}").write_text(command[3])
        if command[3] == "scatter" and len(asked) <= len(compile_ahead.works(mx.bfloat16)):
            raise subprocess.CalledProcessError(1, command)

    replace = Path.replace

    def moved(file: Path, target: Path) -> Path:
        order.append(file.name)
        return replace(file, target)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(Path, "replace", moved)
    works = set(compile_ahead.works(mx.bfloat16))
    compile_ahead._compile(folder, mx.bfloat16)
    assert {file.stem for file in folder.glob("*.ptx")} == works - {"scatter"}
    assert order.index("gather.txt") < order.index("gather.ptx")
    # What failed is tried again, and what is done is not done again.
    assert not compile_ahead._mark(folder, mx.bfloat16).exists()
    compile_ahead._compile(folder, mx.bfloat16)
    assert {file.stem for file in folder.glob("*.ptx")} == works
    assert compile_ahead._mark(folder, mx.bfloat16).exists() and not any(each.is_dir() for each in folder.iterdir())


def test_two_processes_compile_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A node is prepared before its first replica starts, which then finds the kernels or waits for them."""
    asked, going_on = list[str](), threading.Event()

    def compile_one(folder: Path, scratch: Path, work: str, kind: mx.Dtype) -> bool:
        asked.append(work)
        return going_on.wait(30)

    monkeypatch.setattr(compile_ahead, "_compile_one", compile_one)
    threads = [compile_ahead.begin(tmp_path), compile_ahead.begin(tmp_path)]
    going_on.set()
    for thread in threads:
        assert thread is not None
        thread.join(30)
    assert sorted(asked) == sorted(compile_ahead.works(mx.bfloat16))
    assert compile_ahead.begin(tmp_path) is None
