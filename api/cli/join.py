"""`satchel join`: makes this machine a node of a cluster, until a signal comes or the head that started it closes its
input."""

from __future__ import annotations

import asyncio
import os
import re
import select
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from ...cluster.bring_up.launch import READY, JoinOrder
from ...cluster.bring_up.runtime import LocalCluster
from ...cluster.config import Config, Home
from ...cluster.errors import ActorAway, ClusterError, ModelLoadError, NoAnswer, SatchelError
from ...cluster.home import HomeLock, prepare_home
from ...cluster.nodes import Node
from ...cluster.timing import USUAL
from ...cluster.trust.admission import Admission, enter
from ...cluster.trust.invitations import Invitation, remembered
from .progress import ProgressDisplay
from .serve import POLL_S, StopSignals, as_sentence, leave

ORDER_S = 30.0
ORDER_BYTES_MAX = 65_536
FORMER_S = 40.0
"""How long a restarted node waits until Ray knows that its previous process has ended, which takes 15 s."""

RETURN_S = 30.0
"""How long a returning node's replicas may take until they can be called."""

AGAIN_S = 0.5
END_S = 2.0
"""For ending what runs on a node that leaves."""


def read_order() -> JoinOrder:
    """Reads the order on standard input.

    Raises:
        ClusterError: none comes, or it is malformed.
    """
    descriptor, line, ends = sys.stdin.fileno(), b"", time.monotonic() + ORDER_S
    while not line.endswith(b"\n") and len(line) < ORDER_BYTES_MAX:
        readable, _, _ = select.select([descriptor], [], [], max(0.0, ends - time.monotonic()))
        part = os.read(descriptor, 4096) if readable else b""
        if not part:
            break
        line += part
    try:
        return JoinOrder.from_line(line)
    except ValueError as error:
        raise ClusterError(str(error)) from None


def own_node(name: str | None, address: str, head: str) -> Node:
    """Returns this machine as a node that no config describes.

    Raises:
        ClusterError: the name or the head's address (`host:port`) is invalid, or there is no route to the head.
    """
    host, _, port = head.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65536):
        raise ClusterError(f"{head!r} is not the address of a cluster, HOST:PORT")
    if not address:
        # Finds the local address of the route to the head; nothing is sent.
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((host, 9))
                address = str(probe.getsockname()[0])
        except OSError as error:
            raise ClusterError(f"there is no way to {host}: {error.strerror or error}") from None
    name = name or re.sub(r"[^a-z0-9]+", "-", socket.gethostname().partition(".")[0].lower()).strip("-")[:63]
    try:
        return Node(name=name, address=address)
    except ValueError:
        raise ClusterError(f"{name!r} at {address!r} is no node: a name has letters, digits and dashes") from None


def let_in(home: Home, node: Node, invitation: Invitation) -> Admission:
    """As `enter`, if no process runs on the home, whose cluster credentials must not be replaced.

    Raises:
        HomeInUse: a process runs on the home.
    """
    prepare_home(home)
    lock = HomeLock(home)
    lock.acquire()
    lock.release()
    return enter(home, node, invitation)


def join(order: JoinOrder, home: Home, *, ordered: bool) -> None:
    """Joins, serves, leaves, and ends the process: with exit code 0 after an orderly end.

    Args:
        ordered: leave when standard input closes, and print `READY` for the head.
    """
    prepare_home(home)
    signals = StopSignals()
    signals.install()
    progress = ProgressDisplay()
    cluster = LocalCluster(home, node=order.node)
    start = _Start(order, cluster, progress)
    try:
        start.start()
        while start.is_alive() and not signals.stop and not (ordered and _input_closed()):
            start.join(POLL_S)
            if start.connected.is_set() and not start.go_on.is_set():
                signals.install()
                start.go_on.set()
        progress.close()
        if start.is_alive():
            start.withdraw(for_good=not ordered)
            cluster.stop(abandon=True)
            leave(0)
        if start.error is not None:
            start.withdraw(for_good=not ordered)
            raise as_sentence(start.error, home)
        signals.install()
        progress.say(READY if ordered else f"{order.node.name} has joined {order.invitation.door}; Ctrl-C leaves")
        _stay(cluster, signals, ordered)
        progress.say("Leaving")
        _leave_cluster(start, order.node, progress, for_good=not ordered)
    except SatchelError as error:
        cluster.stop()
        print(f"satchel: {error.message}", file=sys.stderr)
        leave(1)
    cluster.stop()
    leave(0)


class _Start(threading.Thread):
    """Joins and starts the node's actors; `error` is set if that failed."""

    def __init__(self, order: JoinOrder, cluster: LocalCluster, progress: ProgressDisplay) -> None:
        super().__init__(name="join", daemon=True)
        self._order, self._cluster, self._progress = order, cluster, progress
        self.connected, self.go_on, self.begun = threading.Event(), threading.Event(), threading.Event()
        self.replicas: dict[str, Any] = {}
        self.timing = USUAL
        self.error: BaseException | None = None

    def withdraw(self, *, for_good: bool) -> None:
        """Leaves the cluster during a join, so that nothing waits for a node that never comes."""
        if for_good and self.begun.is_set():
            _leave_cluster(self, self._order.node, self._progress, for_good=True)

    def run(self) -> None:
        try:
            self._join()
        except BaseException as error:
            self.error = error

    def _join(self) -> None:
        self._progress.report(f"Joining {self._order.invitation.door}", None)
        self._cluster.start(let_in(self._cluster.home, self._order.node, self._order.invitation))
        self.connected.set()
        self.go_on.wait()
        self._await_name()
        from ...actors.start import compare_models, start_node
        from ..ray_backend.dispatch import cluster_config

        config: Config = cluster_config()
        self._cluster.go_by(config)
        self.timing = config.timing
        self.begun.set()
        self.replicas = start_node(config, self._order.node)
        self._await_replicas(config)
        self._progress.say(*asyncio.run(compare_models(self.replicas, self.timing)))
        self._cluster.note_processes()

    def _await_name(self) -> None:
        """Waits until no other node has this one's name. After a crash, the previous process holds it for a while.

        Raises:
            ClusterError: another node has it.
        """
        import ray

        node, own = self._order.node, ray.get_runtime_context().get_node_id()
        ends = time.monotonic() + FORMER_S
        while True:
            alive = [each for each in ray.nodes() if each["Alive"] and node.resource in each["Resources"]]
            others = [each["NodeManagerAddress"] for each in alive if each["NodeID"] != own]
            if not others:
                return
            if time.monotonic() > ends:
                raise ClusterError(
                    f"the cluster has a node {node.name} already, at {others[0]}; join by another --name"
                )
            self._progress.report(f"Waiting until the former {node.name} at {others[0]} is gone", None)
            time.sleep(AGAIN_S)

    def _await_replicas(self, config: Config) -> None:
        """Waits until the node's replicas have loaded their models.

        Raises:
            ModelLoadError: one does not load.
        """
        from ...actors.start import wait_until_ready

        ends = time.monotonic() + RETURN_S
        while True:
            try:
                asyncio.run(wait_until_ready(self.replicas, config.timeouts.model_load_s, self._progress.report))
                return
            except ModelLoadError as error:
                # Replicas that return with the node cannot be called before they are started.
                if not isinstance(error.__cause__, ActorAway) or time.monotonic() > ends:
                    raise
            time.sleep(AGAIN_S)


def _stay(cluster: LocalCluster, signals: StopSignals, ordered: bool) -> None:
    """Returns when it is time to leave.

    Raises:
        ClusterError: the cluster is gone.
    """
    while not signals.stop and not (ordered and _input_closed()):
        time.sleep(POLL_S)
        if (failure := cluster.failure()) is not None:
            raise ClusterError(f"the cluster is gone: {failure}")
        cluster.tend()


def _leave_cluster(start: _Start, node: Node, progress: ProgressDisplay, *, for_good: bool) -> None:
    """Ends the node's rows, and tells the router. A node that leaves for good hands its agents over first."""
    from ray.exceptions import RayError

    from ...actors.protocol.clients import RouterClient
    from ...actors.start import leave_node
    from ..ray_backend.leaving import drain_and_hand_over

    timing = start.timing

    def work() -> None:
        with suppress(NoAnswer, RayError, ValueError, TimeoutError):
            if for_good:
                handed = asyncio.run(drain_and_hand_over(start.replicas, node, timing))
                if handed.moved or handed.left:
                    progress.say(f"{handed.moved} of {handed.moved + handed.left} agents live on other nodes now")
        leave_node(start.replicas, node, timing, 0.0 if for_good else timing.node_drain_s, for_good)
        # Else the router would not know for some seconds. A router that restarts has forgotten the node anyway.
        with suppress(NoAnswer):
            RouterClient(timing).lose_node(node.name).within(timing.ask_s).wait()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(timing.node_drain_s + timing.ask_s + END_S + (timing.hand_over_s if for_good else 0.0))


def _input_closed() -> bool:
    readable, _, _ = select.select([sys.stdin.fileno()], [], [], 0.0)
    return bool(readable) and not os.read(sys.stdin.fileno(), 4096)


def invited(where: str | None, home: Home) -> Invitation:
    """Returns the invitation of `satchel join`'s argument: an invitation's text, or None or HOST:PORT for the cluster
    that this machine was in.

    Raises:
        ClusterError: the text is no invitation, or this machine has joined no cluster yet.
    """
    if where is not None and "#" in where:
        try:
            return Invitation.from_text(where)
        except ValueError as error:
            raise ClusterError(f"{where.partition('#')[0]}#… is {error}") from None
    last = remembered(home)
    if last is None:
        raise ClusterError("this machine has joined no cluster yet: `satchel invite` on a head says what to type here")
    return Invitation(where or last.door, last.fingerprint)
