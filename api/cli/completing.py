"""Shell completion of names that the running server knows. It is silent if none runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import typer

from ...cluster.errors import SatchelError
from .options import chosen_home

_ANSWER_S = 2.0


def complete_model(context: typer.Context, incomplete: str) -> list[str]:
    """Returns the names of served models that begin so."""
    return _asked(context, incomplete, "/v1/models", lambda found: (each["id"] for each in found["data"]))


def complete_agent(context: typer.Context, incomplete: str) -> list[str]:
    """Returns the ids of the owner's agents that begin so."""
    return _asked(context, incomplete, "/v1/agents?limit=100", lambda found: (each["id"] for each in found["data"]))


def _asked(context: typer.Context, begins: str, path: str, names: Callable[[Any], Iterable[str]]) -> list[str]:
    from .views import client, get_json

    given = context.params.get("home") or (context.parent and context.parent.params.get("home"))
    try:
        with client(chosen_home(given), timeout_s=_ANSWER_S) as session:
            return [name for name in names(get_json(session, path)) if name.startswith(begins)]
    except (SatchelError, LookupError, TypeError):
        return []
