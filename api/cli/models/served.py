"""`satchel models`: list what is served, load a model into the running cluster, unload or remove one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional, TextIO

import typer

from ....cluster.connection import find_cluster
from ....cluster.errors import ModelNotFound
from ....cluster.home import Home
from ..completing import complete_model
from ..options import Dtype, HomeOption, JsonOption, NoSelfTestOption, TextOption, chosen_home
from ..printing import print_json
from .choosing import meant

if TYPE_CHECKING:
    from ...client.cluster import Cluster
    from ..progress import ProgressDisplay

app = typer.Typer(
    help="List the models of the running server; load, unload or remove one.", invoke_without_command=True
)


NameArgument = Annotated[
    str, typer.Argument(help="The model's name, as `satchel models` shows it.", autocompletion=complete_model)
]


@app.callback()
def models(context: typer.Context, json: JsonOption = False, home: HomeOption = None) -> None:
    """List the models of the running server, the default first; or load, unload or remove one."""
    context.obj = home
    if context.invoked_subcommand is None:
        _list(home, json)


@app.command("list")
def list_models(context: typer.Context, json: JsonOption = False, home: HomeOption = None) -> None:
    """List the models of the running server, the default first."""
    _list(home or context.obj, json)


@app.command()
def load(
    context: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            help="A Hub id (owner/name or owner/name@revision), a folder, embedded:NAME; "
            "or the name of a listed model that is not loaded."
        ),
    ],
    name: Annotated[
        TextOption, typer.Option("--name", help="The name for clients (else the Hub id or the folder's name).")
    ] = None,
    adapter: Annotated[
        TextOption, typer.Option("--adapter", help="A LoRA or DoRA adapter: a folder or Hub id.")
    ] = None,
    adapters: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            "--adapters",
            "--lora-modules",
            metavar="NAME=SOURCE",
            help="A LoRA adapter that requests may name: a folder or Hub id; may be repeated.",
        ),
    ] = None,
    replicas: Annotated[int, typer.Option("--replicas", min=1, help="How many replicas serve it.")] = 1,
    context_tokens_max: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            "--context-tokens-max",
            min=1,
            help="The most tokens of a prompt and its answer together (else the model's own).",
        ),
    ] = None,
    dtype: Annotated[Dtype, typer.Option("--dtype", help="The data type in which it computes.")] = Dtype.auto,
    no_self_test: NoSelfTestOption = False,
    json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Serve one more model, until it is unloaded or the server stops. It is downloaded if necessary."""
    loaded = load_into(
        chosen_home(home or context.obj),
        source,
        output=sys.stderr if json else None,
        name=name,
        adapter=adapter,
        adapters=_named(adapters or []),
        replicas=replicas,
        context_tokens_max=context_tokens_max,
        dtype=dtype.value,
        self_test=not no_self_test,
    )
    if json:
        print_json({"model": loaded, "loaded": True})


@app.command()
def unload(
    context: typer.Context,
    name: NameArgument,
    json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Unload a model. Its running requests finish first. If its config has `load: request`, it stays in the list and is
    loaded again when it is needed; else it is removed."""
    with _connected(home or context.obj, sys.stderr if json else None) as (cluster, progress), _hinting(name):
        cluster.unload_sync(name, report=progress.report)
    progress.say(f"Unloaded {name}")
    if json:
        print_json({"model": name, "loaded": False})


@app.command()
def remove(
    context: typer.Context,
    name: NameArgument,
    json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Stop serving a model, until the server starts again. Its running requests finish first. Its files stay."""
    with _connected(home or context.obj, sys.stderr if json else None) as (cluster, progress), _hinting(name):
        cluster.remove_sync(name, report=progress.report)
    progress.say(f"Removed {name} from the server")
    if json:
        print_json({"model": name, "removed": True})


def _named(adapters: list[str]) -> dict[str, str]:
    """Returns adapters by name.

    Raises:
        typer.BadParameter: one is not of the form NAME=SOURCE.
    """
    pairs = [each.partition("=") for each in adapters]
    wrong = next(
        (each for each, (name, _, source) in zip(adapters, pairs, strict=True) if not name or not source), None
    )
    if wrong is not None:
        raise typer.BadParameter(f"{wrong!r}: an adapter is given as NAME=SOURCE", param_hint="--adapters")
    if len({name for name, _, _ in pairs}) < len(pairs):
        raise typer.BadParameter("a name is there twice", param_hint="--adapters")
    return {name: source for name, _, source in pairs}


def load_into(home: Home, source: str, *, output: TextIO | None = None, **how: Any) -> str:
    """Loads a model into the running server, shows its notes, and returns its name.

    Args:
        output: for progress and notes; None is standard output.
        how: as `Cluster.load` takes it.
    """
    with _connected(home.root, output) as (cluster, progress):
        loaded = cluster.load_sync(source, report=progress.report, **how)
        notes = cluster.notes_sync(loaded)
    progress.say(*(f"{loaded}: {note}" for note in notes), f"Loaded {loaded}")
    return loaded


@contextmanager
def _connected(given: Path | None, output: TextIO | None = None) -> Iterator[tuple[Cluster, ProgressDisplay]]:
    """Connects to the running server, and shows a progress bar meanwhile, on standard output or `output`."""
    from ..progress import ProgressDisplay

    home = chosen_home(given)
    # Fails early, because importing Ray takes seconds.
    find_cluster(home)
    from ...client.cluster import connect

    progress = ProgressDisplay(output)
    try:
        with connect(home.root) as cluster:
            yield cluster, progress
    finally:
        progress.close()


@contextmanager
def _hinting(name: str) -> Iterator[None]:
    """Adds the most similar name to the error about a model that is not served."""
    try:
        yield
    except ModelNotFound as error:
        from ....actors.protocol import registry

        served = [entry.model.name for entry in registry.entries()]
        raise ModelNotFound(error.message + meant(name, served)) from None


def _list(home: Path | None, as_json: bool) -> None:
    from ..views import show_models

    show_models(chosen_home(home), as_json=as_json)
