"""Python handles whose server ends: a process of their own, and a real server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from satchel.cluster.bring_up.ports import free_port

from .serving import kill_everything, serving_recall

PROGRAM = """
import asyncio, sys, threading, time
from satchel.api import connect
from satchel.cluster.errors import NotRunning

home = sys.argv[1]


def told(call):
    try:
        return call()
    except NotRunning:
        return "not running"


def say(*words):
    print(*words, flush=True)


def read():
    for _ in agent.chat_sync("Tell me a story.", max_tokens=3000, ignore_eos=True):
        streaming.set()


async def read_async():
    async for _ in agent.chat("Tell me a story.", max_tokens=3000, ignore_eos=True):
        pass


cluster = connect(home)
agent, router, streaming = cluster.agent("zed"), cluster.router, threading.Event()
say(agent.ask_sync("Remember: the code of oslo is 4711.", temperature=0))
heard = []
threads = [threading.Thread(target=lambda: heard.append(told(read))),
           threading.Thread(target=lambda: heard.append(told(lambda: asyncio.run(read_async()))))]
for thread in threads:
    thread.start()
streaming.wait(60)
say("streaming")
input()
for thread in threads:
    thread.join(30)
say(heard)
say([told(each) for each in (
    lambda: agent.ask_sync("Hello."),
    lambda: asyncio.run(agent.ask("Hello.")),
    lambda: list(agent.chat_sync("Hello.")),
    lambda: cluster.generate_sync("Hello."),
    lambda: router.nodes().wait(),
    lambda: cluster.replicas(),
    lambda: cluster.agents_sync(),
    lambda: connect(home),
    lambda: connect(),
)])
input()
with connect(home) as again:
    say(again.agent("zed").ask_sync("What is the code of oslo?", temperature=0))
say(told(lambda: agent.ask_sync("Hello.")))
input()
time.sleep(float(sys.argv[2]))
say("alive")
"""

RAY_ENDS_S = 65.0
"""Ray ends a process that has not reached the head for a minute."""


@pytest.mark.slow
def test_a_process_outlives_its_server_and_finds_the_next_one(tmp_path: Path):
    """Streams, calls and `connect` say that nothing runs; the process ends by itself when it is done."""
    home, port = tmp_path / "home", free_port()
    home.mkdir()
    with serving_recall(home, port) as server, handles(home) as process:
        assert process.stdout is not None
        assert line(process.stdout) == "Noted."
        assert line(process.stdout) == "streaming"
        kill_everything(server.pid)
        server.wait(10)
        go_on(process)
        assert line(process.stdout) == str(["not running"] * 2)
        assert line(process.stdout) == str(["not running"] * 9)
        with serving_recall(home, port):
            go_on(process)
            assert line(process.stdout) == "The code of oslo is 4711."
            assert line(process.stdout) == "not running"
        # The second server has ended too.
        go_on(process)
        assert line(process.stdout) == "alive"
        assert process.wait(timeout=30) == 0


def test_nothing_is_waited_for_at_an_address_where_nobody_listens(tmp_path: Path):
    """As on a machine whose node still runs, and whose head has ended."""
    program = """
import sys
from satchel.api import connect
from satchel.cluster.errors import NotRunning

try:
    connect(sys.argv[1], address=sys.argv[2])
except NotRunning as error:
    print(error.message)
"""
    command = [sys.executable, "-c", program, str(tmp_path), f"127.0.0.1:{free_port()}"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert told.stdout.startswith("no control store of a cluster answers at 127.0.0.1:")


def handles(home: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(home), str(RAY_ENDS_S)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={"SATCHEL_HOME": str(home), "PATH": "/usr/bin:/bin"},
    )


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def line(stream: IO[str]) -> str:
    return stream.readline().rstrip("\n")
