"""What a command prints while it runs, when the reader of its output goes away."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """\
import sys, threading
from satchel.api.cli.progress import ProgressDisplay, print_error
from satchel.cluster.errors import SatchelError

display = ProgressDisplay(sys.stdout)
display.say("first")
sys.stdin.readline()
display.say("second", "third")
step = threading.Thread(target=lambda: (display.report("Loading", 0.5), print("the step went on", file=sys.stderr)))
step.start()
step.join()
print_error(SatchelError("nobody hears it"), sys.stdout)
print("the end", file=sys.stderr)
sys.stdout = None
"""


def test_a_reader_that_goes_away_ends_neither_the_process_nor_a_step():
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == "first\n"
    process.stdout.close()
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stderr.read() == "the step went on\nthe end\n"
    assert process.wait(10) == 0
    process.stdin.close()
    process.stderr.close()
