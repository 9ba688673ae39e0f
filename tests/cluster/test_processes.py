"""What a process does with memory that it has freed, with garbage, and how many files it may open."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import weakref

import pytest

from satchel.cluster.processes import keep_from_collection

PROGRAM = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
import psutil
from satchel.cluster.processes import give_freed_memory_back

def handle(number):
    for _ in range(3):
        together.wait()
        body, pieces = bytes(30 * 2**20), [b"x" * (8 * 2**20) for _ in range(3)]
        del body, pieces

together = threading.Barrier(4)
if sys.argv[1:]:
    give_freed_memory_back()
before = psutil.Process().memory_info().rss
with ThreadPoolExecutor(4) as pool:
    list(pool.map(handle, range(4)))
    print((psutil.Process().memory_info().rss - before) // 2**20)
"""


def kept_mib(*arguments: str) -> int:
    command = [sys.executable, "-c", PROGRAM, *arguments]
    return int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="only glibc keeps what is freed")
def test_what_large_bodies_took_is_given_back():
    assert kept_mib() > 100, "or this shows nothing"
    assert kept_mib("give back") < 32


@pytest.mark.parametrize(("soft", "hard", "then"), [(256, 20_000, 10_240), (256, 4096, 4096), (12_000, 20_000, 12_000)])
def test_a_process_and_its_children_may_open_many_files(soft: int, hard: int, then: int):
    """macOS begins with 256. What is allowed already is not lowered."""
    program = "import resource, subprocess, sys; from satchel.cluster.processes import raise_open_files\n"
    program += f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard})); print(raise_open_files())\n"
    program += "sys.stdout.flush(); subprocess.run(['sh', '-c', 'ulimit -Sn'])"
    said = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    assert said.split() == [str(then)] * 2


def test_objects_that_stay_are_not_looked_at_again_and_garbage_is_gone():
    class Ring:
        def __init__(self) -> None:
            self.itself = self

    before = gc.get_freeze_count()
    gone, stays = weakref.ref(Ring()), Ring()
    try:
        keep_from_collection()
        assert gone() is None and gc.get_freeze_count() > 0
        assert not any(found is stays for found in gc.get_objects())
        later = weakref.ref(Ring())
        gc.collect()
        assert later() is None
    finally:
        gc.unfreeze()
        if before:
            gc.freeze()


@pytest.mark.parametrize("kept, said", [(False, "collected"), (True, "")])
def test_what_is_kept_to_the_end_is_not_looked_at_while_the_process_ends(kept: bool, said: str):
    program = (
        "import gc; from satchel.cluster.processes import keep_to_the_end; gc.disable()\n"
        "class Ring:\n"
        "    def __init__(self): self.itself = self\n"
        "    def __del__(self): print('collected')\n"
        f"if {kept}: keep_to_the_end()\n"
        "Ring()"
    )
    ended = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60)
    assert ended.stdout.strip() == said
