"""What agents' next prompts will probably be: the rewriting of their programs, learned and checked turn by turn. Pure.

Agents of one program rewrite their histories alike (`rewrites.py`). Every turn is compared with the one before it: a
rewrite that the program's rule explains confirms it, one that it does not explain ends it, and the new one is learned
instead. How long a conversation gets before it is rewritten is learned too. A conversation that begins anew with a
summary says nothing about the rule.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cachetools import LRUCache

from ..requests.history import Message
from .rewrites import Edit, alike, explains, forgets_reasoning, in_place, learned, size_of

PROGRAMS_MAX = 256
CHARACTERS_MAX = 2**25
"""How many characters of agents' latest messages are remembered, of all agents together."""

LINES_MAX = 4
"""How many conversations of an agent are remembered: it may have side requests, such as for a title."""

_MESSAGE_CHARACTERS = 256
"""Counted for a message besides its texts."""


@dataclass
class _Program:
    """One program's rewriting.

    Attributes:
        contents, reasoning: edits of either kind that explain all rewrites so far; the first one is used.
        shortest: characters of the shortest conversation that was rewritten; None before the first.
        longest: characters of the longest that was not, though there was something to rewrite.
        every_turn: whether each turn is rewritten; None if not known.
    """

    contents: list[Edit] = field(default_factory=list)
    reasoning: list[Edit] = field(default_factory=list)
    shortest: int | None = None
    longest: int = 0
    every_turn: bool | None = None


@dataclass
class _Line:
    """An agent's conversation after its latest turn.

    Attributes:
        rewritten: whether the program rewrote it before that turn.
        predicted: whether a rewrite was predicted since the last one.
        growth: characters that a turn adds, smoothed.
    """

    messages: Sequence[Message]
    size: int
    rewritten: bool = False
    predicted: bool = False
    growth: float = 0.0


def program_of(name: str, tenant: str, tools: Sequence[Mapping[str, Any]], messages: Sequence[Message]) -> bytes:
    """Returns a key of the program that sends such requests: by its name, its tenant and its tools, or without tools by
    its system prompt."""
    first = messages[0] if messages and messages[0]["role"] == "system" else None
    shown: Any = sorted(tool["function"]["name"] for tool in tools) or (first and first["content"])
    return hashlib.sha256(json.dumps([name, tenant, shown], sort_keys=True).encode()).digest()


class Programs:
    """The rewriting of programs, in bounded memory. `turn` is for one thread at a time, `forget` for any, also during a
    turn.

    Attributes:
        confirmed, contradicted: rewrites of contents that their program's rule explained, and that it did not.
        unexplained: rewrites without a rule, from which none could be learned.
    """

    def __init__(self, programs_max: int = PROGRAMS_MAX, characters_max: int = CHARACTERS_MAX) -> None:
        self.confirmed = self.contradicted = self.unexplained = 0
        self._programs: LRUCache[bytes, _Program] = LRUCache(programs_max)
        self._agents: LRUCache[str, list[_Line]] = LRUCache(
            characters_max, getsizeof=lambda lines: sum(_memory_of(line) for line in lines)
        )
        # Of `_agents`.
        self._lock = threading.Lock()

    def turn(self, key: bytes, agent: str, asked: Sequence[Message], answer: Message) -> list[Message] | None:
        """Notes a turn of an agent, and predicts how its program will have rewritten the conversation by the next one.

        Args:
            key: of the program, from `program_of`.
            asked: the request's messages.

        Returns:
            The messages so far, rewritten; None if no rewrite of them is expected, or was predicted before.
        """
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = _Program()
        with self._lock:
            lines = self._agents.pop(agent, [])
        line = _continued(lines, asked)
        rewritten = line is not None and self._compare(program, line, asked)
        said = [*asked, answer]
        now = _Line(said, size_of(said), rewritten)
        if line is not None:
            # What was predicted right after a rewrite tells whether each turn is rewritten.
            now.predicted = line.predicted and not rewritten and not line.rewritten
            added = now.size - line.size
            now.growth = line.growth if rewritten else (line.growth + added) / 2 if line.growth else added
        predicted = _predicted(program, now)
        others = [other for other in lines if other is not line]
        if _memory_of(now) <= self._agents.maxsize:
            with self._lock:
                self._remember(agent, [now, *others[: LINES_MAX - 1]])
        return predicted

    def forget(self, agent: str) -> None:
        """Forgets an agent's messages."""
        with self._lock:
            self._agents.pop(agent, None)

    def _remember(self, agent: str, lines: list[_Line]) -> None:
        while sum(map(_memory_of, lines)) > self._agents.maxsize:
            lines.pop()
        self._agents[agent] = lines

    def _compare(self, program: _Program, line: _Line, asked: Sequence[Message]) -> bool:
        """Learns from a request that continues `line`. Returns whether contents were rewritten before it."""
        before = line.messages
        program.reasoning = _agreeing(program.reasoning, forgets_reasoning(before, asked), before, asked)
        if all(alike(old, new) for old, new in zip(before, asked, strict=False)):
            edited = program.contents[0].apply(before, asked[len(before) :]) if program.contents else before
            if _same(before, edited):
                # Nothing is learned from a turn in which there was nothing to change.
                return line.rewritten
            if line.rewritten or program.every_turn:
                program.every_turn = False
            program.longest = max(program.longest, size_of(asked))
            return False
        found = learned(before, asked)
        if program.contents and explains(program.contents[0], before, asked):
            self.confirmed += 1
            program.every_turn = line.rewritten if program.every_turn is None else program.every_turn
        else:
            self.contradicted += bool(program.contents)
            self.unexplained += not found
            program.shortest, program.longest, program.every_turn = None, 0, None
        program.contents = _agreeing(program.contents, found, before, asked)
        size = line.size + size_of(asked[len(before) :])
        program.shortest = size if program.shortest is None else min(program.shortest, size)
        return True


def _memory_of(line: _Line) -> int:
    # Reasoning may be longer than what a prompt shows.
    hidden = sum(
        len(message.get("reasoning_content", "")) + len(message.get("told", "")) + len(message.get("written", ""))
        for message in line.messages
    )
    return line.size + hidden + _MESSAGE_CHARACTERS * len(line.messages)


def _continued(lines: Sequence[_Line], asked: Sequence[Message]) -> _Line | None:
    """Returns the conversation that a request continues, rewritten or not; None for a new one."""
    fitting = [line for line in lines if in_place(line.messages, asked)]

    def same(line: _Line) -> int:
        return sum(alike(old, new) for old, new in zip(line.messages, asked, strict=False))

    best = max(fitting, key=same, default=None)
    # The newest answer is hardly ever changed, and nobody else got the same.
    return best if best is not None and alike(best.messages[-1], asked[len(best.messages) - 1]) else None


def _agreeing(known: list[Edit], found: list[Edit], before: Sequence[Message], after: Sequence[Message]) -> list[Edit]:
    """Returns the known edits that explain a rewrite too, narrowed to what agrees with both; the found ones if there
    are none."""
    kept: list[Edit] = []
    for edit in known:
        joined = (edit.keep.joined(other.keep) for other in found if other.shortening == edit.shortening)
        narrowed = replace(edit, keep=next((keep for keep in joined if keep is not None), edit.keep))
        if explains(narrowed, before, after):
            kept.append(narrowed)
    return kept or found


def _predicted(program: _Program, line: _Line) -> list[Message] | None:
    """Returns a conversation as its program will have rewritten it by the next turn; None if it will not. Notes in the
    line that its contents will be."""
    # What comes takes part of what a program keeps.
    coming, said = coming_after(line.messages, " " * int(line.growth)), list(line.messages)
    edited = program.reasoning[0].apply(said, coming) if program.reasoning else said
    if program.contents and (program.every_turn or (_is_near(program, line) and not line.predicted)):
        before, edited = edited, program.contents[0].apply(edited, coming)
        line.predicted = line.predicted or not _same(before, edited)
    return None if _same(said, edited) else edited


def _is_near(program: _Program, line: _Line) -> bool:
    """Whether the next request will probably be long enough to be rewritten."""
    if program.shortest is None:
        return False
    if line.rewritten and program.every_turn is None:
        return True
    known = program.longest < program.shortest
    limit = (program.shortest + program.longest) / 2 if known and program.longest else program.shortest
    return line.size + line.growth >= limit


def _same(messages: Sequence[Message], edited: Sequence[Message]) -> bool:
    """Whether an edit changed nothing."""
    return all(old is new for old, new in zip(messages, edited, strict=True))


def coming_after(said: Sequence[Message], text: str = "") -> list[Message]:
    """Returns what a program sends after the answer `said[-1]`: the results of its calls, or else a user's message.

    Args:
        text: stands for the unknown contents.
    """
    calls = said[-1].get("tool_calls", ())
    results: list[Message] = [{"role": "tool", "content": text, "tool_call_id": call.get("id", "")} for call in calls]
    return results or [{"role": "user", "content": text}]
