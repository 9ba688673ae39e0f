"""From messages to text: the pipeline that the HTTP endpoint and the Python handles share.

A request goes ``check -> render -> encode`` in a worker thread, then to the backend as token ids. It comes back as one
`TextStream` per choice: ``tokens -> characters -> reasoning -> stop strings -> tool calls -> events``, on the event
loop, a few microseconds per token. Independent of HTTP and Ray.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from ...actors.protocol.replica_messages import GenerateRequest
from ...cluster.config.config import Config
from ...cluster.errors import (
    DeadlineExceeded,
    InvalidRequest,
    MemoryFull,
    ModelNotFound,
    NoReplica,
    QuotaExceeded,
    Unavailable,
    quoted,
)
from ..agents.memory import AgentMemory, CommittedTurn, Turn, past_of
from ..agents.preparing import Preparations
from ..agents.streams import TurnKeeper
from ..media.fetch import PictureLoader
from ..media.prompt import Medium
from ..media.sources import VideoSource
from ..requests.backend import Backend, Generation, ListedModel, ServedModel
from ..requests.callers import OWNING, AdmittedSequences, Caller
from ..requests.loading import Loading
from ..requests.options import Options
from ..requests.remembered import OVER_QUOTA, UNANSWERED, Remembered
from ..requests.requests import (
    Chat,
    ChatRequest,
    CompletionRequest,
    PreparedPrompt,
    Request,
    ToolUse,
    count_prompt,
    prepare_chat,
    prompt_tokens,
)
from ..requests.taken_media import has_audio, may_take_audio, without_audio
from ..requests.unsupported_media import RefusedMessages, media_in, without_unread
from ..text.answers.grammars import AnswerForm, Thought
from ..text.model import TextModel, load_text_model
from ..tools.call_finder import CallFinder
from ..tools.formats.call_format import ConstrainedCalls
from .constrained_answers import ModelGrammars, constrained_calls, scripted_grammar
from .kinds import check_makes_text, first_of_text
from .prompt_logprobs import with_prompt_logprobs
from .prompts import check_vocabulary, prepare_completion, text_tokens
from .running import RunningSequences
from .sequence_metrics import SequenceMetrics, SequenceTimes
from .spans import CHAT, COMPLETION, note_model, note_sequence
from .streams import TextStream, Usage, abort_all, all_or_none
from .truncation import truncated

_log = logging.getLogger(__name__)


class Generator:
    """Starts sequences on a backend, for one event loop. Loads each model's tokenizer once.

    Args:
        memory: the agents' memory; None without one.
        load_text: loads a model's text side; tests replace it.
    """

    def __init__(
        self,
        backend: Backend,
        config: Config,
        *,
        memory: AgentMemory | None = None,
        load_text: Callable[..., TextModel] = load_text_model,
    ) -> None:
        self.backend = backend
        self.config = config
        self.memory = memory
        self.preparations = Preparations(backend, config, memory) if memory is not None else None
        self.loader = PictureLoader(config.media)
        self.running = RunningSequences()
        self.metrics = SequenceMetrics()
        self._load_text = load_text
        self._texts: dict[tuple[str, bytes], asyncio.Task[TextModel]] = {}
        self._grammars: dict[TextModel, ModelGrammars] = {}
        self._refused = RefusedMessages()
        self._aborts: set[asyncio.Task[None]] = set()
        # A sequence that fails over sends its images again, so they stay in memory. The loader counts them until then.
        self._shown: WeakKeyDictionary[Generation, list[Medium]] = WeakKeyDictionary()

    async def named(self, name: str = "", caller: Caller = OWNING, *, any_model: bool = False) -> ListedModel:
        """Returns the entry of the model called `name`, loaded or not. If `name` is "", returns the first model of text
        that the caller may use. With `any_model` it also does so if `name` is none that the caller may use.

        Raises:
            ModelNotFound: there is no such model that the caller may use.
        """
        listed = [model for model in await self.backend.listed() if caller.may_use(model.name)]
        if (found := next((one for one in listed if name in (one.name, *one.aliases)), None)) is not None:
            return found
        if not listed or (name and not any_model):
            raise ModelNotFound(f"the model {quoted(name)} does not exist", param="model", model=name)
        return first_of_text(listed, await self.backend.models())

    async def served(
        self,
        name: str = "",
        caller: Caller = OWNING,
        *,
        any_model: bool = False,
        load: bool = True,
        loading: Loading | None = None,
    ) -> ServedModel:
        """Returns the model called `name`, as `named` does. If it comes and goes and is not loaded, waits until it is.

        Args:
            load: whether to wait for that.
            loading: learns how far it is.

        Raises:
            ModelNotFound: there is no such model that the caller may use.
            ModelLoadError: it cannot be loaded.
            DeadlineExceeded: it was not loaded within `timeouts.request_s`.
            NoReplica: it has not been loaded yet.
        """
        wanted = await self.named(name, caller, any_model=any_model)
        loads, most_s = load and wanted.comes_and_goes, self.config.timeouts.request_s
        try:
            async with asyncio.timeout(most_s):
                while True:
                    if loads:
                        await self.backend.load(wanted.name, loading or Loading())
                    for model in await self.backend.models():
                        if model.info.name == wanted.name:
                            return model
                    if not loads:
                        break
                    # Its replica has ended again, or has not answered yet.
                    await asyncio.sleep(self.config.timing.retry_s)
        except TimeoutError:
            raise DeadlineExceeded(f"the model {wanted.name!r} was not loaded within {most_s:g} s") from None
        why = "not loaded: a request for it loads it" if wanted.comes_and_goes else "still loading"
        raise NoReplica(f"the model {wanted.name!r} is {why}", param="model")

    async def text_model(self, model: ServedModel) -> TextModel:
        """Returns the text side of `model`, loaded on first use.

        Raises:
            InvalidRequest, ModelLoadError: it makes images, and no text; or its tokenizer does not load.
        """
        check_makes_text(model)
        task = self._texts.get(key := (model.info.folder, model.info.files_id))
        if task is None or (task.done() and (task.cancelled() or task.exception())):
            task = asyncio.create_task(asyncio.to_thread(self._load, model))
            self._texts[key] = task
            # Drop text sides of models that are no longer served.
            served = {key, *((other.info.folder, other.info.files_id) for other in await self.backend.models())}
            self._texts = {known: text for known, text in self._texts.items() if known in served}
        # Shielded: a cancelled request must not end the loading for other requests.
        return await asyncio.shield(task)

    def _load(self, model: ServedModel) -> TextModel:
        """Loads a model's text side, and logs what its template drops."""
        text = self._load_text(model.info.folder, name=model.info.name, trusted=model.info.trust_remote_code)
        for note in text.template.habits(model.template_kwargs).notes:
            _log.warning("%s: %s", model.info.name, note)
        return text

    async def template_notes(self, model: ServedModel) -> list[str]:
        """Returns sentences that say what the model's chat template drops; none if its tokenizer does not load."""
        try:
            return (await self.text_model(model)).template.habits(model.template_kwargs).notes
        except Exception:
            # One model's failure must not fail the list of all models; requests for that model say what is wrong.
            return []

    async def start_chat(self, request: ChatRequest) -> TextStream:
        """Starts a conversation with one choice; see `start_chats`."""
        (stream,) = await self.start_chats(request)
        return stream

    async def start_chats(self, request: ChatRequest) -> list[TextStream]:
        """Checks, renders, encodes and queues a conversation. Returns a stream for every choice, in order.

        Returns once replicas have accepted all sequences; if one is refused, none runs. An agent remembers the messages
        and its first answer. A request with `agent_continue` waits for the agent's turn.

        Raises:
            RequestError: the request is invalid.
            AgentBusy: another turn of the agent takes too long.
            Unavailable: no replica accepts it now.
            DeadlineExceeded: no replica accepted it in time.
        """
        async with self._turn() as turns, self.deadline(request) as deadline:
            chat = await self._prepare_chat(request, turns)
            return await self._start_all([chat], deadline, next(iter(turns), None))

    async def count(self, request: ChatRequest) -> int:
        """Returns how many tokens the prompt of a conversation has. Nothing is queued, and no agent's memory is read: a
        turn that continues an agent's stored token ids may have a few more or fewer.

        Raises:
            RequestError: the request is invalid, other than by being too long.
            Unavailable: the model has not been loaded yet.
        """
        model, text = await self._chosen(request)
        request, media = await self._with_media(request, model, text)
        return await asyncio.to_thread(count_prompt, text, model, request, media)

    async def tokenize(
        self,
        request: ChatRequest | CompletionRequest,
        *,
        reply: bool = True,
        special_tokens: bool = False,
        written: bool = False,
    ) -> tuple[ServedModel, list[int], list[str] | None]:
        """Returns the model that would answer, the prompt's tokens, and, if `written`, each token's text in the
        vocabulary. Nothing is queued, and no agent's memory is read.

        Args:
            reply, special_tokens: as in `prompt_tokens`, for chats.

        Raises:
            RequestError: the request is invalid, or its prompt is several times as long as the context.
            Unavailable: the model has not been loaded yet.
        """
        model, text = await self._chosen(request)
        if isinstance(request, ChatRequest):
            request, media = await self._with_media(request, model, text)
            tokens = await asyncio.to_thread(
                prompt_tokens, text, model, request, media, reply=reply, special_tokens=special_tokens
            )
        else:
            tokens = await asyncio.to_thread(text_tokens, text, model, request)
        return model, tokens, await asyncio.to_thread(text.tokenizer.written, tokens) if written else None

    async def detokenize(self, request: CompletionRequest, tokens: list[int]) -> str:
        """Returns the text of tokens, special ones included.

        Raises:
            RequestError: one is not in the model's vocabulary.
            Unavailable: the model has not been loaded yet.
        """
        model, text = await self._chosen(request)
        check_vocabulary(tokens, model.info.vocabulary_size, "tokens")
        return await asyncio.to_thread(text.tokenizer.decode, tokens)

    async def inject(self, request: ChatRequest) -> tuple[Usage, Remembered]:
        """Appends messages to an agent's transcript and computes their KV, without a reply. Returns the usage and the
        state of the agent's memory.

        Raises:
            RequestError, AgentBusy, Unavailable, DeadlineExceeded: as `start_chats` does.
            MemoryFull, QuotaExceeded, Unavailable: the messages were not committed.
        """
        options = Options(temperature=0.0)
        silent = replace(request, options=options, max_tokens_default=0, agent_continue=True, choices=1)
        async with self._turn() as turns:
            async with self.deadline(silent) as deadline:
                chat = await self._prepare_chat(silent, turns, reply=False)
                (stream,) = await self._start_all([chat], deadline)
            usage = (await stream.collect()).usage
            (turn,) = turns
            kept = CommittedTurn(
                chat.prompt, chat.text, chat.messages, chat.continuation, stream.model_id, injected=True
            )
            await turn.commit(kept)
            if why := turn.remembered.unkept:
                # An injection that was not committed has no effect, so it is an error.
                kind = {UNANSWERED: Unavailable, OVER_QUOTA: QuotaExceeded}.get(why, MemoryFull)
                raise kind(f"what was injected is not kept: {why}")
            return usage, turn.remembered

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[list[Turn]]:
        """Yields a list to which a request adds its turn; if the request fails, the turn is abandoned."""
        turns: list[Turn] = []
        try:
            yield turns
        except BaseException:
            for turn in turns:
                turn.leave()
            raise

    async def _prepare_chat(self, request: ChatRequest, turns: list[Turn], *, reply: bool = True) -> Chat:
        agent = request.agent_key
        _check_salt(request)
        if request.agent_continue and not agent:
            raise InvalidRequest("agent_continue needs an agent: X-Agent-ID or agent_id", param="agent_continue")
        if request.agent_continue and self.memory is None:
            raise InvalidRequest("agent_continue: this endpoint keeps no agents' memory", param="agent_continue")
        model, text = await self._chosen(request)
        request, media = await self._with_media(request, model, text)
        turn, past = None, None
        if agent and self.memory is not None:
            turn = Turn(
                self.memory,
                agent,
                model.info.files_id,
                text,
                continues=request.agent_continue,
                limits=request.caller.disk_limits,
                program=request.program,
                parent=request.parent,
            )
            turns.append(turn)
            await turn.open()
            past = past_of(turn.lines, self.config.date_days * 86_400.0, turn.messages)
        truncated_messages = 0
        if request.truncates and not request.agent_continue:
            shorter = await asyncio.to_thread(truncated, text, model, request, media)
            request, media = shorter.request, shorter.media
            truncated_messages = shorter.truncated_messages
        chat = await asyncio.to_thread(prepare_chat, text, model, request, past, media, reply=reply)
        if turn is not None and self.memory is not None:
            self.memory.count(chat.continuation, turn.lines)
        constrained = constrained_calls(request)
        grammar = ""
        if text.script is not None:
            grammar = await asyncio.to_thread(scripted_grammar, text.script, chat, constrained)
        if not grammar:
            grammar = await self._grammar(text, chat.thought, request.form, constrained)
        finder = await self._call_finder(text, chat.tools, request.tool_use)
        _check_limits(request, grammar)
        return replace(chat, grammar=grammar, calls=finder, truncated_messages=truncated_messages)

    async def _grammar(
        self, text: TextModel, thought: Thought, form: AnswerForm | None, calls: ConstrainedCalls | None
    ) -> str:
        """As `ModelGrammars.grammar`, in a worker thread."""
        if form is None and calls is None:
            return ""
        return await asyncio.to_thread(self._grammars_of(text).grammar, thought, form, calls)

    def _grammars_of(self, text: TextModel) -> ModelGrammars:
        grammars = self._grammars.get(text)
        if grammars is None:
            grammars = ModelGrammars(text, self.config.endpoint.grammar_bytes_max)
            # Drop grammars of models that are no longer served.
            loaded = [task for task in self._texts.values() if task.done() and not task.cancelled()]
            served = {task.result() for task in loaded if task.exception() is None}
            self._grammars = {known: each for known, each in self._grammars.items() if known in served}
            self._grammars[text] = grammars
        return grammars

    async def _call_finder(self, text: TextModel, tools: list[dict[str, Any]], use: ToolUse) -> CallFinder | None:
        """Returns what finds the tool calls in answers; None if the model is shown no tools."""
        if not tools:
            return None
        some = [tool for tool in tools if use.names is None or tool["function"]["name"] in use.names]
        most = None if use.parallel else 1
        return await asyncio.to_thread(
            lambda: CallFinder(text.calls, text.tokenizer, some, text.call_format, forced=use.forced, calls_max=most)
        )

    async def _with_media(
        self, request: ChatRequest, model: ServedModel, text: TextModel
    ) -> tuple[ChatRequest, Sequence[Medium]]:
        """Returns a request without the media that its model cannot see, and its pictures and videos, in order; none if
        the model supports none."""
        # In threads, because there may be thousands of parts.
        request = await asyncio.to_thread(request.of, model)
        if text.pictures is None or model.info.blind:
            return await self._marked(request, model), []
        audio = text.pictures.audio if may_take_audio(model) else None
        if audio is None and await asyncio.to_thread(has_audio, request.messages):
            request = await self._marked(request, model)
            told = await asyncio.to_thread(without_audio, request.messages, request.left_out, model)
            request = replace(request, messages=told)
        found = await asyncio.to_thread(media_in, request.messages, spares=model.omits_unseen)
        if not found:
            return request, []
        sources, spared = zip(*found, strict=True)
        loaded = await self.loader.load_all(sources, spared, audio=audio)
        unread = {number for number, frames in enumerate(loaded) if not frames}
        if unread:
            told = await asyncio.to_thread(without_unread, request.messages, unread, request.left_out)
            request = replace(request, messages=told)
        kinds = [isinstance(source, VideoSource) for source in sources]
        return request, [Medium.of(each, video=video) for each, video in zip(loaded, kinds, strict=True) if each]

    async def _marked(self, request: ChatRequest, model: ServedModel) -> ChatRequest:
        """Returns a request with the media of a refused message marked as earlier ones, if they may be left out."""
        if not model.omits_unseen:
            return request
        scope = f"{request.scope}/{request.agent}"
        marked = await asyncio.to_thread(self._refused.marked, request.messages, scope)
        return replace(request, messages=marked)

    async def start_completion(self, request: CompletionRequest) -> list[TextStream]:
        """Checks, encodes and queues prompts. The choices of the first prompt come first. Raises as `start_chats`."""
        async with self.deadline(request) as deadline:
            _check_salt(request)
            model, text = await self._chosen(request)
            prompts_max = self.config.scheduling.queue_requests_max // request.choices
            prompts = await asyncio.to_thread(prepare_completion, text, model, request, prompts_max)
            grammar = await self._grammar(text, Thought.NONE, request.form, None)
            _check_limits(request, grammar)
            return await self._start_all([replace(prompt, grammar=grammar) for prompt in prompts], deadline)

    @asynccontextmanager
    async def deadline(self, request: Request, missed: str = "no replica took the request") -> AsyncIterator[float]:
        """Yields a request's deadline, by the event loop's clock, and enforces it while the context is open.

        Args:
            missed: says in the error what did not happen in time.

        Raises:
            DeadlineExceeded: the deadline has passed.
        """
        limit_s = self.config.timeouts.request_s
        if request.options.timeout_s is not None:
            limit_s = min(limit_s, request.options.timeout_s)
        waited_s = time.perf_counter() - request.arrived
        deadline = asyncio.get_running_loop().time() + limit_s - waited_s
        timeout = asyncio.timeout_at(deadline)
        try:
            async with timeout:
                yield deadline
        except TimeoutError:
            if timeout.expired():
                raise DeadlineExceeded(f"{missed} within {limit_s:g} s") from None
            raise

    async def _chosen(self, request: Request) -> tuple[ServedModel, TextModel]:
        """Returns the request's model, after checking the options against it."""
        caller, loading = request.caller, request.loading
        model = await self.served(request.model, caller, any_model=request.any_model, loading=loading)
        request.caller.priority(request.options.priority)
        scheduling = self.config.scheduling
        options, limit = request.options, scheduling.max_tokens_max
        if limit is not None and options.max_tokens is not None and options.max_tokens > limit:
            name = request.max_tokens_field
            raise InvalidRequest(f"{name}: at most {limit} tokens are possible (scheduling.max_tokens_max)", param=name)
        if request.choices > scheduling.queue_requests_max:
            raise InvalidRequest(f"n: at most {scheduling.queue_requests_max} choices are possible", param="n")
        options.check_tokens(model.info.vocabulary_size)
        return model, await self.text_model(model)

    async def _start_all(
        self, prompts: Sequence[PreparedPrompt], deadline: float, turn: Turn | None = None
    ) -> list[TextStream]:
        """Starts every prompt's first sequence, then its other sequences on the same replica, where they share the
        prompt's KV. The first choice of a chat is committed to the `turn`."""
        request = prompts[0].request
        given, others = request.options.seed, range(1, request.choices)
        admission = request.caller.admit(len(prompts) * request.choices, sum(len(prompt.prompt) for prompt in prompts))
        start = partial(self._start, admission, deadline)
        first: list[TextStream] = []
        try:
            if isinstance(request, CompletionRequest) and (top := request.prompt_logprobs) is not None:
                prompts = await with_prompt_logprobs(self.backend, prompts, top, deadline)
            starts = [(prompt, secrets.randbits(63) if given is None else given) for prompt in prompts]
            first = await all_or_none([start(prompt, seed, turn=turn) for prompt, seed in starts])
            rest = await all_or_none(
                [
                    start(prompt, seed, choice, stream.replica)
                    for (prompt, seed), stream in zip(starts, first, strict=True)
                    for choice in others
                ]
            )
        except BaseException:
            await abort_all(first)
            admission.close()
            raise
        size = len(others)
        return [sequence for i, stream in enumerate(first) for sequence in (stream, *rest[i * size : (i + 1) * size])]

    async def _start(
        self,
        admission: AdmittedSequences,
        deadline: float,
        prepared: PreparedPrompt,
        seed: int,
        choice: int = 0,
        beside: str = "",
        turn: Turn | None = None,
    ) -> TextStream:
        request, model, text, prompt = prepared.request, prepared.model, prepared.text_model, prepared.prompt
        agent, caller = request.agent_key, request.caller
        sampling = request.options.sampling(
            text.sampling,
            seed=seed,
            choice=choice,
            max_tokens=self._max_tokens(request, model.info.context_tokens - len(prompt)),
            vocabulary_size=model.info.vocabulary_size,
            grammar=prepared.grammar,
            bad_words=prepared.bad_words,
            thinking=prepared.thinking_budget,
        )
        sequence = GenerateRequest(
            # Callers choose request ids and may repeat them; sequences' ids must differ.
            request_id=f"{request.request_id or 'sequence'}/{secrets.token_hex(8)}",
            consumer="",
            model=model.info.replicas_of,
            adapter=model.info.adapter,
            agent=agent,
            prompt=prompt,
            block_ids=[],
            root_id=b"",
            sampling=sampling,
            priority=caller.priority(request.options.priority),
            deadline_s=max(0.001, deadline - asyncio.get_running_loop().time()),
            choices=request.choices,
            media=prepared.media,
            remembered_tokens=prepared.remembered_tokens,
            lasting_tokens=prepared.lasting_tokens,
            lasting_saved=prepared.lasting_saved,
            tenant=caller.tenant,
            flow=agent or f"{caller.tenant}/ {caller.host}",
            memory_bytes_max=caller.limits.memory_bytes_max,
            disk_bytes_max=caller.limits.disk_bytes_max,
        )
        note_model(CHAT if isinstance(prepared, Chat) else COMPLETION, request.model, model.info.name)
        note_sequence(sequence)
        generation = await self.backend.generate(
            model, sequence, cache_salt=request.cache_salt, beside=beside, loading=request.loading
        )
        if prepared.shown:
            self._shown[generation] = prepared.shown

        def on_end(tokens: int) -> None:
            self.running.end(sequence.request_id)
            admission.end_sequence(tokens)

        stream = TextStream(
            generation,
            prepared.sequence_text(),
            model=model,
            prompt_tokens=len(prompt),
            choice=choice,
            deadline=deadline,
            times=SequenceTimes(self.metrics, model.info.name, generation, request.arrived, len(prompt)),
            abort=self._begin_abort,
            on_end=on_end,
            keeper=self._keeper(turn, prepared) if turn is not None and isinstance(prepared, Chat) else None,
            prompt=text.plain(prompt) if request.return_token_ids else None,
            truncated_messages=prepared.truncated_messages,
            learner=prepared.learner(),
        )
        self.running.begin(sequence, stream)
        return stream

    def _keeper(self, turn: Turn, chat: Chat) -> TurnKeeper:
        return TurnKeeper(turn, chat, self.preparations.turn_ended if self.preparations is not None else None)

    def _max_tokens(self, request: Request, left: int) -> int:
        wanted = request.options.max_tokens
        limits = [request.max_tokens_default, self.config.scheduling.max_tokens_max] if wanted is None else [wanted]
        return min([left, *(limit for limit in limits if limit is not None)])

    def _begin_abort(self, generation: Generation) -> asyncio.Task[None]:
        # A separate task: the caller is often being cancelled, and the sequence must be stopped even then.
        task = asyncio.create_task(generation.abort())
        self._aborts.add(task)
        task.add_done_callback(self._aborted)
        return task

    def _aborted(self, task: asyncio.Task[None]) -> None:
        self._aborts.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("aborting a sequence failed", exc_info=error)


def _check_salt(request: Request) -> None:
    if request.agent_key and request.cache_salt:
        message = "cache_salt is for requests without an agent: an agent's memory is found by its id"
        raise InvalidRequest(message, param="cache_salt")


def _check_limits(request: Request, grammar: str) -> None:
    """Refuses options that restrict tokens if there is a grammar: together they may leave no token to sample."""
    for name in ("allowed_token_ids", "bad_words"):
        if grammar and getattr(request.options, name):
            message = f"{name}: not possible with constrained decoding (a response format or tools)"
            raise InvalidRequest(message, param=name)
