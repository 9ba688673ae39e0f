"""`satchel run`: on a running server, and with none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from satchel.api.cli.main import app
from satchel.api.cli.models.choosing import Choice
from satchel.api.cli.talk import run as cli_run
from satchel.cluster.errors import PortInUse, SatchelError
from satchel.cluster.home import Home

from ..conftest import Served


async def test_a_served_model_answers_at_once(served: Served) -> None:
    assert await served.says("run", "other", "Hi") == "Hello there\n"
    assert served.endpoint.backend.requests[-1]["model"] == "other"
    found = json.loads(await served.says("run", "satchel/tiny", "Hi", "--json"))
    assert (found["model"], found["agent"], found["text"]) == ("satchel/tiny", None, "Hello there")
    assert found["usage"]["completion_tokens"] > 0


async def test_standard_input_is_added_to_the_prompt(served: Served) -> None:
    await served.says("run", "satchel/tiny", "Sum this up:", "--agent", "zed", input="one\ntwo\n")
    (message, _) = json.loads(await served.store.transcript("default/zed"))
    assert message["content"] == "Sum this up:\n\none\ntwo"
    await served.says("run", "satchel/tiny", "--agent", "yan", input="only this\n")
    (message, _) = json.loads(await served.store.transcript("default/yan"))
    assert message["content"] == "only this"


async def test_another_model_is_loaded_into_the_running_server(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Any] = []

    def load(home: Home, source: str, **how: Any) -> str:
        loaded.append((home.root, source, how["name"], how["kv"], how["context_tokens_max"]))
        return "other"

    monkeypatch.setattr(cli_run, "load_into", load)
    options = ("--kv", "q4", "--context", "900")
    assert "Hello there" in await served.says("run", "embedded:recall", "Hi", *options)
    assert loaded == [(served.home.root, "embedded:recall", "recall", "q4", 900)]


async def test_what_is_no_model_is_refused(served: Served) -> None:
    assert "did you mean embedded:recall?" in await served.refuses("run", "embeded:recall", "Hi")
    assert await served.refuses("run", "other", "--json") == "--json needs a PROMPT"


async def test_a_model_that_is_not_served_is_refused_with_a_similar_one(served: Served) -> None:
    assert "did you mean satchel/tiny?" in await served.refuses("chat", "--model", "satchel/tini", "Hi")
    assert await served.refuses("chat", "--json") == "--json needs a message"


class Started(Exception):
    """Nothing is asked of a server that the test has not started."""


def test_without_a_server_one_is_started_at_a_free_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choices: list[Choice] = []

    def start(choice: Choice, home: Home, say: Any) -> dict[str, Any]:
        choices.append(choice)
        raise Started

    def taken(listen: str, port: int) -> None:
        raise PortInUse("taken")

    monkeypatch.setattr(cli_run, "start_in_background", start)
    monkeypatch.setattr(cli_run, "check_port_free", taken)
    arguments = ["run", "embedded:recall", "Hi", "--home", str(tmp_path / "home")]
    for more in ([], ["--port", "8001"]):
        assert isinstance(CliRunner().invoke(app, [*arguments, *more]).exception, Started)
    free, given = (choice.read() for choice in choices)
    assert free.models[0].source == "embedded:recall" and free.endpoint.port != 8000
    assert given.endpoint.port == 8001, "a port that was asked for is not replaced"
    refused = CliRunner().invoke(app, ["run", "nothing", "Hi", "--home", str(tmp_path / "home")])
    assert isinstance(refused.exception, SatchelError) and len(choices) == 2
