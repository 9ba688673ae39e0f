"""Ties results of tools to their calls, in whatever order clients send them.

A chat template shows results as they come, and most models take the first for the first call. So they are put behind
the message that calls, in the order of its calls. A result is its call's by id; one without an id, or with one that no
call has, is the call's that has no result yet: of its name if it has one, else the first. Results with the same id stay
together as they came, and those that belong to no call stay where they are.

Plain functions on plain data; long conversations belong in a worker thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from .history import Message, MessageCall

T = TypeVar("T")


@dataclass
class _Turn:
    """A message that calls tools, at the index `at`, and the indexes of the results of each of its calls. `loose` are
    results behind it that no id ties to a call."""

    at: int
    calls: Sequence[MessageCall]
    results: list[list[int]]
    loose: list[int] = field(default_factory=list)

    def place(self, id: str, *, answered: bool = False) -> int | None:
        """Returns which call has an id and no result yet; with `answered` it may have one."""
        for place, call in enumerate(self.calls):
            if id and call.get("id") == id and (answered or not self.results[place]):
                return place
        return None


def in_call_order(messages: Sequence[Message]) -> list[Message]:
    """Returns the messages with each tool's results behind its call's message, in the order of the calls, and with the
    names and ids of their calls where they lack them."""
    return [messages[index] if said is None else said for index, said in ordered(messages)]


def ordered(messages: Sequence[Message]) -> list[tuple[int, Message | None]]:
    """As `in_call_order`, as indexes of the messages, with what has become of one that was changed."""
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
    """Returns every message that calls by its index, with its results."""
    turns: dict[int, _Turn] = {}
    early: list[int] = []
    run: _Turn | None = None
    for index, message in enumerate(messages):
        if calls := message.get("tool_calls"):
            run = turns[index] = _Turn(index, calls, [[] for _ in calls])
        elif message["role"] != "tool":
            run = None
        elif not _tie_by_id(index, message.get("tool_call_id", ""), turns, run):
            early.append(index)
            if run is not None:
                run.loose.append(index)
    for index in early:
        # Its call may come behind it.
        id = messages[index].get("tool_call_id", "")
        for turn in turns.values():
            if turn.at > index and (place := turn.place(id)) is not None:
                turn.results[place].append(index)
                break
    placed = {index for turn in turns.values() for results in turn.results for index in results}
    for turn in turns.values():
        _tie_loose(turn, [index for index in turn.loose if index not in placed], messages)
    return turns


def _tie_by_id(index: int, id: str, turns: dict[int, _Turn], run: _Turn | None) -> bool:
    """Ties a result to the last call before it that has its id and no result yet. Ids may come again in later turns."""
    for turn in reversed(turns.values()):
        if (place := turn.place(id)) is not None:
            turn.results[place].append(index)
            return True
    if run is not None and (place := run.place(id, answered=True)) is not None:
        run.results[place].append(index)
        return True
    return False


def _tie_loose(turn: _Turn, loose: list[int], messages: Sequence[Message]) -> None:
    """Ties results that no id does to the calls without a result: by name first, then in their order."""
    for by_name in (True, False):
        for index in tuple(loose):
            name = messages[index].get("name")
            for place, call in enumerate(turn.calls):
                if turn.results[place] or (by_name and call["function"]["name"] != name):
                    continue
                turn.results[place].append(index)
                loose.remove(index)
                break


def _named(result: Message, call: MessageCall) -> Message | None:
    """Returns a result with its call's name and id, None if it has both."""
    lacking: Message = {**result}
    if not result.get("name"):
        lacking["name"] = call["function"]["name"]
    if not result.get("tool_call_id") and (id := call.get("id")):
        lacking["tool_call_id"] = id
    return None if lacking == result else lacking


def permuted(order: Sequence[int], sizes: Sequence[int], values: Sequence[T]) -> list[T]:
    """Returns values in a new order of what they belong to.

    Args:
        order: the old index of each owner.
        sizes: how many of the values each owner has, by its old index; they follow one another.
    """
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + size)
    return [value for index in order for value in values[starts[index] : starts[index + 1]]]
