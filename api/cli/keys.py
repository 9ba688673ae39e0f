"""`satchel keys`: make, list and revoke the endpoint's keys. It works on the home, whether a server runs or not."""

from __future__ import annotations

import json as json_text
from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any, Optional

import typer

from ...cluster.audit import Audit
from ...cluster.errors import InvalidRequest
from ...cluster.keys import Key, create_key, read_keys, remove_keys, revoke_key
from .options import HomeOption, JsonOption, chosen_home

app = typer.Typer(help="Make, list, revoke and remove the endpoint's keys. Each is a tenant.", no_args_is_help=True)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The tenant.")]


def _limit(flag: str, metavar: str, text: str) -> Any:
    return typer.Option(flag, metavar=metavar, help=text)


@app.command()
def create(
    name: NameArgument,
    admin: Annotated[bool, typer.Option("--admin", help="The key may also see the cluster and move agents.")] = False,
    requests: Annotated[Optional[int], _limit("--requests-per-minute", "N", "Requests (else no limit).")] = None,  # noqa: UP045
    tokens: Annotated[Optional[int], _limit("--tokens-per-minute", "N", "Tokens of prompts and answers.")] = None,  # noqa: UP045
    rows: Annotated[Optional[int], _limit("--rows", "N", "Concurrent answers.")] = None,  # noqa: UP045
    priority: Annotated[Optional[int], _limit("--priority", "N", "The highest priority (else 0).")] = None,  # noqa: UP045
    memory: Annotated[Optional[str], _limit("--memory", "SIZE", "KV that a replica keeps for reuse.")] = None,  # noqa: UP045
    disk: Annotated[Optional[str], _limit("--disk", "SIZE", "Disk for its agents on each node.")] = None,  # noqa: UP045
    model: Annotated[Optional[list[str]], _limit("--model", "NAME", "Only this model; may be repeated.")] = None,  # noqa: UP045
    json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Make a key and print it. It is shown only now."""
    limits: dict[str, Any] = {
        "requests_per_minute": requests,
        "tokens_per_minute": tokens,
        "rows_max": rows,
        "priority_max": priority,
        "memory_bytes_max": memory,
        "disk_bytes_max": disk,
        "models": tuple(model or ()),
    }
    where = chosen_home(home)
    first = read_keys(where) is None
    key, secret = create_key(where, name, admin=admin, **limits)
    Audit(where).note("key created", tenant=key.name, key=key.id, admin=key.admin)
    typer.echo(json_text.dumps({**_shown(key), "secret": secret}, indent=2) if json else secret)
    typer.echo(
        f"This is the key of {name!r}; it is shown only now. Clients send it as Authorization: Bearer KEY.", err=True
    )
    if first:
        typer.echo("It is the first key: from now on every client needs one.", err=True)


@app.command("list")
def list_keys(json: JsonOption = False, home: HomeOption = None) -> None:
    """List all keys, revoked ones too, without their secrets."""
    keys = read_keys(chosen_home(home)) or ()
    if json:
        typer.echo(json_text.dumps([_shown(key) for key in keys], indent=2))
        return
    if not keys:
        typer.echo("There are no keys; make one with `satchel keys create NAME`.")
        return
    from rich.console import Console

    from .tables import table

    shown = table("name", "key", "made", "may", "state")
    for key in keys:
        state = "valid" if key.revoked is None else f"revoked {_day(key.revoked)}"
        shown.add_row(key.name, f"sk-satchel-{key.id}-…", _day(key.created), _may(key), state)
    Console(markup=False, highlight=False).print(shown)


@app.command()
def revoke(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The key's name or id.")],
    json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Revoke a key at once. Its tenant's agents stay; a new key of the same name has them again."""
    where = chosen_home(home)
    key = revoke_key(where, name)
    Audit(where).note("key revoked", tenant=key.name, key=key.id)
    typer.echo(json_text.dumps(_shown(key), indent=2) if json else f"Revoked the key of {key.name!r}.")


@app.command()
def remove(
    every: Annotated[bool, typer.Option("--all", help="Required, so that nobody does it by mistake.")] = False,
    json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Remove all keys at once: every caller is the owner again. Tenants' agents stay theirs."""
    if not every:
        raise InvalidRequest("this removes all keys, and then no client needs one: confirm with --all")
    where = chosen_home(home)
    remove_keys(where)
    Audit(where).note("all keys removed")
    if json:
        typer.echo(json_text.dumps({"removed": True}))
        return
    typer.echo(
        "All keys are removed. If other machines can reach the endpoint, it now answers only this machine's owner."
    )


def _shown(key: Key) -> dict[str, Any]:
    return {name: value for name, value in asdict(key).items() if name not in ("salt", "digest")}


def _day(unix_s: float) -> str:
    return f"{datetime.fromtimestamp(unix_s):%Y-%m-%d %H:%M}"


def _may(key: Key) -> str:
    limits = [f"{name} {value}" for name, value in asdict(key.limits).items() if value is not None and value != ()]
    return ", ".join(["everything" if key.admin else "its own", *limits])
