"""`satchel chat`: one message, or a conversation in the terminal, over the endpoint's HTTP interface."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Annotated, Any, Optional

import httpx
import typer

from ....cluster.errors import InvalidRequest, SatchelError
from ....cluster.home import Home
from ....cluster.keys import check_agent_id
from ..completing import complete_agent
from ..models.choosing import meant
from ..views import client, error_of, get_json

_SILENCE_S_MAX = 600.0
"""How long the endpoint may send nothing, such as during the prefill of a long prompt."""

AgentOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--agent",
        metavar="NAME",
        help="The agent that continues and remembers the conversation.",
        autocompletion=complete_agent,
    ),
]


def chat(
    home: Home, *, agent: str | None, model: str | None, text: str | None, new: bool = False, as_json: bool = False
) -> None:
    """Sends `text` and prints the answer as it comes; without `text`, reads messages until end of file or Ctrl-C.

    Args:
        agent: whose memory the conversation continues and extends.
        new: whether it is a new conversation, as another branch of the agent's memory.
        as_json: whether to print the whole answer to `text` at its end: `model`, `agent`, `text` and `usage`.

    Raises:
        InvalidRequest: the agent's name, or a text, cannot be sent.
        NotRunning: no server runs on the home, or it does not answer.
        SatchelError: the endpoint refused the request.
    """
    if agent is not None:
        check_agent_id(agent)
    elif new:
        raise InvalidRequest("--new needs --agent: without one, every conversation is a new one")
    if as_json and text is None:
        raise InvalidRequest("--json needs a message")
    for given in (model, text):
        _check_text(given or "")
    with client(home, timeout_s=_SILENCE_S_MAX) as session:
        talk = _Conversation(session, _first_model(session) if model is None else model, agent, new, quiet=as_json)
        if text is not None:
            answer = talk.say(text)
            if as_json:
                said = {"model": talk.model, "agent": agent, "text": answer, "usage": talk.usage}
                print(json.dumps(said, indent=2))
        else:
            _converse(talk)


def _first_model(session: httpx.Client) -> str:
    models = get_json(session, "/v1/models").get("data", [])
    if not models:
        raise SatchelError("the endpoint serves no model yet")
    return str(models[0]["id"])


class _Conversation:
    """The messages so far and the model. If an agent continues its memory, the earlier messages are there."""

    def __init__(self, session: httpx.Client, model: str, agent: str | None, new: bool, *, quiet: bool) -> None:
        self.model = model
        self.usage: dict[str, Any] | None = None
        """Of the last answer."""
        self._quiet = quiet
        self._session = session
        self._headers = {} if agent is None else {"X-Agent-ID": agent}
        self._goes_on = agent is not None and not new
        self._messages: list[dict[str, str]] = []

    def say(self, text: str) -> str:
        """Sends a message, prints the answer and returns it. If it fails or is interrupted, the message is dropped."""
        message = {"role": "user", "content": text}
        body: dict[str, Any] = {"model": self.model, "messages": [*self._messages, message], "stream": True}
        if self._goes_on:
            body["agent_continue"] = True
        body["stream_options"] = {"include_usage": True}
        answer = self._answer(body)
        if not self._goes_on:
            self._messages += [message, {"role": "assistant", "content": answer}]
        return answer

    def _answer(self, body: dict[str, Any]) -> str:
        parts: list[str] = []
        with self._session.stream("POST", "/v1/chat/completions", json=body, headers=self._headers) as response:
            if not response.is_success:
                response.read()
                raise self._refusal(response)
            for chunk in _chunks(response):
                self.usage = chunk.get("usage") or self.usage
                for choice in chunk.get("choices", []):
                    parts.append(choice.get("delta", {}).get("content") or "")
                    if not self._quiet:
                        sys.stdout.write(parts[-1])
                        sys.stdout.flush()
        if not self._quiet:
            print()
        return "".join(parts)

    def _refusal(self, response: httpx.Response) -> SatchelError:
        """Returns the error of a failed response; for an unknown model with the most similar one."""
        error = error_of(response)
        if response.status_code != 404:
            return error
        names = [each["id"] for each in get_json(self._session, "/v1/models").get("data", [])]
        return SatchelError(error.message + meant(self.model, names))


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


def _chunks(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Yields the chunks of a streamed chat completion.

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
        yield chunk
    raise SatchelError("the answer broke off")
