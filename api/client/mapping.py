"""One answer for every row of a table, computed while nothing else is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from ...actors.protocol.replica_messages import IDLE_PRIORITY
from ...cluster.errors import InvalidRequest, SatchelError
from ..batches.patience import until_taken

Row = Mapping[str, Any]
"""A row's values by the names of its columns."""

Prompt = str | Callable[[Row], str | Sequence[Mapping[str, object]]]
"""A format string with the row's columns (`"Summarize: {text}"`), or a function that returns a text or messages."""


@runtime_checkable
class Dataset(Protocol):
    """What is used of a `ray.data.Dataset`."""

    def map_batches(self, fn: Any, *, batch_size: int, fn_kwargs: dict[str, Any]) -> Any: ...


Data = TypeVar("Data", bound=Dataset)

ANSWER, ERROR = "answer", "error"


class Answered(Protocol):
    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


async def map_rows(
    generate: Callable[..., Awaitable[Answered]], rows: Iterable[Row], prompt: Prompt, *, at_once: int, **options: Any
) -> list[dict[str, object]]:
    """Returns the rows, in order, with `answer`, `finish_reason`, `prompt_tokens`, `completion_tokens` and
    `cached_tokens`; where a request was refused or failed, `answer` is None and `error` says why.

    A row that the cluster cannot take now is tried again, until this is cancelled.

    Args:
        generate: answers one prompt.
        at_once: how many rows are asked at the same time.
        options: of every request.
    """
    if at_once < 1:
        raise InvalidRequest("at_once must be 1 or more", param="at_once")
    options = {"priority": IDLE_PRIORITY, **options}
    room = asyncio.Semaphore(at_once)

    async def answer(row: Row) -> dict[str, object]:
        async with room:
            asked = prompt.format(**row) if isinstance(prompt, str) else prompt(row)
            try:
                reply = await until_taken(lambda: generate(asked, **options))
            except SatchelError as error:
                return {**row, ANSWER: None, ERROR: error.message}
        counts = {name: getattr(reply, name) for name in ("prompt_tokens", "completion_tokens", "cached_tokens")}
        return {**row, ANSWER: reply.text, "finish_reason": reply.finish_reason, **counts, ERROR: None}

    tasks = [asyncio.ensure_future(answer(row)) for row in rows]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def map_batch(
    batch: Mapping[str, Any], connect: Callable[[str], Any], home: str, prompt: Prompt, at_once: int, options: Row
) -> dict[str, list[Any]]:
    """Answers a batch of a Ray Dataset, in a task of Ray Data. `connect` returns the cluster of a home."""
    rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
    answered = connect(home).map_sync(rows, prompt, at_once=at_once, **options)
    names = dict.fromkeys(name for row in answered for name in row)
    return {name: [row.get(name) for row in answered] for name in names}
