"""Streams of events from running sequences: reading, deadlines, aborting."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ...actors.protocol.replica_messages import SequenceUpdate
from ...cluster.errors import DeadlineExceeded, GenerationFailed, RequestAborted, from_wire
from ...cluster.telemetry.context import span
from ..requests.backend import Generation, ServedModel
from ..requests.history import Message, answer_message
from ..requests.remembered import Remembered
from ..text.answers.logprobs import ShownToken
from ..text.answers.sequence_text import SequenceText, TextDelta
from ..text.callers_text import AnswerLearner
from ..text.lone_surrogates import of_characters
from ..tools.answer_pieces import CallArguments, CallBegun, ReasoningDelta, ToolCall
from .sequence_metrics import SequenceTimes
from .spans import note_finish, note_usage

_ABORT_WAIT_S = 5.0
_INTERLEAVED_EVENTS_MAX = 256

WAITING = b": waiting\n\n"
"""A comment among server-sent events: it keeps proxies from closing the connection, and clients skip it."""


@dataclass(frozen=True)
class Usage:
    """Token counts of one sequence, or the sum of several.

    `cached_tokens` is how many of the prompt's tokens were not computed again. `reasoning_tokens` is how many
    completion tokens are in the block of reasoning, markers included. If a prompt has several choices, only the first
    counts the prompt.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
        )


@dataclass(frozen=True)
class Finished:
    """The last event of a stream. `reason` is `stop`, `length` or `tool_calls`; it is `tool_calls` only if the last
    call is complete. `stop_string` is the one that ended the answer."""

    reason: str
    usage: Usage
    stop_string: str | None = None


Event = TextDelta | ReasoningDelta | CallBegun | CallArguments | ToolCall | Finished


@dataclass(frozen=True)
class Answer:
    """A whole answer; `text` is its content. `logprobs` is None if not requested, `stop_string` as in `Finished`.
    `tokens` and `prompt` are token ids, None if not requested."""

    text: str
    tool_calls: list[ToolCall]
    reason: str
    usage: Usage
    reasoning: str = ""
    logprobs: list[ShownToken] | None = None
    stop_string: str | None = None
    tokens: list[int] | None = None
    prompt: list[int] | None = None


class AnswerKeeper(Protocol):
    """Stores the answer of an agent's turn."""

    @property
    def remembered(self) -> Remembered: ...

    async def keep(self, tokens: list[int], message: Message, generation: Generation) -> None:
        """Stores a complete answer, before its last event; an error raised here ends the stream.

        Args:
            tokens: as sampled.
            message: in OpenAI's form.
        """

    def leave(self) -> None:
        """Abandons the turn if nothing was stored."""


class TextStream:
    """One running sequence as text. Iterate it once, or `collect` it; `abort` it at any time.

    Args:
        prompt_tokens: length of the prompt in tokens.
        choice: which of the prompt's choices it is.
        deadline: by the event loop's clock.
        times: measures the sequence.
        abort: starts removing a generation from its batch, in a task that the caller's cancellation does not end.
        on_end: called once with the number of answer tokens, when the sequence has ended or its abort has begun.
        keeper: stores the answer of an agent's turn, which is abandoned if the stream is left early.
        prompt: the prompt's token ids if they and the answer's are asked for, else None.
        truncated_messages: how many messages were left out of the prompt because they did not fit.
        learner: remembers which markers of an answer were control tokens.

    Attributes:
        model: the served model.
        replica, node, why: where the sequence was placed and why.
        prompt_tokens: length of the prompt in tokens.
        truncated_messages: as given.
        first_event_at: when the first event was yielded, by `time.perf_counter`; None before.
    """

    def __init__(
        self,
        generation: Generation,
        sequence: SequenceText,
        *,
        model: ServedModel,
        prompt_tokens: int,
        choice: int = 0,
        deadline: float,
        times: SequenceTimes,
        abort: Callable[[Generation], asyncio.Task[None]],
        on_end: Callable[[int], None] = lambda tokens: None,
        keeper: AnswerKeeper | None = None,
        prompt: Sequence[int] | None = None,
        truncated_messages: int = 0,
        learner: AnswerLearner | None = None,
    ) -> None:
        self.model = model
        self.truncated_messages = truncated_messages
        self.replica = generation.replica
        self.node = generation.node
        self.why = generation.why
        self.prompt_tokens = prompt_tokens
        self.first_event_at: float | None = None
        self._generation = generation
        self._updates = aiter(generation)
        self._sequence = sequence
        self._choice = choice
        self._deadline = deadline
        self._times = times
        self._abort = abort
        self._on_end = on_end
        self._keeper = keeper
        self._prompt = prompt
        self._learner = learner
        self._span = span()
        self._over = False
        self._reading = False
        self._stopped = False
        self._waiting: asyncio.Timeout | None = None
        self._cached_tokens = 0
        self._tokens: list[int] = []
        self._sent: list[Event] = []

    @property
    def model_id(self) -> bytes:
        """The model's id at the replica that has the sequence now."""
        return self._generation.model_id

    @property
    def where(self) -> tuple[str, str]:
        """The replica and the node that have the sequence now; after a failover not those that it began on."""
        return self._generation.replica, self._generation.node

    @property
    def cached_tokens(self) -> int:
        """How many of the prompt's tokens were not computed again, as far as known; 0 before the first token."""
        return self._cached_tokens

    @property
    def prompt(self) -> list[int] | None:
        """The prompt's token ids, None if not asked for."""
        return None if self._prompt is None else list(self._prompt)

    @property
    def tokens(self) -> list[int] | None:
        """The answer's token ids so far, None if not asked for."""
        return None if self._prompt is None else self._tokens[: self._sequence.tokens]

    @property
    def usage(self) -> Usage:
        """The token counts of the sequence so far."""
        return self._usage()

    @property
    def remembered(self) -> Remembered | None:
        """How the answer was stored in its agent's memory, complete once `Finished` came; None without an agent."""
        return None if self._keeper is None else self._keeper.remembered

    def __aiter__(self) -> AsyncGenerator[Event, None]:
        return self._events()

    async def _events(self) -> AsyncGenerator[Event, None]:
        """Yields a sequence's tokens as events. This is the second of the four generators that an answer passes; the
        first follows the sequence from replica to replica. Ends with exactly one `Finished`, once the answer is stored.

        Raises:
            SatchelError: the sequence failed, reached its deadline, or could not be stored.
        """
        self._reading = True
        try:
            finish = None
            while finish is None:
                update = await self._next()
                self._times.note(update)
                if update.cached_tokens is not None:
                    self._cached_tokens = update.cached_tokens
                finish = update.finish
                if finish == "error":
                    self._end()
                    raise from_wire(update.error or {"kind": "GenerationFailed", "message": "the sequence failed"})
                events = self._sequence.add(update.tokens, update.logprobs)
                if self._keeper is not None or self._prompt is not None or self._learner is not None:
                    self._tokens += update.tokens
                if finish is not None:
                    self._end()
                for event in events:
                    yield self._record(event)
                    self._reading = True
                if self._sequence.stopped:
                    finish = "stop"
                    await self.abort()
            if finish not in ("stop", "length"):
                raise GenerationFailed(f"the sequence ended with {finish!r} before its answer was complete")
            for event in self._sequence.finish(cut=finish == "length"):
                yield self._record(event)
                self._reading = True
            if self._learner is not None:
                content = "".join(event.text for event in self._sent if isinstance(event, TextDelta))
                if self._learner.wants(content):
                    await asyncio.to_thread(self._learner.learn, self._tokens, content)
            # The text that was held back may have a stop string that ended the answer before its limit.
            finish = "stop" if self._sequence.called_enough else finish
            if self._keeper is not None:
                await self._keeper.keep(self._tokens, _message(self._sent), self._generation)
            self._times.end(finish)
            reason = "tool_calls" if self._sequence.called and finish == "stop" else finish
            note_finish(self._span, reason)
            yield self._record(Finished(reason, self._usage(), self._sequence.stop_string))
        except Exception as error:
            self._times.end("abort" if isinstance(error, RequestAborted) else "error")
            raise
        finally:
            self._reading = False
            try:
                await self.abort()
            finally:
                if self._keeper is not None:
                    self._keeper.leave()

    def _record(self, event: Event) -> Event:
        """Notes an event that is about to be yielded, and returns it."""
        # A model may write a lone surrogate as a JSON escape.
        if isinstance(event, ToolCall) and (arguments := of_characters(event.arguments)) != event.arguments:
            event = replace(event, arguments=arguments)
        elif isinstance(event, CallArguments) and (text := of_characters(event.text)) != event.text:
            event = replace(event, text=text)
        if self.first_event_at is None:
            self.first_event_at = time.perf_counter()
        if self._keeper is not None or self._learner is not None:
            self._sent.append(event)
        self._reading = False
        return event

    def _usage(self) -> Usage:
        sequence = self._sequence
        if self._choice:
            return Usage(0, sequence.tokens, 0, sequence.reasoning_tokens)
        return Usage(self.prompt_tokens, sequence.tokens, self._cached_tokens, sequence.reasoning_tokens)

    def stop(self) -> None:
        """Ends the sequence for its reader too, who gets `RequestAborted`. Does nothing once the last token came."""
        self._stopped = True
        if self._waiting is not None and not self._waiting.expired():
            self._waiting.reschedule(0.0)

    async def _next(self) -> SequenceUpdate:
        timeout = self._waiting = asyncio.timeout_at(0.0 if self._stopped else self._deadline)
        try:
            async with timeout:
                return await anext(self._updates)
        except StopAsyncIteration:
            raise GenerationFailed("the replica ended the sequence before its answer was complete") from None
        except TimeoutError:
            if timeout.expired():
                if self._stopped:
                    raise RequestAborted("this request was aborted by its id") from None
                raise DeadlineExceeded(
                    "the request took longer than its timeout_s or timeouts.request_s allows"
                ) from None
            raise
        finally:
            self._waiting = None

    async def collect(self) -> Answer:
        """Returns the whole answer.

        Raises:
            SatchelError: as iterating does.
        """
        text: list[str] = []
        reasoning: list[str] = []
        calls: list[ToolCall] = []
        logprobs: list[ShownToken] | None = [] if self._sequence.follows_tokens else None
        try:
            async for event in self:
                if isinstance(event, TextDelta):
                    text.append(event.text)
                    if logprobs is not None:
                        logprobs += event.logprobs or ()
                elif isinstance(event, ReasoningDelta):
                    reasoning.append(event.text)
                elif isinstance(event, ToolCall):
                    calls.append(event)
                elif isinstance(event, Finished):
                    return Answer(
                        "".join(text),
                        calls,
                        event.reason,
                        event.usage,
                        reasoning="".join(reasoning),
                        logprobs=logprobs,
                        stop_string=event.stop_string,
                        tokens=self.tokens,
                        prompt=self.prompt,
                    )
        finally:
            await self.abort()
        raise GenerationFailed("the sequence ended before its answer was complete")

    async def abort(self) -> None:
        """Removes the sequence from its batch unless it has ended. Cancelling the caller does not cancel this."""
        await abort_all([self])

    def begin_abort(self) -> asyncio.Task[None] | None:
        """Starts an `abort` without waiting for it. None if the sequence has ended."""
        # A stopped sequence aborts itself while it is read. Any other abort means that nobody reads it any more.
        if not self._reading:
            self._times.end("abort")
            if self._keeper is not None:
                self._keeper.leave()
        if self._over:
            return None
        self._end()
        return self._abort(self._generation)

    def _end(self) -> None:
        self._over = True
        used = self._usage()
        note_usage(self._span, used.prompt_tokens, used.cached_tokens, used.completion_tokens)
        self._on_end(self._sequence.tokens)


def _message(events: Sequence[Event]) -> Message:
    """Returns an answer in OpenAI's form, from its events."""
    text = "".join(event.text for event in events if isinstance(event, TextDelta))
    reasoning = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
    return answer_message(text, reasoning, [event for event in events if isinstance(event, ToolCall)])


async def all_or_none(starts: Sequence[Coroutine[Any, Any, TextStream]]) -> list[TextStream]:
    """Starts sequences at the same time. If one is refused, none runs."""
    tasks = [asyncio.create_task(start) for start in starts]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        await abort_all([stream for stream in done if isinstance(stream, TextStream)])
        raise


async def abort_all(streams: Sequence[TextStream]) -> None:
    """Aborts all streams, and waits at most 5 s for that."""
    # All are started before the first wait, so a cancellation arriving here leaves none running.
    tasks = {task for stream in streams if (task := stream.begin_abort()) is not None}
    if tasks:
        await asyncio.wait(tasks, timeout=_ABORT_WAIT_S)


async def collect_all(streams: Sequence[TextStream]) -> list[Answer]:
    """Returns the whole answers, in order.

    Raises:
        SatchelError: one failed; all are aborted.
    """
    tasks = [asyncio.create_task(stream.collect()) for stream in streams]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await abort_all(streams)


async def interleave(streams: Sequence[TextStream]) -> AsyncGenerator[tuple[int, Event], None]:
    """Yields the events of all choices' streams as they come, each with its stream's index: the third generator of an
    answer. The first failure ends all streams."""
    if len(streams) == 1:
        async with aclosing(aiter(streams[0])) as events:
            async for event in events:
                yield 0, event
        return
    queue: asyncio.Queue[tuple[int, Event] | Exception | None] = asyncio.Queue(_INTERLEAVED_EVENTS_MAX)

    async def forward(index: int, stream: TextStream) -> None:
        try:
            async for event in stream:
                await queue.put((index, event))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(forward(index, stream)) for index, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await abort_all(streams)
