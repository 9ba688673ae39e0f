"""`satchel serve`: starts the endpoint of a config, runs it, and shuts everything down.

The main thread only waits: for the start-up, which has its own thread, for a signal, and for a failure of the cluster.
So it reacts to a signal at once, whatever Ray is doing. Ray installs its own handlers, which end the process on
SIGTERM; they are replaced as soon as they are installed.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from types import FrameType, MappingProxyType
from typing import NoReturn, Protocol

from ...actors.model_files.image_folders import has_image_layout
from ...actors.model_files.source import found_here
from ...actors.model_files.speech_folders import speech_folder
from ...actors.replica.ahead import preparing
from ...cluster.bring_up.launch import Launcher, unresolved
from ...cluster.bring_up.ports import check_endpoint, check_port_free
from ...cluster.bring_up.runtime import LocalCluster
from ...cluster.config.config import Config, Endpoint
from ...cluster.devices.cards import found_cards
from ...cluster.devices.devices import with_devices
from ...cluster.errors import ClusterError, HomeInUse, SatchelError
from ...cluster.home import Home, prepare_home, write_private
from ...cluster.keys import owner_key, write_owner_key
from ...cluster.node_keeper import find_keeper
from ...cluster.telemetry.logs import adopt_ray_loggers, begin_logs
from ...cluster.trust.admission import led_elsewhere
from ...cluster.trust.endpoint_certificate import read_certificate
from ...cluster.trust.invitations import invite
from ...cluster.trust.takeover_state import takeover_state_of
from .endpoint import ToldEndpoint, tell_nodes
from .progress import ProgressDisplay, print_error

POLL_S = 0.1
NODES_WAIT_S = 120.0
"""How long to wait for the other machines before the endpoint is announced; they may still join later."""

_READ_S = 3.0
"""How long a stopping server lets clients read the rest of their answers."""

_SAME_SIGNAL_S = 0.4
"""Seconds within which two signals count as one: under `make` Ctrl-C arrives twice, from the terminal and from make."""


class RunningDeployment(Protocol):
    """The result of `satchel.api.serve.deploy`."""

    url: str
    models: list[str]

    def drain(self, timeout_s: float) -> None: ...

    def stop(self, timeout_s: float) -> None: ...


class StopSignals:
    """Counts SIGINT, SIGTERM and SIGHUP: the first asks for a graceful shutdown, a later one for an immediate end."""

    def __init__(self) -> None:
        self._first_at: float | None = None
        self._again = False

    def install(self) -> None:
        """Installs the handlers; main thread only. A SIGHUP that is ignored (`nohup`) stays ignored."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._arrived)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self._arrived)

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first_at is None:
            self._first_at = now
        elif now - self._first_at > _SAME_SIGNAL_S:
            self._again = True

    @property
    def stop(self) -> bool:
        return self._first_at is not None

    @property
    def at_once(self) -> bool:
        return self._again


class StartUp(threading.Thread):
    """Starts everything. Sets `connected` once Ray runs, and `deployment` or `error` at the end.

    Once connected, it waits for `go_on`, so that the server's signal handlers, not Ray's, are installed while models
    load.
    """

    def __init__(self, config: Config, home: Home, cluster: LocalCluster, progress: ProgressDisplay) -> None:
        super().__init__(name="start-up", daemon=True)
        self._config = config
        self._home = home
        self._cluster = cluster
        self._progress = progress
        self.connected = threading.Event()
        self.go_on = threading.Event()
        self.deployment: RunningDeployment | None = None
        self.launcher: Launcher | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._bring_up()
        except BaseException as error:
            self.error = error

    def _bring_up(self) -> None:
        started = time.monotonic()
        self._progress.report("Starting Ray", None)
        record = self._cluster.start(meanwhile=_import_deploy)
        adopt_ray_loggers()
        self.connected.set()
        self.go_on.wait()
        self._progress.say(f"Ray started in {time.monotonic() - started:.0f} s; its logs are in {record.log_dir}")
        from ...actors.start import located as located_model
        from ..serve import deploy

        machines = self._config.machines
        if len(machines) > 1:
            self.launcher = Launcher(
                machines[1:],
                self._home,
                lambda: invite(self._home, record.join_server),
                self._progress.say,
                self._config.timing.node_leave_s,
            )
        # Relative folders of models are resolved in the folder where this server was started; other machines get
        # absolute paths.
        located = replace(self._config, models=tuple(map(located_model, self._config.models)))
        self._cluster.lead_with(takeover_state_of(self._home, located))
        write_private(self._home.served_config_file, json.dumps(asdict(located), indent=2, default=str) + "\n")
        deployment = deploy(self._config, report=self._progress.report)
        if self.launcher is not None:
            self._progress.report("Waiting for the other nodes", None)
            for late in self.launcher.wait(NODES_WAIT_S):
                self._progress.say(f"Node {late}")
        shown = None if self._config.endpoint.tls is None else str(self._home.shown_certificate_file)
        self._cluster.publish_endpoint(deployment.url, shown)
        tell_nodes(_told(self._config, self._home))
        self._cluster.note_processes()
        self.deployment = deployment


def _import_deploy() -> None:
    """Imports what starts the actors and the endpoint. It imports Ray, so it must not be imported before the home is
    known."""
    from .. import serve  # noqa: F401


def _told(config: Config, home: Home) -> ToldEndpoint:
    """Returns where other machines find the endpoint, and what they need to use it."""
    endpoint, head = config.endpoint, config.machines[0]
    certificate = "" if endpoint.tls is None else read_certificate(endpoint.tls.certificate).pem
    return ToldEndpoint(endpoint.url(everywhere=head.address), owner_key(home), certificate, head.name)


def serve(config: Config, home: Home) -> None:
    """Serves until a signal comes, then ends the process: with exit code 0 after a graceful shutdown, and with 1 and a
    sentence on standard error if the home is in use, a model does not load or Ray died. In both cases no process is
    left.

    Raises:
        PortInUse: the endpoint's port is taken. Nothing was started.
        ConfigError: `devices` does not fit this machine's cards.
        ClusterError: the home, the address or the certificate cannot be used, or other machines could use the endpoint
            without a key.
    """
    if config.devices is not None:
        config = with_devices(config, found_cards())
    check_port_free(config.endpoint.listen, config.endpoint.port)
    prepare_home(home)
    if (keeper := find_keeper(home)) is not None:
        raise HomeInUse(
            f"{home.root} is that of {keeper.name}, a node of {keeper.join_server}; `satchel leave` ends that"
        )
    if (head := led_elsewhere(home)) is not None:
        raise ClusterError(
            f"another machine leads this cluster now, at {head.join_server}: `satchel join '{head.to_text()}'` makes "
            "this one a node of it"
        )
    advice = check_endpoint(config.endpoint, home)
    begin_logs("server", config.logs, home, terminal=True)
    write_owner_key(home)
    signals = StopSignals()
    signals.install()
    progress = ProgressDisplay(sys.stdout)
    # Ray's output about nodes and processes goes to its own log, so that it does not mix with the messages.
    write_private(home.log_file, "")
    sys.stdout = home.log_file.open("a", buffering=1, encoding="utf-8")
    progress.say(f"Home is {home.root}", *(f"Warning: {each.found}; {each.mend}" for each in advice))
    progress.say(*(f"Warning: {each}; it is retried" for each in unresolved(config.machines)))
    cluster = LocalCluster(
        home,
        node=config.machines[0],
        port=config.control_port,
        silent_s=config.timeouts.silent_s,
        heartbeat_s=config.timing.heartbeat_s,
        ahead=preparing(model.dtype for model in config.models),
    )
    start_up = StartUp(config, home, cluster, progress)
    try:
        deployment = _start(start_up, home, cluster, signals, progress)
        if deployment is not None:
            _run(deployment, config, cluster, signals, progress)
            _shut_down(deployment, config, signals, progress)
    except SatchelError as error:
        _stop(start_up, cluster)
        print_error(error)
        leave(1)
    _stop(start_up, cluster)
    progress.say("Stopped")
    leave(0)


def _stop(start_up: StartUp, cluster: LocalCluster) -> None:
    if start_up.launcher is not None:
        start_up.launcher.stop()
    cluster.stop()


def _start(
    start_up: StartUp, home: Home, cluster: LocalCluster, signals: StopSignals, progress: ProgressDisplay
) -> RunningDeployment | None:
    """Starts Ray and the models. None if a signal came first.

    Raises:
        SatchelError: something did not start.
    """
    start_up.start()
    while start_up.is_alive() and not signals.stop:
        start_up.join(POLL_S)
        if start_up.connected.is_set() and not start_up.go_on.is_set():
            signals.install()
            start_up.go_on.set()
    progress.close()
    if signals.stop:
        progress.say("Stopping while starting")
        if start_up.launcher is not None:
            start_up.launcher.stop()
        cluster.stop(abandon=True)
        return None
    if start_up.deployment is None:
        raise as_sentence(start_up.error, home)
    return start_up.deployment


def _run(
    deployment: RunningDeployment,
    config: Config,
    cluster: LocalCluster,
    signals: StopSignals,
    progress: ProgressDisplay,
) -> None:
    """Returns when a signal comes.

    Raises:
        SatchelError: the cluster died.
    """
    # Installed again, because Ray's core has installed its own handlers, which print stack traces.
    signals.install()
    _announce(deployment, config, progress)
    while not signals.stop:
        time.sleep(POLL_S)
        failure = cluster.failure()
        if failure is not None and not signals.stop:
            raise SatchelError(f"the endpoint is gone: {failure}")
        cluster.tend()


_JSON_HEADER = "  {curl} -H 'Content-Type: application/json' \\"
_TRIED = MappingProxyType(
    {
        "": (
            "chat/completions",
            [_JSON_HEADER, """    -d '{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello"}}]}}'"""],
        ),
        "images": (
            "images/generations",
            [_JSON_HEADER, """    -d '{{"model": "{name}", "prompt": "a red cube", "size": "512x512"}}'"""],
        ),
        "tts": (
            "audio/speech",
            [_JSON_HEADER, """    -d '{{"model": "{name}", "input": "Hello"}}' -o hello.wav"""],
        ),
        "stt": ("audio/transcriptions", ["  {curl} -F model={name} -F file=@speech.wav"]),
    }
)
"""How a model of a kind is tried: the route, and the lines of a command."""


def _announce(deployment: RunningDeployment, config: Config, progress: ProgressDisplay) -> None:
    url, trusting = for_clients(deployment.url, config.endpoint)
    kinds = {model.name: _kind(model.source) for model in config.models}
    first = next((name for name, kind in kinds.items() if not kind), deployment.models[0])
    route, rest = _TRIED[kinds.get(first, "")]
    tried = [line.format(curl=f"curl {trusting}{url}/v1/{route}", name=first) for line in rest]
    progress.say(f"\nReady: {url}/v1", f"Models: {', '.join(deployment.models)}", "Try it:", *tried)
    # The log of a background server leaves this out.
    if sys.stdout.isatty():
        progress.say("Ctrl-C stops.")


def _kind(source: str) -> str:
    """Returns `images`, `stt` or `tts` if a model's folder is on this machine and is that of a model of images or of
    speech; else ""."""
    try:
        folder = found_here(source)
    except SatchelError:
        return ""
    if folder is None or has_image_layout(folder):
        return "images" if folder is not None else ""
    speech = speech_folder(folder)
    return speech.kind if speech is not None else ""


def for_clients(url: str, endpoint: Endpoint) -> tuple[str, str]:
    """Returns the URL by which clients reach the endpoint at `url`, and curl's option to trust it ("" for none)."""
    url = url.rstrip("/")
    if endpoint.tls is None:
        return url, ""
    found = read_certificate(endpoint.tls.certificate)
    return found.reached_at(url), f"--cacert {shlex.quote(found.path)} " if found.is_self_signed else ""


def _shut_down(deployment: RunningDeployment, config: Config, signals: StopSignals, progress: ProgressDisplay) -> None:
    drain_s = config.timeouts.drain_s
    progress.say(f"Finishing running requests, for at most {drain_s:g} s; once more Ctrl-C stops at once")
    _bounded(lambda: deployment.drain(drain_s), drain_s + 0.5, signals, progress)
    _bounded(lambda: deployment.stop(_READ_S), _READ_S + 2.5, signals, progress)


def _bounded(work: Callable[[], None], timeout_s: float, signals: StopSignals, progress: ProgressDisplay) -> None:
    """Runs `work` in a thread, and waits until it ends, the time is up, or a second signal comes."""
    failures: list[Exception] = []

    def run() -> None:
        try:
            work()
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    deadline = time.monotonic() + timeout_s
    if not signals.at_once:
        thread.start()
        while thread.is_alive() and time.monotonic() < deadline and not signals.at_once:
            thread.join(0.05)
    if failures:
        progress.say(f"Not stopped in order: {failures[0]}")


def as_sentence(error: BaseException | None, home: Home) -> SatchelError:
    """Returns the error to show for a failed start-up. If the error is unexpected, its traceback goes into a file."""
    if isinstance(error, SatchelError):
        return error
    log = home.run / "serve.log"
    write_private(log, "".join(traceback.format_exception(error)))
    return SatchelError(f"the server could not start: {type(error).__name__}: {error} (more in {log})")


def leave(code: int) -> NoReturn:
    """Ends the process now. Ray's own exit handlers would wait for a cluster that has ended."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue
    os._exit(code)
