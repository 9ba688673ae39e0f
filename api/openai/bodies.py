"""OpenAI's wire format on the way in: request bodies.

Bodies are validated strictly: a number is a number, and a field that changes the answer is either obeyed or refused by
name. Unknown fields are ignored.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, WithJsonSchema

from ...cluster.config import Endpoint
from ...cluster.errors import InvalidRequest
from ..generation.bodies import RequestBody, check_counts, check_nested
from ..generation.options import (
    CacheSalt,
    Choices,
    LogitBias,
    MaxTokens,
    MinP,
    MinTokens,
    Options,
    Penalty,
    Priority,
    RepetitionPenalty,
    Seed,
    Stop,
    StopTokenIds,
    Temperature,
    TimeoutS,
    TopK,
    TopLogprobs,
    TopP,
    make_options,
)
from ..generation.requests import ChatRequest, CompletionRequest
from ..text.grammars import AnswerForm
from .forms import read_form, read_tool_choice
from .messages import Messages, Tools

COMPLETION_MAX_TOKENS = 16
"""The default `max_tokens` of `/v1/completions`, as OpenAI's."""

# Fields that change the answer and are not supported yet, each with its neutral values.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "web_search_options": (),
    # vLLM's.
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
}


def _tool_choice(value: Any) -> Any:
    read_tool_choice(value)
    return value


_FORMS = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")

Json = Annotated[Any, WithJsonSchema({})]
Few = Annotated[dict[str, Any], Field(max_length=100)]
ToolChoice = Annotated[Literal["auto", "none", "required"] | dict[str, Any] | None, BeforeValidator(_tool_choice)]


def _prompt_tag(given: Any) -> str | None:
    if isinstance(given, str):
        return "<text>"
    if not isinstance(given, list):
        return None
    return {str: "<texts>", list: "<prompts>"}.get(type(given[0]) if given else int, "<tokens>")


PromptBody = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[str], Tag("<texts>")]
    | Annotated[list[int], Tag("<tokens>")]
    | Annotated[list[list[int]], Tag("<prompts>")],
    Discriminator(
        _prompt_tag,
        custom_error_type="prompt",
        custom_error_message="must be a string, a list of strings, a list of token ids, or a list of such lists",
    ),
]


# Only read to tell agents apart; a value of any form is fine.
Unchecked = Annotated[Any, WithJsonSchema({})]


class GenerationBody(RequestBody):
    """The fields that both generation routes take. None, written `null`, means the default."""

    model: str | None = None
    stream: bool | None = None
    stream_options: Few | None = None
    n: Choices | None = None
    best_of: int | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    seed: Seed | None = None
    max_tokens: MaxTokens | None = None
    min_tokens: MinTokens | None = None
    stop: Stop | None = None
    stop_token_ids: StopTokenIds | None = None
    ignore_eos: bool | None = None
    priority: Priority | None = None
    timeout_s: TimeoutS | None = None
    user: str | None = None
    cache_salt: CacheSalt | None = None
    conversation: Unchecked = None
    prompt_cache_key: Unchecked = None
    metadata: Unchecked = None
    agent_id: str | None = None
    agent_continue: bool | None = None
    # These are checked by `read_form`, which knows where in them something is wrong.
    response_format: Json = None
    structured_outputs: Json = None
    guided_json: Json = None
    guided_regex: Json = None
    guided_choice: Json = None
    guided_grammar: Json = None

    @property
    def form(self) -> AnswerForm | None:
        """What the answer's content must be.

        Raises:
            InvalidRequest: the body says it wrongly, or twice.
        """
        return read_form({name: getattr(self, name) for name in _FORMS})

    @property
    def include_usage(self) -> bool:
        return bool((self.stream_options or {}).get("include_usage"))

    @property
    def choices(self) -> int:
        return self.n or 1

    @classmethod
    def check_fields(cls, fields: dict[str, Any], values: int, limits: Endpoint) -> None:
        _refuse_many(fields.get("messages"), values, limits)
        _refuse_unsupported(fields)

    def check(self) -> None:
        if not isinstance((self.stream_options or {}).get("include_usage"), bool | None):
            raise InvalidRequest("stream_options.include_usage must be a boolean", param="stream_options.include_usage")
        _ = self.form  # Raises if it is malformed.
        if self.best_of is not None and self.best_of != self.choices:
            raise InvalidRequest("best_of: only the value of n is possible", param="best_of")

    def options(self, *, max_tokens: int | None, logprobs: int | None) -> Options:
        same = {
            name: getattr(self, name) for name in Options.__dataclass_fields__ if name not in ("max_tokens", "logprobs")
        }
        return make_options(**same, max_tokens=max_tokens, logprobs=logprobs)


class ChatBody(GenerationBody):
    """The body of `/v1/chat/completions`."""

    messages: Messages
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["low", "medium", "high"] | None = None
    chat_template_kwargs: Few | None = None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs: only possible with logprobs", param="top_logprobs")

    def request(self, agent: str) -> ChatRequest:
        # The newer name wins if both are given.
        newer = self.max_completion_tokens is not None
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return ChatRequest(
            messages=self.messages,
            tools=[{**tool} for tool in self.tools or ()],
            tool_use=read_tool_choice(self.tool_choice, parallel=self.parallel_tool_calls is not False),
            form=self.form,
            template_kwargs=effort | (self.chat_template_kwargs or {}),
            model=self.model or "",
            agent=agent,
            agent_continue=bool(self.agent_continue),
            options=self.options(
                max_tokens=self.max_completion_tokens if newer else self.max_tokens,
                logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            ),
            choices=self.choices,
            max_tokens_field="max_completion_tokens" if newer else "max_tokens",
            cache_salt=self.cache_salt or "",
        )


class CompletionBody(GenerationBody):
    """The body of `/v1/completions`."""

    prompt: PromptBody
    logprobs: TopLogprobs | None = None

    def check(self) -> None:
        super().check()
        if self.agent_continue:
            raise InvalidRequest("agent_continue: only chat completions continue a transcript", param="agent_continue")

    def request(self, agent: str) -> CompletionRequest:
        return CompletionRequest(
            prompt=self.prompt,
            model=self.model or "",
            agent=agent,
            options=self.options(max_tokens=self.max_tokens, logprobs=self.logprobs),
            choices=self.choices,
            max_tokens_default=max(COMPLETION_MAX_TOKENS, self.min_tokens or 0),
            form=self.form,
            cache_salt=self.cache_salt or "",
        )


class InjectBody(RequestBody):
    """The body of `/v1/agents/{id}/inject`."""

    messages: Messages
    model: str | None = None

    @classmethod
    def check_fields(cls, fields: dict[str, Any], values: int, limits: Endpoint) -> None:
        _refuse_many(fields.get("messages"), values, limits)


class ForkBody(BaseModel):
    """The body of `/v1/agents/{id}/fork`; `as` is the new agent's id."""

    model_config = ConfigDict(strict=True, extra="ignore")

    target: str = Field(alias="as")


def _refuse_many(messages: Any, values: int, limits: Endpoint) -> None:
    """Checks the numbers of messages, parts and values before they are validated."""
    if not isinstance(messages, list):
        return
    parts, nested = 0, []
    for message in messages:
        if not isinstance(message, dict):
            continue
        parts += len(content) if isinstance(content := message.get("content"), list) else 0
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, dict) else None
            arguments = function.get("arguments") if isinstance(function, dict) else None
            if isinstance(arguments, str):
                nested.append(arguments)
    check_counts(messages, parts, limits)
    check_nested(nested, values, limits)


def _refuse_unsupported(fields: dict[str, Any]) -> None:
    for name, neutral in _NEUTRAL.items():
        value = fields.get(name)
        # True equals 1 in Python, so types are compared too.
        if value is None or any(type(value) is type(known) and value == known for known in neutral):
            continue
        allowed = " or ".join(json.dumps(known) for known in neutral[:1]) or "null"
        raise InvalidRequest(f"{name}: only {allowed} is possible; other values are not supported yet", param=name)
