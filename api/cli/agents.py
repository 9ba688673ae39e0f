"""`satchel agents`: list, show, move, fork, give and forget agents, over the running endpoint's HTTP interface.
`satchels.py` packs them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from ...cluster.errors import InvalidRequest, SatchelError
from ...cluster.keys import check_agent_id
from .completing import complete_agent
from .options import HomeOption, JsonOption, chosen_home
from .printing import print_json

if TYPE_CHECKING:
    import httpx

app = typer.Typer(
    help="List the agents of the running server, or show, move, fork, give, pack, unpack or forget one.",
    invoke_without_command=True,
)

EVERY = "*"
"""All tenants, as the endpoint's `?tenant=` has it."""

_ANSWER_S = 30.0
_MOVE_S = 3600.0
"""Longer than any move takes: the server limits it itself (`timeouts.request_s`)."""

AgentArgument = Annotated[str, typer.Argument(metavar="AGENT", help="The agent's id.", autocompletion=complete_agent)]
LimitOption = Annotated[int, typer.Option("--limit", min=1, max=100, help="How many agents to list.")]
TenantOption = Annotated[str, typer.Option("--tenant", metavar="KEY", help="The agents of this key, by its name.")]
AllOption = Annotated[bool, typer.Option("--all", help="The agents of all keys and of the owner.")]
AfterOption = Annotated[str, typer.Option("--after", metavar="AGENT", help="List the agents after this one.")]


@app.callback()
def agents(
    context: typer.Context,
    tenant: TenantOption = "",
    every: AllOption = False,
    json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """List the agents of the running server, or show, move, fork, give, pack, unpack or forget one."""
    context.obj = home
    if context.invoked_subcommand is None:
        _list(home, _whose(tenant, every), 20, "", json)


@app.command("list")
def list_agents(
    context: typer.Context,
    limit: LimitOption = 20,
    after: AfterOption = "",
    tenant: TenantOption = "",
    every: AllOption = False,
    json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """List agents by id: the owner's (which belong to no key), those of a key, or all."""
    _list(home or context.obj, _whose(tenant, every), limit, after, json)


@app.command()
def show(
    context: typer.Context,
    agent: AgentArgument,
    tenant: TenantOption = "",
    json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Show an agent, and where its memory lives."""
    with endpoint(home or context.obj, _ANSWER_S, tenant) as session:
        found = _ask(session, "GET", agent)
        place = session.get(f"/v1/cluster/agents/{_name(agent)}")
        # If the agent's node is unknown, the rest is still worth showing.
        found |= json_of(place) if place.is_success else {}
        found["object"] = "agent"
    if json:
        print_json(found)
        return
    from rich.console import Console
    from rich.text import Text

    from .tables import size, table

    console = Console(markup=False, highlight=False)
    where = f" on {found['home']}" if found.get("home") else ""
    copies = f", copies on {', '.join(found['copies'])}" if found.get("copies") else ""
    count = len(found["pictures"])
    pictures = f", {count:,} picture{'s' if count > 1 else ''}" if count else ""
    words = f"{size(found['bytes'])} of words"
    program = f", {found['program']}" if found.get("program") else ""
    parent = f", works for {_parent(found)}" if found.get("parent") else ""
    console.print(
        f"{found['id']}{where}{copies}: {found['tier']}, {words}{pictures}, used {_used(found)}{program}{parent}"
    )
    shown = table("branch", "model", "tokens", "messages", "turns", "used")
    for branch in found["branches"]:
        numbers = [f"{branch[name]:,}" for name in ("tokens", "messages", "turns")]
        shown.add_row(str(branch["branch"]), Text(branch["model"]), *numbers, _used(branch))
    console.print(shown)


@app.command()
def move(
    context: typer.Context,
    agent: AgentArgument,
    node: Annotated[str, typer.Argument(metavar="NODE", help="The name of the new home node, as in `satchel status`.")],
    tenant: TenantOption = "",
    json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Move an agent's memory to another node, which also runs its next turns."""
    with endpoint(home or context.obj, _MOVE_S, tenant) as session:
        done = _ask(session, "POST", agent, "/move", {"to": node})
    if json:
        print_json(done)
    elif not done["moved"]:
        print(f"{agent} already lives on {node}")
    else:
        from .tables import size

        what = f"{done['tokens']:,} tokens, {done['blocks']:,} blocks, {size(done['bytes'])}"
        print(f"{agent} has moved from {done['from'] or 'nowhere'} to {node}: {what} in {done['seconds']:.2f} s")


@app.command()
def fork(
    context: typer.Context,
    agent: AgentArgument,
    new: Annotated[str, typer.Argument(metavar="NEW", help="The new agent's id.")],
    tenant: TenantOption = "",
    json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Copy an agent's memory to a new id."""
    with endpoint(home or context.obj, _ANSWER_S, tenant) as session:
        done = _ask(session, "POST", agent, "/fork", {"as": new})
    _print_done(done, f"{new} is a copy of {agent} ({done['branches']} branches)", json)


@app.command()
def forget(
    context: typer.Context,
    agent: AgentArgument,
    tenant: TenantOption = "",
    json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Erase an agent's memory, on disk too."""
    with endpoint(home or context.obj, _ANSWER_S, tenant) as session:
        done = _ask(session, "DELETE", agent)
    _print_done(done, f"{agent} is erased", json)


@app.command()
def give(
    context: typer.Context,
    agent: AgentArgument,
    to: Annotated[str, typer.Option("--to", metavar="KEY", help="The new owner, by the name of the key.")],
    tenant: TenantOption = "",
    json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Give an agent to another key, such as an agent that is older than the first key. Its transcripts stay as they
    are."""
    # The server may wait for the end of a turn.
    with endpoint(home or context.obj, _MOVE_S, tenant) as session:
        done = _ask(session, "POST", agent, "/give", {"to": to})
    _print_done(done, f"{agent} now belongs to {to}", json)


def _whose(tenant: str, every: bool) -> str:
    if tenant and every:
        raise InvalidRequest("--tenant names one key's agents, and --all means everybody's; give one of them")
    return EVERY if every else tenant


def _list(given: Path | None, tenant: str, limit: int, after: str, as_json: bool) -> None:
    with endpoint(given, _ANSWER_S, tenant) as session:
        asked = {"limit": str(limit), **({"after": after} if after else {})}
        page = json_of(session.get("/v1/agents", params=asked))
        primaries = _primaries(session)
    for agent in page["data"]:
        agent.update(primaries.get((agent.get("tenant", ""), agent["id"]), {}))
    if as_json:
        print_json(page["data"])
        return
    from rich.console import Console
    from rich.text import Text

    from .tables import size, table

    # Only columns with at least one value, because a terminal is narrow.
    owner = ["tenant"] if tenant == EVERY else []
    origins = [name for name in ("program", "parent") if any(agent[name] for agent in page["data"])]
    shown = table(*owner, "agent", *origins, "home", "copies", "model", "tokens", "turns", "words", "used")
    for agent in page["data"]:
        shown.add_row(
            *(Text(agent[name]) for name in owner),
            Text(agent["id"]),
            *(Text(_parent(agent) if name == "parent" else agent[name] or "") for name in origins),
            Text(agent.get("home") or ""),
            Text(", ".join(agent.get("copies", []))),
            Text(agent["model"]),
            f"{agent['tokens']:,}",
            f"{agent['turns']:,}",
            size(agent["bytes"]),
            _used(agent),
        )
    console = Console(markup=False, highlight=False)
    console.print(shown)
    if page["has_more"]:
        console.print(f"There are more: --after {page['last_id']}")


def _parent(agent: dict[str, Any]) -> str:
    """Returns the parent for which an agent works, and the parent's branch at that time."""
    branch = agent.get("parent_branch")
    return f"{agent['parent'] or ''}{'' if branch is None else f' (branch {branch})'}"


def _primaries(session: httpx.Client) -> dict[tuple[str, str], dict[str, Any]]:
    """Returns home and copies of the agents in the cluster's view, by tenant ("" if the view is of one tenant) and
    agent; {} without a view."""
    answer = session.get("/v1/cluster")
    if not answer.is_success:
        return {}
    return {
        (each.get("tenant", ""), each["id"]): {"home": each["home"], "copies": each["copies"]}
        for each in json_of(answer)["agents"]
    }


@contextmanager
def endpoint(given: Path | None, timeout_s: float, tenant: str = "") -> Iterator[httpx.Client]:
    """Opens a client of the endpoint whose requests are about the agents of a tenant, "" for the owner's."""
    from .views import client

    with client(chosen_home(given), timeout_s=timeout_s) as session:
        if tenant:
            session.params = {"tenant": tenant}
        yield session


def _ask(session: httpx.Client, method: str, agent: str, action: str = "", body: dict[str, Any] | None = None) -> Any:
    return json_of(session.request(method, path_of(agent, action), json=body))


def path_of(agent: str, action: str = "") -> str:
    """Returns the path of an agent's route."""
    return f"/v1/agents/{_name(agent)}{action}"


def _name(agent: str) -> str:
    """Returns the id quoted for a path. An id that consists of dots is quoted too, because it would mean a folder.

    Raises:
        InvalidRequest: it is not an agent id.
    """
    check_agent_id(agent)
    return quote(agent, safe="").replace(".", "%2E")


def json_of(answer: httpx.Response) -> Any:
    """Returns the JSON of an answer. Raises `SatchelError` for a failed one."""
    if not answer.is_success:
        from .views import error_of

        raise error_of(answer)
    try:
        return answer.json()
    except ValueError:
        raise SatchelError(f"the endpoint's answer to {answer.request.url.path} is not JSON") from None


def _print_done(answer: Any, sentence: str, as_json: bool) -> None:
    if as_json:
        print_json(answer)
    else:
        print(sentence)


def _used(shown: dict[str, Any]) -> str:
    """Returns the time of the last use, in this machine's time zone."""
    return datetime.fromtimestamp(shown["last_used"]).strftime("%Y-%m-%d %H:%M")
