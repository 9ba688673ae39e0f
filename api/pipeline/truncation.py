"""Leaves out the oldest messages of a conversation that does not fit. Computation only; call it in a worker thread.

The cut stays at the same place over several turns. So the prompts of a growing conversation begin with the same tokens,
and their KV is reused. If the cut moved a little at every turn, every prompt would be computed from its beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ...cluster.errors import InvalidRequest
from ..media.prompt import Medium
from ..requests.backend import ServedModel
from ..requests.conversation import sources_in
from ..requests.history import Message
from ..requests.requests import ChatRequest, count_prompt
from ..text.model import TextModel

_STEPS = 4
"""The cut moves in steps of the context's length divided by this."""

_ANSWER_PART = 8
"""If a request gives no length for its answer, the context divided by this is left for it."""


@dataclass(frozen=True)
class Truncated:
    """What remains of a request and its media, and how many messages are left out."""

    request: ChatRequest
    media: Sequence[Medium]
    truncated_messages: int = 0


def truncated(text: TextModel, model: ServedModel, request: ChatRequest, media: Sequence[Medium]) -> Truncated:
    """Returns the request without its oldest messages, so that prompt and answer fit the context. A call stays with its
    results. System and developer messages stay, and so do the last user message and the last message. If that is still
    too much, nothing is left out.

    Raises:
        InvalidRequest: the model's template refuses the messages.
    """
    context = model.info.context_tokens
    room = min(request.options.max_tokens or request.max_tokens_default or context // _ANSWER_PART, context // 2)
    order = _oldest_first(request.messages)

    def without(count: int) -> Truncated:
        dropped = {place for unit in order[:count] for place in unit}
        return _without(request, media, dropped)

    def tokens(count: int) -> int:
        left = without(count)
        return count_prompt(text, model, left.request, left.media)

    whole, most = tokens(0), context - max(1, room)
    if whole <= most:
        return Truncated(request, media)
    step = max(1, context // _STEPS)
    goal = whole - -(-(whole - most) // step) * step
    for enough in (goal, most, context - 1):
        if (count := _least(len(order), tokens, enough)) is not None:
            return without(count)
    return Truncated(request, media)


def _least(most: int, tokens: Callable[[int], int], enough: int) -> int | None:
    """Returns the least number of units to leave out so that at most `enough` tokens remain; None if there is none. A
    number is skipped if the template refuses what remains, for example because it begins with the wrong role."""

    def reaches(count: int) -> int | None:
        """Returns the first number from `count` on that the template accepts, if few enough tokens remain."""
        for at in range(count, most + 1):
            try:
                return at if tokens(at) <= enough else None
            except InvalidRequest:
                continue
        return None

    low, high, found = 1, most, None
    while low <= high:
        middle = (low + high) // 2
        if (at := reaches(middle)) is None:
            low = middle + 1
        else:
            found, high = at, middle - 1
    return found


def _oldest_first(messages: Sequence[Message]) -> list[list[int]]:
    """Returns the units that may be left out, as indexes of messages, in the order in which they go: those before the
    last user message, then those after it."""
    units: list[list[int]] = []
    calls: dict[str, int] = {}
    for place, message in enumerate(messages):
        if message["role"] == "system":
            continue
        begun = calls.get(message.get("tool_call_id", ""))
        if message["role"] == "tool" and begun is not None and begun < len(units):
            # A unit has everything between a call and its result.
            units[begun:] = [[*(each for unit in units[begun:] for each in unit), place]]
        else:
            units.append([place])
        for call in message.get("tool_calls", ()):
            calls[call.get("id", "")] = len(units) - 1
    asked = max((i for i, unit in enumerate(units) if any(messages[at]["role"] == "user" for at in unit)), default=-1)
    return [unit for i, unit in enumerate(units[:-1]) if i != asked]


def _without(request: ChatRequest, media: Sequence[Medium], dropped: set[int]) -> Truncated:
    if not dropped:
        return Truncated(request, media)
    kept: list[Message] = []
    seen: list[Medium] = []
    at = 0
    for place, message in enumerate(request.messages):
        count = len(sources_in([message])) if media else 0
        if place not in dropped:
            kept.append(message)
            seen += media[at : at + count]
        at += count
    return Truncated(replace(request, messages=kept), seen, len(dropped))
