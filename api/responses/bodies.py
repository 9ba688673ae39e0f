"""The Responses API on the way in: the bodies of `/v1/responses` and `/v1/responses/input_tokens`.

Bodies are validated strictly: a number is a number, and a field that changes the answer is either obeyed or refused by
name. What concerns OpenAI's own service (`service_tier`, `prompt_cache_retention`, `context_management`) and what
nobody knows is ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from ...cluster.config import Endpoint
from ...cluster.errors import InvalidRequest, quoted
from ..generation.bodies import RequestBody, check_counts, check_nested
from ..generation.history import Message
from ..generation.options import MaxTokens, Options, Temperature, TopLogprobs, TopP, make_options
from ..generation.requests import ChatRequest, ToolUse
from ..generation.tool_results import in_call_order
from ..text.answers.grammars import AnswerForm
from .items import Input, InputItems, messages_of
from .tools import OfferedTools, Tools, read_choice

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"

Unchecked = Annotated[Any, WithJsonSchema({})]
Id = Annotated[str, Field(min_length=1, max_length=1024)]

_STRICT = ConfigDict(strict=True, extra="ignore")
_NAME_CHARACTERS_MAX = 64
# Templates know three degrees.
_EFFORTS = {"minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}


class ReasoningBody(BaseModel):
    """How long the model thinks, where its template knows that. No summaries are made: `summary` changes nothing."""

    model_config = _STRICT

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None


class TextBody(BaseModel):
    """The `format` of the answer. `verbosity` is for models that were trained to it."""

    model_config = _STRICT

    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class StreamOptions(BaseModel):
    """`include_obfuscation` hides lengths from who listens to the network. Nothing is hidden here."""

    model_config = _STRICT

    include_obfuscation: bool | None = None


def _conversation(value: Any) -> Any:
    id = value.get("id") if isinstance(value, dict) else value
    if value is not None and not (isinstance(id, str) and 0 < len(id) <= 1024):
        raise ValueError("must be a conversation's id, or an object with it")
    return id


ConversationId = Annotated[str | None, BeforeValidator(_conversation)]


def read_format(given: dict[str, Any] | None) -> AnswerForm | None:
    """Reads the `format` of an answer.

    Raises:
        InvalidRequest: it is malformed; `param` is the place.
    """
    where, kind = "text.format", "text" if given is None else given.get("type")
    if given is None or kind == "text":
        return None
    if kind == "json_object":
        return AnswerForm("json", {"type": "object"}, where)
    if kind != "json_schema":
        known = "'text', 'json_object' and 'json_schema'"
        raise InvalidRequest(f"{where}.type is {quoted(kind)}; possible are {known}", param=f"{where}.type")
    if not isinstance(name := given.get("name"), str) or not 0 < len(name) <= _NAME_CHARACTERS_MAX:
        message = f"{where}.name must be a string of 1 to {_NAME_CHARACTERS_MAX} characters"
        raise InvalidRequest(message, param=f"{where}.name")
    if not isinstance(strict := given.get("strict"), bool | None):
        raise InvalidRequest(f"{where}.strict must be a boolean", param=f"{where}.strict")
    if not isinstance(schema := given.get("schema"), dict):
        raise InvalidRequest(f"{where}.schema must be an object", param=f"{where}.schema")
    return AnswerForm("json", schema, f"{where}.schema", bool(strict))


class AskedBody(RequestBody):
    """The fields of which a prompt is made. None, written `null`, means the default."""

    model: str | None = None
    input: Input = Field(default_factory=InputItems)
    instructions: str | None = None
    previous_response_id: Id | None = None
    conversation: ConversationId = None
    tools: Tools = Field(default_factory=OfferedTools)
    tool_choice: Unchecked = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningBody | None = None
    text: TextBody | None = None
    truncation: Literal["auto", "disabled"] | None = None
    prompt: Unchecked = None

    @classmethod
    def check_fields(cls, fields: dict[str, Any], values: int, limits: Endpoint) -> None:
        if isinstance(items := fields.get("input"), list):
            check_counts(items, sum(map(_parts, items)), limits, "input")
            arguments = (item.get("arguments") for item in items if isinstance(item, dict))
            check_nested([each for each in arguments if isinstance(each, str)], values, limits)
        for name, value in fields.items():
            # It is shown again, and JSON has no infinity.
            if not _finite(value):
                raise InvalidRequest(f"{name} has a number that is too large", param=name)
        if fields.get("prompt") is not None:
            raise InvalidRequest("prompt: templates of prompts are not kept here", param="prompt")

    def check(self) -> None:
        if self.previous_response_id is not None and self.conversation is not None:
            message = "conversation: a request goes on with a conversation or with previous_response_id, not with both"
            raise InvalidRequest(message, param="conversation")
        _ = self.form, self.tool_use

    @property
    def form(self) -> AnswerForm | None:
        """What the answer's text must be.

        Raises:
            InvalidRequest: as `read_format`.
        """
        return None if self.text is None else read_format(self.text.format)

    @property
    def tool_use(self) -> ToolUse:
        """What the answer does with tools.

        Raises:
            InvalidRequest: as `read_choice`.
        """
        return read_choice(self.tool_choice, self.tools, parallel=self.parallel_tool_calls is not False)

    @property
    def left_out(self) -> list[str]:
        """What the model is not told of, because OpenAI's servers would run it or did: tools and items by their
        types."""
        return list(dict.fromkeys([*self.tools.left_out, *self.input.left_out]))

    def messages(self, earlier: Sequence[Message], look_up: Callable[[str], dict[str, Any] | None]) -> list[Message]:
        """Returns the messages of the input, after `earlier` ones.

        Raises:
            InvalidRequest: as `messages_of`, or nothing is said at all.
        """
        said = messages_of(self.input.parts, look_up, earlier)
        if not said and not earlier:
            raise InvalidRequest("input is empty", param="input")
        return in_call_order([*earlier, *said])

    def chat(self, messages: Sequence[Message], *, agent_continue: bool = False, **fields: Any) -> ChatRequest:
        """Returns the conversation.

        Args:
            messages: from `messages`.
            fields: further ones of a `ChatRequest`.
        """
        opening: list[Message] = [{"role": "system", "content": self.instructions}] if self.instructions else []
        kwargs: dict[str, Any] = {}
        if self.reasoning is not None and (effort := self.reasoning.effort) is not None:
            kwargs = {"enable_thinking": False} if effort == "none" else {"reasoning_effort": _EFFORTS[effort]}
        return ChatRequest(
            messages=list(messages) if agent_continue else [*opening, *messages],
            opening=opening if agent_continue else [],
            tools=self.tools.tools,
            tool_places=self.tools.places,
            tool_use=self.tool_use,
            form=self.form,
            template_kwargs=kwargs,
            model=self.model or "",
            max_tokens_field="max_output_tokens",
            agent_continue=agent_continue,
            truncates=self.truncation == "auto",
            **fields,
        )


class ResponseBody(AskedBody):
    """The body of `/v1/responses`. `agent_id` and `agent_continue` are Satchel's."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    max_output_tokens: MaxTokens | None = None
    max_tool_calls: Annotated[int, Field(ge=1, le=2**63 - 1)] | None = None
    top_logprobs: TopLogprobs | None = None
    include: Annotated[list[str], Field(max_length=64)] | None = None
    metadata: Annotated[dict[str, Any], Field(max_length=64)] | None = None
    store: bool | None = None
    background: bool | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    agent_id: str | None = None
    agent_continue: bool | None = None

    def check(self) -> None:
        super().check()
        if self.background and not self.kept:
            message = "background: what is made in the background must be kept, so store cannot be false"
            raise InvalidRequest(message, param="background")
        if self.agent_continue and self.previous_response_id is not None:
            message = "agent_continue: the response before is gone on with already (previous_response_id)"
            raise InvalidRequest(message, param="agent_continue")

    @property
    def kept(self) -> bool:
        """Whether the response can be gone on with by its id."""
        return self.store is not False

    @property
    def includes(self) -> frozenset[str]:
        return frozenset(self.include or ())

    @property
    def options(self) -> Options:
        wanted = self.top_logprobs is not None or LOGPROBS in self.includes
        return make_options(
            max_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            logprobs=(self.top_logprobs or 0) if wanted else None,
        )


class InputTokensBody(AskedBody):
    """The body of `/v1/responses/input_tokens`."""


def _finite(value: Any) -> bool:
    """Returns whether all numbers in a value are finite. Not recursive: bodies may be nested deeply."""
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            left += value.values()
        elif isinstance(value, list):
            left += value
        elif isinstance(value, float) and not math.isfinite(value):
            return False
    return True


def _parts(item: Any) -> int:
    """Returns the number of parts in an item that has not been checked yet."""
    if not isinstance(item, dict):
        return 0
    given = (item.get(name) for name in ("content", "output", "summary"))
    return sum(len(parts) for parts in given if isinstance(parts, list))
