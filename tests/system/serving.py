"""A real `satchel serve`, for tests that end it or kill its parts."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

COMMAND = [sys.executable, "-m", "satchel.api.cli"]


@contextmanager
def serving(home: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A server on `home`, ready to answer, in a session of its own; ended in order afterwards if it still runs."""
    output = (home / "output").open("w")
    process = subprocess.Popen(
        [*COMMAND, "serve", "--home", str(home), *arguments],
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        ends = time.monotonic() + 120
        while "Ready" not in (home / "output").read_text():
            assert process.poll() is None and time.monotonic() < ends, (home / "output").read_text()
            time.sleep(0.1)
        yield process
    finally:
        output.close()
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=30)
