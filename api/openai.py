"""OpenAI's wire format: request bodies in, response bodies and stream chunks out.

Bodies are validated strictly: a number is a number, and a field that changes the answer is either obeyed or refused by
name. Unknown fields are ignored.
"""

from __future__ import annotations

import json
import secrets
import time
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import from_json

from ..cluster.errors import InvalidRequest, SatchelError
from .backend import ServedModel
from .generation import (
    ChatRequest,
    CompletionRequest,
    MaxTokens,
    Options,
    Priority,
    Seed,
    Stop,
    Temperature,
    TopK,
    TopP,
    invalid,
    make_options,
)
from .streams import Answer, Usage
from .tool_calls import ToolCall

COMPLETION_MAX_TOKENS = 16
"""What `/v1/completions` generates where the caller gives no `max_tokens`, as OpenAI's does."""

# Fields that change the answer and are not built yet, each with the values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "min_p": (0, 0.0),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "stop_token_ids": ([],),
    "response_format": ({"type": "text"},),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "web_search_options": (),
    "agent_continue": (False,),
}


class GenerationBody(BaseModel):
    """The fields that both generation routes take. None, written `null`, means the default."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    seed: Seed | None = None
    max_tokens: MaxTokens | None = None
    stop: Stop | None = None
    ignore_eos: bool | None = None
    priority: Priority | None = None
    user: str | None = None
    agent_id: str | None = None

    @property
    def include_usage(self) -> bool:
        return bool((self.stream_options or {}).get("include_usage"))

    def options(self, max_tokens: int | None) -> Options:
        return make_options(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            max_tokens=max_tokens,
            stop=self.stop,
            ignore_eos=self.ignore_eos,
            priority=self.priority,
        )


class ChatBody(GenerationBody):
    """The body of `/v1/chat/completions`."""

    messages: list[Any]
    max_completion_tokens: MaxTokens | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None

    def request(self, agent: str, request_id: str) -> ChatRequest:
        """Raises InvalidRequest for a `tool_choice` that is not possible."""
        if self.tool_choice not in (None, "auto", "none"):
            raise InvalidRequest(
                "tool_choice: only 'auto' and 'none' are possible; a required or named tool is not supported yet",
                param="tool_choice",
            )
        # The newer name wins where both are given.
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return ChatRequest(
            messages=self.messages,
            tools=self.tools or (),
            use_tools=self.tool_choice != "none",
            model=self.model or "",
            agent=agent,
            options=self.options(max_tokens),
            request_id=request_id,
        )


class CompletionBody(GenerationBody):
    """The body of `/v1/completions`."""

    prompt: Any

    def request(self, agent: str, request_id: str) -> CompletionRequest:
        return CompletionRequest(
            prompt=self.prompt,
            model=self.model or "",
            agent=agent,
            options=self.options(COMPLETION_MAX_TOKENS if self.max_tokens is None else self.max_tokens),
            request_id=request_id,
        )


Body = TypeVar("Body", bound=GenerationBody)


def parse_body(kind: type[Body], data: bytes) -> Body:
    """The body of class `kind` in `data`. Large bodies take milliseconds: call it in a worker thread.

    Raises:
        InvalidRequest: not JSON, not an object, a wrong value, or a field that is not supported.
    """
    try:
        # This parser, unlike json.loads, refuses NaN, unpaired surrogates and deep nesting.
        fields = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidRequest("the body must be a JSON object")
    _refuse_unsupported(fields)
    try:
        body = kind.model_validate(fields)
    except ValidationError as error:
        raise invalid(error) from None
    usage = (body.stream_options or {}).get("include_usage")
    if not isinstance(usage, bool | None):
        raise InvalidRequest("stream_options.include_usage must be a boolean", param="stream_options.include_usage")
    return body


def _refuse_unsupported(fields: dict[str, Any]) -> None:
    for name, neutral in _NEUTRAL.items():
        value = fields.get(name)
        # True equals 1 in Python, so types are compared too.
        if value is None or any(type(value) is type(known) and value == known for known in neutral):
            continue
        allowed = " or ".join(json.dumps(known) for known in neutral[:1]) or "null"
        raise InvalidRequest(f"{name}: only {allowed} is possible; other values are not supported yet", param=name)


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _tool_call_body(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def chat_body(model: str, answer: Answer) -> dict[str, Any]:
    """A `chat.completion`. `content` is "" where the answer is tool calls and nothing else."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    if answer.tool_calls:
        message["tool_calls"] = [_tool_call_body(call) for call in answer.tool_calls]
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": answer.reason}
    return {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": usage_body(answer.usage),
    }


def completion_body(model: str, answers: list[Answer]) -> dict[str, Any]:
    """A `text_completion` with a choice for every prompt, in the prompts' order."""
    total = Usage(0, 0, 0)
    for answer in answers:
        total = total + answer.usage
    return {
        "id": f"cmpl-{secrets.token_hex(12)}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [
            {"index": index, "text": answer.text, "logprobs": None, "finish_reason": answer.reason}
            for index, answer in enumerate(answers)
        ],
        "usage": usage_body(total),
    }


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, separators=(",", ":")).encode("ascii") + b"\n\n"


DONE = b"data: [DONE]\n\n"


class _Chunks:
    """Server-sent events of one streamed answer. Escapes leave only ASCII in them, so no line separator gets in."""

    def __init__(self, id: str, kind: str, model: str, include_usage: bool) -> None:
        head = {"id": id, "object": kind, "created": int(time.time()), "model": model}
        self._head = f"data: {json.dumps(head, separators=(',', ':'))[:-1]},"
        self._include_usage = include_usage

    def _chunk(self, choice: str) -> bytes:
        # Built from strings: one goes out for every token of every client.
        tail = ',"usage":null}\n\n' if self._include_usage else "}\n\n"
        return f'{self._head}"choices":[{choice}]{tail}'.encode("ascii")

    def usage(self, usage: Usage) -> bytes:
        return f'{self._head}"choices":[],"usage":{json.dumps(usage_body(usage))}}}\n\n'.encode("ascii")


class ChatChunks(_Chunks):
    """Chunks of a streamed chat: `start` once, then text and calls, `finish` once, then maybe `usage`."""

    def __init__(self, model: str, include_usage: bool) -> None:
        super().__init__(f"chatcmpl-{secrets.token_hex(12)}", "chat.completion.chunk", model, include_usage)

    def _delta(self, delta: str, reason: str = "null") -> bytes:
        return self._chunk(f'{{"index":0,"delta":{delta},"logprobs":null,"finish_reason":{reason}}}')

    def start(self) -> bytes:
        return self._delta('{"role":"assistant","content":""}')

    def text(self, index: int, text: str) -> bytes:
        return self._delta(f'{{"content":{json.dumps(text)}}}')

    def tool_call(self, call: ToolCall) -> bytes:
        return self._delta(json.dumps({"tool_calls": [{"index": call.index, **_tool_call_body(call)}]}))

    def finish(self, index: int, reason: str) -> bytes:
        return self._delta("{}", json.dumps(reason))


class CompletionChunks(_Chunks):
    """Chunks of streamed completions; those of several prompts interleave, told apart by `index`."""

    def __init__(self, model: str, include_usage: bool) -> None:
        super().__init__(f"cmpl-{secrets.token_hex(12)}", "text_completion", model, include_usage)

    def _choice(self, index: int, text: str, reason: str = "null") -> bytes:
        choice = f'{{"index":{index},"text":{json.dumps(text)},"logprobs":null,"finish_reason":{reason}}}'
        return self._chunk(choice)

    def start(self) -> bytes:
        return b""

    def text(self, index: int, text: str) -> bytes:
        return self._choice(index, text)

    def tool_call(self, call: ToolCall) -> bytes:
        raise AssertionError("completions have no tool calls")

    def finish(self, index: int, reason: str) -> bytes:
        return self._choice(index, "", json.dumps(reason))


def model_body(model: ServedModel) -> dict[str, Any]:
    """An entry of the list of models. `max_model_len` is the context in tokens, as vLLM names it."""
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "satchel",
        "max_model_len": model.context_tokens,
    }


def error_body(status: int, message: str, *, code: str, param: str | None = None) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "service_unavailable" if status == 503 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_event(error: SatchelError) -> bytes:
    """The event that ends a stream which failed."""
    return _event(error_body(error.status, error.message, code=error.code, param=error.param))
