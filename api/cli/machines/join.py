"""The process of a node: makes this machine a node of a cluster, until a signal comes, the cluster is lost, or the
process that started it closes its input: the head, or the `satchel join` that supervises it (`stay.py`)."""

from __future__ import annotations

import asyncio
import logging
import os
import select
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ....actors.replica.ahead import preparing
from ....cluster.bring_up.launch import READY, JoinOrder
from ....cluster.bring_up.runtime import LocalCluster
from ....cluster.config.config import Config, Logs
from ....cluster.config.nodes import Node
from ....cluster.config.timing import USUAL
from ....cluster.errors import ActorAway, ClusterError, ModelLoadError, NoAnswer, NodeRemoved, NotRunning, SatchelError
from ....cluster.home import Home, HomeLock, prepare_home
from ....cluster.telemetry.logs import adopt_ray_loggers, begin_logs
from ....cluster.trust.admission import Admission, ask_news, enter, knock
from ....cluster.trust.invitations import Invitation
from ....cluster.trust.takeover_state import (
    digest,
    forget_takeover_state,
    keep_takeover_state,
    kept_takeover_state,
    renounce_takeover_state,
)
from ..progress import ProgressDisplay, print_error
from ..serve import POLL_S, StopSignals, as_sentence, leave

logger = logging.getLogger(__name__)

ORDER_S = 30.0
ORDER_BYTES_MAX = 65_536
FORMER_S = 40.0
"""How long a restarted node waits until Ray knows that its previous process has ended, which takes 15 s."""

RETURN_S = 30.0
"""How long a returning node's replicas may take until they can be called."""

AGAIN_S = 0.5
NEWS_S = 3.0
REFUSALS_MAX = 2
"""If the head's join port refuses connections this many times in succession, while its machine answers, the head's
server has ended."""

SILENT_S = 120.0
"""Seconds for which a silent head explains that Ray has given the cluster up; Ray does so after 15 to 60 s."""

REMOVED = 4
"""The exit code of a node that its head has removed."""

END_S = 2.0
"""Seconds for ending everything that runs on a node that leaves."""


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


def let_in(home: Home, node: Node, invitation: Invitation) -> Admission:
    """As `enter`, but only if no process runs on the home, because its cluster credentials must not be replaced.

    Raises:
        HomeInUse: a process runs on the home.
    """
    prepare_home(home)
    lock = HomeLock(home)
    lock.acquire()
    lock.release()
    return enter(home, node, invitation)


def join(order: JoinOrder, home: Home, *, kept: bool) -> None:
    """Joins, prints `READY`, serves, leaves, and ends the process: with exit code 0 after an orderly end, `REMOVED` if
    the head has removed this machine, else 1 and a sentence.

    Args:
        kept: whether `satchel join` supervises this process. Then a signal means to leave for good.
    """
    prepare_home(home)
    begin_logs("node", Logs(), home, terminal=True)
    signals = StopSignals()
    signals.install()
    output = sys.stdout
    if kept:
        # Libraries' output goes to the log, so that it does not mix with the messages.
        sys.stdout = sys.stderr
    progress = ProgressDisplay(output)
    # The models are not known yet.
    cluster = LocalCluster(home, node=order.node, ahead=preparing(["auto"]))
    start = _Start(order, cluster, progress)
    try:
        start.start()
        while start.is_alive() and not signals.stop and not _input_closed():
            start.join(POLL_S)
            if start.connected.is_set() and not start.go_on.is_set():
                signals.install()
                start.go_on.set()
        progress.close()
        if start.is_alive():
            start.withdraw(for_good=kept and signals.stop)
            cluster.stop(abandon=True)
            leave(0)
        if start.error is not None:
            # Nothing must wait for a node that never comes. A node that was in the cluster before tries again.
            start.withdraw(for_good=kept and bool(order.invitation.secret))
            raise as_sentence(start.error, home)
        signals.install()
        progress.say(READY)
        follower = Follower(home, order, cluster.record.address)
        follower.start()
        _stay(cluster, signals, follower)
        progress.say("Leaving")
        for_good = follower.removed is not None or (kept and signals.stop)
        in_order = _leave_cluster(start, order.node, progress, for_good=for_good)
        follower.end()
        if follower.removed is not None:
            raise follower.removed
        if for_good and in_order:
            renounce_takeover_state(home)
    except SatchelError as error:
        cluster.stop()
        if isinstance(error, NodeRemoved):
            forget_takeover_state(home)
            home.token_file.unlink(missing_ok=True)
        # The supervising process reads it with the progress, separate from libraries' output.
        print_error(error, output if kept else None)
        leave(REMOVED if isinstance(error, NodeRemoved) else 1)
    cluster.stop()
    leave(0)


def _import_actors() -> None:
    """Imports what starts the node's actors."""
    from ....actors import start  # noqa: F401


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
        """Withdraws from the cluster during a join, so that nothing waits for a node that never comes."""
        if for_good and self.begun.is_set():
            _leave_cluster(self, self._order.node, self._progress, for_good=True)

    def run(self) -> None:
        try:
            self._join()
        except BaseException as error:
            self.error = error

    def _join(self) -> None:
        self._progress.report(f"Joining {self._order.invitation.join_server}", None)
        admission = let_in(self._cluster.home, self._order.node, self._order.invitation)
        self._cluster.start(admission, meanwhile=_import_actors)
        adopt_ray_loggers()
        self.connected.set()
        self.go_on.wait()
        self._await_name()
        from ....actors.start import compare_models, start_node
        from ...ray_backend.dispatch import cluster_config

        config: Config = cluster_config()
        self._cluster.go_by(config)
        self.timing = config.timing
        begin_logs("node", config.logs, self._cluster.home, terminal=True)
        self.begun.set()
        self.replicas = start_node(config, self._order.node)
        self._await_replicas(config)
        self._progress.say(*asyncio.run(compare_models(self.replicas, self.timing)))
        self._cluster.note_processes()

    def _await_name(self) -> None:
        """Waits until no other node has this one's name. After a crash the previous process still has it for a while.

        Raises:
            ClusterError: another node has it.
        """
        import ray

        from ....actors.protocol import control_store

        node, own = self._order.node, ray.get_runtime_context().get_node_id()
        ends = time.monotonic() + FORMER_S
        while True:
            alive = [each for each in control_store.ray_nodes() if node.resource in each.resources]
            others = [each.address for each in alive if each.node_id != own]
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
        from ....actors.start import wait_until_ready

        ends = time.monotonic() + RETURN_S
        while True:
            try:
                asyncio.run(wait_until_ready(self.replicas, config.timeouts.model_load_s, self._progress.report))
                return
            except ModelLoadError as error:
                # Replicas that return with the node cannot be called until they have started.
                if not isinstance(error.__cause__, ActorAway) or time.monotonic() > ends:
                    raise
            time.sleep(AGAIN_S)


class Follower(threading.Thread):
    """Polls the head's join server while this machine is a node, and stores the takeover state.

    Attributes:
        removed: set once the head has removed this machine.
        over: a sentence that says why the cluster has ended; "" while it may still run.
        silent: whether the head did not answer within the last `SILENT_S`.
    """

    def __init__(self, home: Home, order: JoinOrder, ray: str) -> None:
        super().__init__(name="news", daemon=True)
        self.removed: NodeRemoved | None = None
        self.over = ""
        self._silent_at: float | None = None
        self._home, self._name, self._ray = home, order.node.name, ray
        self._invitation = replace(order.invitation, secret="")
        self._refusals = 0
        self._storing = threading.Lock()
        self._ended = False

    @property
    def silent(self) -> bool:
        return self._silent_at is not None and time.monotonic() - self._silent_at < SILENT_S

    def run(self) -> None:
        while self.removed is None and not self.over and not self._ended:
            self.ask()
            time.sleep(NEWS_S)

    def end(self) -> None:
        """Stops storing."""
        with self._storing:
            self._ended = True

    def ask(self) -> None:
        """Polls once."""
        known = kept_takeover_state(self._home)
        try:
            news = ask_news(self._home, self._name, self._invitation, digest(known[1]) if known else "")
            with self._storing:
                if news.takeover_state and not self._ended:
                    keep_takeover_state(self._home, news.takeover_state)
        except NodeRemoved as error:
            self.removed = error
            return
        except NotRunning:
            self._silent_at = time.monotonic()
            self._refusals = self._refusals + 1 if knock(self._invitation.join_server) == "refused" else 0
            if self._refusals >= REFUSALS_MAX:
                self.over = f"the head at {self._invitation.join_server} has ended"
            return
        except ClusterError as error:
            logger.warning("no news of the cluster: %s", error.message)
            return
        self._refusals = 0
        if news.ray and news.ray != self._ray:
            self.over = f"the head at {self._invitation.join_server} has started again"


def _stay(cluster: LocalCluster, signals: StopSignals, follower: Follower) -> None:
    """Returns when it is time to leave.

    Raises:
        ClusterError: the cluster is gone.
    """
    while not signals.stop and not _input_closed() and follower.removed is None:
        time.sleep(POLL_S)
        if follower.over:
            raise ClusterError(follower.over)
        if (failure := cluster.failure()) is not None:
            raise ClusterError("the head did not answer for too long" if follower.silent else failure)
        cluster.tend()


def _leave_cluster(start: _Start, node: Node, progress: ProgressDisplay, *, for_good: bool) -> bool:
    """Ends the node's sequences, and tells the router. A node that leaves for good hands its agents over first. Returns
    whether the router was told."""
    from ray.exceptions import RayError

    from ....actors.protocol.clients import RouterClient
    from ....actors.start import leave_node
    from ...ray_backend.leaving import drain_and_hand_over

    timing, told = start.timing, threading.Event()

    def work() -> None:
        with suppress(NoAnswer, RayError, ValueError, TimeoutError):
            if for_good:
                handed = asyncio.run(drain_and_hand_over(start.replicas, node, timing))
                if handed.moved or handed.left:
                    progress.say(f"{handed.moved} of {handed.moved + handed.left} agents live on other nodes now")
        leave_node(start.replicas, node, timing, 0.0 if for_good else timing.node_drain_s, for_good)
        # Otherwise the router would notice only after some seconds. A restarted router does not know the node anyway.
        with suppress(NoAnswer):
            RouterClient(timing).lose_node(node.name).within(timing.ask_s).wait()
            told.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(timing.node_drain_s + timing.ask_s + END_S + (timing.hand_over_s if for_good else 0.0))
    return told.is_set()


def _input_closed() -> bool:
    readable, _, _ = select.select([sys.stdin.fileno()], [], [], 0.0)
    return bool(readable) and not os.read(sys.stdin.fileno(), 4096)
