"""The keeper ends what is left of a session."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import psutil, subprocess, sys
from satchel.cluster.bring_up import keeper

created, shift = psutil.Process.create_time, [0.0]
psutil.Process.create_time = lambda process: created(process) + shift[0]

def keep(essential):
    shift[0] = 100.0
    return True

left = subprocess.Popen(["sleep", "60"])
keeper.keep = keep
keeper.main()
print(left.wait())
"""


def test_it_ends_the_session_though_the_clock_was_set_meanwhile(tmp_path: Path):
    """By then times of creation are others, as the system and psutil tell them."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "folder"), str(tmp_path / "logs")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, start_new_session=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in ("-15", "0"), "it was ended, and perhaps reaped already"
