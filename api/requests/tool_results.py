"""Matches results of tools with their calls, in whatever order clients send them.

A chat template shows results in the order of the messages, and most models take the first result for that of the first
call. So results are put behind the message with the calls, in the order of its calls. A result is matched by its id. If
it has no id, or one that no call has, it gets a call without a result: one with the same name if the result has a name,
else the first. Results with the same id stay together in their order, and those that match no call stay where they are.

Plain functions on plain data; long conversations belong in a worker thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from .history import Message, MessageCall

T = TypeVar("T")


@dataclass
class _Turn:
    """A message with tool calls, at the index `at`, and the indexes of each call's results. `ids` are the places of its
    calls by their ids; `loose` are results behind it whose id matches no call."""

    at: int
    calls: Sequence[MessageCall]
    results: list[list[int]]
    ids: dict[str, int] = field(default_factory=dict)
    loose: list[int] = field(default_factory=list)


class _Open:
    """Calls that have no result yet, by their ids: for each, its turn and its place there, in order."""

    def __init__(self) -> None:
        self._calls: dict[str, list[tuple[_Turn, deque[int]]]] = {}

    def add(self, turn: _Turn) -> None:
        for place, call in enumerate(turn.calls):
            if not (id := call.get("id", "")):
                continue
            turn.ids.setdefault(id, place)
            known = self._calls.setdefault(id, [])
            if not known or known[-1][0] is not turn:
                known.append((turn, deque()))
            known[-1][1].append(place)

    def take_last(self, id: str) -> tuple[_Turn, int] | None:
        """Takes out and returns the first call with this id in the last turn that has one."""
        if not (known := self._calls.get(id)):
            return None
        turn, places = known[-1]
        place = places.popleft()
        if not places:
            known.pop()
        return turn, place

    def take_after(self, id: str, index: int) -> tuple[_Turn, int] | None:
        """As `take_last`, but in the first turn behind an index. Indexes must come in order: earlier turns are
        dropped."""
        known = self._calls.get(id, [])
        while known:
            turn, places = known[0]
            place = places.popleft() if turn.at > index else None
            if place is None or not places:
                known.pop(0)
            if place is not None:
                return turn, place
        return None


def in_call_order(messages: Sequence[Message]) -> list[Message]:
    """Returns the messages with the results of tools behind the message with their calls, in the order of the calls. A
    result without a name or an id gets that of its call."""
    return [messages[index] if said is None else said for index, said in ordered(messages)]


def ordered(messages: Sequence[Message]) -> list[tuple[int, Message | None]]:
    """As `in_call_order`, but returns the index of each message, and the new message if it was changed."""
    if not any(message["role"] == "tool" for message in messages):
        return [(index, None) for index in range(len(messages))]
    turns = _tied(messages)
    placed = {index for turn in turns.values() for results in turn.results for index in results}
    order: list[tuple[int, Message | None]] = []
    for index in range(len(messages)):
        if index in placed:
            continue
        order.append((index, None))
        if (turn := turns.get(index)) is not None:
            order += [
                (result, _named(messages[result], call))
                for call, results in zip(turn.calls, turn.results, strict=True)
                for result in results
            ]
    return order


def _tied(messages: Sequence[Message]) -> dict[int, _Turn]:
    """Returns every message with calls, by its index, with its results."""
    turns: dict[int, _Turn] = {}
    calls_left, early, run = _Open(), list[tuple[int, _Turn | None]](), None
    for index, message in enumerate(messages):
        if calls := message.get("tool_calls"):
            run = turns[index] = _Turn(index, calls, [[] for _ in calls])
            calls_left.add(run)
        elif message["role"] != "tool":
            run = None
        else:
            id = message.get("tool_call_id", "")
            # Later turns may use an id again, so the last call with it counts.
            if (call := calls_left.take_last(id)) is not None:
                turn, place = call
                turn.results[place].append(index)
            elif run is not None and (again := run.ids.get(id)) is not None:
                run.results[again].append(index)
            else:
                early.append((index, run))
    for index, behind in early:
        # Its call may come behind it.
        if (call := calls_left.take_after(messages[index].get("tool_call_id", ""), index)) is not None:
            turn, place = call
            turn.results[place].append(index)
        elif behind is not None:
            behind.loose.append(index)
    for turn in turns.values():
        if turn.loose:
            _tie_loose(turn, messages)
    return turns


def _tie_loose(turn: _Turn, messages: Sequence[Message]) -> None:
    """Matches results whose id matches no call with the calls that have no result: by name first, then in their
    order."""
    free = [place for place, results in enumerate(turn.results) if not results]
    named: dict[str, deque[int]] = {}
    for place in free:
        named.setdefault(turn.calls[place]["function"]["name"], deque()).append(place)
    unnamed: list[int] = []
    for index in turn.loose:
        if places := named.get(messages[index].get("name", "")):
            turn.results[places.popleft()].append(index)
        else:
            unnamed.append(index)
    left = (place for place in free if not turn.results[place])
    for index, place in zip(unnamed, left, strict=False):
        turn.results[place].append(index)


def _named(result: Message, call: MessageCall) -> Message | None:
    """Returns a result with its call's name and id, None if it has both."""
    lacking: Message = {**result}
    if not result.get("name"):
        lacking["name"] = call["function"]["name"]
    if not result.get("tool_call_id") and (id := call.get("id")):
        lacking["tool_call_id"] = id
    return None if lacking == result else lacking


def permuted(order: Sequence[int], sizes: Sequence[int], values: Sequence[T]) -> list[T]:
    """Returns values after their owners were reordered.

    Args:
        order: the old index of each owner.
        sizes: how many of the values each owner has, by its old index; they follow one another.
    """
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + size)
    return [value for index in order for value in values[starts[index] : starts[index + 1]]]
