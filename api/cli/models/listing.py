"""`satchel list` and `satchel rm`: the models on this machine's disk."""

from __future__ import annotations

import shutil
import sys
from typing import Annotated, Any

import typer

from ....cluster.errors import InvalidRequest, ModelLoadError, NotRunning, SatchelError
from ....cluster.home import Home
from ..options import HomeOption, JsonOption, chosen_home
from ..printing import print_json
from .choosing import meant
from .disk import LocalModel, complete_source, hub_models, local_models

_ANSWER_S = 10.0


def list_local(json: JsonOption = False, home: HomeOption = None) -> None:
    """List the models on this machine: those that ship, those in the Hub's cache, and folders that are served."""
    served = _served(chosen_home(home))
    found = [_entry(each, served) for each in local_models(served)]
    if json:
        print_json(found)
        return
    from rich.console import Console
    from rich.text import Text

    from ..tables import size, table

    shown = table("model", "weights", "served as", numbers=("size",))
    for each in found:
        kept = (each["weights"] or "") if each["complete"] else "downloaded in part"
        shown.add_row(Text(each["source"]), kept, Text(each["served_as"] or ""), size(each["bytes"]))
    Console(highlight=False).print(shown)


def rm(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A Hub id, as `satchel list` shows it.", autocompletion=complete_source),
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Remove a model from the Hub's cache on this machine, all of its revisions."""
    found = _in_cache(model)
    served = _served(chosen_home(home), must_know=True)
    if (name := _name_of(found, served)) is not None:
        raise InvalidRequest(f"{found.source} is served as {name}: `satchel models unload {name}` first")
    from ..tables import size

    if not yes:
        if not sys.stdin.isatty():
            raise InvalidRequest(f"--yes removes {found.source} ({size(found.nbytes)}) without a question")
        typer.confirm(f"Remove {found.source} ({size(found.nbytes)}) from {found.root}?", abort=True)
    try:
        shutil.rmtree(found.root)
    except OSError as error:
        raise SatchelError(f"{found.root} cannot be removed: {error.strerror or error}") from None
    if json:
        print_json({"source": found.source, "removed": True, "bytes": found.nbytes})
    else:
        print(f"Removed {found.source}: {size(found.nbytes)} are free again")


def _in_cache(model: str) -> LocalModel:
    """
    Raises:
        ModelLoadError: the Hub's cache has no such model.
    """
    known = {each.source: each for each in hub_models()}
    if (found := known.get(model.partition("@")[0])) is not None:
        return found
    if model.startswith("embedded:"):
        raise ModelLoadError(f"{model} ships with Satchel and stays")
    there = ", ".join(known) or "none"
    raise ModelLoadError(f"the Hub's cache has no {model}{meant(model, known) or f'; there are: {there}'}")


def _served(home: Home, *, must_know: bool = False) -> dict[str, str]:
    """Returns models' names by the folders of this machine from which they are served.

    Args:
        must_know: whether a server that is starting or does not answer is an error.

    Raises:
        SatchelError: it is not known what is served.
    """
    # Imported here because completion imports this file.
    from ....cluster.connection import find_cluster
    from ..views import client, get_json

    try:
        node = find_cluster(home).node
    except NotRunning:
        return {}
    try:
        with client(home, timeout_s=_ANSWER_S) as session:
            replicas = get_json(session, "/v1/cluster?agents=0").get("replicas", [])
    except SatchelError as error:
        if must_know:
            raise SatchelError(f"it is not known what the running server serves: {error.message}") from None
        return {}
    if must_know and any(not each.get("folder") for each in replicas):
        raise SatchelError("a model of the running server is still loading, and it may be this one: try again later")
    return {each["folder"]: each["model"] for each in replicas if each.get("folder") and each["node"] == node}


def _name_of(model: LocalModel, served: dict[str, str]) -> str | None:
    return next((name for folder, name in served.items() if model.holds(folder)), None)


def _entry(model: LocalModel, served: dict[str, str]) -> dict[str, Any]:
    return {
        "source": model.source,
        "place": model.place,
        "folder": None if model.folder is None else str(model.folder),
        "bytes": model.nbytes,
        "weights": model.kept or None,
        "complete": model.complete,
        "served_as": _name_of(model, served),
    }
