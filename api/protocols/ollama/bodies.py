"""Ollama's wire format on the way in: the bodies of `/api/chat`, `/api/generate`, `/api/embed` and `/api/show`.

Bodies are validated strictly: values are not converted between types, and a field that changes the answer is either
used or refused by name. Fields for Ollama's own runtime (`keep_alive`, most `options`) are ignored. Unknown fields are
ignored too, and named in a header. A prompt that is too long is never cut, whatever `truncate` and `shift` say; a text
to embed is cut, unless `truncate` is false.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

from ....cluster.config.config import Endpoint
from ....cluster.errors import InvalidRequest
from ...pipeline.vectors import EmbeddingRequest
from ...requests.conversation import with_system
from ...requests.field_aliases import NAMES
from ...requests.fields.shared import AgentBody, ChatFieldsBody
from ...requests.fields.thinking import EFFORTS
from ...requests.history import Message
from ...requests.options import WHOLE, Options, TopLogprobs
from ...requests.request_body import RequestBody, check_counts, wrong
from ...requests.requests import ChatRequest, CompletionRequest
from ..openai.bodies import SystemWords, tools_for_templates
from .messages import OllamaImages, OllamaMessages, OllamaTools, content_of
from .options import ModelOptions


def _keep_alive(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float | str | None):
        raise ValueError("must be a number of seconds or a duration such as '5m'")
    return value


def _think(value: Any) -> Any:
    if not isinstance(value, bool | None) and not (isinstance(value, str) and value in EFFORTS):
        raise ValueError(f"must be true, false or one of {', '.join(map(repr, EFFORTS))}")
    return value


def ends_at_once(keep_alive: Any) -> bool:
    """Returns whether a model is to be unloaded."""
    return keep_alive in (0, "0") or (isinstance(keep_alive, str) and keep_alive in ("0s", "0m", "0h"))


KeepAlive = Annotated[Any, PlainValidator(_keep_alive), WithJsonSchema({"type": ["number", "string", "null"]})]
Think = Annotated[Any, PlainValidator(_think), WithJsonSchema({"type": ["boolean", "string", "null"]})]
ModelName = Annotated[str, Field(min_length=1)]
_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}


class OllamaBody(ChatFieldsBody, AgentBody):
    """The fields of both generation routes. `null` means the default. Most sampling fields are in `options`; those
    beside it are vLLM's."""

    own_names = MappingProxyType(
        {
            **{name: (f"options.{name}",) for name in NAMES},
            "max_tokens": ("options.num_predict",),
            "repetition_penalty": ("options.repeat_penalty",),
            "system": ("system",),
        }
    )
    own_forms = ("format",)
    own_switches = ("think",)

    model: ModelName
    stream: bool | None = None
    system: SystemWords | None = None
    format: Annotated[Any, WithJsonSchema({"type": ["string", "object", "null"]})] = None
    think: Think = None
    options: ModelOptions | None = None
    keep_alive: KeepAlive = None
    truncate: bool | None = None
    shift: bool | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    debug_render_only: bool | None = Field(default=None, alias="_debug_render_only")

    def check(self) -> None:
        _ = self.form, self.thinking_said  # Raises if one is malformed.
        if self.options is not None:
            self.options.check()
        if self.debug_render_only:
            raise InvalidRequest("_debug_render_only is not supported", param="_debug_render_only")

    @property
    def streams(self) -> bool:
        return self.stream is not False

    @property
    def sampling(self) -> Options:
        top = (self.top_logprobs or 0) if self.logprobs else None
        return self.drawing(logprobs=top, **(self.options or ModelOptions()).sampling)

    @property
    def ignored(self) -> list[str]:
        unknown = [] if self.options is None else self.options.model_extra or {}
        return [*super().ignored, *(f"options.{name}" for name in unknown)]

    def _chat(self, messages: list[Message], agent: str, **fields: Any) -> ChatRequest:
        opening = with_system(self.system, []) if self.agent_continue else []
        return ChatRequest(
            messages=messages if self.agent_continue else with_system(self.system, messages),
            opening=opening,
            form=self.form,
            template_kwargs=self.thinking_said.kwargs,
            thinking_budget=self.thinking_said.budget,
            model=self.model,
            agent=agent,
            agent_continue=bool(self.agent_continue),
            options=self.sampling,
            max_tokens_field=self.named("options.num_predict"),
            **fields,
        )


class OllamaChatBody(OllamaBody):
    """The body of `/api/chat`. Without messages it only asks to load the model."""

    messages: OllamaMessages = Field(default_factory=list)
    tools: OllamaTools | None = None

    @classmethod
    def check_fields(cls, fields: dict[str, Any], values: int, limits: Endpoint) -> None:
        if isinstance(messages := fields.get("messages"), list):
            images = (message.get("images") for message in messages if isinstance(message, dict))
            check_counts(messages, sum(len(given) for given in images if isinstance(given, list)), limits)

    def check(self) -> None:
        super().check()
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != "assistant":
            return
        if last.get("tool_calls"):
            raise wrong("messages", "end with a call of a tool, so its result must follow")
        if len(self.messages) == 1:
            raise wrong("messages", "begin with the answer that is to be continued")

    @property
    def loads(self) -> bool:
        return not self.messages

    def request(self, agent: str) -> ChatRequest:
        """Returns the conversation. If its last message is the assistant's, that is the beginning of the answer."""
        messages, begun = list(self.messages), ""
        if messages[-1]["role"] == "assistant" and isinstance(messages[-1]["content"], str):
            begun = messages.pop()["content"]
        return self._chat(messages, agent, prefill=begun, tools=tools_for_templates(self.tools or ()))


class OllamaGenerateBody(OllamaBody):
    """The body of `/api/generate`. Without a prompt it only asks to load the model."""

    prompt: str | None = None
    suffix: str | None = None
    template: str | None = None
    context: Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "integer"}})] = None
    raw: bool | None = None
    images: OllamaImages = Field(default_factory=list)

    @classmethod
    def check_fields(cls, fields: dict[str, Any], values: int, limits: Endpoint) -> None:
        if isinstance(images := fields.get("images"), list):
            check_counts((), len(images), limits, "images")

    def check(self) -> None:
        super().check()
        if not isinstance(self.context, list | None):
            raise wrong("context", "must be a list of token ids")
        if self.template:
            raise wrong("template", "is not supported: the model's own is used, or none with raw")
        if self.context:
            raise wrong("context", "is not supported; /api/chat takes the messages before this one")
        if not (self.raw or self.suffix):
            return
        for name, given in (("system", self.system), ("images", self.images), ("think", self.think)):
            if given:
                raise wrong(name, f"is not possible with {'raw' if self.raw else 'suffix'}: there is no conversation")
        if self.agent_continue:
            raise wrong("agent_continue", "is not possible with raw or suffix: there is no conversation")

    @property
    def loads(self) -> bool:
        return not self.prompt

    def request(self, agent: str) -> ChatRequest | CompletionRequest:
        prompt = self.prompt or ""
        if self.raw or self.suffix:
            return CompletionRequest(
                prompt=prompt,
                suffix=self.suffix or "",
                form=self.form,
                model=self.model,
                agent=agent,
                options=self.sampling,
                max_tokens_field=self.named("options.num_predict"),
            )
        asked: Message = {"role": "user", "content": content_of(prompt, self.images)}
        return self._chat([asked], agent)


class OllamaEmbedBody(RequestBody):
    """The body of `/api/embed`. Without a text it only asks to load the model."""

    model: ModelName
    input: Annotated[str | list[str] | None, WithJsonSchema(_TEXTS)] = None
    truncate: bool | None = None
    dimensions: Annotated[int, Field(ge=0, le=2**31 - 1), WHOLE] | None = None
    options: ModelOptions | None = None
    keep_alive: KeepAlive = None

    @classmethod
    def check_fields(cls, fields: dict[str, Any], values: int, limits: Endpoint) -> None:
        given = fields.get("input")
        if not isinstance(given, str | None) and not (
            isinstance(given, list) and all(isinstance(each, str) for each in given)
        ):
            raise wrong("input", "must be a string or a list of strings")

    @property
    def loads(self) -> bool:
        return not self.input

    def request(self) -> EmbeddingRequest:
        kept = None if self.truncate is False else -1
        return EmbeddingRequest(
            self.input or "", self.dimensions or None, model=self.model, truncate_prompt_tokens=kept
        )


class OllamaEmbeddingsBody(RequestBody):
    """The body of `/api/embeddings`, the older form for one text."""

    model: ModelName
    prompt: str | None = None
    options: ModelOptions | None = None
    keep_alive: KeepAlive = None

    @property
    def loads(self) -> bool:
        return not self.prompt

    def request(self) -> EmbeddingRequest:
        return EmbeddingRequest(self.prompt or "", model=self.model, truncate_prompt_tokens=-1)


class OllamaShowBody(BaseModel):
    """The body of `/api/show`. `name` is the older name of `model`."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = None
    name: str | None = None

    @property
    def wanted(self) -> str:
        """The model's name.

        Raises:
            InvalidRequest: there is none.
        """
        if not (name := self.model or self.name):
            raise wrong("model", "is required")
        return name


class OllamaPullBody(OllamaShowBody):
    """The body of `/api/pull`."""

    stream: bool | None = None
