"""The config of a command line: a config file, or models by their sources."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from ....actors.model_files.source import default_name, embedded_names, is_model_folder
from ....cluster.config.config import Config, Model, default_config, load_config, name_refusal, parse_model
from ....cluster.errors import ConfigError
from ....cluster.home import expanded
from ..options import KV, LogFormat
from .disk import complete_source

_SUFFIXES = (".yaml", ".yml")
_HUB_ID = re.compile(r"[^/.~@\s][^/@\s]*/[^/@\s]+(@[^@\s]+)?")

WhatArgument = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Argument(
        metavar="[MODEL…]",
        help="Hub ids (owner/name or owner/name@revision), folders, embedded:NAME; or one config (.yaml).",
        autocompletion=complete_source,
    ),
]
ServedNameOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--name",
        "--served-model-name",
        metavar="NAME",
        help="The name for clients, if there is one MODEL (else the Hub id or the folder's name).",
    ),
]
KVOption = Annotated[
    Optional[KV],  # noqa: UP045
    typer.Option("--kv", help="The format of cached KV (else the config's, or auto)."),
]
ContextOption = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(
        "--context",
        "--max-model-len",
        min=1,
        metavar="TOKENS",
        help="The most tokens of a prompt and its answer together (else the config's, or the model's own).",
    ),
]


@dataclass(frozen=True)
class Choice:
    """What a command line says of the config.

    Attributes:
        what: sources of models, or one config file.
        config: of `--config`.
        name: of the only model.
        kv, context, port, listen, log_format: None leaves the config's.
    """

    what: Sequence[str] = ()
    config: Path | None = None
    name: str | None = None
    kv: KV | None = None
    context: int | None = None
    port: int | None = None
    listen: str | None = None
    self_test: bool = True
    log_format: LogFormat | None = None

    @property
    def file(self) -> Path | None:
        """The config file; None if there is none.

        Raises:
            ConfigError: there is more beside it.
        """
        given = [Path(each) for each in self.what if each.lower().endswith(_SUFFIXES)]
        files = given if self.config is None else [self.config, *given]
        if not files:
            return None
        if len(files) > 1:
            raise ConfigError(f"give one config, not {len(files)}: {', '.join(map(str, files))}")
        if len(self.what) > len(given):
            raise ConfigError(f"give a config ({files[0]}) or models, not both: the config says what is served")
        return expanded(files[0])

    def read(self) -> Config:
        """Returns the config.

        Raises:
            ConfigError: it is wrong, or a source is none.
        """
        file = self.file
        if self.name is not None and len(self.what) != 1:
            raise ConfigError("--name is for one MODEL; several are called by their Hub ids or folders' names")
        if file is not None:
            if self.name is not None:
                raise ConfigError("--name is for a MODEL; a config names its models itself")
            config = load_config(file)
        else:
            config = Config(models=models_of(self.what, self.name)) if self.what else default_config()
        set_here: dict[str, Any] = {} if self.self_test else {"self_test": False}
        if self.kv is not None:
            set_here["kv"] = self.kv.value
        if self.context is not None:
            set_here["context_tokens_max"] = self.context
        config = replace(config, models=tuple(replace(model, **set_here) for model in config.models))
        if self.log_format is not None:
            config = replace(config, logs=replace(config.logs, format=self.log_format.value))
        return with_endpoint(config, self.port, self.listen)

    def arguments(self) -> list[str]:
        """Returns the arguments of `satchel serve` that say the same."""
        options = {"--name": self.name, "--context": self.context, "--port": self.port, "--listen": self.listen}
        options |= {"--kv": None if self.kv is None else self.kv.value}
        options |= {"--log-format": None if self.log_format is None else self.log_format.value}
        options |= {"--config": None if self.file is None else self.file.absolute()}
        words = [word for name, value in options.items() if value is not None for word in (name, str(value))]
        words += [] if self.self_test else ["--no-self-test"]
        return [*words, *(["--", *self.what] if self.file is None and self.what else [])]


def models_of(sources: Iterable[str], name: str | None = None) -> tuple[Model, ...]:
    """Returns the models of these sources.

    Raises:
        ConfigError: one is no source, or two have the same name.
    """
    found: list[Model] = []
    for given in sources:
        source, usual = source_of(given)
        model = parse_model(name=name or usual, source=source)
        if (refusal := name_refusal(model, found)) is not None:
            raise ConfigError(f"{given}: {refusal}; serve one of them with another --name, or by a config")
        found.append(model)
    return tuple(found)


def source_of(given: str) -> tuple[str, str]:
    """Returns the source that a person means, and the name of its model for clients. A model that ships with Satchel
    may be called by its name, such as `satchel/recall`.

    Raises:
        ConfigError: it is neither a folder, nor a Hub id, nor a model that ships with Satchel.
    """
    folder = _folder(given)
    if folder is not None:
        if not is_model_folder(folder):
            raise ConfigError(f"{folder} has no config.json; it must be a folder as the Hub or mlx-lm lay it out")
        return str(folder), default_name(given)
    shipped = embedded_names()
    if given.startswith("embedded:") and given.removeprefix("embedded:") in shipped:
        return given, default_name(given)
    if given.startswith("satchel/") and given.removeprefix("satchel/") in shipped:
        return f"embedded:{given.removeprefix('satchel/')}", given
    if _HUB_ID.fullmatch(given) and not given.startswith("satchel/"):
        return given, default_name(given)
    known = [f"embedded:{name}" for name in shipped]
    hint = meant(given, [*known, *shipped, *(f"satchel/{name}" for name in shipped)])
    looks_like_path = given.startswith(("/", ".", "~")) or given.endswith("/")
    why = "there is no such folder" if looks_like_path else f"neither a folder, nor a Hub id, nor {_among(known)}"
    raise ConfigError(f"{given!r}: {why}{hint}")


def meant(given: str, known: Iterable[str]) -> str:
    """Returns "; did you mean …?" for the most similar of `known`, "" if none is similar."""
    close = get_close_matches(given, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def with_endpoint(config: Config, port: int | None, listen: str | None) -> Config:
    """Returns the config with the endpoint's port and address from the command line."""
    endpoint = config.endpoint
    if port is not None:
        endpoint = replace(endpoint, port=port)
    if listen is not None:
        endpoint = replace(endpoint, listen=listen)
    return replace(config, endpoint=endpoint)


def _folder(given: str) -> Path | None:
    path = expanded(given)
    return path if path.is_dir() else None


def _among(names: Sequence[str]) -> str:
    return f"one that ships with Satchel ({', '.join(names)})"
