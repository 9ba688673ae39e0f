"""A group of stages on this machine: the leader here, followers in processes of their own or on threads."""

from __future__ import annotations

import multiprocessing
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

from satchel.actors.replica.device import blas
from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.group.forming import GroupTimes, Member
from satchel.actors.replica.group.link.broken import GroupBroken
from satchel.actors.replica.group.loading import load_stage
from satchel.cluster import environment
from tests.worlds.replica.bench import Bench

KEY = b"a cluster's key for tests"
GROUP = "group-1"
TIMES = GroupTimes(form_s=20.0, beat_s=0.05, silent_s=3.0, stalled_s=3.0)


def listener() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def follow(folder: str, start: int, stop: int, told: Pipe) -> None:
    """A follower's process. Says where it listens, and at its end how much KV it keeps, or what broke."""
    listens = listener()
    loaded = load_stage(folder, start, stop)
    told.send(listens.getsockname()[:2])
    member = Member(GROUP, 0, KEY, listens, TIMES)
    try:
        following = member.follow(loaded)
        following.run()
        told.send(following.kept)
    except GroupBroken as error:
        told.send(str(error))
    finally:
        member.close()


class Process:
    """A follower in a process of its own."""

    def __init__(self, folder: Path, start: int, stop: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._told, telling = context.Pipe()
        self.process = context.Process(target=follow, args=(str(folder), start, stop, telling), daemon=True)
        # It must multiply as this process does.
        with environment.set_during(SATCHEL_OPENBLAS="1" if blas.chosen().name else ""):
            self.process.start()
        self.address: tuple[str, int] = self.hear()

    def hear(self, wait_s: float = 60.0) -> Any:
        assert self._told.poll(wait_s), "the follower says nothing"
        return self._told.recv()


@contextmanager
def on_a_thread(run: Callable[[], Any]) -> Iterator[Future[Any]]:
    """Runs something on a thread, whose result or error is in the future."""
    done: Future[Any] = Future()

    def work() -> None:
        try:
            done.set_result(run())
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield done
    finally:
        thread.join(30.0)
        assert not thread.is_alive()


class Led:
    """The leader of a group, as a bench. Close its member."""

    def __init__(self, loaded: LoadedModel, *followers: tuple[str, int], **how: Any) -> None:
        listens = listener()
        self.member = Member(GROUP, len(followers), KEY, listens, TIMES)
        self.bench = Bench(loaded, **how)
        try:
            self.member.lead(loaded, self.bench.engine.executor, [*followers, listens.getsockname()[:2]])
        except BaseException:
            self.member.close()
            raise


class Fault:
    """A model of a stage that fails at one call, and notes how many there were."""

    def __init__(self, model: Any, fails_at: int) -> None:
        self.model, self.fails_at, self.calls = model, fails_at, 0

    def __call__(self, *given: Any, **named: Any) -> Any:
        self.calls += 1
        if self.calls == self.fails_at:
            raise ValueError("injected")
        return self.model(*given, **named)
