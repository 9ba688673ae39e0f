"""How an agent program rewrites its history, learned from one rewrite. Pure.

Programs shorten long conversations: they replace old tool results by a placeholder or cut them in the middle, and leave
out the reasoning of earlier answers. Everything behind the first changed message is then computed again. What changes
follows from rules, so the next rewrite can be predicted: `learned` finds all `Edit`s that explain an observed one, and
`Edit.apply` does the same to other messages.

Only messages that stay in their places are compared. If messages are left out, or a model's summary stands for them,
there is no rule: nobody can know a summary before it is written.

Plain functions on plain data; long conversations belong in a worker thread.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, cast

from ..requests.history import Message, called_with
from ..text.spelling import common_length

_COUNTS: Mapping[str, Callable[[str], int]] = {
    "lines": lambda text: len(text.splitlines()),
    "characters": len,
    "bytes": lambda text: len(text.encode("utf-8", "surrogatepass")),
}
"""What a placeholder may count in the text that it stands for."""

TURNS_MAX = 4
"""Up to how many of the newest user messages a rule may keep what follows them."""

ALIKE_SHARE = 0.5
"""A text of which this share is the begin and the end of the old one was cut in the middle, not replaced."""

PLACEHOLDER_CHARACTERS_MAX = 2000
"""A longer text is no placeholder."""


@dataclass(frozen=True)
class Shortening:
    """How a text is shortened: its first `head` characters, a placeholder, its last `tail` characters.

    The placeholder is `pieces` joined by counts of what was left out: `counts` names one of `_COUNTS` between each two
    pieces.
    """

    head: int
    pieces: tuple[str, ...]
    counts: tuple[str, ...]
    tail: int

    def of(self, text: str) -> str:
        """Returns the shortened text; the text itself if it is shortened already, or if a cut would not shorten it."""
        if self.head + self.tail > len(text) or self._is_short(text):
            return text
        left_out = text[self.head : len(text) - self.tail]
        middle = self.pieces[0]
        for count, piece in zip(self.counts, self.pieces[1:], strict=True):
            middle += str(_COUNTS[count](left_out)) + piece
        short = text[: self.head] + middle + text[len(text) - self.tail :]
        return text if self.head + self.tail and len(short) >= len(text) else short

    def _is_short(self, text: str) -> bool:
        """Whether the placeholder is in its place in the text."""
        pattern = r"\d+".join(map(re.escape, self.pieces))
        return re.fullmatch(pattern, text[self.head : len(text) - self.tail]) is not None


@dataclass(frozen=True)
class Keep:
    """Which of the newest messages an edit leaves as they are.

    Attributes:
        unit: `messages`: the newest ones. `characters`: the newest ones as far as their texts have this many together,
            not counting those behind the `turns`-th newest user message, which all stay. `turns`: all behind the
            newest user messages.
        least, most: how many of the unit. They differ if an observed rewrite does not tell.
        turns: for `characters`.
    """

    unit: Literal["messages", "characters", "turns"]
    least: int
    most: int
    turns: int = 0

    def count(self, places: Sequence[int], messages: Sequence[Message]) -> int:
        """Returns how many of `places`, the indexes of messages that may be edited, are left as they are."""
        amount = (self.least + self.most) // 2
        if self.unit == "messages":
            return min(amount, len(places))
        if self.unit == "turns":
            return _behind(places, messages, amount)
        count = _behind(places, messages, self.turns)
        for place in reversed(places[: len(places) - count]):
            amount -= len(text_of(messages[place]))
            if amount < 0:
                break
            count += 1
        return count

    def joined(self, other: Keep) -> Keep | None:
        """Returns what agrees with both; None if nothing does."""
        least, most = max(self.least, other.least), min(self.most, other.most)
        if (self.unit, self.turns) != (other.unit, other.turns) or least > most:
            return None
        return replace(self, least=least, most=most)


def _behind(places: Sequence[int], messages: Sequence[Message], turns: int) -> int:
    """Returns how many of `places` are behind the `turns`-th newest user message; none for 0."""
    users = [place for place, message in enumerate(messages) if message["role"] == "user"]
    if not turns:
        return 0
    first = users[-turns] if turns <= len(users) else -1
    return sum(place > first for place in places)


@dataclass(frozen=True)
class Edit:
    """One way in which a program changes messages that it has sent before.

    Attributes:
        role: whose messages.
        keep: the newest ones that stay.
        shortening: of their contents; None if their reasoning is left out.
        oldest: how many of the oldest stay too, such as the task.
        spared: tools whose results stay.
        characters_min: shorter texts stay.
    """

    role: str
    keep: Keep
    shortening: Shortening | None = None
    oldest: int = 0
    spared: frozenset[str] = field(default_factory=frozenset)
    characters_min: int = 0

    def apply(self, messages: Sequence[Message], coming: Sequence[Message] = ()) -> list[Message]:
        """Returns messages as a later request has them.

        Args:
            coming: what that request has behind them.
        """
        edited, both = list(messages), [*messages, *coming]
        places = self.places(both)
        tools = called_tools(messages) if self.spared else {}
        for place in places[self.oldest : len(places) - self.keep.count(places, both)]:
            if place < len(edited) and tools.get(place, "") not in self.spared:
                edited[place] = self._edited(messages[place])
        return edited

    def places(self, messages: Sequence[Message]) -> list[int]:
        """Returns the indexes of messages that it may edit."""
        return [
            place
            for place, message in enumerate(messages)
            if message["role"] == self.role and (self.shortening is not None or "reasoning_content" in message)
        ]

    def _edited(self, message: Message) -> Message:
        if self.shortening is None:
            return cast(Message, {key: value for key, value in message.items() if key != "reasoning_content"})
        text = text_of(message)
        if len(text) < self.characters_min or (short := self.shortening.of(text)) == text:
            return message
        # What the model wrote is no longer what is shown.
        kept = {key: value for key, value in message.items() if key not in ("told", "written")}
        return cast(Message, {**kept, "content": short})


def text_of(message: Message) -> str:
    """Returns the text of a message's content; of parts that are not text, nothing."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content if isinstance(part, dict))


def size_of(messages: Sequence[Message]) -> int:
    """Returns about how many characters of a prompt messages become."""
    calls = (call["function"] for message in messages for call in message.get("tool_calls", ()))
    return sum(map(len, map(text_of, messages))) + sum(len(called["arguments"]) for called in calls)


def alike(one: Message, other: Message) -> bool:
    """Whether two messages say the same, whatever the reasoning before it, the ids of calls and how their arguments
    are formatted. Parts that are not text differ."""
    if one is other:
        return True
    if one["role"] != other["role"] or one["content"] != other["content"]:
        return False
    calls, others = _calls(one), _calls(other)
    return calls == others or (
        len(calls) == len(others)
        and all(
            name == named and called_with(given) == called_with(arguments)
            for (name, given), (named, arguments) in zip(calls, others, strict=True)
        )
    )


def _calls(message: Message) -> list[tuple[str, str]]:
    called = [call["function"] for call in message.get("tool_calls", ())]
    return [(function["name"], function["arguments"]) for function in called]


def called_tools(messages: Sequence[Message]) -> dict[int, str]:
    """Returns the names of the tools whose results messages are, by the messages' indexes."""
    names: dict[str, str] = {}
    found: dict[int, str] = {}
    for place, message in enumerate(messages):
        names |= {call.get("id", ""): call["function"]["name"] for call in message.get("tool_calls", ())}
        if message["role"] == "tool":
            found[place] = names.get(message.get("tool_call_id", ""), "")
    return found


def in_place(before: Sequence[Message], after: Sequence[Message]) -> bool:
    """Whether every message of `before` has a counterpart of the same role in its place, and more follow."""
    pairs = zip(before, after, strict=False)
    return 0 < len(before) < len(after) and all(old["role"] == new["role"] for old, new in pairs)


def learned(before: Sequence[Message], after: Sequence[Message]) -> list[Edit]:
    """Returns edits that explain the contents that changed; none if they stayed, or if nothing explains them.

    Args:
        before: messages of a conversation, with the last answer.
        after: the messages of the next request, of which the first are `in_place`.
    """
    changed = [place for place, old in enumerate(before) if not alike(old, after[place])]
    pairs = [(before[place], after[place]) for place in changed]
    roles = {old["role"] for old, _ in pairs}
    plain = all(isinstance(old["content"], str) and _calls(old) == _calls(new) for old, new in pairs)
    if len(roles) != 1 or not plain:
        return []
    shortening = _shortening([(text_of(old), text_of(new)) for old, new in pairs])
    if shortening is None:
        return []
    edit = Edit(roles.pop(), Keep("messages", 0, 0), shortening)
    places = edit.places(after)
    last = places.index(changed[-1])
    left = [place for place in places[: last + 1] if shortening.of(text_of(before[place])) != text_of(after[place])]
    # Some programs never change the first ones, such as the task.
    stayed = set(left)
    oldest = next((count for count, place in enumerate(places) if place not in stayed), 0)
    spared, least = _exceptions(before, left[oldest:], changed)
    edit = replace(edit, oldest=oldest, spared=spared, characters_min=least)
    edits = [replace(edit, keep=keep) for keep in _keeps(before, after, places, last)]
    return [edit for edit in edits if explains(edit, before, after)]


def forgets_reasoning(before: Sequence[Message], after: Sequence[Message]) -> list[Edit]:
    """As `learned`, for reasoning that is left out."""
    places = [place for place, message in enumerate(before) if message.get("reasoning_content")]
    gone = [place for place in places if not after[place].get("reasoning_content")]
    if not gone:
        return []
    edit = Edit("assistant", Keep("messages", 0, 0))
    places = edit.places(before)
    keeps = _keeps(before, after, places, places.index(gone[-1]))
    edits = [replace(edit, keep=keep) for keep in keeps if keep.unit != "characters"]
    return [edit for edit in edits if explains(edit, before, after)]


def explains(edit: Edit, before: Sequence[Message], after: Sequence[Message]) -> bool:
    """Whether an edit makes the first messages of `after` of all of `before`."""
    edited, reasoning = edit.apply(before, after[len(before) :]), edit.shortening is None
    return all(
        bool(old.get("reasoning_content")) == bool(new.get("reasoning_content")) if reasoning else alike(old, new)
        for old, new in zip(edited, after, strict=False)
    )


def _exceptions(before: Sequence[Message], left: Sequence[int], changed: Sequence[int]) -> tuple[frozenset[str], int]:
    """Returns the tools and the least length that explain why messages between those that changed stayed."""
    if not left:
        return frozenset(), 0
    longest = max(len(text_of(before[place])) for place in left)
    shortest = min(len(text_of(before[place])) for place in changed)
    if longest < shortest:
        return frozenset(), shortest
    tools = called_tools(before)
    return frozenset(tools.get(place, "") for place in left) - {tools.get(place, "") for place in changed}, 0


def _keeps(before: Sequence[Message], after: Sequence[Message], places: Sequence[int], last: int) -> list[Keep]:
    """Returns the rules by which `places` behind index `last` are kept, and those up to it are not."""
    kept = len(places) - last - 1
    keeps = [Keep("messages", kept, kept)]
    turns = [_behind(places, after, count) for count in range(TURNS_MAX + 1)]
    for count, behind in enumerate(turns):
        if behind == kept and count:
            keeps.append(Keep("turns", count, count))
        if behind <= kept:
            size = sum(len(text_of(after[place])) for place in places[last + 1 : len(places) - behind])
            # With the newest one that changed there are too many characters.
            most = size + len(text_of(before[places[last]])) - 1
            keeps.append(Keep("characters", size, most, count))
    return keeps


def _shortening(texts: Sequence[tuple[str, str]]) -> Shortening | None:
    """Returns how all these texts, old and new, were shortened; None if there is no one way."""
    if sum(len(new) - len(old) for old, new in texts) >= 0:
        return None
    head = min(common_length(*pair) for pair in texts)
    shortest = min(len(new) for _, new in texts)
    tail = min(common_length(old[::-1], new[::-1]) for old, new in texts)
    tail = min(tail, shortest - head)
    places = [(head, tail), (0, 0)] if head + tail >= ALIKE_SHARE * shortest else [(0, 0), (head, tail)]
    for begin, end in places:
        spans = [(old[begin : len(old) - end], new[begin : len(new) - end]) for old, new in texts]
        if (found := _placeholder(spans)) is not None:
            return Shortening(begin, *found, end)
    return None


def _placeholder(texts: Sequence[tuple[str, str]]) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Returns the pieces and the counts of a placeholder (see `Shortening`) that stands for each of these texts; None
    if there is none."""
    if max(len(new) for _, new in texts) > PLACEHOLDER_CHARACTERS_MAX:
        return None
    rows = [re.split(r"(\d+)", new) for _, new in texts]
    if len({tuple(row[::2]) for row in rows}) != 1:
        return None
    counted = {name: [str(count(old)) for old, _ in texts] for name, count in _COUNTS.items()}
    pieces, counts = [rows[0][0]], list[str]()
    for column in range(1, len(rows[0]), 2):
        numbers = [row[column] for row in rows]
        count = next((name for name, found in counted.items() if found == numbers), None)
        if count is not None:
            counts.append(count)
            pieces.append(rows[0][column + 1])
        elif len(set(numbers)) == 1:
            pieces[-1] += numbers[0] + rows[0][column + 1]
        else:
            return None
    return tuple(pieces), tuple(counts)
