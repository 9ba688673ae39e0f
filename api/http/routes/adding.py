"""Adding a route to the application."""

from __future__ import annotations

from functools import cache
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel


def add_route(
    app: FastAPI,
    method: str,
    path: str,
    handler: Any,
    body: type[BaseModel] | None = None,
    *,
    shown: bool = True,
) -> None:
    """Adds a route to `app`. One of GET takes HEAD too.

    Args:
        handler: a coroutine function that FastAPI calls.
        body: the class of the request's body, which the application's description shows; the handler reads it.
        shown: whether the route is in the description.
    """
    extra = None
    if body is not None:
        extra = {"requestBody": {"required": True, "content": {"application/json": {"schema": _schema_of(body)}}}}
    app.add_api_route(
        path, handler, methods=[method], response_model=None, openapi_extra=extra, include_in_schema=shown
    )
    if method == "GET":
        app.add_api_route(path, handler, methods=["HEAD"], response_model=None, include_in_schema=False)


@cache
def _schema_of(body: type[BaseModel]) -> dict[str, Any]:
    """Takes long, and is the same for every application."""
    return body.model_json_schema()
