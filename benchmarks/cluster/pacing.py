"""Nodes of one machine that compute as fast as other machines would: each step of a model lasts as long as there.

A node's processes get a folder on their PYTHONPATH whose `sitecustomize` calls `install`. Then a replica's chunks and
decode steps, which compute a tiny model, take the time of their `Pace` if they were done sooner. What the replica
measures and reports, and all that follows from it, is as with a machine that needs that time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

MODULE = "satchel.actors.replica.execution.executor"


@dataclass(frozen=True)
class Pace:
    """How long a machine computes.

    Attributes:
        prefill_token_s: a token of a prompt.
        step_s, row_s: a decode step without sequences, and what each sequence adds to it.
    """

    prefill_token_s: float
    step_s: float
    row_s: float


def command_with(pace: Pace, folder: Path, root: Path) -> list[str]:
    """Returns the beginning of a command whose Python processes, and those that they start, have this pace.

    Args:
        folder: a new one, for the hook.
        root: where the benchmarks are.
    """
    folder.mkdir(parents=True)
    hook = f"from benchmarks.cluster.pacing import Pace, install\n\ninstall(Pace(**{asdict(pace)}))\n"
    (folder / "sitecustomize.py").write_text(hook)
    return ["env", f"PYTHONPATH={folder}:{root}"]


def install(pace: Pace) -> None:
    """Gives this process the pace, once it imports the executor."""
    sys.meta_path.insert(0, _Finder(pace))


class _Finder(MetaPathFinder):
    def __init__(self, pace: Pace) -> None:
        self._pace = pace

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._pace)
        return spec


class _Loader(Loader):
    def __init__(self, loader: Loader, pace: Pace) -> None:
        self._loader, self._pace = loader, pace

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        executor: Any = vars(module)["BatchExecutor"]
        executor.prefill, executor.time_next = _timed(_lasting(executor.prefill, self._prefill_s))
        executor.step = _lasting(executor.step, self._step_s)

    def _prefill_s(self, ready: None, work: Sequence[tuple[str, Sequence[int]]]) -> float:
        return self._pace.prefill_token_s * sum(len(tokens) for _, tokens in work)

    def _step_s(self, ready: Sequence[object]) -> float:
        return self._pace.step_s + self._pace.row_s * len(ready)


def _timed(prefill: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., None]]:
    """Returns the prefill and the `time_next` of an executor whose replica is told how long all of a prefill lasts."""
    notes: list[Callable[[int, float], object]] = []

    def time_next(executor: Any, note: Callable[[int, float], object]) -> None:
        notes[:] = [note]

    def timed(executor: Any, work: Sequence[tuple[str, Sequence[int]]]) -> None:
        began = time.perf_counter()
        prefill(executor, work)
        if notes:
            notes.pop()(sum(len(tokens) for _, tokens in work), time.perf_counter() - began)

    return timed, time_next


def _lasting(method: Callable[..., Any], seconds: Callable[..., float]) -> Callable[..., Any]:
    def lasts(executor: Any, *arguments: Any) -> Any:
        ends = time.perf_counter()
        answer = method(executor, *arguments)
        ends += seconds(answer, *arguments)
        time.sleep(max(0.0, ends - time.perf_counter()))
        return answer

    return lasts
