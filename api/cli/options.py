"""Options that several commands have."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Optional

import typer

from ...cluster.environment import default_home
from ...cluster.home import Home, expanded

# typer reads these annotations at run time; it supports `Optional`, but not every form of `X | None`.
HomeOption = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--home", metavar="DIR", help="Where the cluster keeps its state (else SATCHEL_HOME, ~/.satchel)."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
TextOption = Optional[str]  # noqa: UP045
NoSelfTestOption = Annotated[
    bool,
    typer.Option(
        "--no-self-test",
        "--no-trial",
        help="Skip the self-test of models; untested ones may give wrong answers when batched.",
    ),
]
PortOption = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--port", min=1, max=65535, help="The endpoint's port (else the config's)."),
]
ListenOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--listen", metavar="ADDR", help="The endpoint's address (else the config's); 0.0.0.0 is all."),
]


class Dtype(StrEnum):
    """The values of `Model.dtype`."""

    auto = "auto"
    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


class KV(StrEnum):
    """The values of `Model.kv`."""

    auto = "auto"
    q4 = "q4"
    k6v4 = "k6v4"
    k8v4 = "k8v4"
    fp16 = "fp16"


class LogFormat(StrEnum):
    """The values of `Logs.format`."""

    text = "text"
    json = "json"


LogFormatOption = Annotated[
    Optional[LogFormat],  # noqa: UP045
    typer.Option("--log-format", help="How lines of the logs are written (else the config's, or text)."),
]


def chosen_home(given: Path | None) -> Home:
    return Home(expanded(given).absolute()) if given is not None else default_home()
