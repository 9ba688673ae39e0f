"""vLLM's wire format for tokens without an answer: the bodies of `/tokenize` and `/detokenize`."""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated, Any

from pydantic import Field

from ....cluster.config.config import Endpoint
from ....cluster.errors import InvalidRequest
from ...requests.conversation import with_system
from ...requests.field_aliases import Translated
from ...requests.fields.shared import ThinkingBody
from ...requests.options import WHOLE
from ...requests.request_body import RequestBody
from ...requests.requests import ChatRequest, CompletionRequest
from .bodies import Few, SystemWords, check_continued, continue_marked, refuse_many, tools_for_templates
from .messages import Messages, Tools
from .unsupported import NEUTRAL, refuse_unsupported


class TokenizeBody(ThinkingBody):
    """A text, or messages that the template renders. `null` means the default."""

    own_names = MappingProxyType({"system": ("system",)})
    own_switches = ("chat_template_kwargs", "reasoning_effort")
    tolerated = frozenset(NEUTRAL)

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    system: SystemWords | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Few | None = None
    return_token_strs: bool | None = None

    @classmethod
    def check_fields(cls, fields: dict[str, Any], values: int, limits: Endpoint) -> None:
        refuse_many(fields.get("messages"), values, limits)
        refuse_unsupported(fields, {})

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("either prompt or messages must be given, and not both", param="prompt")
        if self.continue_final_message:
            where = self.named("continue_final_message")
            check_continued(self.messages or (), self.add_generation_prompt, where)
        _ = self.thinking_said

    @classmethod
    def adapt(cls, read: Translated) -> None:
        continue_marked(read)

    @property
    def reply(self) -> bool:
        """Whether the prompt ends where the assistant begins."""
        return self.add_generation_prompt is not False or bool(self.continue_final_message)

    def request(self) -> ChatRequest | CompletionRequest:
        """Returns the request whose prompt is tokenized."""
        if self.messages is None:
            special = self.add_special_tokens is not False
            return CompletionRequest(prompt=self.prompt or "", model=self.model or "", special_tokens=special)
        begun = bool(self.continue_final_message)
        return ChatRequest(
            messages=with_system(self.system, self.messages[:-1] if begun else self.messages),
            prefill=self.messages[-1]["content"] if begun else "",
            tools=tools_for_templates(self.tools or ()),
            template_kwargs=self.thinking_said.kwargs,
            model=self.model or "",
        )


class DetokenizeBody(RequestBody):
    """Token ids to turn into text."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0, le=2**31 - 1), WHOLE]]

    def request(self) -> CompletionRequest:
        return CompletionRequest(prompt=self.tokens, model=self.model or "")
