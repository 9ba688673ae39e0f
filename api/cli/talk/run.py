"""`satchel run`: serves a model in the background if it is not served yet, and talks to it."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Optional

import typer

from ....cluster.bring_up.ports import check_port_free, free_port
from ....cluster.connection import find_cluster
from ....cluster.errors import InvalidRequest, NotRunning, PortInUse
from ....cluster.home import Home
from ..cluster import start_in_background
from ..models.choosing import Choice, ContextOption, KVOption, source_of
from ..models.disk import complete_source
from ..models.served import load_into
from ..options import HomeOption, JsonOption, PortOption, chosen_home
from ..printing import line_printer
from ..views import client, get_json
from .chat import AgentOption, chat

_START_S = 3600.0
"""How long to wait for a server that is starting already."""

_KNOWN_S = 60.0
_POLL_S = 0.3
_ANSWER_S = 15.0


def run(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A Hub id (owner/name or owner/name@revision), a folder, embedded:NAME, or a served model's name.",
            autocompletion=complete_source,
        ),
    ],
    prompt: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(metavar="[PROMPT]", help="One message; without it, a conversation. Standard input is added."),
    ] = None,
    agent: AgentOption = None,
    port: PortOption = None,
    kv: KVOption = None,
    context: ContextOption = None,
    json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Talk to a model. If no server runs, one is started in the background; else it loads the model if necessary."""
    where, text = chosen_home(home), _message(prompt)
    if json and text is None:
        raise InvalidRequest("--json needs a PROMPT")
    started, name = _served(model, where, Choice((model,), None, None, kv, context, port))
    if started or text is None:
        # Not on standard output, which has the answer alone.
        print(f"`satchel down` stops the server, `satchel run {model}` continues here.", file=sys.stderr)
    chat(where, agent=agent, model=name, text=text, as_json=json)


def _message(prompt: str | None) -> str | None:
    """Returns the prompt, followed by standard input if that is no terminal; None if there is neither."""
    if sys.stdin is None or sys.stdin.isatty():
        return prompt
    piped = sys.stdin.read().strip()
    return "\n\n".join(part for part in (prompt, piped) if part) or prompt


def _served(model: str, home: Home, choice: Choice) -> tuple[bool, str]:
    """Serves the model if necessary. Returns whether a server was started, and the model's name."""
    try:
        find_cluster(home)
    except NotRunning:
        (chosen,) = choice.read().models
        start_in_background(_with_port(choice), home, line_printer(as_json=True))
        return True, chosen.name
    _await_endpoint(home)
    with client(home, timeout_s=_ANSWER_S) as session:
        listed = get_json(session, "/v1/models")["data"]
    names = [name for each in listed for name in (each["id"], *each["aliases"])]
    if model in names:
        return False, model
    source, name = source_of(model)
    if name in names:
        return False, name
    kv = None if choice.kv is None else choice.kv.value
    loaded = load_into(home, source, output=sys.stderr, name=name, kv=kv, context_tokens_max=choice.context)
    _await_model(home, loaded)
    return False, loaded


def _await_model(home: Home, name: str) -> None:
    """Waits until the endpoint knows a model that was loaded: it looks for new ones from time to time.

    Raises:
        NotRunning: it does not within a minute.
    """
    ends = time.monotonic() + _KNOWN_S
    with client(home, timeout_s=_ANSWER_S) as session:
        while name not in [each["id"] for each in get_json(session, "/v1/models")["data"]]:
            if time.monotonic() > ends:
                raise NotRunning(f"{name} is loaded, but the endpoint does not serve it yet; try again in a moment")
            time.sleep(_POLL_S)


def _with_port(choice: Choice) -> Choice:
    """Returns the choice, with a free port if none is given and the usual one is taken."""
    endpoint = choice.read().endpoint
    try:
        check_port_free(endpoint.listen, endpoint.port)
    except PortInUse:
        if choice.port is None:
            return Choice(choice.what, None, None, choice.kv, choice.context, free_port())
    return choice


def _await_endpoint(home: Home) -> None:
    """Waits for a server that is starting.

    Raises:
        NotRunning: it ended, or is not ready after an hour.
    """
    ends, said = time.monotonic() + _START_S, False
    while True:
        record = find_cluster(home)
        if record.joined or record.endpoint_url is not None:
            return
        if time.monotonic() > ends:
            raise NotRunning("the server is still starting; `satchel logs` shows what it does")
        if not said:
            print("Waiting for the server that is starting", file=sys.stderr, flush=True)
            said = True
        time.sleep(_POLL_S)
