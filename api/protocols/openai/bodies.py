"""OpenAI's wire format on the way in: request bodies.

Bodies are validated strictly: values are not converted between types, and a field that changes the answer is either
used or refused by name. Other protocols' names are read too (`requests/field_aliases.py`); unknown fields are ignored,
and named in a header.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, WithJsonSchema

from ....cluster.config.config import Endpoint
from ....cluster.errors import InvalidRequest, quoted
from ...requests.conversation import mark_of_last, with_system
from ...requests.field_aliases import NAMES, Translated, joined_texts
from ...requests.fields.shared import AgentBody, ChatFieldsBody, FormBody
from ...requests.history import Message
from ...requests.options import WHOLE, CacheSalt, Choices, MaxTokens, TopLogprobs, whole
from ...requests.request_body import RequestBody, check_counts, check_nested
from ...requests.requests import ChatRequest, CompletionRequest
from .functions import FunctionCall, tool_use_of, tools_of
from .messages import Functions, Messages, Tools
from .tool_choice import read_tool_choice
from .unsupported import NEUTRAL, refuse_unsupported

COMPLETION_MAX_TOKENS = 16
"""The default `max_tokens` of `/v1/completions`, as OpenAI's."""

NO_LIMIT = -1
"""The `max_tokens` of an answer that may fill the context, in programs written for LM Studio and llama.cpp."""


def _limit(value: Any) -> Any:
    return None if whole(value) == NO_LIMIT else value


def _tool_choice(value: Any) -> Any:
    # `any` is Mistral's word.
    value = "required" if value == "any" else value
    read_tool_choice(value)
    return value


Json = Annotated[Any, WithJsonSchema({})]
SAMPLING: Mapping[str, Sequence[str]] = MappingProxyType(
    {"max_tokens": ("max_tokens",), **{name: (name,) for name in NAMES if name not in ("max_tokens", "system")}}
)

LimitOrNone = Annotated[
    MaxTokens | None, BeforeValidator(_limit, json_schema_input_type=Literal[-1] | MaxTokens | None)
]
KeptTokens = Annotated[int, Field(ge=-1, le=2**63 - 1), WHOLE]
TokenId = Annotated[int, WHOLE]
SystemWords = Annotated[str, BeforeValidator(joined_texts)]
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
    | Annotated[list[TokenId], Tag("<tokens>")]
    | Annotated[list[list[TokenId]], Tag("<prompts>")],
    Discriminator(
        _prompt_tag,
        custom_error_type="prompt",
        custom_error_message="must be a string, a list of strings, a list of token ids, or a list of such lists",
    ),
]


# Only read to identify agents, so a value of any form is accepted.
Unchecked = Annotated[Any, WithJsonSchema({})]


class GenerationBody(FormBody, AgentBody):
    """The fields of both generation routes. `null` means the default."""

    own_names = SAMPLING
    own_forms = (
        *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        *("json_schema", "grammar"),
    )

    undone: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Fields of other routes that this one does not support, with their neutral values."""

    model: str | None = None
    stream: bool | None = None
    stream_options: Few | None = None
    n: Choices | None = None
    best_of: Annotated[int, WHOLE] | None = None
    max_tokens: Annotated[int, WHOLE] | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: KeptTokens | None = None
    return_token_ids: bool | None = None
    user: str | None = None
    cache_salt: CacheSalt | None = None
    conversation: Unchecked = None
    prompt_cache_key: Unchecked = None
    metadata: Unchecked = None
    # `read_form` checks these, because it knows the place of an error in them.
    response_format: Json = None
    structured_outputs: Json = None
    guided_json: Json = None
    guided_regex: Json = None
    guided_choice: Json = None
    guided_grammar: Json = None
    json_schema: Json = None
    grammar: Json = None

    @property
    def include_usage(self) -> bool:
        return bool((self.stream_options or {}).get("include_usage"))

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream has the usage so far."""
        return self.include_usage and bool((self.stream_options or {}).get("continuous_usage_stats"))

    @property
    def choices(self) -> int:
        return self.n or 1

    @classmethod
    def check_fields(cls, fields: dict[str, Any], values: int, limits: Endpoint) -> None:
        refuse_many(fields.get("messages"), values, limits)
        refuse_unsupported(fields, cls.undone)

    def check(self) -> None:
        for option in ("include_usage", "continuous_usage_stats"):
            if not isinstance((self.stream_options or {}).get(option), bool | None):
                raise InvalidRequest(f"stream_options.{option} must be a boolean", param=f"stream_options.{option}")
        if self.stream_options and not self.stream:
            raise InvalidRequest("stream_options: only possible with stream", param="stream_options")
        if self.spaces_between_special_tokens and self.skip_special_tokens is False:
            message = "spaces_between_special_tokens: only possible with skip_special_tokens"
            raise InvalidRequest(message, param="spaces_between_special_tokens")
        _ = self.form  # Raises if it is malformed.


class ChatBody(GenerationBody, ChatFieldsBody):
    """The body of `/v1/chat/completions`. `system` comes before the messages, as other protocols have it."""

    beside = ChatFieldsBody.beside
    own_names = MappingProxyType(
        {**SAMPLING, "max_tokens": ("max_completion_tokens", "max_tokens"), "system": ("system",)}
    )
    own_switches = ("chat_template_kwargs", "reasoning_effort")
    undone = MappingProxyType({"echo": (False,), "suffix": ("",), "add_special_tokens": (False,)})
    tolerated = frozenset({*NEUTRAL, *undone})

    messages: Messages
    system: SystemWords | None = None
    max_tokens: LimitOrNone = None
    max_completion_tokens: LimitOrNone = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    functions: Functions | None = None
    function_call: FunctionCall = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    chat_template_kwargs: Few | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs: only possible with logprobs", param="top_logprobs")
        if self.best_of is not None and self.best_of != self.choices:
            raise InvalidRequest("best_of: must be equal to n", param="best_of")
        for name, newer in (("functions", "tools"), ("function_call", "tool_choice")):
            if getattr(self, name) is not None and (self.tools or self.tool_choice is not None):
                raise InvalidRequest(f"{name}: not possible with {newer}, which is its newer form", param=name)
        called = self.function_call["name"] if isinstance(self.function_call, dict) else None
        if called is not None and all(function["name"] != called for function in self.functions or ()):
            message = f"function_call: {quoted(called)} is not among the functions"
            raise InvalidRequest(message, param="function_call")
        self._check_beginning()

    def _check_beginning(self) -> None:
        """Checks the fields that say where the answer begins."""
        _ = self.thinking_said  # Raises if a switch is malformed.
        if not self.continue_final_message:
            if self.add_generation_prompt is False:
                message = "add_generation_prompt: false is only possible with continue_final_message"
                raise InvalidRequest(message, param="add_generation_prompt")
            return
        check_continued(self.messages, self.add_generation_prompt, self.named("continue_final_message"))

    @classmethod
    def adapt(cls, read: Translated) -> None:
        continue_marked(read)

    @property
    def has_functions(self) -> bool:
        """Whether calls are returned in the older form (`functions.py`)."""
        return self.functions is not None

    @property
    def _tools(self) -> list[dict[str, Any]]:
        return tools_for_templates(self.tools or () if self.functions is None else tools_of(self.functions))

    def request(self, agent: str) -> ChatRequest:
        # If both are given, the newer name counts.
        newer = self.max_completion_tokens is not None
        use = read_tool_choice(self.tool_choice, parallel=self.parallel_tool_calls)
        begun = self.messages[-1]["content"] if self.continue_final_message else ""
        messages = self.messages[:-1] if self.continue_final_message else self.messages
        opening = with_system(self.system, []) if self.agent_continue else []
        return ChatRequest(
            messages=messages if self.agent_continue else with_system(self.system, messages),
            opening=opening,
            prefill=begun,
            tools=self._tools,
            tool_places=[f"functions[{index}].parameters" for index in range(len(self.functions or ()))],
            tool_use=use if self.functions is None else tool_use_of(self.function_call),
            form=self.form,
            template_kwargs=self.thinking_said.kwargs,
            thinking_budget=self.thinking_said.budget,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            return_token_ids=bool(self.return_token_ids),
            model=self.model or "",
            agent=agent,
            agent_continue=bool(self.agent_continue),
            options=self.drawing(
                max_tokens=self.max_completion_tokens if newer else self.max_tokens,
                logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            ),
            choices=self.choices,
            max_tokens_field="max_completion_tokens" if newer else self.named("max_tokens"),
            cache_salt=self.cache_salt or "",
        )


class CompletionBody(GenerationBody):
    """The body of `/v1/completions`."""

    beside = FormBody.beside
    undone = MappingProxyType({"functions": ([],), "tools": ([],), "continue_final_message": (False,)})
    tolerated = frozenset({*NEUTRAL, *undone})

    prompt: PromptBody
    max_tokens: Annotated[int, Field(ge=NO_LIMIT, le=2**63 - 1), WHOLE] | None = None
    logprobs: TopLogprobs | None = None
    best_of: Choices | None = None
    echo: bool | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None

    @property
    def sequences(self) -> int:
        """How many answers are generated for every prompt; the best `choices` of them are returned."""
        return max(self.choices, self.best_of or 0)

    @property
    def _max_tokens_default(self) -> int | None:
        if self.max_tokens == NO_LIMIT:
            return None
        # With 0 the prompt is prefilled and nothing is generated.
        return 0 if self.max_tokens == 0 else max(COMPLETION_MAX_TOKENS, self.min_tokens or 0)

    def check(self) -> None:
        super().check()
        if self.best_of is not None and self.best_of < self.choices:
            raise InvalidRequest("best_of is less than n", param="best_of")
        if self.sequences > self.choices and self.stream:
            raise InvalidRequest("best_of: not possible with stream", param="best_of")
        if self.sequences > self.choices and self.echo and self.logprobs is not None:
            raise InvalidRequest("best_of: not possible with echo and logprobs", param="best_of")
        if self.suffix and self.truncate_prompt_tokens is not None:
            message = "truncate_prompt_tokens: not possible with a suffix"
            raise InvalidRequest(message, param="truncate_prompt_tokens")
        if self.max_tokens == 0 and self.min_tokens:
            raise InvalidRequest("min_tokens is more than max_tokens", param="min_tokens")
        if self.agent_continue:
            raise InvalidRequest("agent_continue: only chat completions continue a transcript", param="agent_continue")

    def request(self, agent: str) -> CompletionRequest:
        return CompletionRequest(
            prompt=self.prompt,
            model=self.model or "",
            agent=agent,
            # Answers are compared by their logprobs.
            options=self.drawing(
                max_tokens=self.max_tokens if (self.max_tokens or 0) > 0 else None,
                logprobs=0 if self.logprobs is None and self.sequences > self.choices else self.logprobs,
            ),
            choices=self.sequences,
            max_tokens_default=self._max_tokens_default,
            max_tokens_field=self.named("max_tokens"),
            form=self.form,
            special_tokens=self.add_special_tokens is not False,
            suffix=self.suffix or "",
            echo=bool(self.echo),
            prompt_logprobs=self.logprobs if self.echo else None,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            return_token_ids=bool(self.return_token_ids),
            cache_salt=self.cache_salt or "",
        )


class InjectBody(RequestBody):
    """The body of `/v1/agents/{id}/inject`."""

    messages: Messages
    model: str | None = None

    @classmethod
    def check_fields(cls, fields: dict[str, Any], values: int, limits: Endpoint) -> None:
        refuse_many(fields.get("messages"), values, limits)


class ForkBody(BaseModel):
    """The body of `/v1/agents/{id}/fork`; `as` is the new agent's id."""

    model_config = ConfigDict(strict=True, extra="ignore")

    target: str = Field(alias="as")


def refuse_many(messages: Any, values: int, limits: Endpoint) -> None:
    """Checks how many messages, parts and values there are, before they are validated."""
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
        called = message.get("function_call")
        if isinstance(called, dict) and isinstance(called.get("arguments"), str):
            nested.append(called["arguments"])
    check_counts(messages, parts, limits)
    check_nested(nested, values, limits)


def tools_for_templates(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns tools without the nulls in their functions, which templates would print."""
    return [
        {**tool, "function": {name: value for name, value in tool["function"].items() if value is not None}}
        for tool in tools
    ]


def continue_marked(read: Translated) -> None:
    """Continues the last message if it has a field that says so: `partial` (Moonshot, Alibaba) or `prefix` (DeepSeek,
    Mistral). Such fields of earlier messages are ignored.

    Raises:
        InvalidRequest: the field is not a boolean.
    """
    if (where := mark_of_last(read.fields.get("messages"), "messages")) is None:
        return
    read.fields["continue_final_message"] = True
    read.named["continue_final_message"] = where
    if read.fields.get("add_generation_prompt") is None:
        read.fields["add_generation_prompt"] = False


def check_continued(messages: Sequence[Message], generation_prompt: bool | None, where: str) -> None:
    """Checks whether the last message can be continued.

    Args:
        where: the field that says so.

    Raises:
        InvalidRequest: it is not an assistant's text, or the request says that a new message begins after it.
    """
    if generation_prompt is not False:
        raise InvalidRequest(f"{where}: only possible with add_generation_prompt false", param=where)
    last = messages[-1] if messages else None
    if last is None or last["role"] != "assistant" or last.get("tool_calls") or not isinstance(last["content"], str):
        raise InvalidRequest(f"{where}: the last message must be the assistant's, with text only", param=where)
    if len(messages) == 1:
        raise InvalidRequest(f"{where}: there must be a message before the last one", param=where)
