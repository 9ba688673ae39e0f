"""`satchel nodes`: list the machines of the cluster, and remove one for good."""

from __future__ import annotations

import json as json_text
from typing import Annotated
from urllib.parse import quote

import typer
from rich.console import Console

from ..options import HomeOption, JsonOption, chosen_home
from ..views import client, error_of, get_json, node_table

app = typer.Typer(
    help="List the machines of the running cluster, or remove one that does not come back.", invoke_without_command=True
)

LIST_S = 15.0


@app.callback()
def nodes(context: typer.Context, json: JsonOption = False, home: HomeOption = None) -> None:
    """List the machines of the running cluster, the head first; or remove one."""
    context.obj = home
    if context.invoked_subcommand is None:
        list_nodes(context, json, home)


@app.command("list")
def list_nodes(context: typer.Context, json: JsonOption = False, home: HomeOption = None) -> None:
    """List the machines of the running cluster, the head first."""
    with client(chosen_home(home or context.obj), timeout_s=LIST_S) as session:
        found = get_json(session, "/v1/cluster?agents=0").get("nodes", [])
    if json:
        print(json_text.dumps(found, indent=2))
        return
    Console().print(node_table(found))


@app.command()
def remove(
    context: typer.Context,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The name of a machine that has joined by an invitation.")
    ],
    json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Remove a machine that has joined: it needs an invitation to come back. If it is running, it leaves in order."""
    with client(chosen_home(home or context.obj), timeout_s=LIST_S) as session:
        answer = session.delete(f"/v1/cluster/nodes/{quote(name, safe='')}")
        if not answer.is_success:
            raise error_of(answer)
        leaves = answer.json().get("leaves")
    if json:
        print(json_text.dumps(answer.json(), indent=2))
    elif leaves:
        print(f"{name} moves its agents to other nodes and leaves, which takes up to half a minute")
    else:
        print(f"{name} is removed; `satchel invite` lets a machine of that name in again")
