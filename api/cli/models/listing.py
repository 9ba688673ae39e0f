"""`satchel list` and `satchel rm`: the models on this machine's disk."""

from __future__ import annotations

import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass, field
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
    served = _Served.of(chosen_home(home))
    folders = served.on_demand() | served.folders
    found = [_entry(each, folders, served.models) for each in local_models(folders)]
    if json:
        print_json(found)
        return
    from rich.console import Console
    from rich.text import Text

    from ..tables import names_line, size, state_line, table

    shown = table("model", "weights", "served as", numbers=("size",))
    for each in found:
        kept = (each["weights"] or "") if each["complete"] else "downloaded in part"
        name = names_line(each["served_as"] or "", each["aliases"])
        state = f": {state_line(each)}" if each["state"] not in (None, "loaded") else ""
        shown.add_row(Text(each["source"]), kept, Text(f"{name}{state}"), size(each["bytes"]))
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
    served = _Served.of(chosen_home(home), must_know=True)
    if (name := _name_of(found, served.folders)) is not None:
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


@dataclass(frozen=True)
class _Served:
    """What the running server serves.

    Attributes:
        folders: models' names by the folders of this machine from which they are loaded.
        models: the entries of `/v1/cluster`, by name.
    """

    folders: dict[str, str] = field(default_factory=dict)
    models: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, home: Home, *, must_know: bool = False) -> _Served:
        """Asks the server; nothing if none runs.

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
            return cls()
        try:
            with client(home, timeout_s=_ANSWER_S) as session:
                view = get_json(session, "/v1/cluster?agents=0")
        except SatchelError as error:
            if must_know:
                raise SatchelError(f"it is not known what the running server serves: {error.message}") from None
            return cls()
        replicas = view["replicas"]
        if must_know and any(not each["folder"] for each in replicas):
            raise SatchelError(
                "a model of the running server is still loading, and it may be this one: try again later"
            )
        here = {each["folder"]: each["model"] for each in replicas if each["folder"] and each["node"] == node}
        return cls(here, {model["id"]: model for model in view["models"]})

    def on_demand(self) -> dict[str, str]:
        """Returns the names of the models that come and go and are not loaded here, by their folders on this
        machine."""
        from ....actors.model_files.source import found_here

        names = {}
        for name, model in self.models.items():
            if model["load"] == "request" and name not in self.folders.values():
                # Its files may be nowhere yet.
                with suppress(ModelLoadError):
                    if (folder := found_here(model["source"])) is not None:
                        names.setdefault(str(folder), name)
        return names


def _name_of(model: LocalModel, served: dict[str, str]) -> str | None:
    return next((name for folder, name in served.items() if model.holds(folder)), None)


def _entry(model: LocalModel, served: dict[str, str], models: dict[str, dict[str, Any]]) -> dict[str, Any]:
    name = _name_of(model, served)
    known = models.get(name or "", {})
    return {
        "source": model.source,
        "place": model.place,
        "folder": None if model.folder is None else str(model.folder),
        "bytes": model.nbytes,
        "weights": model.kept or None,
        "complete": model.complete,
        "served_as": name,
        "aliases": known.get("aliases", []),
        "state": known.get("state"),
        "progress": known.get("progress"),
    }
