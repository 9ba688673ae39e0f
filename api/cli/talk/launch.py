"""`satchel launch`: starts an agent program against the running endpoint."""

from __future__ import annotations

import json as json_text
import os
import shlex
import shutil
import sys
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Optional

import httpx
import typer

from ....cluster.environment import snapshot
from ....cluster.errors import InvalidRequest, SatchelError
from ..completing import complete_model
from ..endpoint import FoundEndpoint, find_endpoint
from ..options import HomeOption, JsonOption, chosen_home
from ..printing import print_json
from ..views import client_of, named_model

_ANSWER_S = 15.0
_ANSWER_PART = 8
"""A program is told that an answer takes at most the context divided by this."""

_ANSWER_TOKENS_MAX = 32_000

_PATIENCE_MS = 3_600_000
"""How long programs wait for an answer. By themselves they give up after 5 to 10 minutes, which a long prompt may take
on a slow machine."""

_ANY_KEY = "satchel"
"""What programs send while the endpoint has no keys: they do not start without any."""


class Program(StrEnum):
    """Agent programs, by their commands."""

    claude = "claude"
    codex = "codex"
    opencode = "opencode"
    qwen = "qwen"


_PACKAGES = {
    Program.claude: "@anthropic-ai/claude-code",
    Program.codex: "@openai/codex",
    Program.opencode: "opencode-ai",
    Program.qwen: "@qwen-code/qwen-code",
}
"""Of npm."""


@dataclass(frozen=True)
class Launch:
    """A program's command line and what its environment has besides this shell's."""

    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)


def launch(
    program: Annotated[Program, typer.Argument(metavar="PROGRAM", help="claude, codex, opencode or qwen.")],
    arguments: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(metavar="[-- ARGUMENTS…]", help="What the program gets, after `--`."),
    ] = None,
    model: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--model", metavar="NAME", help="The model (else the first).", autocompletion=complete_model),
    ] = None,
    key: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--key", metavar="KEY", help="A key of the endpoint, if it has keys (else SATCHEL_KEY)."),
    ] = None,
    only_print: Annotated[bool, typer.Option("--print", help="Print the environment and the command line.")] = False,
    json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Start an agent program that uses the running server."""
    found = find_endpoint(chosen_home(home))
    with client_of(found, timeout_s=_ANSWER_S) as session:
        served = named_model(session, model)
        secret = _checked_key(session, key or snapshot().get("SATCHEL_KEY"))
    # What the files of a model that is not loaded say is unknown.
    context = served.get("context_length")
    made = launched(program, found, model or served["id"], secret, arguments or [], context)
    if json:
        described = {"program": program.value, "command": made.command, "environment": made.environment}
        print_json(described)
        return
    if only_print:
        for name, value in made.environment.items():
            print(f"export {name}={shlex.quote(value)}")
        print(shlex.join(made.command))
        return
    if shutil.which(program.value) is None:
        raise SatchelError(f"{program.value} is not installed: `npm install -g {_PACKAGES[program]}`")
    sys.stdout.flush()
    try:
        os.execvpe(made.command[0], made.command, {**snapshot(), **made.environment})
    except OSError as error:
        raise SatchelError(f"{program.value} cannot be started: {error.strerror or error}") from None


def launched(
    program: Program, found: FoundEndpoint, model: str, key: str, arguments: list[str], context_tokens: int | None
) -> Launch:
    """Returns how a program is started.

    Args:
        context_tokens: the model's context, so that the program compacts a conversation before it is full; None if it
            is unknown. Qwen Code cannot be told: it compacts once the endpoint refuses a prompt.
    """
    made = {
        Program.claude: _claude,
        Program.codex: _codex,
        Program.opencode: _opencode,
        Program.qwen: _qwen,
    }[program](found.url, model, key, context_tokens)
    return Launch([*made.command, *arguments], {**made.environment, **_trust(found)})


def _claude(url: str, model: str, key: str, context_tokens: int | None) -> Launch:
    environment = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": key, "ANTHROPIC_MODEL": model}
    # Its side requests, such as titles.
    environment |= {"ANTHROPIC_SMALL_FAST_MODEL": model, "ANTHROPIC_DEFAULT_HAIKU_MODEL": model}
    environment["API_TIMEOUT_MS"] = str(_PATIENCE_MS)
    if context_tokens is not None:
        environment["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = str(context_tokens)
        environment["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(_answer_tokens(context_tokens))
    return Launch(["claude"], environment)


def _codex(url: str, model: str, key: str, context_tokens: int | None) -> Launch:
    protocol = f'wire_api="responses",env_key="SATCHEL_KEY",stream_idle_timeout_ms={_PATIENCE_MS}'
    provider = f'{{name="Satchel",base_url={_toml(url + "/v1")},{protocol}}}'
    settings = [f"model={_toml(model)}", "model_provider=satchel", f"model_providers.satchel={provider}"]
    if context_tokens is not None:
        settings.append(f"model_context_window={context_tokens}")
    return Launch(["codex", *(word for setting in settings for word in ("-c", setting))], {"SATCHEL_KEY": key})


def _qwen(url: str, model: str, key: str, context_tokens: int | None) -> Launch:
    return Launch(["qwen"], {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key, "OPENAI_MODEL": model})


def _opencode(url: str, model: str, key: str, context_tokens: int | None) -> Launch:
    described: dict[str, Any] = {"name": model}
    if context_tokens is not None:
        described["limit"] = {"context": context_tokens, "output": _answer_tokens(context_tokens)}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Satchel",
        "options": {"baseURL": f"{url}/v1", "apiKey": key, "chunkTimeout": _PATIENCE_MS},
        "models": {model: described},
    }
    config = {"model": f"satchel/{model}", "provider": {"satchel": provider}}
    return Launch(["opencode"], {"OPENCODE_CONFIG_CONTENT": json_text.dumps(config)})


def _answer_tokens(context_tokens: int) -> int:
    return max(1, min(_ANSWER_TOKENS_MAX, context_tokens // _ANSWER_PART))


def _toml(text: str) -> str:
    """Returns a TOML string. JSON's strings are TOML's too."""
    return json_text.dumps(text)


def _trust(found: FoundEndpoint) -> dict[str, str]:
    """Returns the variables by which programs trust the endpoint's certificate: those of Node.js and of OpenSSL."""
    if found.certificate is None or "\n" in found.certificate:
        return {}
    return {"NODE_EXTRA_CA_CERTS": found.certificate, "SSL_CERT_FILE": found.certificate}


def _checked_key(session: httpx.Client, given: str | None) -> str:
    """Returns the key that the program sends. It never gets the owner's.

    Raises:
        InvalidRequest: the endpoint does not take it.
    """
    key = given or _ANY_KEY
    answer = session.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
    if answer.status_code == 401:
        why = "takes only its keys" if given is None else "does not take that key"
        raise InvalidRequest(f"the endpoint {why}: make one with `satchel keys create NAME`, and give it with --key")
    return key
