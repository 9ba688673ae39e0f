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
from .models import HomeOption, JsonOption, chosen_home

app = typer.Typer(help="Make, list, revoke and remove the endpoint's keys. Each is a tenant.", no_args_is_help=True)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The tenant.")]


def _limit(flag: str, metavar: str, text: str) -> Any:
    return typer.Option(flag, metavar=metavar, help=text)


@app.command()
def create(
    name: NameArgument,
    admin: Annotated[bool, typer.Option("--admin", help="It also sees the cluster and moves agents.")] = False,
    requests: Annotated[Optional[int], _limit("--requests-per-minute", "N", "Else as many as it likes.")] = None,  # noqa: UP045
    tokens: Annotated[Optional[int], _limit("--tokens-per-minute", "N", "Of prompts and answers.")] = None,  # noqa: UP045
    rows: Annotated[Optional[int], _limit("--rows", "N", "Answers computed at a time.")] = None,  # noqa: UP045
    priority: Annotated[Optional[int], _limit("--priority", "N", "The highest it may ask for; else 0.")] = None,  # noqa: UP045
    memory: Annotated[Optional[str], _limit("--memory", "SIZE", "KV a replica keeps in memory for it.")] = None,  # noqa: UP045
    disk: Annotated[Optional[str], _limit("--disk", "SIZE", "Words and KV a node keeps on disk for it.")] = None,  # noqa: UP045
    model: Annotated[Optional[list[str]], _limit("--model", "NAME", "Only this one; may be repeated.")] = None,  # noqa: UP045
    home: HomeOption = None,
) -> None:
    """Make a key and print it. It is shown this once."""
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
    typer.echo(secret)
    typer.echo(f"This is the key of {name!r}, shown once. Clients send it as Authorization: Bearer KEY.", err=True)
    if first:
        typer.echo("It is the first key: from now on everybody needs one.", err=True)


@app.command("list")
def list_keys(json: JsonOption = False, home: HomeOption = None) -> None:
    """List every key that was ever made, without its secret."""
    keys = read_keys(chosen_home(home)) or ()
    if json:
        typer.echo(json_text.dumps([_shown(key) for key in keys], indent=2))
        return
    if not keys:
        typer.echo("There are no keys; make one with `satchel keys create NAME`.")
        return
    from rich.console import Console

    from .views import table

    shown = table("name", "key", "made", "may", "state")
    for key in keys:
        state = "valid" if key.revoked is None else f"revoked {_day(key.revoked)}"
        shown.add_row(key.name, f"sk-satchel-{key.id}-…", _day(key.created), _may(key), state)
    Console(markup=False, highlight=False).print(shown)


@app.command()
def revoke(name: Annotated[str, typer.Argument(metavar="NAME", help="Or its id.")], home: HomeOption = None) -> None:
    """End a key at once. What its tenant has stays; a new key of the same name has it again."""
    where = chosen_home(home)
    key = revoke_key(where, name)
    Audit(where).note("key revoked", tenant=key.name, key=key.id)
    typer.echo(f"Revoked the key of {key.name!r}.")


@app.command()
def remove(
    every: Annotated[bool, typer.Option("--all", help="Needed, so that nobody does it by mistake.")] = False,
    home: HomeOption = None,
) -> None:
    """Go back to no keys at once: every caller is the owner again. What tenants have stays theirs."""
    if not every:
        raise InvalidRequest("this removes all keys, and then nobody needs one: --all says that you mean it")
    where = chosen_home(home)
    remove_keys(where)
    Audit(where).note("all keys removed")
    typer.echo("There are no keys any more. An endpoint that other machines reach answers this machine's owner alone.")


def _shown(key: Key) -> dict[str, Any]:
    return {name: value for name, value in asdict(key).items() if name not in ("salt", "digest")}


def _day(unix_s: float) -> str:
    return f"{datetime.fromtimestamp(unix_s):%Y-%m-%d %H:%M}"


def _may(key: Key) -> str:
    limits = [f"{name} {value}" for name, value in asdict(key.limits).items() if value is not None and value != ()]
    return ", ".join(["everything" if key.admin else "its own", *limits])
