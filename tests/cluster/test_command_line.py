from __future__ import annotations

import ipaddress
import json
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from satchel.api.cli.main import main
from satchel.api.cli.serve import as_sentence
from satchel.cluster.bring_up.doctor import (
    check_home,
    check_keys,
    check_last_start,
    check_port,
    check_version,
    examine,
)
from satchel.cluster.bring_up.ports import free_port
from satchel.cluster.config.config import Config, default_config, parse_config
from satchel.cluster.config.nodes import Node
from satchel.cluster.connection import satchel_version
from satchel.cluster.home import Home, prepare_home
from satchel.cluster.keys import create_key, revoke_key
from satchel.cluster.trust.invitations import Invitation, remember

CONFIGS = Path(__file__).parents[2] / "configs"


def satchel(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "satchel.api.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=cwd, check=False)


def test_version_and_help(tmp_path: Path) -> None:
    assert satchel("--version", cwd=tmp_path).stdout == f"satchel {satchel_version()}\n"
    help_text = satchel("--help", cwd=tmp_path).stdout
    commands = ("serve", "status", "models", "chat", "probe", "doctor", "agents", "explain", "up", "down", "leave")
    commands += ("nodes", "promote")
    assert all(command in help_text for command in commands)


def test_configurations_that_ship_are_listed_and_printed(tmp_path: Path) -> None:
    listed = satchel("configs", cwd=tmp_path).stdout.splitlines()
    names = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
    assert [line.split()[0] for line in listed] == [*names, "grafana"]
    assert listed[-1].endswith("for Grafana over Prometheus")
    assert satchel("configs", "grafana", cwd=tmp_path).stdout == (CONFIGS / "grafana.json").read_text()
    assert "two-replicas     One machine, two replicas of one model" in listed
    assert satchel("configs", "three-macs", cwd=tmp_path).stdout == (CONFIGS / "three-macs.yaml").read_text()
    unknown = satchel("configs", "four-macs", cwd=tmp_path)
    assert unknown.returncode == 1 and not unknown.stdout
    assert unknown.stderr.startswith("satchel: no configuration 'four-macs' ships with Satchel; there are agents, ")


@pytest.mark.parametrize(
    "command",
    [
        ["status"],
        ["models"],
        ["models", "list"],
        ["models", "load", "owner/name"],
        ["models", "unload", "name"],
        ["models", "remove", "name"],
        ["ray-env"],
        ["chat", "hello"],
        ["agents"],
        ["agents", "list"],
        ["agents", "show", "ann"],
        ["agents", "move", "ann", "mac1"],
        ["agents", "fork", "ann", "bob"],
        ["agents", "forget", "ann"],
        ["explain", "r1"],
        ["nodes"],
        ["nodes", "list"],
        ["nodes", "remove", "mac1"],
    ],
)
def test_without_a_server_there_is_a_sentence(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["satchel", *command, "--home", str(tmp_path / "home")])
    with pytest.raises(SystemExit) as left:
        main()
    said = capsys.readouterr()
    assert left.value.code == 1 and said.out == ""
    assert said.err == f"satchel: no server runs on {tmp_path}/home; start one with `satchel serve`\n"


def test_a_wrong_command_line_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in ("serve --port 0", "dance", "models load owner/name --dtype int8", "models unload"):
        monkeypatch.setattr(sys, "argv", ["satchel", *arguments.split()])
        with pytest.raises(SystemExit) as left:
            main()
        assert left.value.code == 2, arguments


def test_options_of_the_group_reach_its_commands(tmp_path: Path) -> None:
    result = satchel("models", "--home", str(tmp_path / "home"), "list", cwd=tmp_path)
    assert result.stderr.startswith(f"satchel: no server runs on {tmp_path}/home")


def test_a_wrong_config_names_its_place(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("models: [{name: a, source: b, replicas: many}]")
    result = satchel("serve", "--config", "config.yaml", cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr.startswith("satchel: config.yaml: models[0].replicas: ")
    assert "Traceback" not in result.stderr


def imported(modules: str, looked_for: set[str]) -> set[str]:
    """Returns which packages a new Python has imported once it has imported some modules."""
    program = f"import sys, {modules}\nprint(*{looked_for!r} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return set(result.stdout.split())


def test_the_command_line_starts_quickly() -> None:
    """`satchel status` must not wait for Ray or MLX to be imported."""
    modules = ("main", "views", "serve", "talk.chat", "completing", "models.served", "progress", "agents")
    modules += ("machines.service",)
    commands = ", ".join(f"satchel.api.cli.{each}" for each in modules)
    assert imported(commands, {"ray", "mlx", "transformers", "mlx_lm"}) == set()


def test_what_starts_a_cluster_computes_nothing() -> None:
    """MLX for CUDA takes seconds to import, and hundreds of megabytes."""
    assert imported("satchel.api.serve", {"mlx", "transformers", "mlx_lm", "mlx_vlm"}) == set()


def test_the_doctor_finds_this_machine_fit(tmp_path: Path) -> None:
    result = satchel("doctor", "--json", "--home", str(tmp_path), "--port", str(free_port()), cwd=tmp_path)
    checks = {check["name"]: check for check in json.loads(result.stdout)}
    assert result.returncode == 0, checks
    assert {"python", "ray", "mlx", "mlx-lm", "mlx-vlm", "mlx device", "disk", "memory", "port"} <= checks.keys()
    assert all(check["found"] for check in checks.values())
    assert all(check["mend"] for check in checks.values() if check["result"] != "ok")


def test_the_doctor_says_how_to_mend(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    check = check_home(Home(tmp_path))
    assert check.result == "warn" and check.mend == f"chmod 700 {tmp_path}"
    check = check_version("no-such-package")
    assert check.result == "fail" and check.found == "not installed"


def test_the_doctor_refuses_what_serve_refuses(tmp_path: Path) -> None:
    """Before Ray starts: an endpoint that strangers could use, another machine's address, a missing folder."""
    config = parse_config(
        {
            "models": [
                {"name": "m", "source": str(tmp_path / "none")},
                {"name": "n", "source": "embedded:recall", "adapters": {"a": str(tmp_path), "b": "owner/name"}},
                {"name": "o", "source": "embedded:recall", "drafts": {"model": str(tmp_path / "none")}},
                {"name": "p", "source": "embedded:recall", "drafts": {"model": "n"}},
            ],
            "nodes": [{"name": "mac0", "address": "192.0.2.1"}],
            "endpoint": {"listen": "0.0.0.0", "port": free_port()},
        }
    )
    home = Home(tmp_path / "home")
    checks = examine(config, home)
    failed = {check.name for check in checks if check.result == "fail"}
    assert failed == {"keys", "address", "source of m", "adapter a of n"}
    # Without its drafting model a model is served all the same.
    results = {check.name: check.result for check in checks}
    assert (results["drafting model of o"], results["drafting model of p"]) == ("warn", "ok")
    create_key(home, "ann")
    assert check_keys(config.endpoint, home).result == "ok"
    revoke_key(home, "ann")
    assert check_keys(config.endpoint, home).result == "fail"
    home.keys_file.write_text("damaged")
    assert "keys remove --all" in check_keys(config.endpoint, home).mend


@pytest.mark.parametrize("joined", [False, True])
def test_the_doctor_asks_of_a_node_nothing_that_only_the_server_needs(tmp_path: Path, joined: bool) -> None:
    """With the config of the head, whose addresses, keys and certificate are not this machine's."""
    nodes = [{"name": "mac0", "address": "203.0.113.1"}, {"name": "mac1", "address": "203.0.113.2", "ssh": "mac1"}]
    own = [each.address for link in psutil.net_if_addrs().values() for each in link if each.family == socket.AF_INET]
    ours = [address for address in own if not ipaddress.ip_address(address).is_loopback]
    if not joined and not ours:
        pytest.skip("this machine has no network")
    here = {"name": "mac2", "address": [*ours, ""][0], "ssh": "mac2"}
    tls = {"certificate": str(tmp_path / "none.pem"), "key": str(tmp_path / "none.key")}
    config = parse_config(
        {
            "models": [{"name": "n", "source": "embedded:recall"}],
            "nodes": nodes if joined else [*nodes, here],
            "endpoint": {"listen": "203.0.113.1", "port": free_port(), "tls": tls},
        }
    )
    home = Home(tmp_path / "home")
    prepare_home(home)
    if joined:
        assert {"address", "port", "keys", "certificate"} <= failing(config, home), "nothing says that it is no head"
        node = Node(name="mac2", address="127.0.0.1")
        remember(home, Invitation("203.0.113.1:6380", "0" * 64), node)
    assert failing(config, home) == set()
    (found,) = [check.found for check in examine(config, home) if check.name == "address"]
    assert found == "this machine is mac2, and the server runs on mac0 (203.0.113.1)"


def failing(config: Config, home: Home) -> set[str]:
    return {check.name for check in examine(config, home) if check.result == "fail"}


def test_the_doctor_tells_of_a_start_that_failed(tmp_path: Path) -> None:
    home = Home(tmp_path)
    assert check_last_start(home, 0.0).result == "ok"
    prepare_home(home)
    log = home.run / "server.log"
    log.write_text("Starting Ray\nsatchel: the endpoint is gone: Ray has died\n")
    assert check_last_start(home, log.stat().st_mtime).found.endswith("the endpoint is gone: Ray has died")
    log.write_text("Stopped\n")
    assert check_last_start(home, log.stat().st_mtime).result == "ok"
    as_sentence(RuntimeError("no such device"), home)
    at_s = (home.run / "serve.log").stat().st_mtime
    check = check_last_start(home, at_s + 60)
    assert check.result == "warn" and check.found.endswith("RuntimeError: no such device")
    assert check_last_start(home, at_s + 2 * 86400).result == "ok"


def test_what_the_package_offers_is_listed() -> None:
    import satchel.api

    assert {"Agent", "Cluster", "Reply", "connect"} <= set(dir(satchel.api))


def test_the_doctor_sees_a_busy_port(tmp_path: Path) -> None:
    from dataclasses import replace

    with socket.create_server(("127.0.0.1", 0)) as server:
        config = default_config()
        config = replace(config, endpoint=replace(config.endpoint, port=server.getsockname()[1]))
        check = check_port(config, Home(tmp_path))
        assert check.result == "fail" and "in use" in check.found and "--port" in check.mend
        assert any(one.result == "fail" for one in examine(config, Home(tmp_path)))
