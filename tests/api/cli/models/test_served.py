"""What `satchel models load` asks for, by its command line; and how adapters are shown."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from satchel.api.cli import views
from satchel.api.cli.main import app
from satchel.api.cli.models import served


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []

    def load(home: object, source: str, **how: Any) -> str:
        found.append({"source": source, **how})
        return source

    monkeypatch.setattr(served, "load_into", load)
    return found


@pytest.mark.parametrize("option", ["--adapters", "--lora-modules"])
def test_adapters_are_given_by_name(asked: list[dict[str, Any]], tmp_path: Path, option: str):
    """Also by vLLM's name for them."""
    arguments = ["models", "load", "embedded:recall", "--home", str(tmp_path), option, "a=x/y", option, "b=/f=g"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert asked[0]["adapters"] == {"a": "x/y", "b": "/f=g"}


@pytest.mark.parametrize("given", [["a"], ["=x"], ["a="], ["a=x", "a=y"]])
def test_adapters_without_a_name_or_a_source_are_refused(asked: list[dict[str, Any]], tmp_path: Path, given: list[str]):
    more = [argument for each in given for argument in ("--adapters", each)]
    result = CliRunner().invoke(app, ["models", "load", "embedded:recall", "--home", str(tmp_path), *more])
    assert result.exit_code == 2 and "--adapters" in result.output and not asked


def test_status_shows_adapters_with_their_replica():
    """A model that is an adapter has no replicas of its own, and is not idle or silent for that."""
    replica = {"model": "m", "adapters": ["one", "two"], "idle_s": 60.0, "up": True}
    found = {"models": {"m": True, "one": True, "two": True, "other": False}, "replicas": {"m-0": replica}}
    assert views._models_line(found) == "m: idle for 60 s; other: does not answer"
    assert "has the adapters one, two" in list(views._replica_lines(replica))
    rows = views._replica_table(found["replicas"], found["models"])
    printed = StringIO()
    Console(file=printed, width=200).print(rows)
    assert "other" in printed.getvalue() and "one" not in printed.getvalue()
