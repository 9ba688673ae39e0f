"""The commands that bring machines into clusters and out again: `join`, `leave`, `up`, `down`, `install-service`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Optional

import typer

from ..cluster.config import Config, default_config, load_config
from ..cluster.errors import ConfigError
from .cli_models import HomeOption, chosen_home

AddressArgument = Annotated[
    Optional[str],  # noqa: UP045
    typer.Argument(metavar="HOST:PORT", help="The cluster's, as `satchel status` says on its head."),
]
NameOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--name", metavar="NAME", help="Of this node (else the machine's)."),
]
OwnAddressOption = Annotated[str, typer.Option("--address", metavar="ADDR", help="Of this machine, for the others.")]
TokenOption = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--token-file", metavar="FILE", help="The secret: a copy of `run/ray_token` in the head's home."),
]
WaitOption = Annotated[float, typer.Option("--wait", min=0.0, metavar="SECONDS", help="For its end, at most.")]
ConfigArgument = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Argument(metavar="CONFIG", help="A YAML file."),
]
PortOption = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--port", min=1, max=65535, help="The endpoint's port (else the config's)."),
]
ListenOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--listen", metavar="ADDR", help="The endpoint's address (else the config's); 0.0.0.0 is everyone."),
]
OrderedOption = Annotated[bool, typer.Option("--ordered", hidden=True)]


def join(
    address: AddressArgument = None,
    name: NameOption = None,
    own_address: OwnAddressOption = "",
    token: TokenOption = None,
    ordered: OrderedOption = False,
    home: HomeOption = None,
) -> None:
    """Make this machine a node of a running cluster, until Ctrl-C."""
    from ..cluster.launch import JoinOrder
    from .cli_join import invited, own_node, read_order
    from .cli_join import join as run

    where = chosen_home(home)
    if ordered:
        order = read_order()
    elif address is None or ":" not in address:
        raise ConfigError("say which cluster to join: `satchel join HOST:PORT`")
    else:
        order = JoinOrder(invited(address, token or where.token_file), own_node(name, own_address, address))
    run(order, where, ordered=ordered)


def leave(wait: WaitOption = 30.0, home: HomeOption = None) -> None:
    """Take this machine out of the cluster that it has joined: ends the `satchel join` of this home."""
    from .cli_service import leave as run

    run(chosen_home(home), wait_s=wait, say=_say)


def up(
    config: ConfigArgument = None,
    port: PortOption = None,
    listen: ListenOption = None,
    home: HomeOption = None,
) -> None:
    """Serve in the background: as `serve`, but returns once the server is ready."""
    from .cli_service import log_file, satchel_command
    from .cli_service import up as run

    where = chosen_home(home)
    chosen = with_endpoint(load_config(config) if config is not None else default_config(), port, listen)
    command = satchel_command("serve", "--home", str(where.root))
    options = {"--config": config and config.expanduser().absolute(), "--port": port, "--listen": listen}
    for option, value in options.items():
        command += [] if value is None else [option, str(value)]
    record = run(command, chosen, where, _say)
    _say(f"Ready: {record.endpoint_url}/v1")
    _say(f"The server runs in the background (process {record.pid}); its log is {log_file(where)}")
    _say("`satchel status` shows it, `satchel down` ends it.")


def down(
    now: Annotated[bool, typer.Option("--now", help="Do not let running requests finish.")] = False,
    wait: WaitOption = 120.0,
    home: HomeOption = None,
) -> None:
    """End the running server of this home in order, however it was started."""
    from .cli_service import down as run

    run(chosen_home(home), at_once=now, wait_s=wait, say=_say)


def install_service(
    config: ConfigArgument = None,
    join: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--join", metavar="HOST:PORT", help="Be a node of this cluster instead of serving a config."),
    ] = None,
    name: NameOption = None,
    own_address: OwnAddressOption = "",
    token: TokenOption = None,
    only_print: Annotated[bool, typer.Option("--print", help="Show the file and write nothing.")] = False,
    home: HomeOption = None,
) -> None:
    """Let this machine's service manager (launchd or systemd) keep a server, or a node. Starts nothing itself."""
    from .cli_service import head_service, install, node_service

    where = chosen_home(home)
    if (config is None) == (join is None):
        raise ConfigError("say what to keep: a config to serve, or `--join HOST:PORT`")
    if config is not None:
        if name is not None or token is not None or own_address:
            raise ConfigError("--name, --address and --token-file are for a node: `--join HOST:PORT`")
        load_config(config)
        service = head_service(config, where)
    else:
        if token is None or name is None or join is None:
            raise ConfigError("a node needs `--token-file` and `--name`")
        from .cli_join import read_token

        read_token(token)
        service = node_service(join, token, name, own_address, where)
    install(service, where, only_print=only_print, say=_say)


def with_endpoint(config: Config, port: int | None, listen: str | None) -> Config:
    """The config with the endpoint where the command line says."""
    endpoint = config.endpoint
    if port is not None:
        endpoint = replace(endpoint, port=port)
    if listen is not None:
        endpoint = replace(endpoint, listen=listen)
    return replace(config, endpoint=endpoint)


def _say(line: str) -> None:
    print(line, flush=True)
