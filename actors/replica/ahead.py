"""What is done early, so that a replica starts sooner.

`python -m satchel.actors.replica.ahead DTYPE...` prepares a node while Ray starts. It imports what replicas of text
import, so that they find Python's compiled files, and the libraries' in the system's cache. On CUDA it also compiles
MLX's kernels for models of these dtypes. Without compiled files either takes as long as Ray. And a replica begins to
hash a model's files while it imports libraries.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ...cluster.environment import default_home
from ...cluster.errors import ModelLoadError
from ..model_files.identity.digests import digest_files
from ..model_files.source import Progress

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


def digest_ahead(source: str, folder: Path, progress: Progress) -> threading.Thread:
    """Hashes the files in a model's folder in the background. Loading then finds their digests in the home, or waits
    for them, and says what is wrong with a file.

    Returns:
        The thread that hashes.
    """
    # Imported here, because the command line imports this file, and not by the thread: two threads that import the
    # same can wait for each other.
    from .loading.model_id import files_of

    def digest() -> None:
        with suppress(ModelLoadError, OSError):
            kept = default_home().digests_file
            digest_files(files_of(folder), kept, lambda part: progress(f"checking the files of {source}", part))

    thread = threading.Thread(target=digest, name="digests", daemon=True)
    thread.start()
    return thread


def main() -> None:
    os.nice(NICE)
    from .loading import compile_ahead

    compiling = [compile_ahead.begin_here(dtype) for dtype in sys.argv[1:]]
    from . import serving  # noqa: F401

    for thread in filter(None, compiling):
        thread.join()


if __name__ == "__main__":
    main()
