"""Requests, and their conversion to token ids: ``check -> render -> encode``, in a worker thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Self

from ...actors.protocol.media_ids import is_media_token
from ...actors.protocol.replica_messages import MediaSpan, ThinkingBudget
from ...cluster.errors import ContextLengthExceeded, InvalidRequest
from ...cluster.keys import OWNER, check_agent_id
from ..media.prompt import MediaPrompt, Medium, media_said, place, with_media_tokens, with_references
from ..text.answers.grammars import AnswerForm, Thought
from ..text.answers.logprobs import ShownToken
from ..text.answers.reasoning import ReasoningSplitter
from ..text.answers.sequence_text import SequenceText
from ..text.callers_text import AnswerLearner, CallersText
from ..text.continuation import PICTURES_CHANGED, Continuation, Match, StoredBranch, continue_text
from ..text.control_tokens import refuse_breaks, unbroken
from ..text.detokenizing import Detokenizer
from ..text.model import TextModel
from ..text.spelling import common_length
from ..tools.call_finder import CallFinder
from .backend import ServedModel
from .callers import OWNING, Caller
from .conversation import sources_in, with_arguments, with_shown, with_system_first
from .history import History, Message, digests
from .left_out import LeftOut
from .loading import Loading
from .options import Options
from .sent import as_shown, with_kept, with_schema
from .taken_media import kinds_not_taken, processor_of, transcript_taken
from .tool_results import in_call_order, ordered, permuted
from .unsupported_media import without_unseen

_COUNTED_CONTEXTS = 4
"""A prompt longer than this many contexts is counted roughly: encoding megabytes takes seconds."""

_ROLE_TOKENS = 16
"""The most tokens between the last special token and an answer: the name of its role, a line break."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The fields of every request.

    `model` "" is the default model. `agent` is the agent's id or "" for none; `program` and `parent` are as in
    `Identity`. `request_id` appears in logs and need not be unique. `choices` is the number of answers for every
    prompt. If `options` have no `max_tokens`, a sequence generates at most `max_tokens_default`; `max_tokens_field` is
    the caller's name of that option. `arrived` is when the request came, by `time.perf_counter`. KV is shared
    only with requests of the same `caller`'s tenant and the same `cache_salt`. `form` is the form that the answer's
    content must have. Only the last `truncate_prompt_tokens` of a prompt are kept; -1 keeps as many as fit with the
    answer. `return_token_ids` keeps the ids of prompt and answer. With `any_model` the default model answers if there
    is no `model` of that name. `left_out` collects the names of what the model does not get, and `loading` says how far
    it is loaded.
    """

    model: str = ""
    agent: str = ""
    program: str = ""
    parent: str = ""
    options: Options = field(default_factory=Options)
    request_id: str = ""
    choices: int = 1
    max_tokens_default: int | None = None
    max_tokens_field: str = "max_tokens"
    arrived: float = field(default_factory=time.perf_counter, compare=False)
    caller: Caller = OWNING
    cache_salt: str = ""
    form: AnswerForm | None = None
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool = False
    any_model: bool = False
    left_out: LeftOut = field(default_factory=LeftOut, compare=False)
    loading: Loading = field(default_factory=Loading, compare=False)

    @property
    def agent_key(self) -> str:
        """The key under which the backend knows the agent; "" for none.

        Raises:
            InvalidRequest: not an agent id.
        """
        return agent_key(self.agent, self.caller.tenant)

    @property
    def scope(self) -> str:
        """A key for the requests that share KV with this one. Only they may be fast because a prompt begins like an
        earlier one."""
        return f"{self.caller.tenant}/{self.cache_salt}"


@dataclass(frozen=True)
class ToolUse:
    """What an answer does with tools.

    Attributes:
        shown: whether the model is told of the tools.
        forced: whether the answer calls at least one.
        names: which may be called; None for all.
        parallel: whether an answer may have several calls; else it ends with its first.
    """

    shown: bool = True
    forced: bool = False
    names: Sequence[str] | None = None
    parallel: bool = True


@dataclass(frozen=True)
class ChatRequest(Request):
    """A conversation to continue.

    `tools` are in OpenAI's form, as chat templates take them; `tool_places` has the place of each one's schema in the
    body, for errors. `template_kwargs` are variables for the template.

    With `agent_continue` the messages are appended to the agent's stored transcript, or to `opening` if there is none.

    `prefill` is the beginning of the answer's content, which the model continues; it is not among the answer's events.

    With `truncates` the oldest messages are left out of a conversation that does not fit, but not of a transcript.
    """

    messages: Sequence[Message]
    tools: Sequence[dict[str, Any]] = ()
    tool_places: Sequence[str] = ()
    tool_use: ToolUse = ToolUse()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    thinking_budget: int | None = None
    agent_continue: bool = False
    opening: Sequence[Message] = ()
    prefill: str = ""
    truncates: bool = False

    def of(self, model: ServedModel) -> Self:
        """Returns the request with the model's defaults for variables of its template, and with the results of tools in
        the order of their calls."""
        kwargs = {**model.template_kwargs, **self.template_kwargs}
        return replace(self, template_kwargs=kwargs, messages=in_call_order(self.messages))


@dataclass(frozen=True)
class CompletionRequest(Request):
    """Text to continue. `prompt` is a text or its token ids, or several of either.

    `special_tokens` adds those that the tokenizer puts around a text. With a `suffix` the answer is the text between
    the prompt and the suffix. `echo` puts the prompt's text before the answer's; `prompt_logprobs` asks for its tokens'
    logprobs, with so many of the likeliest.
    """

    prompt: str | list[str] | list[int] | list[list[int]]
    special_tokens: bool = True
    suffix: str = ""
    echo: bool = False
    prompt_logprobs: int | None = None


@dataclass(frozen=True, kw_only=True)
class PreparedPrompt:
    """A prompt as its model gets it, with what constrains its answers and how they are parsed.

    `model` answers the `request`, and `text_model` is its text side. `prompt` has media token ids in place of pictures;
    `media` are their spans, `shown` their sources. `prelude` comes before an answer's text, and `prelude_tokens` are
    its tokens if they have logprobs. `grammar` and `bad_words` are as in `Sampling`; `remembered_tokens`,
    `lasting_tokens` and `lasting_saved` as in `GenerateRequest`. `truncated_messages` is how many did not fit.
    """

    request: Request
    model: ServedModel
    text_model: TextModel
    prompt: list[int]
    prelude: str = ""
    prelude_tokens: list[ShownToken] | None = None
    grammar: str = ""
    bad_words: list[list[int]] = field(default_factory=list)
    media: list[MediaSpan] = field(default_factory=list)
    shown: list[Medium] = field(default_factory=list)
    remembered_tokens: int = 0
    lasting_tokens: int = 0
    lasting_saved: bool = False
    truncated_messages: int = 0

    @property
    def thinking_budget(self) -> ThinkingBudget | None:
        """How the answer's reasoning is limited; None for no limit. Encodes the model's markers."""
        return None

    def sequence_text(self) -> SequenceText:
        """Returns what turns an answer's tokens into text."""
        detokenizer = self.text_model.tokenizer.detokenizer(self.prompt)
        return self._read(detokenizer, prelude=self.prelude, prelude_tokens=self.prelude_tokens)

    def learner(self) -> AnswerLearner | None:
        """Returns what remembers which markers of an answer were control tokens; None if that is not needed."""
        return None

    def _read(self, detokenizer: Detokenizer, **stages: Any) -> SequenceText:
        options = self.request.options
        return SequenceText(
            self.text_model.tokenizer,
            detokenizer,
            stops=options.stop,
            stop_tokens=options.stop_token_ids,
            min_tokens=options.min_tokens,
            keeps_stop=options.include_stop_str_in_output,
            special_tokens=not options.skip_special_tokens,
            logprobs=options.logprobs is not None,
            **stages,
        )


@dataclass(frozen=True, kw_only=True)
class Chat(PreparedPrompt):
    """A rendered conversation.

    `thinking` says that the prompt ends inside a block of reasoning, `may_think` that the answer may begin with one.
    `text` is the text of `prompt`, `messages` the whole conversation as a transcript, `tools` the tools that the model
    is shown, and `continuation` how the prompt continues the agent's memory, None if there is nothing to continue. The
    prompt ends with the request's `prefill`. `calls` finds the tool calls in an answer, None if it can have none.
    """

    request: ChatRequest
    tools: list[dict[str, Any]]
    thinking: bool
    text: str
    messages: list[Message]
    continuation: Continuation | None = None
    may_think: bool = False
    calls: CallFinder | None = None

    @property
    def thought(self) -> Thought:
        """Whether the answer begins with reasoning."""
        return Thought.OPEN if self.thinking else Thought.POSSIBLE if self.may_think else Thought.NONE

    @property
    def thinking_budget(self) -> ThinkingBudget | None:
        tokens = self.request.thinking_budget
        if tokens is None or self.thought is Thought.NONE:
            return None
        return self.text_model.thinking_budget(tokens, inside=self.thinking, calls=self.calls is not None)

    def sequence_text(self) -> SequenceText:
        text, request, finder = self.text_model, self.request, self.calls
        reasoning, most = None, None if request.tool_use.parallel else 1
        channels = text.calls.channels(self.tools, answering=bool(request.prefill), calls_max=most)
        if channels is None and text.template.has_thinking:
            called = finder.in_thought() if finder is not None else None
            start, end = text.template.think_start, text.template.think_end
            reasoning = ReasoningSplitter(start, end, inside=self.thinking, calls=called)
        calls = finder.stage(channels) if finder is not None else None
        return self._read(text.tokenizer.detokenizer(), reasoning=reasoning, calls=calls, harmony=channels)

    def learner(self) -> AnswerLearner | None:
        if self.model.marks_are_tokens:
            return None
        request, tokenizer = self.request, self.text_model.tokenizer
        return AnswerLearner(tokenizer, request.scope, request.prefill, not request.options.skip_special_tokens)


@dataclass(frozen=True)
class Past:
    """An agent's memory: the transcript that a request is appended to, the lines that its prompt may continue, and for
    each line the media token ids in it. `began` has the lines' transcripts and when they were opened, as Unix time. If
    `date_s` is not 0, the date that a template shows stays the same for the first `date_s` seconds of a
    conversation."""

    messages: Sequence[Message] = ()
    lines: Sequence[StoredBranch] = ()
    media_tokens: Sequence[Sequence[int]] = ()
    began: Sequence[tuple[History, float]] = ()
    date_s: float = 0.0

    def kept(self, messages: Sequence[Message]) -> Mapping[int, Mapping[str, str]]:
        """Returns how earlier messages of a conversation were shown to the model, by their places."""
        lines = [history for history, _ in self.began if history.kept]
        known = digests(messages, {place for history in lines for place in history.known_at})
        found: dict[int, Mapping[str, str]] = {}
        for history in lines:
            found |= history.kept_in(known)
        return found

    def shown_at(self, messages: Sequence[Message], now_s: float) -> datetime:
        """Returns the time whose date the prompt of a conversation shows, in the local time zone."""
        lines = sorted(self.began, key=lambda line: line[0].length, reverse=True) if self.date_s else []
        # The longest first, because each comparison costs a digest of the messages.
        began = next((began for history, began in lines if history.begins(messages)), None)
        if began is None:
            return datetime.fromtimestamp(now_s)
        return datetime.fromtimestamp(began + max(0.0, now_s - began) // self.date_s * self.date_s)


def agent_key(agent: str, tenant: str = OWNER) -> str:
    """Returns the key under which the backend knows an agent of the tenant; "" for none.

    Raises:
        InvalidRequest: not an agent id.
    """
    if not agent:
        return ""
    check_agent_id(agent)
    return f"{tenant}/{agent}"


def too_long(
    tokens: int, model: ServedModel, where: str, *, at_least: bool = False, answered: bool = True
) -> ContextLengthExceeded:
    """Returns the error of a text that does not fit.

    Args:
        tokens: how many it has, or `at_least` has.
        answered: whether an answer must fit too.
    """
    amount = f"at least {tokens} tokens" if at_least else f"{tokens} tokens"
    if answered:
        amount += ", and at least one is for the answer"
    # Clients compact a conversation if the error has OpenAI's words.
    return ContextLengthExceeded(
        f"This model's maximum context length is {model.info.context_tokens} tokens. However, your {where} resulted in "
        f"{amount}. Please reduce the length of the {where}.",
        param=where.partition("[")[0],
        tokens=tokens,
        tokens_max=model.info.context_tokens - answered,
    )


def kept_tokens(prompt: list[int], model: ServedModel, request: Request) -> list[int]:
    """Returns the prompt's last tokens, as many as the request keeps."""
    if (most := request.truncate_prompt_tokens) is None:
        return prompt
    if most < 0:
        answer = request.options.max_tokens or request.max_tokens_default or 1
        most = max(1, model.info.context_tokens - answer)
    return prompt[-most:]


def check_length(prompt: list[int], model: ServedModel, where: str) -> None:
    """Raises:
    ContextLengthExceeded: a prompt does not fit.
    """
    if len(prompt) >= model.info.context_tokens:
        raise too_long(len(prompt), model, where)


def check_least(text: TextModel, string: str, model: ServedModel, where: str, *, cut: bool = False) -> None:
    """Refuses text that cannot fit before it is encoded, because megabytes take seconds.

    Args:
        cut: whether it may be several times as long, because only a part of it is kept.

    Raises:
        ContextLengthExceeded: it is too long.
    """
    most = model.info.context_tokens * (_COUNTED_CONTEXTS if cut else 1)
    if (least := text.tokenizer.tokens_min(string, most)) >= most:
        raise too_long(least, model, where, at_least=True)


def prepare_chat(
    text: TextModel,
    model: ServedModel,
    request: ChatRequest,
    past: Past | None = None,
    media: Sequence[Medium] = (),
    *,
    reply: bool = True,
) -> Chat:
    """Renders and encodes a conversation.

    Args:
        past: the agent's memory.
        media: the request's pictures and videos, in order.
        reply: whether the prompt ends where the assistant begins, or with the last message.

    Raises:
        InvalidRequest: the model supports no media or tools, or its template refuses the messages.
        ContextLengthExceeded: they do not fit.
    """
    past, pictures = past or Past(), processor_of(text, model)
    if request.truncate_prompt_tokens is not None and (request.agent or media):
        message = "truncate_prompt_tokens: not possible with an agent's memory, or with pictures"
        raise InvalidRequest(message, param="truncate_prompt_tokens")
    placed, transcript, shown = _render(text, model, request, past, media, reply=reply)
    rendered, continuation = placed.text, None
    if past.lines:
        check_least(text, rendered, model, "messages")
        continuation = continue_text(rendered, past.lines, text.spelling)
        prompt = continuation.tokens
    else:
        check_least(text, rendered, model, "messages", cut=request.truncate_prompt_tokens is not None)
        prompt = kept_tokens(text.recent.encode(rendered, request.scope), model, request)
    if not prompt:
        raise InvalidRequest("the model's chat template made an empty prompt of these messages", param="messages")
    check_length(prompt, model, "messages")
    spans: list[MediaSpan] = []
    if pictures is not None:
        prompt, spans = with_media_tokens(pictures, prompt, placed)
        if continuation is not None and continuation.line is not None and past.media_tokens:
            continuation = _seen_alike(continuation, prompt, past.media_tokens[continuation.line])
    return Chat(
        request=request,
        model=model,
        text_model=text,
        prompt=prompt,
        tools=_told_tools(request),
        thinking=text.template.ends_in_thought(rendered),
        text=unbroken(rendered),
        messages=transcript,
        continuation=continuation,
        bad_words=text.tokenizer.word_tokens(request.options.bad_words),
        media=spans,
        shown=shown,
        # An answer that the request has begun does not begin with reasoning.
        may_think=not request.prefill and text.template.may_think(rendered),
        remembered_tokens=0 if continuation is None else continuation.kept_tokens,
        lasting_tokens=lasting_tokens(text, prompt, rendered, request.template_kwargs) if request.agent else 0,
        # Templates drop what follows a user message after the next one; between the steps of a turn they mostly keep
        # it.
        lasting_saved=bool(request.agent)
        and bool(transcript)
        and transcript[-1]["role"] == "user"
        and text.template.habits(request.template_kwargs).drops_thinking,
    )


def lasting_tokens(text: TextModel, prompt: list[int], rendered: str, template_kwargs: Mapping[str, Any]) -> int:
    """Returns how many of a rendered prompt's tokens come before the part that the template adds only for the next
    answer; 0 if it adds nothing."""
    end = text.template.habits(template_kwargs).passing_end
    return tokens_before(text, prompt, end) if end and rendered.endswith(end) else 0


def tokens_before(text: TextModel, prompt: list[int], end: str) -> int:
    """Returns how many of a prompt's tokens stay if another text takes the place of `end`, with which it ends."""
    left, count = len(end.encode()), 0
    while left > 0 and count < len(prompt):
        count += 1
        left -= len(text.tokenizer.token_bytes(prompt[-count]))
    lasting = len(prompt) - count
    # If other text follows, the last line break may become part of another token. Up to a special token nothing
    # changes.
    near = range(lasting, max(0, lasting - _ROLE_TOKENS), -1)
    return next((at for at in near if prompt[at - 1] in text.tokenizer.hidden_tokens), lasting)


def count_prompt(text: TextModel, model: ServedModel, request: ChatRequest, media: Sequence[Medium] = ()) -> int:
    """Returns how many tokens the prompt of a conversation has, whatever its length. If the prompt is several times as
    long as the context, it is not encoded, and a lower bound is returned.

    Raises:
        InvalidRequest: as `prepare_chat`.
    """
    placed, _, _ = _render(text, model, request, Past(), media, reply=True)
    far = _COUNTED_CONTEXTS * model.info.context_tokens
    if (least := text.tokenizer.tokens_min(placed.text, far)) >= far:
        return least
    return len(_encoded(text, model, request, placed, special_tokens=False))


def prompt_tokens(
    text: TextModel,
    model: ServedModel,
    request: ChatRequest,
    media: Sequence[Medium] = (),
    *,
    reply: bool,
    special_tokens: bool,
) -> list[int]:
    """Returns the tokens of a conversation's prompt, without an agent's memory. It may be a few times as long as the
    context.

    Args:
        reply: as in `prepare_chat`.
        special_tokens: whether to add those that the tokenizer puts around a text, besides the template's own.

    Raises:
        InvalidRequest: as `prepare_chat`.
        ContextLengthExceeded: it is several times as long as the context.
    """
    placed, _, _ = _render(text, model, request, Past(), media, reply=reply)
    check_least(text, placed.text, model, "messages", cut=True)
    return list(text.plain(_encoded(text, model, request, placed, special_tokens=special_tokens)))


def _encoded(
    text: TextModel, model: ServedModel, request: Request, placed: MediaPrompt, *, special_tokens: bool
) -> list[int]:
    prompt = text.recent.encode(placed.text, request.scope, special_tokens=special_tokens)
    if (pictures := processor_of(text, model)) is not None:
        # Refuses what a generation would refuse.
        prompt, _ = with_media_tokens(pictures, prompt, placed)
    return prompt


def _told_tools(request: ChatRequest) -> list[dict[str, Any]]:
    """Returns the tools that the model is shown."""
    return list(request.tools) if request.tool_use.shown else []


def _render(
    text: TextModel,
    model: ServedModel,
    request: ChatRequest,
    past: Past,
    media: Sequence[Medium],
    *,
    reply: bool,
) -> tuple[MediaPrompt, list[Message], list[Medium]]:
    """Returns the text of a prompt with the places of its media, its messages as a transcript, and its media as the
    model gets them. The text is guarded: a lone surrogate in callers' markers keeps them from becoming control tokens
    (`text/callers_text.py`)."""
    pictures = processor_of(text, model)
    messages = request.messages
    if request.agent_continue and (before := past.messages or request.opening):
        before = transcript_taken(before, pictures, request.left_out) if model.omits_unseen else before
        messages, media = _appended(before, messages, media)
    if not messages:
        raise InvalidRequest("messages: there must be one before the answer that is to be continued", param="messages")
    if unseen := kinds_not_taken(pictures) if model.omits_unseen else ():
        messages = without_unseen(messages, request.left_out, unseen)
    if pictures is not None and pictures.audio is None:
        # That of a transcript that another model has begun; in the messages a sentence replaces it.
        media = [medium for medium in media if medium.audio is None]
    pieces = None if pictures is None else [medium.shown(pictures) for medium in media]
    parts = None if pieces is None else iter([[one.part for one in piece] for piece in pieces])
    takes_audio = pictures is not None and pictures.audio is not None
    messages = with_shown(messages, parts, model.info.blind, model.info.no_audio, takes_audio=takes_audio)
    messages = with_kept(messages, past.kept(messages))
    form = request.form
    if reply and model.schema_in_prompt and form is not None and form.kind == "json" and not request.tool_use.forced:
        messages = with_schema(messages, form)
    guard = CallersText(text.tokenizer, request.scope, past.lines, model.marks_are_tokens)
    shown_tools, variables = guard.value(_told_tools(request)), guard.value(dict(request.template_kwargs))
    shown = [one for piece in pieces or () for one in piece]
    transcript, template, at = with_references(messages, shown), text.template, None
    if past.began and template.shows_date:
        at = past.shown_at(transcript, time.time())
    said, rendered = _rendered(messages, guard, lambda said: template.render(said, shown_tools, variables, at=at))
    if not reply:
        closed = template.render(said, shown_tools, variables, generation_prompt=False, at=at)
        # Some templates end a conversation so that no answer could follow.
        rendered = closed if closed and rendered.startswith(closed) else rendered
    elif request.prefill:
        rendered = template.prefilled(rendered, guard.beginning(request.prefill))
    if model.marks_are_tokens:
        refuse_breaks(rendered)
    placed = MediaPrompt(rendered, []) if pictures is None else place(pictures, rendered, shown)
    return placed, transcript, shown


def _appended(
    before: Sequence[Message], messages: Sequence[Message], media: Sequence[Medium]
) -> tuple[list[Message], list[Medium]]:
    """Returns a transcript with messages appended, the results of tools moved behind their calls, and its media in the
    new order."""
    joined = [*before, *messages]
    earlier = [media_said([message]) for message in before]
    sizes = [*map(len, earlier), *(len(sources_in([message])) if media else 0 for message in messages)]
    order = ordered(joined)
    known = [medium for each in earlier for medium in each]
    return (
        [joined[index] if said is None else said for index, said in order],
        permuted([index for index, _ in order], sizes, [*known, *media]),
    )


def _rendered(
    messages: Sequence[Message], guard: CallersText, render: Callable[[list[dict[str, Any]]], str]
) -> tuple[list[dict[str, Any]], str]:
    """Returns the messages in the first form that the template accepts, guarded as in `_render`, and the rendered
    text."""
    forms = [{"written": True}]
    if any("written" in message for message in messages):
        # Some templates refuse results without a call before them.
        forms.append({"written": False})
    refusal: InvalidRequest | None = None
    for how in forms:
        said = guard.messages(with_arguments(as_shown(messages, **how)))
        for form in (said, with_system_first(said)):
            if refusal is not None and form == said and form is not said:
                continue
            try:
                return form, render(form)
            except InvalidRequest as error:
                refusal = error
    assert refusal is not None
    raise refusal


def _seen_alike(continuation: Continuation, prompt: list[int], media_tokens: Sequence[int]) -> Continuation:
    """Returns the continuation only up to the first picture that differs: the text is the same for another picture."""
    places = [place for place, token in enumerate(prompt) if is_media_token(token)]
    same = common_length([prompt[place] for place in places], list(media_tokens))
    if same == len(media_tokens):
        return continuation
    kept = continuation.kept_tokens if same == len(places) else min(continuation.kept_tokens, places[same])
    return replace(continuation, match=Match.DIVERGE, kept_tokens=kept, reason=PICTURES_CHANGED)
