"""The command line: `satchel run | serve | up | down | list | ps | status | models | agents | …`.

A mistake or a failure is one sentence on standard error and exit code 1 (2 for a wrong command line), never a
traceback. Nothing heavy is imported until a command needs it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from ...cluster.errors import SatchelError
from ...cluster.processes import keep_to_the_end
from .cluster import down, install_service, invite, join, leave, promote, up
from .completing import complete_model
from .configs import configs
from .keys import app as keys
from .machines.cert import cert
from .machines.nodes import app as nodes
from .machines.ray_env import ray_env
from .models.choosing import Choice, ContextOption, KVOption, ServedNameOption, WhatArgument
from .models.convert import convert
from .models.fit import fit
from .models.listing import list_local, rm
from .models.probe import probe
from .models.pull import pull
from .models.served import app as models
from .options import HomeOption, JsonOption, ListenOption, LogFormatOption, NoSelfTestOption, PortOption, chosen_home
from .satchels import app as agents
from .talk.bench import bench
from .talk.chat import AgentOption
from .talk.launch import launch
from .talk.run import run
from .watch.logs import logs
from .watch.ps import ps
from .watch.top import top

app = typer.Typer(
    name="satchel",
    help="Serves MLX language models as one OpenAI endpoint, for agents that keep their memory.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

TALK, SERVE, MODELS, WATCH, MACHINES = "Talk", "Serve", "Models", "Watch", "Machines and keys"
"""Headings of the help."""

app.add_typer(models, name="models", rich_help_panel=MODELS)
app.add_typer(nodes, name="nodes", rich_help_panel=MACHINES)
app.add_typer(agents, name="agents", rich_help_panel=TALK)
app.add_typer(keys, name="keys", rich_help_panel=MACHINES)

ConfigOption = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(
        "--config",
        metavar="FILE",
        help="A YAML file; without one, the two small models that ship with Satchel are served.",
    ),
]


def _show_version(wanted: bool) -> None:
    if wanted:
        from ...cluster.connection import satchel_version

        print(f"satchel {satchel_version()}")
        raise typer.Exit


@app.callback()
def satchel(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Serves MLX language models from a handful of Macs as one OpenAI endpoint."""


@app.command(rich_help_panel=SERVE)
def serve(
    what: WhatArgument = None,
    config: ConfigOption = None,
    name: ServedNameOption = None,
    port: PortOption = None,
    listen: ListenOption = None,
    kv: KVOption = None,
    context: ContextOption = None,
    no_self_test: NoSelfTestOption = False,
    log_format: LogFormatOption = None,
    home: HomeOption = None,
) -> None:
    """Serve models, or those of a config, until Ctrl-C or SIGTERM; `satchel up` does it in the background."""
    from .serve import serve as run

    choice = Choice(what or (), config, name, kv, context, port, listen, not no_self_test, log_format)
    run(choice.read(), chosen_home(home))


@app.command(rich_help_panel=WATCH)
def status(
    json: JsonOption = False,
    long: Annotated[bool, typer.Option("--long", "-l", help="Show tables and details for one machine, too.")] = False,
    home: HomeOption = None,
) -> None:
    """Show the running server, its nodes, its models and its replicas."""
    from .views import show_status

    show_status(chosen_home(home), as_json=json, long=long)


@app.command(rich_help_panel=TALK)
def chat(
    text: Annotated[Optional[str], typer.Argument(help="One message; without it, a conversation.")] = None,  # noqa: UP045
    agent: AgentOption = None,
    new: Annotated[
        bool, typer.Option("--new", help="Start a new conversation, as another branch of the agent's memory.")
    ] = False,
    model: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--model", metavar="NAME", help="The model (else the first).", autocompletion=complete_model),
    ] = None,
    json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Talk to a model of the running server."""
    from .talk.chat import chat as run

    run(chosen_home(home), agent=agent, model=model, text=text, new=new, as_json=json)


@app.command(rich_help_panel=WATCH)
def explain(
    request_id: Annotated[
        str, typer.Argument(metavar="REQUEST_ID", help="The `x-request-id` of a response, one of the last thousand.")
    ],
    json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Say why the router chose a request's replica, and the estimated costs of the others."""
    from .views import show_decision

    show_decision(chosen_home(home), request_id, as_json=json)


for command in (run, launch, bench):
    app.command(rich_help_panel=TALK)(command)
for command in (pull, rm, fit, probe, convert):
    app.command(rich_help_panel=MODELS)(command)
app.command("list", rich_help_panel=MODELS)(list_local)
for command in (ps, top, logs):
    app.command(rich_help_panel=WATCH)(command)
app.command("ray-env", rich_help_panel=MACHINES)(ray_env)
for command in (up, down, configs, install_service, cert):
    app.command(rich_help_panel=SERVE)(command)
for command in (invite, join, leave, promote):
    app.command(rich_help_panel=MACHINES)(command)


@app.command(rich_help_panel=WATCH)
def doctor(
    file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Argument(metavar="FILE", help="Where `--report` writes (else satchel-report.md in this folder)."),
    ] = None,
    report: Annotated[
        bool, typer.Option("--report", help="Test and measure a model, and write all into a file to send in.")
    ] = False,
    model: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--model", metavar="SOURCE", help="The model to measure: a Hub id, a folder, a configured name."),
    ] = None,
    config: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--config", metavar="FILE", help="A YAML file; without one, what the running server of this home has."
        ),
    ] = None,
    port: PortOption = None,
    listen: ListenOption = None,
    json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Check this machine; exit code 1 if something must be fixed. --report also measures a model, for minutes."""
    from ...cluster.connection import served_config
    from .views import show_doctor

    chosen, place = Choice(config=config, port=port, listen=listen), chosen_home(home)
    served = served_config(place) if chosen == Choice() else None
    show_doctor(served or chosen.read(), place, as_json=json, report=report, file=file, model=model)


def main() -> None:
    """The entry point of the command `satchel`."""
    keep_to_the_end()
    try:
        app()
    except SatchelError as error:
        print(f"satchel: {error.message}", file=sys.stderr)
        raise SystemExit(1) from None
    except UnicodeEncodeError:
        # Python gives bytes of the command line that are not UTF-8 as lone surrogates.
        print("satchel: an argument, the input or a file name is not valid UTF-8", file=sys.stderr)
        raise SystemExit(1) from None
    except BrokenPipeError:
        # The reader of our output has gone (`| head`); Python would complain once more while closing it.
        sys.stdout = None
        raise SystemExit(1) from None
