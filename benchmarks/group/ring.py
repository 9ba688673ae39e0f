"""A process that passes arrays to another one of the same host and back, by their cards and over TCP.

    python -m benchmarks.group.ring

Two of them are asked (`cluster/worker.py`): one for its `address`, which then shall `follow`, the other one to `lead`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import time

import mlx.core as mx

from satchel.actors.replica.group.link.connection import Connection
from satchel.actors.replica.group.link.device_ring import Offer, Receiving, Sending, answer
from satchel.actors.rpc.shell import SWITCH_S
from satchel.cluster.errors import LinkError

from ..cluster import worker
from .process import KEY

NAME, FORM_S = "ring", 30.0
ROUND, END = "round", "end"
CARDS, TCP = "cards", "TCP"
TOGETHER_BYTES = 2**20
"""Arrays of at most so many bytes are launched all at once: their way is shorter than a launch."""


class Side:
    """One of the two processes: it has a connection through rings, if those work, and one without."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ways: dict[str, Connection] = {}

    def pid(self) -> int:
        return os.getpid()

    def address(self) -> int:
        return self._listener.getsockname()[1]

    # The one that follows, on a thread of its own.

    def follow(self) -> None:
        threading.Thread(target=self.answer, daemon=True).start()

    def answer(self) -> None:
        """Passes back what comes, until the other one ends."""
        for way in (CARDS, TCP):
            self._ways[way] = Connection.accept(self._listener.accept()[0], KEY, NAME)
        connection, until = self._ways[CARDS], time.monotonic() + FORM_S
        connection.receiving = answer(connection, until)
        connection.sending = Offer(connection, until).tried()
        while (said := connection.receive()) is not None and said[0] == ROUND:
            way, nbytes, rounds = said[1]
            if way == TCP:
                for _ in range(rounds):
                    self._ways[TCP].send_array(self._ways[TCP].receive_array((nbytes // 4,)))
                continue
            for count in (1, rounds):
                done = []
                for _ in range(count):
                    done.append(self._passed_back(nbytes))
                    if nbytes > TOGETHER_BYTES:
                        mx.async_eval(done[-1])
                mx.async_eval(done)
        self._close()

    # The one that leads.

    def lead(self, address: int) -> bool:
        """Returns whether arrays pass by the cards, both ways."""
        until = time.monotonic() + FORM_S
        for way in (CARDS, TCP):
            self._ways[way] = Connection.connect(("127.0.0.1", address), KEY, NAME, until)
        connection = self._ways[CARDS]
        connection.sending = Offer(connection, until).tried()
        connection.receiving = answer(connection, until)
        return connection.sending is not None and connection.receiving is not None

    def one_way_s(self, way: str, nbytes: int, rounds: int) -> float:
        """Returns how long an array of so many bytes takes one way.

        Raises:
            RuntimeError: another array came back.
        """
        first = array = mx.random.randint(0, 2**30, (nbytes // 4,)).astype(mx.uint32)
        mx.eval(array)
        self._ways[CARDS].send(ROUND, way, nbytes, rounds)
        if way == TCP:
            began = time.perf_counter()
            for _ in range(rounds):
                self._ways[TCP].send_array(array)
                array = self._ways[TCP].receive_array((nbytes // 4,))
        else:
            # With the first one the other side has begun to launch.
            array, done = self._turn(array, nbytes)
            mx.eval(done, array)
            began = time.perf_counter()
            for _ in range(rounds):
                array, done = self._turn(array, nbytes)
                if nbytes > TOGETHER_BYTES:
                    mx.async_eval(done)
            if nbytes <= TOGETHER_BYTES:
                began = time.perf_counter()
            mx.eval(done, array)
        took_s = time.perf_counter() - began
        if not mx.array_equal(array, first):
            raise RuntimeError(f"another array of {nbytes} bytes came back, over {way}")
        return took_s / rounds / 2

    def _turn(self, array: mx.array, nbytes: int) -> tuple[mx.array, mx.array]:
        """Returns what comes back for an array, and what must be launched to send it."""
        sending, receiving = self._rings()
        done, _ = sending.put(array)
        return receiving.take((nbytes // 4,), mx.uint32), done

    def _passed_back(self, nbytes: int) -> mx.array:
        """Returns what must be launched to take an array and to send it back."""
        sending, receiving = self._rings()
        return sending.put(receiving.take((nbytes // 4,), mx.uint32))[0]

    def _rings(self) -> tuple[Sending, Receiving]:
        sending, receiving = self._ways[CARDS].sending, self._ways[CARDS].receiving
        assert sending is not None and receiving is not None
        return sending, receiving

    def close(self) -> None:
        """Ends this process's part, and the other one's."""
        if CARDS in self._ways:
            with contextlib.suppress(LinkError):
                self._ways[CARDS].send(END)
        self._close()

    def _close(self) -> None:
        for connection in self._ways.values():
            connection.close()
        self._listener.close()


def main() -> None:
    worker.start_answering()
    sys.setswitchinterval(SWITCH_S)
    # If the other one waits for it.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    side = Side()
    worker.answer(worker.methods_of(side))
    side.close()


if __name__ == "__main__":
    main()
