"""The Responses API on the way out: the response object, its items, usage and errors."""

from __future__ import annotations

import secrets
import time
from typing import Any

from ....cluster.errors import ContextLengthExceeded, RateLimited, SatchelError
from ...pipeline.streams import Usage
from ...requests.remembered import Remembered
from ...text.answers.logprobs import ShownToken, chat_logprobs
from .bodies import ENCRYPTED, ResponseBody
from .thoughts import sealed

QUEUED, IN_PROGRESS, COMPLETED = "queued", "in_progress", "completed"
INCOMPLETE, FAILED, CANCELLED = "incomplete", "failed", "cancelled"

_DIGITS_BYTES = 24


def new_id(kind: str) -> str:
    """Returns an id for an item of a `kind`: `msg`, `rs`, `fc`, `ctc`, `tsc`."""
    return f"{kind}_{secrets.token_hex(_DIGITS_BYTES)}"


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def logprobs_body(tokens: list[ShownToken] | None) -> list[dict[str, Any]]:
    return [] if tokens is None else chat_logprobs(tokens)["content"]


def text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "annotations": [], "logprobs": logprobs, "text": text}


def thought_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def error_of(error: SatchelError) -> dict[str, str]:
    """Returns the `error` of a failed response. Clients know a few codes; if the code says that the prompt is too long,
    they compact instead of trying again."""
    if isinstance(error, ContextLengthExceeded):
        return {"code": error.code, "message": error.message}
    code = "rate_limit_exceeded" if isinstance(error, RateLimited) else "server_error"
    return {"code": code, "message": error.message}


class ResponseObject:
    """One response as its client sees it.

    Args:
        id: of the response.
        body: the request.
        model: the model that answers.
        created_s: when it was created, as Unix time; None for now.

    Attributes:
        output: its items so far.
        truncated_messages: how many messages were left out of the prompt because they did not fit.
    """

    def __init__(self, id: str, body: ResponseBody, model: str, *, created_s: int | None = None) -> None:
        self.id = id
        self.output: list[dict[str, Any]] = []
        self.truncated_messages = 0
        self._body = body
        self._model = model
        self._created = int(time.time()) if created_s is None else created_s

    @property
    def encrypts(self) -> bool:
        """Whether reasoning has `encrypted_content`: if the request asks for it, or if the response is not stored
        here."""
        return ENCRYPTED in self._body.includes or not self._body.kept

    def sealed(self, text: str) -> dict[str, str]:
        return {"encrypted_content": sealed(text)} if self.encrypts else {}

    def shown(
        self,
        status: str,
        *,
        usage: Usage | None = None,
        error: SatchelError | None = None,
        remembered: Remembered | None = None,
    ) -> dict[str, Any]:
        """Returns the whole object; `satchel` reports what its agent's memory and its prompt lack."""
        body = self._body
        reasoning, text = body.reasoning, body.text
        shown: dict[str, Any] = {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": bool(body.background),
            "completed_at": int(time.time()) if status == COMPLETED else None,
            "error": None if error is None else error_of(error),
            "incomplete_details": {"reason": "max_output_tokens"} if status == INCOMPLETE else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "model": self._model,
            "output": list(self.output),
            "parallel_tool_calls": body.tool_use.parallel,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": reasoning and reasoning.effort, "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": body.kept,
            "temperature": body.temperature,
            "text": {"format": (text and text.format) or {"type": "text"}, "verbosity": text and text.verbosity},
            "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
            "tools": body.tools.given,
            "top_logprobs": body.top_logprobs or 0,
            "top_p": body.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None if usage is None else usage_body(usage),
            "user": body.user,
            "metadata": body.metadata or {},
        }
        if body.conversation is not None:
            shown["conversation"] = {"id": body.conversation}
        noted = (remembered.body if remembered is not None else None) or {}
        if self.truncated_messages:
            noted = {**noted, "truncated_messages": self.truncated_messages}
        return {**shown, "satchel": noted} if noted else shown
