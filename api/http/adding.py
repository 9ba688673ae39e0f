"""Adds a route to the application and to its description (`/openapi.json`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.routing import compile_path

from .error_shapes import shape_of

JSON, EVENTS, NDJSON, TEXT = "application/json", "text/event-stream", "application/x-ndjson", "text/plain"
BYTES = "application/octet-stream"
_COMPONENTS = "#/components/schemas/{model}"


class DeferredRoute(APIRoute):
    """A route whose handler FastAPI examines when the route is first used, not when it is added. That takes a
    millisecond a route, and a process uses few of a hundred."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        self._deferred: dict[str, Any] | None = {"path": path, "endpoint": endpoint, **options}
        # What a request is compared with.
        self.path, self.endpoint, self.methods = path, endpoint, set(options["methods"])
        self.path_regex, self.path_format, self.param_convertors = compile_path(path)

    def __getattr__(self, name: str) -> Any:
        """Makes the whole route, of which only a part was there."""
        deferred = self.__dict__.get("_deferred")
        if deferred is None:
            raise AttributeError(f"a route has no attribute {name!r}")
        self._deferred = None
        super().__init__(**deferred)
        return getattr(self, name)


def add_route(
    app: FastAPI,
    method: str,
    path: str,
    handler: Any,
    body: type[BaseModel] | None = None,
    *,
    takes: str = "",
    answers: tuple[str, ...] = (JSON,),
    shown: bool = True,
) -> None:
    """Adds a route to `app`. A route for GET accepts HEAD too.

    Args:
        handler: a coroutine function that FastAPI calls.
        body: the class of the request's body, for the description; the handler reads the body itself.
        takes: the media type if the body is a file; "" for none.
        answers: the media types of its answers.
        shown: whether the route is in the description.
    """
    extra = None
    if body is not None:
        extra = {"requestBody": {"required": True, "content": {JSON: {"schema": _schema_of(body)}}}}
    elif takes:
        file = {"type": "string", "format": "binary"}
        extra = {"requestBody": {"required": True, "content": {takes: {"schema": file}}}}
    app.router.add_api_route(
        path,
        handler,
        methods=[method],
        route_class_override=DeferredRoute,
        response_model=None,
        responses={
            200: {"description": "The answer", "content": {media: {} for media in answers}},
            "default": {"description": "An error", "content": {JSON: {"schema": shape_of(path).schema}}},
        },
        openapi_extra=extra,
        include_in_schema=shown,
    )
    if method == "GET":
        app.router.add_api_route(
            path,
            handler,
            methods=["HEAD"],
            route_class_override=DeferredRoute,
            response_model=None,
            include_in_schema=False,
        )


def describe_bodies(app: FastAPI) -> None:
    """Puts the classes that routes' bodies refer to into the description of `app`."""
    without = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = without()
            classes = made.setdefault("components", {}).setdefault("schemas", {})
            for operations in made["paths"].values():
                for operation in operations.values():
                    for body in operation.get("requestBody", {}).get("content", {}).values():
                        classes |= body["schema"].pop("$defs", {})
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = openapi


@cache
def _schema_of(body: type[BaseModel]) -> dict[str, Any]:
    """Returns the JSON schema of a body. Cached, because it takes long and is the same for every application."""
    return body.model_json_schema(ref_template=_COMPONENTS)
