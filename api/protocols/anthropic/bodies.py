"""Anthropic's wire format on the way in: the bodies of `/v1/messages` and `/v1/messages/count_tokens`.

Bodies are validated strictly: values are not converted between types, and a field that changes the answer is either
used or refused by name. Fields for Anthropic's own service (`service_tier`, `container`, `context_management`, unknown
betas) and unknown fields are ignored, and named in a header.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from ....cluster.config.config import Endpoint
from ....cluster.errors import InvalidRequest
from ...requests.field_aliases import NAMES
from ...requests.fields.shared import AgentBody, ChatFieldsBody
from ...requests.history import Message
from ...requests.options import MaxTokens, MinTokens, Options, Stop
from ...requests.request_body import check_counts
from ...requests.requests import ChatRequest, ToolUse
from .messages import Messages, SystemText, Tools, ToolSet, with_tools

Unchecked = Annotated[Any, WithJsonSchema({})]

_STRICT = ConfigDict(strict=True, extra="ignore")


def _only_list(value: Any) -> Any:
    if value is not None and not isinstance(value, list):
        raise ValueError("must be a list of strings")
    return value


StopSequences = Annotated[Stop, BeforeValidator(_only_list)]


class Thinking(BaseModel):
    """Whether the model thinks first, if its template has a switch for that, and for at most how many tokens. `display`
    is ignored."""

    model_config = _STRICT

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: MaxTokens | None = None


class OutputConfig(BaseModel):
    """How much effort an answer takes, for templates that support it, and its `format`."""

    model_config = _STRICT

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: dict[str, Any] | None = None


class Metadata(BaseModel):
    model_config = _STRICT

    user_id: str | None = None


class ToolChoiceBody(BaseModel):
    """How the model must use tools."""

    model_config = _STRICT

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


def read_tool_choice(given: ToolChoiceBody | None, tools: ToolSet) -> ToolUse:
    """Reads a tool choice.

    Raises:
        InvalidRequest: it names no tool, or one that is not in `tools`.
    """
    if given is None:
        return ToolUse()
    # An answer that must call a tool has one call unless it may have several.
    parallel = not given.disable_parallel_tool_use
    if given.type in ("any", "tool"):
        parallel = given.disable_parallel_tool_use is False
    if given.type != "tool":
        return ToolUse(given.type != "none", given.type == "any", parallel=parallel)
    if given.name is None:
        raise InvalidRequest("tool_choice.name is missing", param="tool_choice.name")
    if given.name not in (tool["function"]["name"] for tool in tools.tools):
        raise InvalidRequest("tool_choice.name: there is no tool of that name in tools", param="tool_choice.name")
    return ToolUse(True, True, (given.name,), parallel)


class PromptBody(ChatFieldsBody):
    """The fields from which a prompt is made. `null` means the default."""

    own_names: ClassVar[Mapping[str, Sequence[str]]] = MappingProxyType({"system": ("system",)})
    own_forms = ("output_config.format", "output_format")
    own_switches = ("thinking", "output_config.effort")

    model: str | None = None
    messages: Messages
    system: SystemText = ""
    tools: Tools = Field(default_factory=ToolSet)
    tool_choice: ToolChoiceBody | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    parallel_tool_calls: bool | None = None
    mcp_servers: Unchecked = None
    context_management: Unchecked = None

    @classmethod
    def check_fields(cls, fields: dict[str, Any], values: int, limits: Endpoint) -> None:
        messages = fields.get("messages")
        if isinstance(messages, list):
            check_counts(messages, sum(map(_parts, messages)), limits)

    def check(self) -> None:
        _ = self.tool_use, self.form, self.thinking_said

    @cached_property
    def offered(self) -> ToolSet:
        """The tools, including those that are defined in messages.

        Raises:
            InvalidRequest: as `with_tools`.
        """
        return with_tools(self.tools, self.messages.tools) if self.messages.tools else self.tools

    @property
    def tool_use(self) -> ToolUse:
        """What the answer does with tools. OpenAI's `parallel_tool_calls` is read too.

        Raises:
            InvalidRequest: as `read_tool_choice`.
        """
        use = read_tool_choice(self.tool_choice, self.offered)
        silent = self.tool_choice is None or self.tool_choice.disable_parallel_tool_use is None
        return (
            replace(use, parallel=self.parallel_tool_calls) if silent and self.parallel_tool_calls is not None else use
        )

    @property
    def left_out(self) -> list[str]:
        """What the model does not get: tools that Anthropic's servers would run, by their types, `mcp_servers`, and
        unknown blocks."""
        return [*self.offered.left_out, *(["mcp_servers"] if self.mcp_servers else []), *super().left_out]

    def chat(self, *, agent_continue: bool = False, **fields: Any) -> ChatRequest:
        """Returns the conversation; `fields` are further fields of a `ChatRequest`.

        Raises:
            InvalidRequest: its last message calls a tool.
        """
        messages: list[Message] = list(self.messages)
        system, prefill = self.system, ""
        if messages and messages[0]["role"] == "system" and isinstance(first := messages[0]["content"], str):
            # Few templates accept two system messages.
            system = f"{system}\n\n{first}" if system else first
            del messages[0]
        if messages and messages[-1]["role"] == "assistant":
            last = messages.pop()
            if last.get("tool_calls"):
                raise InvalidRequest("messages: the last one calls a tool, so its result must follow", param="messages")
            prefill = last["content"] if isinstance(last["content"], str) else ""
        opening: list[Message] = [{"role": "system", "content": system}] if system else []
        if not agent_continue:
            messages, opening = [*opening, *messages], []
        return ChatRequest(
            messages=messages,
            opening=opening,
            prefill=prefill,
            tools=self.offered.tools,
            tool_places=self.offered.places,
            tool_use=self.tool_use,
            form=self.form,
            template_kwargs=self.thinking_said.kwargs,
            thinking_budget=self.thinking_said.budget,
            model=self.model or "",
            agent_continue=agent_continue,
            **fields,
        )


class MessagesBody(PromptBody, AgentBody):
    """The body of `/v1/messages`. `max_tokens` 0 prefills the prompt without an answer. Most sampling fields are
    vLLM's."""

    own_names = MappingProxyType({**{name: (name,) for name in NAMES}, "stop": ("stop_sequences",)})

    max_tokens: MinTokens
    stream: bool | None = None
    stop_sequences: StopSequences | None = None
    metadata: Metadata | None = None

    @property
    def user(self) -> dict[str, Any]:
        """The field that identifies the user or session."""
        return {} if self.metadata is None else {"user_id": self.metadata.user_id}

    @property
    def options(self) -> Options:
        wanted: MaxTokens | None = self.max_tokens or None
        more = {} if self.stop_sequences is None else {"stop": self.stop_sequences}
        return self.drawing(max_tokens=wanted, logprobs=None, **more)


class CountBody(PromptBody):
    """The body of `/v1/messages/count_tokens`."""


def _parts(message: Any) -> int:
    """Returns the number of blocks in an unchecked message, including those in tool results."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return 0
    inner = (block.get("content") for block in content if isinstance(block, dict))
    return len(content) + sum(len(blocks) for blocks in inner if isinstance(blocks, list))
