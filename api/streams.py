"""One row's tokens as a stream of text: the part of the pipeline that runs while a model generates.

``tokens -> characters -> stop strings -> tool calls -> events``, on the event loop, a few microseconds a token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from ..actors.messages import RowUpdate
from ..cluster.errors import DeadlineExceeded, GenerationFailed, from_wire
from .backend import Generation, ServedModel
from .text import Detokenizer, StopMatcher, TextModel
from .tool_calls import ToolCall, ToolCallSplitter

_ABORT_WAIT_S = 5.0
_INTERLEAVED_EVENTS_MAX = 256


@dataclass(frozen=True)
class Usage:
    """Tokens of one row, or of several added up. `cached_tokens` of the prompt were not computed again."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
        )


@dataclass(frozen=True)
class TextDelta:
    """More text; never empty."""

    text: str


@dataclass(frozen=True)
class Finished:
    """The last event of a stream. `reason` is `stop`, `length` or `tool_calls`."""

    reason: str
    usage: Usage


Event = TextDelta | ToolCall | Finished


@dataclass(frozen=True)
class Answer:
    """A whole answer."""

    text: str
    tool_calls: list[ToolCall]
    reason: str
    usage: Usage


class RowText:
    """Makes events of one row's tokens. `stopped` is set once a stop string was found; nothing follows then."""

    def __init__(
        self, text: TextModel, detokenizer: Detokenizer, stops: Sequence[str], splitter: ToolCallSplitter | None
    ) -> None:
        self._text = text
        self._detokenizer = detokenizer
        self._stops = StopMatcher(stops)
        self._splitter = splitter
        self.stopped = False
        self.tokens = 0
        self.calls = 0

    def add(self, tokens: list[int]) -> list[TextDelta | ToolCall]:
        pieces: list[str | ToolCall] = []
        for token in tokens:
            if self.stopped:
                break
            self.tokens += 1
            if not self._hidden(token):
                self._feed(self._detokenizer.add(token), pieces)
        if self.stopped:
            self._end(pieces)
        return self._events(pieces)

    def finish(self) -> list[TextDelta | ToolCall]:
        """What was held back."""
        pieces: list[str | ToolCall] = []
        self._feed(self._detokenizer.flush(), pieces)
        if not self.stopped:
            self._split(self._stops.flush(), pieces)
        self._end(pieces)
        return self._events(pieces)

    def _hidden(self, token: int) -> bool:
        if token not in self._text.hidden_tokens:
            return False
        if self._splitter is None or token in self._text.end_tokens:
            return True
        # Some models write a call's name and arguments between special tokens, so inside a call they count as text.
        return not (self._splitter.inside or token in self._text.tool_call_tokens)

    def _feed(self, piece: str, pieces: list[str | ToolCall]) -> None:
        if piece:
            shown, self.stopped = self._stops.add(piece)
            self._split(shown, pieces)

    def _split(self, shown: str, pieces: list[str | ToolCall]) -> None:
        if self._splitter is None:
            pieces.append(shown)
        elif shown:
            pieces.extend(self._splitter.add(shown))

    def _end(self, pieces: list[str | ToolCall]) -> None:
        if self._splitter is not None:
            pieces.extend(self._splitter.flush())

    def _events(self, pieces: list[str | ToolCall]) -> list[TextDelta | ToolCall]:
        events: list[TextDelta | ToolCall] = []
        text = ""
        for piece in pieces:
            if isinstance(piece, str):
                text += piece
                continue
            self.calls += 1
            if text:
                events.append(TextDelta(text))
                text = ""
            events.append(piece)
        if text:
            events.append(TextDelta(text))
        return events


class TextStream:
    """One running row as text. Iterate it once, or `collect` it; then or instead `abort` it.

    Args:
        deadline: by the event loop's clock.
        abort: starts taking a generation out of its batch, in a task that nobody's cancellation ends.

    Attributes:
        model: the served model.
        replica, why: where the row runs and why there.
        prompt_tokens: length of the prompt in tokens.
        first_event_at: when the first event came out, by `time.perf_counter`; None before.
    """

    def __init__(
        self,
        generation: Generation,
        row: RowText,
        *,
        model: ServedModel,
        prompt_tokens: int,
        deadline: float,
        abort: Callable[[Generation], asyncio.Task[None]],
    ) -> None:
        self.model = model
        self.replica = generation.replica
        self.why = generation.why
        self.prompt_tokens = prompt_tokens
        self.first_event_at: float | None = None
        self._generation = generation
        self._updates = aiter(generation)
        self._row = row
        self._deadline = deadline
        self._abort = abort
        self._over = False
        self._cached_tokens = 0

    def __aiter__(self) -> AsyncGenerator[Event, None]:
        return self._timed()

    async def _timed(self) -> AsyncGenerator[Event, None]:
        async with aclosing(self._events()) as events:
            async for event in events:
                if self.first_event_at is None:
                    self.first_event_at = time.perf_counter()
                yield event

    async def _events(self) -> AsyncGenerator[Event, None]:
        """Ends with exactly one `Finished`.

        Raises:
            SatchelError: the row failed, or ran into its deadline.
        """
        try:
            finish = None
            while finish is None:
                update = await self._next()
                if update.cached_tokens is not None:
                    self._cached_tokens = update.cached_tokens
                finish = update.finish
                self._over = finish is not None
                if finish == "error":
                    raise from_wire(update.error or {"kind": "GenerationFailed", "message": "the row failed"})
                for event in self._row.add(update.tokens):
                    yield event
                if self._row.stopped:
                    finish = "stop"
                    await self.abort()
            if finish not in ("stop", "length"):
                raise GenerationFailed(f"the row ended with {finish!r} before its answer was complete")
            if not self._row.stopped:
                for event in self._row.finish():
                    yield event
            reason = "tool_calls" if self._row.calls and finish == "stop" else finish
            yield Finished(reason, Usage(self.prompt_tokens, self._row.tokens, self._cached_tokens))
        finally:
            await self.abort()

    async def _next(self) -> RowUpdate:
        timeout = asyncio.timeout_at(self._deadline)
        try:
            async with timeout:
                return await anext(self._updates)
        except StopAsyncIteration:
            raise GenerationFailed("the replica ended the row without an end of its answer") from None
        except TimeoutError:
            if timeout.expired():
                raise DeadlineExceeded("the request took longer than timeouts.request_s allows") from None
            raise

    async def collect(self) -> Answer:
        """The whole answer.

        Raises:
            SatchelError: as iterating does.
        """
        text: list[str] = []
        calls: list[ToolCall] = []
        try:
            async for event in self:
                if isinstance(event, TextDelta):
                    text.append(event.text)
                elif isinstance(event, ToolCall):
                    calls.append(event)
                else:
                    return Answer("".join(text), calls, event.reason, event.usage)
        finally:
            await self.abort()
        raise GenerationFailed("the row ended without an end of its answer")

    async def abort(self) -> None:
        """Take the row out of its batch unless it has ended. Cancelling the caller does not cancel this."""
        await abort_all([self])

    def begin_abort(self) -> asyncio.Task[None] | None:
        """As `abort`, without waiting. None where there is nothing to do."""
        if self._over:
            return None
        self._over = True
        return self._abort(self._generation)


async def abort_all(streams: Sequence[TextStream]) -> None:
    """Abort every one, and wait a limited time for that."""
    # All are begun before the first wait, so a cancellation arriving here leaves none behind.
    tasks = {task for stream in streams if (task := stream.begin_abort()) is not None}
    if tasks:
        await asyncio.wait(tasks, timeout=_ABORT_WAIT_S)


async def collect_all(streams: Sequence[TextStream]) -> list[Answer]:
    """The whole answers, in order. Where one fails, all are aborted and its error is raised."""
    tasks = [asyncio.create_task(stream.collect()) for stream in streams]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await abort_all(streams)


async def interleave(streams: Sequence[TextStream]) -> AsyncGenerator[tuple[int, Event], None]:
    """The events of all streams as they come, each with its stream's index. The first failure ends everything."""
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
