"""`satchel chat`: one message, or a conversation in the terminal, over the endpoint's HTTP interface."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import httpx

from ....cluster.config import Home
from ....cluster.errors import InvalidRequest, SatchelError
from ....cluster.keys import check_agent_id
from ..views import client, error_of, get_json

_SILENCE_S_MAX = 600.0
"""How long the endpoint may send nothing, such as during the prefill of a long prompt."""


def chat(home: Home, *, agent: str | None, model: str | None, text: str | None, new: bool = False) -> None:
    """Sends `text` and prints the answer as it comes; without `text`, reads messages until end of file or Ctrl-C.

    Args:
        agent: whose memory the conversation continues and extends.
        new: whether it is a new conversation, as another branch of the agent's memory.

    Raises:
        InvalidRequest: the agent's name, or a text, cannot be sent.
        NotRunning: no server runs on the home, or it does not answer.
        SatchelError: the endpoint refused the request.
    """
    if agent is not None:
        check_agent_id(agent)
    elif new:
        raise InvalidRequest("--new needs --agent: without one, every conversation is a new one")
    for given in (model, text):
        _check_text(given or "")
    with client(home, timeout_s=_SILENCE_S_MAX) as session:
        talk = _Conversation(session, _first_model(session) if model is None else model, agent, new)
        if text is not None:
            talk.say(text)
        else:
            _converse(talk)


def _first_model(session: httpx.Client) -> str:
    models = get_json(session, "/v1/models").get("data", [])
    if not models:
        raise SatchelError("the endpoint serves no model yet")
    return str(models[0]["id"])


class _Conversation:
    """The messages so far and the model. If an agent continues its memory, the earlier messages are there."""

    def __init__(self, session: httpx.Client, model: str, agent: str | None, new: bool) -> None:
        self.model = model
        self._session = session
        self._headers = {} if agent is None else {"X-Agent-ID": agent}
        self._goes_on = agent is not None and not new
        self._messages: list[dict[str, str]] = []

    def say(self, text: str) -> None:
        """Sends a message and prints the answer. If it fails or is interrupted, the message is dropped."""
        message = {"role": "user", "content": text}
        body: dict[str, Any] = {"model": self.model, "messages": [*self._messages, message], "stream": True}
        if self._goes_on:
            body["agent_continue"] = True
        answer = _print_answer(self._session, body, self._headers)
        if not self._goes_on:
            self._messages += [message, {"role": "assistant", "content": answer}]


def _converse(talk: _Conversation) -> None:
    if sys.stdin.isatty():
        # For line editing and history.
        import readline  # noqa: F401

        print(f"Talking to {talk.model}. Ctrl-D ends.")
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except (EOFError, KeyboardInterrupt):
            if sys.stdin.isatty():
                print()
            return
        if not line.strip():
            continue
        _check_text(line)
        try:
            talk.say(line)
        except KeyboardInterrupt:
            # Closing the response has stopped the answer.
            print("\n(stopped)")


def _check_text(text: str) -> None:
    """
    Raises:
        InvalidRequest: it has bytes that are not UTF-8. Python gives them as lone surrogates.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest("the message is not valid UTF-8") from None


def _print_answer(session: httpx.Client, body: dict[str, Any], headers: dict[str, str]) -> str:
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
        if not chunk.get("satchel", {}).get("kept", True):
            print(f"satchel: the agent does not remember this: {chunk['satchel'].get('reason', '')}", file=sys.stderr)
        for choice in chunk.get("choices", []):
            yield choice.get("delta", {}).get("content") or ""
    raise SatchelError("the answer broke off")
