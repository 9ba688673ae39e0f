"""The commands that start and stop servers and nodes: `invite`, `join`, `leave`, `up`, `down`, `install-service`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from ...cluster.config.config import load_config
from ...cluster.errors import ClusterError, ConfigError
from ...cluster.home import Home
from .models.choosing import Choice, ContextOption, KVOption, ServedNameOption, WhatArgument
from .options import (
    HomeOption,
    JsonOption,
    ListenOption,
    LogFormatOption,
    NoSelfTestOption,
    PortOption,
    chosen_home,
)
from .printing import line_printer, print_json

InvitationArgument = Annotated[
    Optional[str],  # noqa: UP045
    typer.Argument(
        metavar="INVITATION",
        help="As `satchel invite` prints it on the head; without one, join the last cluster again.",
    ),
]
NameOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--name", metavar="NAME", help="This node's name (else as before, or the machine's name)."),
]
OwnAddressOption = Annotated[
    str, typer.Option("--address", metavar="ADDR", help="The address at which the other nodes reach this machine.")
]
WaitOption = Annotated[
    float, typer.Option("--wait", min=0.0, metavar="SECONDS", help="How long to wait until it has ended.")
]
ConfigArgument = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Argument(metavar="CONFIG", help="A YAML file."),
]
OrderedOption = Annotated[bool, typer.Option("--ordered", hidden=True)]
KeptOption = Annotated[bool, typer.Option("--kept", hidden=True)]


def invite(json: JsonOption = False, home: HomeOption = None) -> None:
    """Print an invitation with which another machine can join this cluster. It is valid once, for an hour."""
    from ...cluster.connection import find_cluster, is_loopback
    from ...cluster.trust.invitations import LIFE_S
    from ...cluster.trust.invitations import invite as run

    record = find_cluster(chosen_home(home))
    if record.joined:
        raise ClusterError(
            f"{record.node} is not the head of its cluster; run this on the head, at {record.join_server}"
        )
    invitation = run(Home(Path(record.home)), record.join_server)
    if json:
        print_json({"invitation": invitation.to_text(), "valid_s": LIFE_S})
        return
    _say(f"On the other machine, once and within {LIFE_S / 60:.0f} minutes:")
    _say(f"  satchel join '{invitation.to_text()}'")
    if is_loopback(record.join_server):
        _say("Only this machine can use that; for other machines the first node in the config needs an address.")


def join(
    invitation: InvitationArgument = None,
    name: NameOption = None,
    own_address: OwnAddressOption = "",
    ordered: OrderedOption = False,
    kept: KeptOption = False,
    home: HomeOption = None,
) -> None:
    """Make this machine a node of a running cluster, until Ctrl-C. If the cluster is lost, it joins again by itself."""
    where = chosen_home(home)
    if ordered or kept:
        from .machines.join import join as run
        from .machines.join import read_order

        run(read_order(), where, kept=kept)
        return
    from .machines.stay import invited, named_node, stay

    found = invited(invitation, where)
    stay(found, named_node(name, own_address, found, where), where)


def leave(wait: WaitOption = 30.0, json: JsonOption = False, home: HomeOption = None) -> None:
    """Take this machine out of the cluster that it has joined. This ends the `satchel join` of this home."""
    from .machines.service import leave as run

    run(chosen_home(home), wait_s=wait, say=line_printer(as_json=json))
    if json:
        print_json({"left": True})


def promote(
    listen: ListenOption = None,
    force: Annotated[bool, typer.Option("--force", help="Promote this machine even if the head answers.")] = False,
    json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Make this machine the head of its cluster, after the head was lost. The other machines find it by themselves."""
    from .machines.promote import promote as run

    where, say = chosen_home(home), line_printer(as_json=json)
    config = run(where, listen=listen, force=force, say=say)
    started = start_in_background(Choice(config=config), where, say)
    say(f"To start it again: satchel up {config}; a service: satchel install-service {config}")
    if json:
        print_json({**started, "config": str(config)})
    say("The lost head may come back as a node (`satchel invite` here), and must not serve its own config again.")


def up(
    what: WhatArgument = None,
    name: ServedNameOption = None,
    port: PortOption = None,
    listen: ListenOption = None,
    kv: KVOption = None,
    context: ContextOption = None,
    no_self_test: NoSelfTestOption = False,
    log_format: LogFormatOption = None,
    json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Serve in the background. Like `serve`, but returns once the server is ready."""
    choice = Choice(what or (), None, name, kv, context, port, listen, not no_self_test, log_format)
    started = start_in_background(choice, chosen_home(home), line_printer(as_json=json))
    if json:
        print_json(started)


def start_in_background(choice: Choice, where: Home, say: Callable[[str], None]) -> dict[str, Any]:
    """Starts a server, shows its start with `say`, and says how to see and end it. Returns what `up --json` prints."""
    from .machines.service import log_file, satchel_command
    from .machines.service import up as run
    from .serve import for_clients

    chosen = choice.read()
    command = satchel_command("serve", "--home", str(where.root), *choice.arguments())
    record = run(command, chosen, where, say)
    url = for_clients(record.endpoint_url or "", chosen.endpoint)[0]
    say(f"Ready: {url}/v1")
    say(f"The server runs in the background (process {record.pid}); its log is {log_file(where)}")
    say("`satchel status` shows it, `satchel down` ends it.")
    models = [model.name for model in chosen.models]
    return {"url": url, "pid": record.pid, "log": str(log_file(where)), "models": models}


def down(
    now: Annotated[bool, typer.Option("--now", help="Do not wait until running requests finish.")] = False,
    wait: WaitOption = 120.0,
    json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Stop the running server of this home in order, however it was started."""
    from .machines.service import down as run

    run(chosen_home(home), at_once=now, wait_s=wait, say=line_printer(as_json=json))
    if json:
        print_json({"stopped": True})


def install_service(
    config: ConfigArgument = None,
    join: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--join", metavar="INVITATION", help="Run a node of a cluster instead of serving a config."),
    ] = None,
    name: NameOption = None,
    own_address: OwnAddressOption = "",
    only_print: Annotated[bool, typer.Option("--print", help="Print the service file instead of writing it.")] = False,
    json: JsonOption = False,
    daemon: Annotated[
        bool, typer.Option("--daemon", help="macOS: start it at boot, without a login; an administrator installs it.")
    ] = False,
    home: HomeOption = None,
) -> None:
    """Write a service (launchd or systemd) that keeps a server or a node running. It is not started yet."""
    from .machines.service import head_service, install, node_service

    where = chosen_home(home)
    if (config is None) == (join is None):
        raise ConfigError("give what the service runs: a config to serve, or `--join INVITATION`")
    if config is not None:
        if name is not None or own_address:
            raise ConfigError("--name and --address are only for a node (`--join INVITATION`)")
        load_config(config)
        service = head_service(config, where)
    else:
        if name is None:
            raise ConfigError("a node needs `--name`")
        from .machines.join import let_in
        from .machines.stay import invited, named_node

        invitation = invited(join, where)
        node = named_node(name, own_address, invitation, where)
        if invitation.secret and not only_print:
            # The service joins by its certificate.
            let_in(where, node, invitation)
        service = node_service(invitation.join_server, name, own_address, where)
    said: list[str] = []
    install(service, where, daemon=daemon, only_print=only_print, say=said.append if json else _say)
    if json:
        print_json({"service": service.name, "command": service.command, "said": said})


def _say(line: str) -> None:
    print(line, flush=True)
