"""Clients that are slow, silent, in a hurry or too many: they hold nobody else up, and what they held comes back."""

from __future__ import annotations

import resource
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from .http import AttackOutcome, head, opened, question
from .scene import AttackScene

_CHAT = "/v1/chat/completions"
_LONG = b'{"messages":[{"role":"user","content":"Tell me a story."}],"stream":true,"max_tokens":400,"ignore_eos":true}'
_BODY_BYTES = 32 * 2**20
_EVERY_S = 1.0


@contextmanager
def _held(scene: AttackScene, outcome: AttackOutcome, what: str) -> Iterator[list[socket.socket]]:
    """While some hold their connections, another asks a question every second. What they held is free afterwards."""
    connections: list[socket.socket] = []
    try:
        yield connections
        until = scene.ends()
        outcome.notes.append(f"{what}: {len(connections)} connections")
        while time.monotonic() < until:
            # An agent's, which stands in no queue of theirs.
            outcome.count(question(scene.port, agent_id="beside"), f"a question beside {what}")
            time.sleep(_EVERY_S)
    finally:
        for connection in connections:
            connection.close()


def _open(connections: list[socket.socket], scene: AttackScene, count: int, first: bytes, **how: int) -> None:
    found = [opened(scene.port, first, **how) for _ in range(count)]
    connections += [connection for connection in found if connection is not None]


def silent(scene: AttackScene) -> AttackOutcome:
    """Connections that say nothing, and some that say half a head."""
    outcome = AttackOutcome()
    with _held(scene, outcome, "silent clients") as connections:
        _open(connections, scene, 900, b"")
        _open(connections, scene, 300, b"POST /v1/chat/completions HTTP/1.1\r\nHost: localh")
    return outcome


def slow_bodies(scene: AttackScene) -> AttackOutcome:
    """Bodies of 32 MiB that lack their last byte."""
    # While they fill endpoint.bodies_bytes_max another one's question is a 503 for some seconds.
    outcome = AttackOutcome(allowed=(503,))
    with _held(scene, outcome, "unfinished bodies") as connections:
        _open(connections, scene, 8, head(_CHAT, _BODY_BYTES))
        for connection in connections:
            try:
                for _ in range(_BODY_BYTES // 2**20 - 1):
                    connection.sendall(b" " * 2**20)
                connection.sendall(b" " * (2**20 - 1))
            except OSError:
                continue
    return outcome


def deaf(scene: AttackScene) -> AttackOutcome:
    """Clients that ask for long streams and read nothing of them."""
    outcome = AttackOutcome(allowed=(503,))
    with _held(scene, outcome, "deaf clients") as connections:
        _open(connections, scene, 64, head(_CHAT, len(_LONG)) + _LONG, receive_bytes=2048)
    return outcome


def hasty(scene: AttackScene) -> AttackOutcome:
    """Clients that ask for long streams and hang up after the first bytes."""
    outcome, until, count = AttackOutcome(allowed=(503,)), scene.ends(), 0
    while time.monotonic() < until:
        for connection in [opened(scene.port, head(_CHAT, len(_LONG)) + _LONG) for _ in range(16)]:
            if connection is None:
                continue
            try:
                connection.settimeout(2.0)
                connection.recv(64)
            except OSError:
                pass
            connection.close()
            count += 1
        outcome.count(question(scene.port), "a question beside clients that hang up")
    outcome.notes.append(f"{count} hung up")
    return outcome


def no_descriptors(scene: AttackScene) -> AttackOutcome:
    """The endpoint may open no more files than it has open, and then asks are made; afterwards it may again."""
    if not sys.platform.startswith("linux"):
        return AttackOutcome(skipped="only Linux changes another process's limits")
    endpoint = scene.process("endpoint")
    if endpoint is None:
        return AttackOutcome(skipped="no endpoint was found")
    # No answer is what a client gets while none can be accepted.
    outcome = AttackOutcome(allowed=(500, 503))
    soft, hard = endpoint.rlimit(psutil.RLIMIT_NOFILE)
    try:
        endpoint.rlimit(psutil.RLIMIT_NOFILE, (endpoint.num_fds() + 1, hard))
    except (PermissionError, psutil.AccessDenied):
        return AttackOutcome(skipped="changing another process's limits is not allowed here")
    refused = answered = 0
    try:
        until = scene.ends()
        while time.monotonic() < until:
            answer = question(scene.port, timeout_s=3.0)
            answered += answer.status != 0
            refused += answer.status == 0
            if answer.status:
                outcome.count(answer, "a question without descriptors")
            time.sleep(0.2)
    finally:
        endpoint.rlimit(psutil.RLIMIT_NOFILE, (soft, hard))
    outcome.notes.append(f"without descriptors {answered} questions were answered and {refused} not")
    for _ in range(5):
        outcome.count(question(scene.port), "a question with descriptors again")
    own = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    outcome.notes.append(f"the attacker itself may open {own} files")
    return outcome
