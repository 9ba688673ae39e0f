"""`satchel chat`: one message, or a conversation in the terminal, over the endpoint's HTTP interface."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import httpx

from ...cluster.config import Home
from ...cluster.errors import SatchelError
from .views import client, error_of, get_json

_SILENCE_S_MAX = 600.0
"""How long the endpoint may send nothing, such as during the prefill of a long prompt."""


def chat(home: Home, *, agent: str | None, model: str | None, text: str | None) -> None:
    """Sends `text` and prints the answer as it comes; without `text`, reads messages until end of file or Ctrl-C.

    Raises:
        NotRunning: no server runs on the home, or it does not answer.
        SatchelError: the endpoint refused the request.
    """
    with client(home, timeout_s=_SILENCE_S_MAX) as session:
        if model is None:
            model = _first_model(session)
        if text is not None:
            _print_answer(session, _request(model, [{"role": "user", "content": text}]), agent)
        else:
            _converse(session, model, agent)


def _first_model(session: httpx.Client) -> str:
    models = get_json(session, "/v1/models").get("data", [])
    if not models:
        raise SatchelError("the endpoint serves no model yet")
    return str(models[0]["id"])


def _request(model: str, messages: list[dict[str, str]]) -> dict[str, Any]:
    return {"model": model, "messages": messages, "stream": True}


def _converse(session: httpx.Client, model: str, agent: str | None) -> None:
    if sys.stdin.isatty():
        # Line editing and history.
        import readline  # noqa: F401

        print(f"Talking to {model}. Ctrl-D ends.")
    messages: list[dict[str, str]] = []
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except (EOFError, KeyboardInterrupt):
            if sys.stdin.isatty():
                print()
            return
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line})
        try:
            answer = _print_answer(session, _request(model, messages), agent)
        except KeyboardInterrupt:
            # Closing the response has stopped the answer; its question is dropped too.
            messages.pop()
            print("\n(stopped)")
            continue
        messages.append({"role": "assistant", "content": answer})


def _print_answer(session: httpx.Client, body: dict[str, Any], agent: str | None) -> str:
    headers = {"X-Agent-ID": agent} if agent is not None else {}
    parts: list[str] = []
    with session.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
        if not response.is_success:
            response.read()
            raise error_of(response)
        for part in _texts(response):
            parts.append(part)
            sys.stdout.write(part)
            sys.stdout.flush()
    print()
    return "".join(parts)


def _texts(response: httpx.Response) -> Iterator[str]:
    """Yields the pieces of text in a stream of chat completion chunks.

    Raises:
        SatchelError: the stream reports a failure, or ends before `[DONE]`.
    """
    for line in response.iter_lines():
        if not line.startswith("data:"):
            continue
        data = line[len("data:") :].strip()
        if data == "[DONE]":
            return
        chunk = json.loads(data)
        if "error" in chunk:
            raise SatchelError(f"the endpoint failed: {chunk['error'].get('message', 'no reason given')}")
        for choice in chunk.get("choices", []):
            yield choice.get("delta", {}).get("content") or ""
    raise SatchelError("the answer broke off")
