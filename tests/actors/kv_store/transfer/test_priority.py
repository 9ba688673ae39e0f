"""Threads that move KV are nicer than those that compute, and only they."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from satchel.actors.kv_store.transfer.priority import LOWER, give_way
from satchel.actors.protocol.block_ids import root_id, scope_of
from tests.worlds.kv_store.kv_files import MODEL, chain
from tests.worlds.kv_store.kv_node import spoken
from tests.worlds.kv_store.store_nodes import cluster

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of threads")


def niceness(thread: threading.Thread) -> int:
    assert thread.native_id is not None
    return os.getpriority(os.PRIO_PROCESS, thread.native_id)


def test_a_thread_gives_way_once_and_for_all_and_no_other_does():
    before, found = niceness(threading.current_thread()), list[int]()

    def work() -> None:
        give_way()
        found.append(niceness(threading.current_thread()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [min(19, before + LOWER)] and niceness(threading.current_thread()) == before


async def test_pulls_and_those_who_serve_them_give_way(tmp_path):
    async with cluster(tmp_path, ["a", "b"], replication=0) as home:
        blocks = chain(2, parent=root_id(MODEL, scope_of("tenant", "default", "alice", "")))
        await home.speak("a", "default/alice", "hello", spoken(*blocks))
        await home.put("a", blocks)
        await home.at("a").send_secondary("default/alice", "b")
        came = await home.at("b").fetch("default/alice", "a", 10.0)
        assert came.blocks == 2
        nicer = {thread.name: niceness(thread) - niceness(threading.main_thread()) for thread in threading.enumerate()}
        pulls = [lower for name, lower in nicer.items() if name.startswith("pull_")]
        assert pulls and set(pulls) == {min(LOWER, 19 - niceness(threading.main_thread()))}
        assert nicer["MainThread"] == 0
