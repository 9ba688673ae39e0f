"""Error responses in the shape of the protocol that a route speaks, wherever on the way the error is raised."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

from fastapi.responses import JSONResponse, Response
from starlette.types import Scope

from ...cluster.errors import SatchelError
from ..anthropic import answers as anthropic
from ..ollama import answers as ollama
from ..openai import answers as openai

MESSAGES = "/v1/messages"
OLLAMA = "/api"
_TEXT, _TEXT_OR_NULL = {"type": "string"}, {"type": ["string", "null"]}


def _object(**fields: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(fields), "properties": fields}


class ErrorShape(Protocol):
    """How a protocol says that something is wrong.

    Attributes:
        request_id_header: the header in which its clients look for the request's id, besides `x-request-id`; "" if
            there is none.
        schema: of the body, in JSON Schema.
    """

    request_id_header: str
    schema: dict[str, Any]

    def body(
        self, error: SatchelError, request_id: str, *, status: int | None = None, code: str | None = None
    ) -> tuple[int, dict[str, Any]]:
        """Returns the status and the body. `status` and `code` replace the error's own."""
        ...


class OpenAIErrors:
    request_id_header = ""
    schema = _object(error=_object(message=_TEXT, type=_TEXT, param=_TEXT_OR_NULL, code=_TEXT_OR_NULL))

    def body(
        self, error: SatchelError, request_id: str, *, status: int | None = None, code: str | None = None
    ) -> tuple[int, dict[str, Any]]:
        shown = error.status if status is None else status
        return shown, openai.error_body(shown, error.message, code=code or error.code, param=error.param)


class AnthropicErrors:
    request_id_header = "request-id"
    schema = _object(type={"const": "error"}, error=_object(type=_TEXT, message=_TEXT), request_id=_TEXT)

    def body(
        self, error: SatchelError, request_id: str, *, status: int | None = None, code: str | None = None
    ) -> tuple[int, dict[str, Any]]:
        shown = anthropic.status_of(error.status if status is None else status)
        return shown, anthropic.error_body(shown, anthropic.error_message(error), request_id)


class OllamaErrors:
    request_id_header = ""
    schema = _object(error=_TEXT)

    def body(
        self, error: SatchelError, request_id: str, *, status: int | None = None, code: str | None = None
    ) -> tuple[int, dict[str, Any]]:
        return error.status if status is None else status, ollama.error_body(error)


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
        status, code: instead of the error's own, for errors of HTTP that are none of Satchel's.
        headers: further ones.
    """
    more = dict(headers or {})
    if error.status == 503 or error.retry_after_s is not None:
        more["Retry-After"] = str(max(1, math.ceil(error.retry_after_s or 1)))
    request_id = scope.get("state", {}).get("request_id", "")
    shown, body = shape_of(scope["path"]).body(error, request_id, status=status, code=code)
    return JSONResponse(body, status_code=shown, headers=more)
