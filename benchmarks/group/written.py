"""A process that writes a model's folder, and answers once it has.

python -m benchmarks.group.written FOLDER MODEL DTYPE
"""

from __future__ import annotations

import sys
from pathlib import Path

import mlx.core as mx

from ..cluster.worker import answer
from ..serve.folders import write_folder


def main() -> None:
    folder, model, dtype = sys.argv[1:]

    def write(_: object) -> None:
        write_folder(model, Path(folder), getattr(mx, dtype))

    answer(write)


if __name__ == "__main__":
    main()
