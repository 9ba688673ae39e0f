"""What `satchel serve` and `satchel up` serve, by their command lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from satchel.actors.model_files.source import EMBEDDED
from satchel.api.cli import cluster as cli_cluster
from satchel.api.cli import serve as cli_serve
from satchel.api.cli.main import app
from satchel.api.cli.models.choosing import Choice
from satchel.api.cli.options import LogFormat
from satchel.cluster.config.config import Config, Model, default_config
from satchel.cluster.errors import ConfigError, SatchelError


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    configs: list[Config] = []
    monkeypatch.setattr(cli_serve, "serve", lambda config, home: configs.append(config))
    return configs


def serve(served: list[Config], *arguments: str) -> Config:
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 0, result.output + str(result.exception)
    return served.pop()


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert isinstance(result.exception, SatchelError), result.output
    return result.exception.message


def sources(config: Config) -> list[tuple[str, str]]:
    return [(model.name, model.source) for model in config.models]


def test_models_are_served_by_their_sources(served: list[Config], tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    config = serve(served, "embedded:recall", "owner/name@main", str(tmp_path / "mine"), "satchel/shapes")
    assert sources(config) == [
        ("recall", "embedded:recall"),
        ("owner/name", "owner/name@main"),
        ("mine", str(tmp_path / "mine")),
        ("satchel/shapes", "embedded:shapes"),
    ]
    assert serve(served) == default_config()


def test_options_that_people_expect(served: list[Config]) -> None:
    options = ("--name", "mine", "--port", "8001", "--kv", "k8v4", "--context", "4096", "--no-self-test")
    options += ("--log-format", "json")
    config = serve(served, "owner/name", *options)
    fields: dict[str, Any] = {"kv": "k8v4", "context_tokens_max": 4096, "self_test": False}
    assert config.models == (Model(name="mine", source="owner/name", **fields),)
    assert config.endpoint.port == 8001 and config.logs.format == "json"
    as_vllm = serve(served, "owner/name", "--served-model-name", "mine", "--max-model-len", "4096")
    assert (as_vllm.models[0].name, as_vllm.models[0].context_tokens_max) == ("mine", 4096)


def test_a_first_argument_that_is_a_file_is_the_config(served: list[Config], tmp_path: Path) -> None:
    file = tmp_path / "my.yml"
    file.write_text("models: [{name: a, source: b/c}, {name: d, source: e/f}]\nendpoint: {port: 8002}")
    for arguments in ((str(file),), ("--config", str(file))):
        config = serve(served, *arguments, "--kv", "fp16")
        assert sources(config) == [("a", "b/c"), ("d", "e/f")] and config.endpoint.port == 8002
        assert [model.kv for model in config.models] == ["fp16", "fp16"]
    assert "give a config" in refused(str(file), "owner/name")
    assert "give one config, not 2" in refused(str(file), "--config", str(file))
    assert "a config names its models itself" in refused(str(file), "--name", "x")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("embeded:recall",), "did you mean embedded:recall?"),
        (("embedded:recal",), "did you mean embedded:recall?"),
        (("satchel/recal",), "did you mean satchel/recall?"),
        (("recal",), "neither a folder, nor a Hub id, nor one that ships with Satchel (embedded:recall, "),
        (("./none",), "'./none': there is no such folder"),
        (("~nobody-here/x",), "names the home of a user who does not exist"),
        (("owner/name", "owner/name@v2"), "owner/name@v2: two models are called 'owner/name'"),
        (("owner/name", "other/name", "--name", "x"), "--name is for one MODEL"),
    ],
)
def test_what_is_no_model_is_refused_before_anything_starts(arguments: tuple[str, ...], says: str) -> None:
    assert says in refused(*arguments)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    assert (
        refused(str(tmp_path)) == f"{tmp_path} has no config.json; it must be a folder as the Hub or mlx-lm lay it out"
    )


def test_up_starts_a_server_that_serves_the_same(served: list[Config], tmp_path: Path) -> None:
    """The background server's command line, read as `serve` reads it, gives the same config."""
    file = tmp_path / "my.yaml"
    file.write_text("models: [{name: a, source: b/c}]")
    for choice in (
        Choice(),
        Choice(("embedded:recall", "owner/name"), port=8003, listen="127.0.0.1"),
        Choice((str(EMBEDDED / "recall"),), name="mine", self_test=False, context=100),
        Choice((str(file),)),
        Choice(config=file, port=8004, log_format=LogFormat.json),
    ):
        assert serve(served, *choice.arguments()) == choice.read()


def test_up_takes_models_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    chosen: list[Choice] = []

    def start(choice: Choice, home: Any, say: Any) -> dict[str, Any]:
        chosen.append(choice)
        return {"pid": 1}

    monkeypatch.setattr(cli_cluster, "start_in_background", start)
    result = CliRunner().invoke(app, ["up", "embedded:recall", "--port", "8001", "--json", "--home", str(tmp_path)])
    assert result.exit_code == 0 and result.output == '{\n  "pid": 1\n}\n'
    assert chosen[0].read().models == (Model(name="recall", source="embedded:recall"),)


def test_a_name_with_a_space_is_refused_with_its_place() -> None:
    with pytest.raises(ConfigError, match="name"):
        Choice(("embedded:recall",), name="my model").read()
