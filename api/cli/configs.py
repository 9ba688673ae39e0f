"""`satchel configs`: the configurations and the dashboard that ship with Satchel, to copy and change."""

from __future__ import annotations

from json import loads
from pathlib import Path
from typing import Annotated, Optional

import typer

from ...cluster.errors import ConfigError
from .options import JsonOption
from .printing import print_json

# Beside the packages, in a checkout and in a wheel.
FOLDER = Path(__file__).parents[2] / "configs"


def configs(
    name: Annotated[Optional[str], typer.Argument(help="Print this one; without a name, list them.")] = None,  # noqa: UP045
    json: JsonOption = False,
) -> None:
    """Print a configuration that ships with Satchel: `satchel configs three-macs > my.yaml`."""
    paths = [*sorted(FOLDER.glob("*.yaml")), *sorted(FOLDER.glob("*.json"))]
    texts = {path.stem: path.read_text(encoding="utf-8") for path in paths}
    if name is not None:
        if name not in texts:
            raise ConfigError(f"no configuration {name!r} ships with Satchel; there are {', '.join(texts)}")
        if json:
            print_json({"name": name, "text": texts[name]})
        else:
            print(texts[name], end="")
        return
    if json:
        print_json([{"name": each, "what": _first_sentence(text)} for each, text in texts.items()])
        return
    width = max(map(len, texts))
    for each, text in texts.items():
        print(f"{each:{width}}  {_first_sentence(text)}")


def _first_sentence(text: str) -> str:
    """Returns the first sentence of the comment at the head of a file; of a dashboard, of its description."""
    if text.startswith("{"):
        return loads(text)["description"].partition(". ")[0].removesuffix(".")
    lines = [line.removeprefix("#").strip() for line in text.splitlines()[:3] if line.startswith("#")]
    return " ".join(lines).partition(". ")[0].removesuffix(".")
