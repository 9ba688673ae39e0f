"""The Responses API on the way in: the bodies of `/v1/responses` and `/v1/responses/input_tokens`.

Bodies are validated strictly: values are not converted between types, and a field that changes the answer is either
used or refused by name. Fields for OpenAI's own service (`service_tier`, `prompt_cache_retention`,
`context_management`) and unknown fields are ignored, and named in a header.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, WithJsonSchema

from ....cluster.config.config import Endpoint
from ....cluster.errors import InvalidRequest
from ...requests.conversation import mark_of_last
from ...requests.field_aliases import NAMES, Translated
from ...requests.fields.shared import AgentBody, ChatFieldsBody
from ...requests.history import Message
from ...requests.options import MaxTokens, Options, TopLogprobs
from ...requests.request_body import check_counts, check_nested
from ...requests.requests import ChatRequest, ToolUse
from ...requests.tool_results import in_call_order
from .items import Input, InputItems, messages_of
from .tools import OfferedTools, Tools, read_choice, with_tools

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"

Unchecked = Annotated[Any, WithJsonSchema({})]
Id = Annotated[str, Field(min_length=1, max_length=1024)]

_STRICT = ConfigDict(strict=True, extra="ignore")


class ReasoningBody(BaseModel):
    """How much the model thinks, if its template supports that, and with `enabled` whether it thinks at all. `summary`
    is ignored, because no summaries are made."""

    model_config = _STRICT

    enabled: bool | None = None

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None


class TextBody(BaseModel):
    """The `format` of the answer. `verbosity` is for models that were trained for it."""

    model_config = _STRICT

    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class StreamOptions(BaseModel):
    """`include_obfuscation` would hide the lengths of events on the network; it is not supported here."""

    model_config = _STRICT

    include_obfuscation: bool | None = None


def _conversation(value: Any) -> Any:
    id = value.get("id") if isinstance(value, dict) else value
    if value is not None and not (isinstance(id, str) and 0 < len(id) <= 1024):
        raise ValueError("must be a conversation's id, or an object with it")
    return id


ConversationId = Annotated[str | None, BeforeValidator(_conversation)]


class AskedBody(ChatFieldsBody):
    """The fields from which a prompt is made. `null` means the default."""

    own_names: ClassVar[Mapping[str, Sequence[str]]] = MappingProxyType({"system": ("instructions",)})
    own_forms = ("text.format",)
    own_switches = ("reasoning",)

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
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    _earlier_tools: list[tuple[Any, str]] = PrivateAttr(default_factory=list)
    _offered: OfferedTools | None = PrivateAttr(default=None)

    @classmethod
    def adapt(cls, read: Translated) -> None:
        if (where := mark_of_last(read.fields.get("input"), "input")) is not None:
            read.fields |= {"continue_final_message": True, "add_generation_prompt": False}
            read.named["continue_final_message"] = where

    @classmethod
    def check_fields(cls, fields: dict[str, Any], values: int, limits: Endpoint) -> None:
        if isinstance(items := fields.get("input"), list):
            check_counts(items, sum(map(_parts, items)), limits, "input")
            arguments = (item.get("arguments") for item in items if isinstance(item, dict))
            check_nested([each for each in arguments if isinstance(each, str)], values, limits)
        for name, value in fields.items():
            # The response repeats it, and JSON has no infinity.
            if not _finite(value):
                raise InvalidRequest(f"{name} has a number that is too large", param=name)
        if fields.get("prompt") is not None:
            raise InvalidRequest("prompt: stored prompt templates are not supported", param="prompt")

    def check(self) -> None:
        if self.previous_response_id is not None and self.conversation is not None:
            message = "conversation: not possible with previous_response_id; use one of them"
            raise InvalidRequest(message, param="conversation")
        _ = self.form, self.tool_use, self.thinking_said
        where = self.named("continue_final_message")
        if self.continue_final_message and self.add_generation_prompt is not False:
            raise InvalidRequest(f"{where}: only possible with add_generation_prompt false", param=where)
        if self.add_generation_prompt is False and not self.continue_final_message:
            message = "add_generation_prompt: false is only possible with continue_final_message"
            raise InvalidRequest(message, param="add_generation_prompt")

    @property
    def tool_use(self) -> ToolUse:
        """What the answer does with tools.

        Raises:
            InvalidRequest: as `read_choice`.
        """
        return read_choice(self.tool_choice, self.offered, parallel=self.parallel_tool_calls)

    @property
    def offered(self) -> OfferedTools:
        """The tools, including those among the items of the input and of earlier responses.

        Raises:
            InvalidRequest: as `with_tools`.
        """
        if self._offered is None:
            self._offered = with_tools(self.tools, self.item_tools)
        return self._offered

    @property
    def item_tools(self) -> list[tuple[Any, str]]:
        """The lists of tools among the items of the input and of earlier responses, each with its place."""
        return [*self._earlier_tools, *self.input.tools]

    def go_on_with(self, item_tools: Sequence[tuple[Any, str]]) -> None:
        """Adds the lists of tools among the items of earlier responses."""
        self._earlier_tools, self._offered = list(item_tools), None

    @property
    def left_out(self) -> list[str]:
        """The types of tools, items and parts that the model does not get, because OpenAI's servers run them or they
        are unknown."""
        return [*self.offered.left_out, *self.input.left_out]

    def messages(self, earlier: Sequence[Message], look_up: Callable[[str], dict[str, Any] | None]) -> list[Message]:
        """Returns the messages of the input, after `earlier` ones.

        Raises:
            InvalidRequest: as `messages_of`, or there are no messages.
        """
        said = messages_of(self.input.parts, look_up, earlier)
        if not said and not earlier:
            raise InvalidRequest("input is empty", param="input")
        return in_call_order([*earlier, *said])

    def parted(self, messages: list[Message]) -> tuple[list[Message], str]:
        """Returns messages without the last one, if the answer continues it, and its text.

        Raises:
            InvalidRequest: it is not an assistant's text, or no message comes before it.
        """
        if not self.continue_final_message:
            return messages, ""
        last, where = messages[-1], self.named("continue_final_message")
        if last["role"] != "assistant" or last.get("tool_calls") or not isinstance(begun := last["content"], str):
            raise InvalidRequest(f"{where}: the last item must be the assistant's, with text only", param=where)
        if len(messages) == 1:
            raise InvalidRequest(f"{where}: there must be an item before the last one", param=where)
        return messages[:-1], begun

    def chat(self, messages: Sequence[Message], *, agent_continue: bool = False, **fields: Any) -> ChatRequest:
        """Returns the conversation.

        Args:
            messages: from `messages`.
            fields: further fields of a `ChatRequest`.
        """
        opening: list[Message] = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return ChatRequest(
            messages=list(messages) if agent_continue else [*opening, *messages],
            opening=opening if agent_continue else [],
            tools=self.offered.tools,
            tool_places=self.offered.places,
            tool_use=self.tool_use,
            form=self.form,
            template_kwargs=self.thinking_said.kwargs,
            thinking_budget=self.thinking_said.budget,
            model=self.model or "",
            max_tokens_field=self.named("max_output_tokens"),
            agent_continue=agent_continue,
            truncates=self.truncation == "auto",
            **fields,
        )


class ResponseBody(AskedBody, AgentBody):
    """The body of `/v1/responses`. `agent_id` and `agent_continue` are Satchel's, and most sampling fields are
    vLLM's."""

    own_names = MappingProxyType(
        {
            **{name: (name,) for name in NAMES},
            "max_tokens": ("max_output_tokens",),
            "system": ("instructions",),
        }
    )

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: MaxTokens | None = None
    max_tool_calls: MaxTokens | None = None
    top_logprobs: TopLogprobs | None = None
    include: Annotated[list[str], Field(max_length=64)] | None = None
    metadata: Annotated[dict[str, Any], Field(max_length=64)] | None = None
    store: bool | None = None
    background: bool | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None

    def check(self) -> None:
        super().check()
        if self.background and not self.kept:
            message = "background: a background response must be stored, so store cannot be false"
            raise InvalidRequest(message, param="background")
        if self.agent_continue and self.previous_response_id is not None:
            message = "agent_continue: not possible with previous_response_id, which continues a transcript already"
            raise InvalidRequest(message, param="agent_continue")

    @property
    def kept(self) -> bool:
        """Whether the response is stored, so that its id can continue it."""
        return self.store is not False

    @property
    def includes(self) -> frozenset[str]:
        return frozenset(self.include or ())

    @property
    def options(self) -> Options:
        wanted = self.top_logprobs is not None or LOGPROBS in self.includes
        return self.drawing(max_tokens=self.max_output_tokens, logprobs=(self.top_logprobs or 0) if wanted else None)


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
    """Returns the number of parts in an unchecked item."""
    if not isinstance(item, dict):
        return 0
    given = (item.get(name) for name in ("content", "output", "summary"))
    return sum(len(parts) for parts in given if isinstance(parts, list))
