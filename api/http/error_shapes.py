"""Error responses in the shape of the route's protocol, wherever the error is raised."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

from fastapi.responses import JSONResponse, Response
from starlette.types import Scope

from ...cluster.errors import ContextLengthExceeded, ModelNotFound, SatchelError, quoted

MESSAGES = "/v1/messages"
OLLAMA = "/api"
OVERLOADED, _NO_ROOM = 529, 507
"""Anthropic's status for 503; its clients retry after it."""

_ANTHROPIC_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}
_TEXT, _TEXT_OR_NULL = {"type": "string"}, {"type": ["string", "null"]}


def _object(**fields: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(fields), "properties": fields}


class ErrorShape(Protocol):
    """A protocol's form of errors.

    Attributes:
        request_id_header: the header in which its clients look for the request's id, besides `x-request-id`; "" if
            there is none.
        schema: the JSON schema of the body.
    """

    request_id_header: str
    schema: dict[str, Any]

    def body(
        self, error: SatchelError, request_id: str, *, status: int | None = None, code: str | None = None
    ) -> tuple[int, dict[str, Any]]:
        """Returns the status and the body. `status` and `code` replace the error's own."""
        ...


def openai_error(status: int, message: str, *, code: str, param: str | None = None) -> dict[str, Any]:
    """Returns the body of an error as OpenAI's clients read it."""
    kind = "invalid_request_error" if status < 500 else "service_unavailable" if status == 503 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class OpenAIErrors:
    request_id_header = ""
    schema = _object(error=_object(message=_TEXT, type=_TEXT, param=_TEXT_OR_NULL, code=_TEXT_OR_NULL))

    def body(
        self, error: SatchelError, request_id: str, *, status: int | None = None, code: str | None = None
    ) -> tuple[int, dict[str, Any]]:
        shown = error.status if status is None else status
        return shown, openai_error(shown, error.message, code=code or error.code, param=error.param)


class AnthropicErrors:
    request_id_header = "request-id"
    schema = _object(type={"const": "error"}, error=_object(type=_TEXT, message=_TEXT), request_id=_TEXT)

    def body(
        self, error: SatchelError, request_id: str, *, status: int | None = None, code: str | None = None
    ) -> tuple[int, dict[str, Any]]:
        shown = error.status if status is None else status
        shown = OVERLOADED if shown in (503, _NO_ROOM) else shown
        kind = _ANTHROPIC_KINDS.get(shown, "invalid_request_error" if shown < 500 else "api_error")
        message = error.message
        if isinstance(error, ContextLengthExceeded) and error.tokens is not None:
            # Clients recognise by this text that they must compact.
            message = f"prompt is too long: {error.tokens} tokens > {error.tokens_max} maximum"
        return shown, {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


class OllamaErrors:
    request_id_header = ""
    schema = _object(error=_TEXT)

    def body(
        self, error: SatchelError, request_id: str, *, status: int | None = None, code: str | None = None
    ) -> tuple[int, dict[str, Any]]:
        message = error.message
        # Ollama's clients look for this text.
        if isinstance(error, ModelNotFound) and error.model:
            message = f"model {quoted(error.model)} not found"
        elif isinstance(error, ContextLengthExceeded) and error.tokens is not None:
            message = f"the input length exceeds the context length: {error.tokens} tokens > {error.tokens_max} maximum"
        return error.status if status is None else status, {"error": message}


_OPENAI = OpenAIErrors()
_OTHERS: tuple[tuple[str, ErrorShape], ...] = ((MESSAGES, AnthropicErrors()), (OLLAMA, OllamaErrors()))


def shape_of(path: str) -> ErrorShape:
    """Returns the shape of errors at a path, served or not."""
    for begins, shape in _OTHERS:
        if path == begins or path.startswith(f"{begins}/"):
            return shape
    return _OPENAI


def error_response(
    scope: Scope,
    error: SatchelError,
    *,
    status: int | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Returns the response to a request that failed.

    Args:
        status, code: replace the error's own, for HTTP errors that do not come from Satchel.
        headers: further ones.
    """
    more = dict(headers or {})
    if error.status == 503 or error.retry_after_s is not None:
        more["Retry-After"] = str(max(1, math.ceil(error.retry_after_s or 1)))
    request_id = scope.get("state", {}).get("request_id", "")
    shown, body = shape_of(scope["path"]).body(error, request_id, status=status, code=code)
    return JSONResponse(body, status_code=shown, headers=more)
