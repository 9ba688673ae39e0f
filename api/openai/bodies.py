"""OpenAI's wire format on the way in: request bodies.

Bodies are validated strictly: a number is a number, and a field that changes the answer is either obeyed or refused by
name. Unknown fields are ignored.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    WithJsonSchema,
)

from ...cluster.config import Endpoint
from ...cluster.errors import InvalidRequest
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
    invalid,
    make_options,
)
from ..generation.requests import ChatRequest, CompletionRequest
from ..text.grammars import AnswerForm
from ..text.json_slices import DEPTH_MAX, TooDeep, TooManyValues, check_values, parse
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


class GenerationBody(BaseModel):
    """The fields that both generation routes take. None, written `null`, means the default."""

    model_config = ConfigDict(strict=True, extra="ignore")

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

    def check(self) -> None:
        """Checks fields against each other.

        Raises:
            InvalidRequest: two fields contradict each other.
        """
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

    def request(self, agent: str, request_id: str, waited_s: float) -> ChatRequest:
        # The newer name wins if both are given.
        newer = self.max_completion_tokens is not None
        tools = read_tool_choice(self.tool_choice)
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return ChatRequest(
            messages=self.messages,
            tools=[{**tool} for tool in self.tools or ()],
            use_tools=tools.shown,
            calls_forced=tools.forced,
            callable_tools=tools.names,
            parallel_calls=self.parallel_tool_calls is not False,
            form=self.form,
            template_kwargs=effort | (self.chat_template_kwargs or {}),
            model=self.model or "",
            agent=agent,
            agent_continue=bool(self.agent_continue),
            options=self.options(
                max_tokens=self.max_completion_tokens if newer else self.max_tokens,
                logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            ),
            request_id=request_id,
            choices=self.choices,
            max_tokens_field="max_completion_tokens" if newer else "max_tokens",
            waited_s=waited_s,
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

    def request(self, agent: str, request_id: str, waited_s: float) -> CompletionRequest:
        return CompletionRequest(
            prompt=self.prompt,
            model=self.model or "",
            agent=agent,
            options=self.options(max_tokens=self.max_tokens, logprobs=self.logprobs),
            request_id=request_id,
            choices=self.choices,
            max_tokens_default=max(COMPLETION_MAX_TOKENS, self.min_tokens or 0),
            form=self.form,
            waited_s=waited_s,
            cache_salt=self.cache_salt or "",
        )


class InjectBody(BaseModel):
    """The body of `/v1/agents/{id}/inject`."""

    model_config = ConfigDict(strict=True, extra="ignore")

    messages: Messages
    model: str | None = None


class ForkBody(BaseModel):
    """The body of `/v1/agents/{id}/fork`; `as` is the new agent's id."""

    model_config = ConfigDict(strict=True, extra="ignore")

    target: str = Field(alias="as")


Body = TypeVar("Body", bound=BaseModel)


def parse_body(kind: type[Body], data: bytes | bytearray, limits: Endpoint) -> Body:
    """Parses and validates a body of class `kind`. Large bodies take up to a second: call it in a worker thread.

    Raises:
        InvalidRequest: not JSON, not an object, over one of the `limits`, a wrong value, or an unsupported field.
    """
    try:
        fields, values = parse(data, limits.body_values_max)
    except TooManyValues:
        raise _too_many_values(limits) from None
    except TooDeep:
        raise InvalidRequest(f"the body is nested deeper than {DEPTH_MAX} levels") from None
    except ValueError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidRequest("the body must be a JSON object")
    _refuse_many(fields.get("messages"), values, limits)
    if issubclass(kind, GenerationBody):
        _refuse_unsupported(fields)
    try:
        body = kind.model_validate(fields)
    except ValidationError as error:
        raise invalid(error) from None
    if isinstance(body, GenerationBody):
        body.check()
    return body


def _too_many_values(limits: Endpoint) -> InvalidRequest:
    return InvalidRequest(
        f"the body has more than {limits.body_values_max} JSON values and keys (endpoint.body_values_max)"
    )


def _refuse_many(messages: Any, values: int, limits: Endpoint) -> None:
    """Checks the numbers of messages, parts and values before they are validated."""
    if not isinstance(messages, list):
        return
    if len(messages) > limits.messages_max:
        raise InvalidRequest(
            f"messages: at most {limits.messages_max} go into one request (endpoint.messages_max)", param="messages"
        )
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
    if parts > limits.parts_max:
        raise InvalidRequest(
            f"messages: at most {limits.parts_max} parts of content go into one request (endpoint.parts_max)",
            param="messages",
        )
    try:
        check_values(nested, limits.body_values_max - values)
    except TooManyValues:
        raise _too_many_values(limits) from None


def _refuse_unsupported(fields: dict[str, Any]) -> None:
    for name, neutral in _NEUTRAL.items():
        value = fields.get(name)
        # True equals 1 in Python, so types are compared too.
        if value is None or any(type(value) is type(known) and value == known for known in neutral):
            continue
        allowed = " or ".join(json.dumps(known) for known in neutral[:1]) or "null"
        raise InvalidRequest(f"{name}: only {allowed} is possible; other values are not supported yet", param=name)
