"""`satchel launch`: what agent programs are started with."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from satchel.api.cli.endpoint import FoundEndpoint
from satchel.api.cli.talk.launch import Program, launched
from satchel.cluster.connection import ClusterRecord
from satchel.cluster.keys import create_key, write_owner_key

from ..conftest import Served

RECORD = ClusterRecord("127.0.0.1:1", "t", "satchel", "0", None, 1, 0.0, "/tmp/x", 0)


async def test_the_environment_is_printed(served: Served) -> None:
    url = served.endpoint_url
    lines = (await served.says("launch", "claude", "--print", "--", "-p", "say hi")).splitlines()
    assert f"export ANTHROPIC_BASE_URL={url}" in lines and "export ANTHROPIC_MODEL=satchel/tiny" in lines
    assert lines[-1] == "claude -p 'say hi'"
    found = json.loads(await served.says("launch", "qwen", "--model", "other", "--json"))
    assert found == {
        "program": "qwen",
        "command": ["qwen"],
        "environment": {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "satchel", "OPENAI_MODEL": "other"},
    }


async def test_codex_and_opencode_get_a_provider(served: Served) -> None:
    codex = json.loads(await served.says("launch", "codex", "--json", "--", "exec", "hi"))
    assert codex["command"][:3] == ["codex", "-c", 'model="satchel/tiny"'] and codex["command"][-2:] == ["exec", "hi"]
    assert f'base_url="{served.endpoint_url}/v1",wire_api="responses",env_key="SATCHEL_KEY",' in codex["command"][6]
    opencode = json.loads(await served.says("launch", "opencode", "--json"))
    config = json.loads(opencode["environment"]["OPENCODE_CONFIG_CONTENT"])
    assert config["model"] == "satchel/satchel/tiny" and config["provider"]["satchel"]["models"].keys() == {
        "satchel/tiny"
    }
    assert config["provider"]["satchel"]["options"]["baseURL"] == f"{served.endpoint_url}/v1"


async def test_a_program_that_is_missing_can_be_installed(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert await served.refuses("launch", "claude") == (
        "claude is not installed: `npm install -g @anthropic-ai/claude-code`"
    )


async def test_a_program_is_started_with_the_environment(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / "qwen"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    started: list[Any] = []
    monkeypatch.setattr(os, "execvpe", lambda *given: started.append(given))
    await served.says("launch", "qwen", "--", "--yolo")
    ((name, command, environment),) = started
    assert (name, command, environment["OPENAI_MODEL"]) == ("qwen", ["qwen", "--yolo"], "satchel/tiny")
    assert environment["PATH"] == str(program.parent)


async def test_a_program_never_gets_the_owners_key(served: Served) -> None:
    write_owner_key(served.home)
    _, secret = create_key(served.home, "me")
    said = await served.refuses("launch", "claude", "--print")
    assert "takes only its keys: make one with `satchel keys create NAME`" in said
    assert "does not take that key" in await served.refuses("launch", "claude", "--print", "--key", "wrong")
    lines = (await served.says("launch", "claude", "--print", "--key", secret)).splitlines()
    assert f"export ANTHROPIC_API_KEY={shlex.quote(secret)}" in lines


async def test_only_served_models_can_be_chosen(served: Served) -> None:
    said = await served.refuses("launch", "claude", "--model", "third")
    assert said == "no model third is served; there are: satchel/tiny, other"


def test_programs_trust_the_endpoints_certificate() -> None:
    found = FoundEndpoint(RECORD, "https://studio.lan:8000", "", "/home/me/endpoint.pem")
    for program in Program:
        environment = launched(program, found, "m", "k", [], None).environment
        assert environment["NODE_EXTRA_CA_CERTS"] == environment["SSL_CERT_FILE"] == "/home/me/endpoint.pem"


def test_programs_are_told_the_models_context() -> None:
    """So they compact a conversation before it is full. By the name of a model they take it for a larger one."""
    found = FoundEndpoint(RECORD, "http://127.0.0.1:8000", "", None)
    claude, codex, opencode = (
        launched(program, found, "qwen-small", "k", ["hi"], 32_768)
        for program in (Program.claude, Program.codex, Program.opencode)
    )
    assert claude.environment["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "32768"
    assert claude.environment["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "4096"
    assert codex.command[-3:] == ["-c", "model_context_window=32768", "hi"]
    config = json.loads(opencode.environment["OPENCODE_CONFIG_CONTENT"])
    described = config["provider"]["satchel"]["models"]["qwen-small"]
    assert described == {"name": "qwen-small", "limit": {"context": 32_768, "output": 4096}}
    # A model that is not loaded yet.
    for program in Program:
        unknown = launched(program, found, "m", "k", [], None)
        words = [*unknown.command, *unknown.environment, *unknown.environment.values()]
        assert "context" not in " ".join(words).lower()


def test_programs_wait_for_a_long_prompt() -> None:
    """By themselves some give up after 5 minutes."""
    found = FoundEndpoint(RECORD, "http://127.0.0.1:8000", "", None)
    claude, codex, opencode = (
        launched(program, found, "m", "k", [], None) for program in (Program.claude, Program.codex, Program.opencode)
    )
    assert claude.environment["API_TIMEOUT_MS"] == "3600000"
    assert "stream_idle_timeout_ms=3600000" in codex.command[6]
    config = json.loads(opencode.environment["OPENCODE_CONFIG_CONTENT"])
    assert config["provider"]["satchel"]["options"]["chunkTimeout"] == 3_600_000


async def test_the_context_is_the_chosen_models(served: Served) -> None:
    found = json.loads(await served.says("launch", "claude", "--json"))
    listed = (await served.endpoint.client.get("/v1/models")).json()["data"]
    assert found["environment"]["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == str(listed[0]["context_length"])
