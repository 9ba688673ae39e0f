"""Compiles kernels of MLX for CUDA in processes of their own, while a model is being loaded.

MLX compiles some of its kernels when they are first used, each in 3 to 8 s and one after the other, and keeps them in a
folder. Models of text need seven or eight of them before their first answer or for their self-test. Processes that
compile one each need as long as the slowest. Each writes into a folder of its own first: MLX reads a file that is not
yet written to its end.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
from filelock import FileLock, Timeout
from mlx import nn

from .....cluster.environment import default_home, snapshot
from ...device.device import on_cuda

logger = logging.getLogger(__name__)

TIMEOUT_S = 120.0
_FOLDER = "MLX_PTX_CACHE_DIR"

Work = Callable[[], mx.array]


@partial(mx.compile, shapeless=True)
def _gate(gate: mx.array, x: mx.array) -> mx.array:
    return nn.silu(gate) * x


def _gather(kind: mx.Dtype, index: mx.Dtype) -> Work:
    return lambda: mx.zeros((4, 64), kind)[mx.array([1, 2], index)]


def _scatter(kind: mx.Dtype) -> Work:
    def work() -> mx.array:
        array = mx.zeros((4, 64), kind)
        array[mx.array([1, 2], mx.uint32)] = mx.ones((2, 64), kind)
        return array

    return work


def _gather_axis(kind: mx.Dtype) -> Work:
    return lambda: mx.take_along_axis(mx.zeros((4, 64), kind), mx.zeros((4, 1), mx.int32), axis=1)


def _gated(kind: mx.Dtype, *, recorded: bool) -> Work:
    """mlx-lm's activation of most models (`swiglu`), as it is called and as it is recorded in a decode step: the names
    of kernels follow from the operations. Importing mlx-lm would take longer than compiling."""
    called = mx.compile(lambda gate, x: _gate(gate, x)) if recorded else _gate
    return lambda: called(mx.ones((4, 64), kind), mx.ones((4, 64), kind))


def works(kind: mx.Dtype) -> dict[str, Work]:
    """Returns what makes MLX compile one kernel each, for a model that computes in this dtype."""
    return {
        "gather_axis": _gather_axis(kind),
        "gated": _gated(kind, recorded=False),
        "gated_recorded": _gated(kind, recorded=True),
        "gather": _gather(kind, mx.uint32),
        "gather_words": _gather(mx.uint32, mx.uint32),
        "gather_words_signed": _gather(mx.uint32, mx.int32),
        "gather_signed": _gather(kind, mx.int32),
        "scatter": _scatter(kind),
    }


def begin_here(dtype: str) -> threading.Thread | None:
    """As `begin`, on CUDA, for a model whose config says this `dtype`."""
    if not on_cuda():
        return None
    return begin(default_home().kernels_folder, mx.float16 if dtype == "float16" else mx.bfloat16)


def begin(folder: Path, kind: mx.Dtype = mx.bfloat16) -> threading.Thread | None:
    """Compiles in the background, unless this was done before. Errors are only logged: what is not there is compiled
    when it is needed.

    Args:
        folder: where MLX keeps its kernels, as `MLX_PTX_CACHE_DIR` says.
        kind: in which the model computes.

    Returns:
        The thread that compiles; None if there is nothing to do.
    """
    if _mark(folder, kind).exists():
        return None
    thread = threading.Thread(target=_compile, args=(folder, kind), name="compile ahead", daemon=True)
    thread.start()
    return thread


def _mark(folder: Path, kind: mx.Dtype) -> Path:
    return folder / f"ahead-{version('mlx')}-{str(kind).removeprefix('mlx.core.')}"


def _compile(folder: Path, kind: mx.Dtype) -> None:
    # The loading process needs a processor too.
    most = max(1, (os.cpu_count() or 2) // 2)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Another process may compile the same now.
        with FileLock(folder / "ahead.lock", TIMEOUT_S, mode=0o600, fallback_to_soft=False):
            if _mark(folder, kind).exists():
                return
            with tempfile.TemporaryDirectory(dir=folder) as scratch, ThreadPoolExecutor(most) as pool:
                done = list(pool.map(lambda work: _compile_one(folder, Path(scratch) / work, work, kind), works(kind)))
            if all(done):
                _mark(folder, kind).touch()
    except (OSError, Timeout) as error:
        logger.warning("kernels are not compiled ahead: %s", error)


def _compile_one(folder: Path, scratch: Path, work: str, kind: mx.Dtype) -> bool:
    """Returns whether it was compiled."""
    scratch.mkdir()
    command = [sys.executable, "-m", __name__, work, str(kind).removeprefix("mlx.core.")]
    try:
        subprocess.run(
            command, env={**snapshot(), _FOLDER: str(scratch)}, check=True, capture_output=True, timeout=TIMEOUT_S
        )
    except subprocess.SubprocessError as error:
        logger.warning("%s is not compiled ahead: %s", work, error)
        return False
    # MLX looks for the module first, and then reads what else belongs to it.
    for file in sorted(scratch.iterdir(), key=lambda file: file.suffix == ".ptx"):
        file.replace(folder / file.name)
    return True


def main() -> None:
    work, kind = sys.argv[1:]
    mx.eval(works(getattr(mx, kind))[work]())


if __name__ == "__main__":
    main()
