"""What is done early, so that a replica starts sooner.

`python -m satchel.actors.replica.ahead DTYPE...` prepares a node while Ray starts. It imports what replicas of text
import, so that they find Python's compiled files, and the libraries' in the system's cache. On CUDA it also compiles
MLX's kernels for models of these dtypes. Without compiled files either takes as long as Ray.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

PROCESSORS_MIN = 4
"""With fewer processors the program would only delay Ray."""

NICE = 10


def preparing(dtypes: Iterable[str]) -> list[str]:
    """Returns the arguments of a Python that prepares this node; none if it has too few processors.

    Args:
        dtypes: of the models, as their configs say.
    """
    if (os.cpu_count() or 1) < PROCESSORS_MIN:
        return []
    return ["-m", __name__, *sorted(set(dtypes))]


def main() -> None:
    os.nice(NICE)
    from .loading.warming import compile_ahead

    compiling = [compile_ahead.begin_here(dtype) for dtype in sys.argv[1:]]
    from . import serving  # noqa: F401

    for thread in filter(None, compiling):
        thread.join()


if __name__ == "__main__":
    main()
