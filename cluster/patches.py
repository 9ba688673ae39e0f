"""What Satchel changes in Ray, and its uses of Ray's internals. No other file under `cluster/` does either.

docs/patches.md lists the patches of all libraries. Each fits the version of Ray that pyproject.toml pins, 2.60.0.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from pathlib import Path
from typing import Any

_STAND_IN = "/bin/sh -c cat"
"""The command in place of an agent, whatever options Ray adds: it waits on its input until its raylet has ended."""
_AGENT = "--dashboard_agent_command"
_AGENT_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
_NOBODYS_PORT = "1"


def start_ray_node(*, head: str | None, register_s: float, **settings: Any) -> tuple[str, list[int]]:
    """Starts Ray's processes for a node, as `ray start` does, with three differences.

    Changes: Ray's `Node`, in a subclass, and while the raylet starts `services.start_ray_process`. No API server is
        started: it serves the dashboard and job submission, and takes four seconds and 120 MB. In place of the
        dashboard's agent, which serves metrics and job submission, the raylet gets a command that only waits: a raylet
        ends with its agent, and waits for the files with the agent's ports. The other agent stays: it makes the
        `runtime_env` of users' own tasks. A node may take longer to register than the 30 s that Ray allows.
    Why: `ray start` turns 127.0.0.1 into the machine's outward address, listens on all interfaces, always starts a
        server for Ray Client, and takes twice the time (17 s against 8 s on two cores).
    Fits: ray 2.60.0.
    Noticed by: tests/cluster/test_patches.py::test_a_node_starts_without_what_nothing_uses

    Args:
        head: the address of the cluster to join (`host:port`); None starts one.
        register_s: how long it may take to register, seconds.
        settings: further ones of Ray's `RayParams`.

    Returns:
        The address for drivers, and the ids of all processes.
    """
    from ray._private import services
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    class LeanNode(Node):
        def start_api_server(self, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
            """Starts none."""

        def start_raylet(self, *arguments: Any, **named: Any) -> None:
            """Starts the raylet without the dashboard's agent."""
            start = services.start_ray_process

            def start_alone(command: list[str], kind: str, **options: Any) -> Any:
                alone = [f"{_AGENT}={_STAND_IN}" if part.startswith(f"{_AGENT}=") else part for part in command]
                return start(alone, kind, **options)

            for port in _AGENT_PORTS:
                Path(self.get_session_dir_path(), f"{port}_{self.node_id}").write_text(_NOBODYS_PORT)
            services.start_ray_process = start_alone
            try:
                super().start_raylet(*arguments, **named)
            finally:
                services.start_ray_process = start

        def start_ray_processes(self) -> None:
            """Also waits until the node is registered."""
            super().start_ray_processes()
            ends = time.monotonic() + register_s
            while time.monotonic() < ends and not self.dead_processes():
                try:
                    services.get_node(self.gcs_address, self._node_id)
                    return
                except RuntimeError:
                    time.sleep(0.1)

    node = LeanNode(
        RayParams(
            gcs_address=head,
            gcs_server_port=0 if head is None else None,
            dashboard_host="127.0.0.1",
            dashboard_agent_listen_port=0,
            include_dashboard=False,
            # Ray annotates it as a string by mistake.
            include_log_monitor=False,  # pyright: ignore[reportArgumentType]
            no_monitor=True,
            **settings,
        ),
        head=head is None,
        shutdown_at_exit=False,
        spawn_reaper=False,
    )
    address = node.address if head is None else head
    assert address is not None
    return address, [entry.process.pid for group in node.all_processes.values() for entry in group]


def init_ray(*, temp_dir: str | None, **settings: Any) -> None:
    """Connects this process to a cluster, as `ray.init` does, through the node with the folder `temp_dir`.

    Changes: nothing. It gives `ray.init` an argument that Ray keeps for itself, `_temp_dir`.
    Why: if several nodes of a cluster run on one machine, Ray takes the head or any of them, and a process ends with
        its node.
    Fits: ray 2.60.0.
    Noticed by: tests/cluster/test_patches.py::test_a_driver_connects_through_the_node_of_its_folder

    Args:
        settings: further ones of `ray.init`.
    """
    import ray

    ray.init(_temp_dir=temp_dir, **settings)


def ray_programs() -> list[str]:
    """Returns the paths of Ray's own programs, to which other machines connect: the control store and the raylet; none
    if Ray is not installed.

    Changes: nothing. Only Ray's insides know the paths, and importing these takes a second.
    Why: they must be executable, and macOS's firewall allows connections program by program.
    Fits: ray 2.60.0.
    Noticed by: tests/cluster/test_patches.py::test_rays_programs_are_where_they_are_looked_for
    """
    ray = importlib.util.find_spec("ray")
    if ray is None or ray.origin is None:
        return []
    core = Path(ray.origin).parent / "core" / "src" / "ray"
    return [str(core / "gcs" / "gcs_server"), str(core / "raylet" / "raylet")]


def reread_ray_settings() -> None:
    """Makes an imported, uninitialized Ray see the present environment.

    Changes: Ray's modules of constants, which are executed again, and the settings and token that its core keeps.
    Why: Ray reads most of the environment while it is imported. A program may import Ray before Satchel.
    Fits: ray 2.60.0.
    Noticed by: tests/cluster/test_patches.py::test_ray_that_was_imported_before_sees_the_settings_of_the_cluster
    """
    from ray._private import auto_init_hook, ray_constants
    from ray._raylet import AuthenticationTokenLoader, Config  # pyright: ignore[reportAttributeAccessIssue]

    importlib.reload(ray_constants)
    importlib.reload(auto_init_hook)
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def control_store_client() -> Any | None:
    """Returns Ray's own client of its control store; None if this process is connected to no cluster.

    Changes: nothing. The client is one of Ray's insides.
    Why: its methods take a time limit. Ray's own functions for the store wait for ever if the head is lost. A process
        with a thread that waits in one can neither leave the cluster nor end.
    Fits: ray 2.60.0.
    Noticed by: tests/cluster/test_patches.py::test_the_control_store_has_values_and_nodes
    """
    from ray.experimental import internal_kv

    return internal_kv.internal_kv_get_gcs_client()


def rest_ray_listener() -> None:
    """Ends Ray's thread that prints the cluster's errors in this driver, once the control store has ended.

    Changes: sets the event by which Ray ends that thread when a driver disconnects; Ray clears it then.
    Why: once the control store has ended, the thread's subscriber returns at once, and the thread calls it again
        without a pause. That takes a quarter of a processor to a whole one for as long as the process lives.
    Fits: ray 2.60.0.
    Noticed by: tests/cluster/test_patches.py::test_ray_listens_no_more_for_errors_of_a_cluster_that_has_ended
    """
    from ray._private import worker

    worker.global_worker.threads_stopped.set()


def keep_ray_serve_on_this_machine() -> None:
    """Binds the port of Ray Serve's replicas for calls between deployments to loopback, in this process.

    Changes: the name `add_port_to_grpc_server` in Ray Serve's module of replicas.
    Why: the port unpickles what it receives, and would listen on all addresses. Satchel does not use it: handles call
        actors.
    Fits: ray 2.60.0.
    Noticed by: tests/cluster/test_patches.py::test_ray_serve_listens_to_this_machine_alone
    """
    from ray._common import tls_utils
    from ray.serve._private import replica

    bind = tls_utils.add_port_to_grpc_server
    setattr(replica, bind.__name__, lambda server, address: bind(server, "127.0.0.1:0"))
