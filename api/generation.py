"""From messages to text: the pipeline that the HTTP endpoint and the Python handles share.

One request goes ``check -> render -> encode`` in a worker thread, then to the backend as token ids, and comes back as
a `TextStream`: ``tokens -> characters -> stop strings -> tool calls -> events``, on the event loop, a few microseconds
a token. Nothing here knows HTTP or Ray.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass as validated

from ..actors.messages import Sampling
from ..cluster.config import Config
from ..cluster.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    NoReplica,
)
from .backend import Backend, Generation, ServedModel
from .conversation import check_messages, check_prompts, check_tools, check_vocabulary
from .streams import RowText, TextStream, abort_all
from .text import TextModel, load_text_model
from .tool_calls import ToolCallSplitter, call_parser

_log = logging.getLogger(__name__)

T = TypeVar("T")

TENANT = "default"
"""Every agent belongs to this tenant until tenants exist."""

_AGENT = re.compile(r"[A-Za-z0-9._:@-]{1,128}", re.ASCII)
_STOPS_MAX = 16
_STOP_CHARACTERS_MAX = 1024

# Below this, dividing logits by the temperature overflows; the limit is greedy.
_GREEDY_BELOW = 1e-5


def _stop_strings(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list | tuple) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("must be a string or a list of strings")
    if len(stops) > _STOPS_MAX:
        raise ValueError(f"has {len(stops)} strings; at most {_STOPS_MAX} are possible")
    if not all(0 < len(stop) <= _STOP_CHARACTERS_MAX for stop in stops):
        raise ValueError(f"every stop string must have 1 to {_STOP_CHARACTERS_MAX} characters")
    return tuple(stops)


_Int64 = Field(ge=-(2**63), le=2**63 - 1)
Temperature = Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)]
TopP = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
TopK = Annotated[int, Field(ge=-1, le=2**63 - 1)]
Seed = Annotated[int, _Int64]
Priority = Annotated[int, _Int64]
MaxTokens = Annotated[int, Field(ge=1, le=2**63 - 1)]
Stop = Annotated[tuple[str, ...], BeforeValidator(_stop_strings, json_schema_input_type=str | list[str])]


@validated(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class Options:
    """How to generate. Numbers out of range raise pydantic's `ValidationError`; `make_options` an `InvalidRequest`.

    Without `temperature`, `top_p` or `top_k` the model's own generation config decides, else they are 1, 1 and 0.
    `top_k` 0 or -1 is off. Without `seed` every row draws its own. Without `max_tokens` a row may fill the context;
    more than is left of the context means what is left.
    """

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    seed: Seed | None = None
    max_tokens: MaxTokens | None = None
    stop: Stop = ()
    ignore_eos: bool = False
    priority: Priority = 0

    def completed(self, own: Mapping[str, float]) -> Options:
        """These options with nothing left open, by the model's `own` sampling."""
        given = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        defaults = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, **own}
        chosen = {name: defaults[name] if value is None else value for name, value in given.items()}
        return replace(
            self,
            temperature=float(chosen["temperature"]),
            top_p=float(chosen["top_p"]),
            top_k=int(chosen["top_k"]),
        )


def make_options(**fields: Any) -> Options:
    """`Options` from fields of which None means the default.

    Raises:
        InvalidRequest: `param` is the field.
    """
    try:
        return Options(**{name: value for name, value in fields.items() if value is not None})
    except ValidationError as error:
        raise invalid(error) from None


def invalid(error: ValidationError) -> InvalidRequest:
    """The first of pydantic's complaints as Satchel's error, with the place as `param`."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ""
    for part in first["loc"]:
        where += f"[{part}]" if isinstance(part, int) else f".{part}" if where else str(part)
    message = first["msg"].removeprefix("Value error, ")
    return InvalidRequest(f"{where}: {message}" if where else message, param=where or None)


@dataclass(frozen=True)
class ChatRequest:
    """A conversation to continue.

    `messages` and `tools` are in OpenAI's form, unchecked; with `use_tools` False the tools are checked and the model
    is not told of them. `model` "" is the default model; `agent` is the agent's id or "" for none. `request_id` appears
    in logs and need not be unique.
    """

    messages: Sequence[Any]
    tools: Sequence[Any] = ()
    use_tools: bool = True
    model: str = ""
    agent: str = ""
    options: Options = field(default_factory=Options)
    request_id: str = ""


@dataclass(frozen=True)
class CompletionRequest:
    """Text to continue; `prompt` in any of OpenAI's four forms, unchecked. The rest as in `ChatRequest`."""

    prompt: Any
    model: str = ""
    agent: str = ""
    options: Options = field(default_factory=Options)
    request_id: str = ""


class Generator:
    """Starts rows on a backend. One an event loop; it loads each model's tokenizer once.

    Args:
        load_text: for tests.
    """

    def __init__(
        self, backend: Backend, config: Config, *, load_text: Callable[..., TextModel] = load_text_model
    ) -> None:
        self.backend = backend
        self.config = config
        self._load_text = load_text
        self._texts: dict[tuple[str, bytes], asyncio.Task[TextModel]] = {}
        self._aborts: set[asyncio.Task[None]] = set()

    async def served(self, name: str = "") -> ServedModel:
        """The model called `name`; "" is the configured default.

        Raises:
            ModelNotFound: no such model.
            NoReplica: it is configured and has not been loaded yet.
        """
        wanted = name or self.config.models[0].name
        for model in await self.backend.models():
            if model.name == wanted:
                return model
        if any(model.name == wanted for model in self.config.models):
            raise NoReplica(f"the model {wanted!r} is still loading", param="model")
        raise ModelNotFound(f"the model {wanted!r} does not exist", param="model")

    async def text_model(self, model: ServedModel) -> TextModel:
        """The text side of `model`, loaded on first use.

        Raises:
            ModelLoadError: its tokenizer does not load.
        """
        key = (model.folder, model.model_id)
        task = self._texts.get(key)
        if task is None or (task.done() and (task.cancelled() or task.exception())):
            task = asyncio.create_task(asyncio.to_thread(self._load_text, model.folder, name=model.name))
            self._texts[key] = task
        # Shielded: one waiting request that goes away must not end the loading for the others.
        return await asyncio.shield(task)

    async def start_chat(self, request: ChatRequest) -> TextStream:
        """Check, render, encode and queue a conversation. Returns once a replica has accepted it.

        Raises:
            RequestError: what is wrong with the request.
            Unavailable: no replica takes it now.
            DeadlineExceeded: none took it within `timeouts.request_s`.
        """

        async def start(deadline: float) -> TextStream:
            agent = agent_key(request.agent)
            model = await self.served(request.model)
            text = await self.text_model(model)
            prompt, tools = await asyncio.to_thread(_prepare_chat, text, model, request)
            splitter = None
            if tools and text.tool_parser is not None:
                parse = call_parser(text.tool_parser, tools)
                splitter = ToolCallSplitter(text.tool_call_start, text.tool_call_end, parse)
            row = RowText(text, text.detokenizer(), request.options.stop, splitter)
            options = request.options.completed(text.sampling)
            return await self._start(model, row, prompt, agent, options, request.request_id, deadline)

        return await self._within_deadline(start)

    async def start_completion(self, request: CompletionRequest) -> list[TextStream]:
        """Check, encode and queue a row for every prompt; all are accepted, or none runs. Raises as `start_chat`."""

        async def start(deadline: float) -> list[TextStream]:
            agent = agent_key(request.agent)
            model = await self.served(request.model)
            text = await self.text_model(model)
            prompts_max = self.config.scheduling.queue_requests_max
            prompts = await asyncio.to_thread(_prepare_completion, text, model, request, prompts_max)

            def row(prompt: list[int]) -> RowText:
                return RowText(text, text.detokenizer(prompt), request.options.stop, None)

            options = request.options.completed(text.sampling)
            starts = [
                self._start(model, row(prompt), prompt, agent, options, request.request_id, deadline)
                for prompt in prompts
            ]
            return await _all_or_none(starts)

        return await self._within_deadline(start)

    async def _within_deadline(self, start: Callable[[float], Awaitable[T]]) -> T:
        deadline = asyncio.get_running_loop().time() + self.config.timeouts.request_s
        timeout = asyncio.timeout_at(deadline)
        try:
            async with timeout:
                return await start(deadline)
        except TimeoutError:
            if timeout.expired():
                raise DeadlineExceeded("no replica took the request within timeouts.request_s") from None
            raise

    async def _start(
        self,
        model: ServedModel,
        row: RowText,
        prompt: list[int],
        agent: str,
        options: Options,
        request_id: str,
        deadline: float,
    ) -> TextStream:
        left = model.context_tokens - len(prompt)
        temperature, top_p, top_k = options.temperature, options.top_p, options.top_k
        assert temperature is not None and top_p is not None and top_k is not None
        sampling = Sampling(
            temperature=0.0 if temperature < _GREEDY_BELOW else temperature,
            top_p=top_p,
            top_k=min(max(top_k, 0), model.vocabulary_size),
            seed=secrets.randbits(63) if options.seed is None else options.seed,
            max_tokens=left if options.max_tokens is None else min(options.max_tokens, left),
            ignore_eos=options.ignore_eos,
        )
        # Callers choose request ids and may repeat them; rows must differ.
        row_id = f"{request_id or 'row'}/{secrets.token_hex(8)}"
        generation = await self.backend.generate(
            model, agent=agent, prompt=prompt, sampling=sampling, request_id=row_id, priority=options.priority
        )
        return TextStream(
            generation, row, model=model, prompt_tokens=len(prompt), deadline=deadline, abort=self._begin_abort
        )

    def _begin_abort(self, generation: Generation) -> asyncio.Task[None]:
        # A task of its own: the caller is often being cancelled, which is when the row must be stopped.
        task = asyncio.create_task(generation.abort())
        self._aborts.add(task)
        task.add_done_callback(self._aborted)
        return task

    def _aborted(self, task: asyncio.Task[None]) -> None:
        self._aborts.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("aborting a row failed", exc_info=error)


def agent_key(agent: str) -> str:
    """The key under which the backend knows an agent; "" for none.

    Raises:
        InvalidRequest: not an agent id.
    """
    if not agent:
        return ""
    if _AGENT.fullmatch(agent) is None:
        raise InvalidRequest("agent_id must be 1 to 128 of the characters A-Z a-z 0-9 . _ : @ -", param="agent_id")
    return f"{TENANT}/{agent}"


async def _all_or_none(starts: Sequence[Coroutine[Any, Any, TextStream]]) -> list[TextStream]:
    tasks = [asyncio.create_task(start) for start in starts]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        await abort_all([stream for stream in done if isinstance(stream, TextStream)])
        raise


def _too_long(amount: str, model: ServedModel, where: str) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"{where} has {amount} tokens; the context of {model.name!r} is {model.context_tokens} tokens, at least one of "
        "which is for the answer",
        param=where.partition("[")[0],
    )


def _check_length(prompt: list[int], model: ServedModel, where: str) -> None:
    if len(prompt) >= model.context_tokens:
        raise _too_long(str(len(prompt)), model, where)


def _encode(text: TextModel, string: str, model: ServedModel, where: str, *, special_tokens: bool) -> list[int]:
    # Megabytes take seconds to encode, so what cannot fit is refused before.
    if (least := text.tokens_min(string)) >= model.context_tokens:
        raise _too_long(f"at least {least}", model, where)
    return text.encode(string, special_tokens=special_tokens)


def _prepare_chat(text: TextModel, model: ServedModel, request: ChatRequest) -> tuple[list[int], list[dict[str, Any]]]:
    messages = check_messages(request.messages)
    tools = check_tools(request.tools)
    if not request.use_tools:
        tools = []
    if tools and not text.has_tool_calls:
        raise InvalidRequest(f"the model {model.name!r} knows no tool calls", param="tools")
    prompt = _encode(text, text.render(messages, tools), model, "messages", special_tokens=False)
    if not prompt:
        raise InvalidRequest("the model's chat template made an empty prompt of these messages", param="messages")
    _check_length(prompt, model, "messages")
    return prompt, tools


def _prepare_completion(
    text: TextModel, model: ServedModel, request: CompletionRequest, prompts_max: int
) -> list[list[int]]:
    prompts: list[list[int]] = []
    several = isinstance(request.prompt, list) and not isinstance(next(iter(request.prompt), None), int)
    for index, prompt in enumerate(check_prompts(request.prompt, prompts_max=prompts_max)):
        where = f"prompt[{index}]" if several else "prompt"
        tokens = _encode(text, prompt, model, where, special_tokens=True) if isinstance(prompt, str) else prompt
        check_vocabulary(tokens, model.vocabulary_size, where)
        if not tokens:
            raise InvalidRequest(f"{where} is empty", param="prompt")
        _check_length(tokens, model, where)
        prompts.append(tokens)
    return prompts
