"""How much of what agent programs rewrite is ready when their next prompt comes, by the tokens alone: no model runs.

The recorded texts have no rewrites, so programs that rewrite as published ones do are played over them. Each sends the
recorded results to a model that gives the recorded answers. What is predicted after a turn is ready at the next one, in
whole blocks: the replica had time for it.

The recorded sessions of block ids do have rewrites, without their texts. Their lengths say of what kind they are.
"""

from __future__ import annotations

import gzip
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from satchel.actors.protocol.block_ids import BLOCK_TOKENS
from satchel.actors.replica.scheduling.prefill_budget import SHORT_PAUSE_S, TOKENS_MIN
from satchel.api.agents.programs import Programs
from satchel.api.agents.rewrites import size_of, text_of
from satchel.api.requests.history import Message
from satchel.api.text.spelling import common_length

from ..parts import Budget, ResultTable, Say
from ..recorded import TRACE_BLOCK, blocks_of, coding_sessions
from .replay import Writer

TURNS_MIN = 6
"""Shorter sessions are left out."""

FORMER_MAX = 32
"""With how many former prompts a prompt is compared."""

LOST_MIN = 16
"""A recorded prompt that differs in fewer of its blocks is no rewrite."""

RATES = (500, 2000, 20_000)
"""Prompt tokens a second of the simulated replicas."""

SESSIONS = 2
"""How many recorded sessions a simulated replica serves at a time."""

STEP_S = 0.02
"""Time of a simulated decode step."""


@dataclass
class Rewriter:
    """A program that rewrites its history. It is asked for each request's messages.

    Attributes:
        role: whose messages it shortens.
        characters: it begins when its history is this long.
        newest: how many of the newest of these messages stay.
        newest_characters: if not None, as many as have this many characters stay instead.
        oldest: how many of the oldest stay.
        placeholder: what it puts in their place; `{lines}` and `{characters}` count what is left out.
        head, tail: how many characters at their begin and end stay.
        every_turn: whether it begins with the whole history each time, not with what it sent last.
    """

    role: str = "tool"
    characters: int = 0
    newest: int = 3
    newest_characters: int | None = None
    oldest: int = 0
    placeholder: str = "[cleared]"
    head: int = 0
    tail: int = 0
    every_turn: bool = False
    history: list[Message] = field(default_factory=list)

    def request(self, new: Sequence[Message]) -> list[Message]:
        """Returns the messages of the next request, which ends with `new` ones."""
        self.history += new
        shown = self._rewritten() if size_of(self.history) > self.characters else list(self.history)
        if not self.every_turn:
            self.history = list(shown)
        return shown

    def answered(self, answer: Message) -> None:
        """Notes the answer to the latest request."""
        self.history.append(answer)

    def _rewritten(self) -> list[Message]:
        shown = list(self.history)
        places = [place for place, message in enumerate(shown) if message["role"] == self.role]
        kept = min(self.newest, len(places))
        if self.newest_characters is not None:
            kept, left = 0, self.newest_characters
            while kept < len(places) and (left := left - len(text_of(shown[places[-1 - kept]]))) >= 0:
                kept += 1
        for place in places[self.oldest : len(places) - kept]:
            shown[place] = {**shown[place], "content": self._short(text_of(shown[place]))}
        return shown

    def _short(self, text: str) -> str:
        left_out = text[self.head : len(text) - self.tail]
        marks = re.sub(r"\\{\w+\\}", r"\\d+", re.escape(self.placeholder))
        if self.head + self.tail > len(text) or re.fullmatch(marks, left_out):
            return text
        said = self.placeholder.format(lines=len(left_out.splitlines()), characters=len(left_out))
        short = text[: self.head] + said + text[len(text) - self.tail :]
        return text if self.head + self.tail and len(short) >= len(text) else short


def published() -> dict[str, Rewriter]:
    """Programs that rewrite as published ones do, with limits for the recorded lengths."""
    return {
        "results but the newest 3 cleared, above a size": Rewriter(
            characters=16_000, placeholder="[Old tool result content cleared]"
        ),
        "the same with each request": Rewriter(characters=16_000, every_turn=True),
        "results cleared beyond a budget of characters, above a size": Rewriter(
            characters=16_000, newest_characters=6000, placeholder="[Old tool result content cleared]"
        ),
        "observations but the newest 5 counted by lines, with each request": Rewriter(
            newest=5, placeholder="Old environment output: ({lines} lines omitted)", every_turn=True
        ),
        "old results cut in the middle, above a size": Rewriter(
            characters=16_000, head=400, tail=400, placeholder="\n[... {characters} characters left out ...]\n"
        ),
    }


def sessions(traces: Path) -> Iterator[list[tuple[Message, Message]]]:
    """Yields the recorded sessions of text: what came before each answer, and the answer."""
    with gzip.open(traces, "rt") as lines:
        for line in lines:
            calls = sorted(json.loads(line)["calls"], key=lambda call: len(call["input"]))
            turns: list[tuple[Message, Message]] = []
            before = ""
            for call in calls:
                text = call["input"]
                if text.startswith(before) and len(text) > len(before):
                    role = "tool" if turns else "user"
                    new = {"role": role, "content": text[len(before) :].strip()}
                    answer = {"role": "assistant", "content": call["output"]}
                    if turns:
                        new["tool_call_id"] = str(len(turns))
                    function = {"name": "shell", "arguments": "{}"}
                    answer["tool_calls"] = [{"id": str(len(turns) + 1), "type": "function", "function": function}]
                    turns.append((new, answer))  # type: ignore[arg-type]
                    before = text
            if len(turns) >= TURNS_MIN:
                yield turns


@dataclass
class _Counts:
    """Of one program: its requests, how many were rewritten, tokens behind the first rewritten place, and how many of
    them were ready; tokens that were prepared."""

    requests: int = 0
    rewrites: int = 0
    rewritten: int = 0
    ready: int = 0
    prepared: int = 0

    def row(self, name: str) -> dict[str, str | int | float | None]:
        return {
            "program": name,
            "requests": self.requests,
            "rewritten": self.rewrites,
            "rewritten tokens": self.rewritten,
            "ready": self.ready,
            "share": round(self.ready / max(1, self.rewritten), 3),
            "prepared tokens": self.prepared,
        }


@dataclass
class Played:
    """Agents of one program, whose rewriting is learned from the first of them."""

    writer: Writer
    programs: Programs = field(default_factory=Programs)
    counts: _Counts = field(default_factory=_Counts)

    def play(self, agent: str, program: Rewriter, turns: Sequence[tuple[Message, Message]]) -> None:
        """Plays a session of one agent."""
        former: list[list[int]] = []
        ready: list[int] = []
        for new, answer in turns:
            asked = program.request([new])
            prompt = self._tokens(asked)
            self.counts.requests += 1
            known = max((common_length(prompt, earlier) for earlier in former[-FORMER_MAX:]), default=0)
            old = len(self._tokens(asked[:-1]))
            if former and known < old:
                self.counts.rewrites += 1
                self.counts.rewritten += old - known
                whole = common_length(prompt[:old], ready) // BLOCK_TOKENS * BLOCK_TOKENS
                self.counts.ready += max(0, whole - known)
            former.append(prompt + self._tokens([answer]))
            program.answered(answer)
            predicted = self.programs.turn(b"program", agent, asked, answer)
            if predicted is not None:
                ready = self._tokens(predicted)
                had = max(common_length(ready, earlier) for earlier in former[-FORMER_MAX:])
                self.counts.prepared += max(0, len(ready) // BLOCK_TOKENS - had // BLOCK_TOKENS) * BLOCK_TOKENS

    def _tokens(self, messages: Sequence[Message]) -> list[int]:
        roles = {"tool": "user"}
        return [
            token
            for message in messages
            for token in self.writer.message(roles.get(message["role"], message["role"]), text_of(message))
        ]


def rewriting(texts: Path | None, blocks: Path | None, budget: Budget, say: Say) -> ResultTable:
    """The share of rewritten tokens that is ready, by program; and of what kind recorded rewrites are."""
    part = ResultTable("Rewrites prepared while idle")
    if texts is None or not texts.is_file():
        part.notes.append("Skipped: it needs agent_text.jsonl.gz (`--traces`).")
        return part
    recorded = list(sessions(texts))
    for name, like in published().items():
        if budget.left_s <= 0:
            part.notes.append("The time was over.")
            break
        played = Played(Writer())
        for number, turns in enumerate(recorded):
            played.play(str(number), _fresh(like), turns)
        row = played.counts.row(name)
        part.rows.append(row)
        say(f"  {name}: {row['share']:.0%} of {row['rewritten tokens']:,} tokens")
    part.notes.append(f"{len(recorded)} recorded sessions of text with {TURNS_MIN} requests or more.")
    if blocks is not None and blocks.is_file():
        traced = list(recorded_sessions(blocks))
        part.notes.append(kinds(traced))
        delays(traced, part)
    return part


def _fresh(like: Rewriter) -> Rewriter:
    return Rewriter(**{**vars(like), "history": []})


@dataclass(frozen=True)
class RecordedRewrite:
    """Tokens of a recorded request that follow the first rewritten place, of its whole prompt, and of the one before
    it."""

    behind: int
    prompt: int
    before: int

    @property
    def kind(self) -> str:
        if self.prompt >= 0.95 * self.before:
            return "as long as before"
        return "shorter by up to a half" if self.prompt >= 0.5 * self.before else "shorter by more than a half"


@dataclass(frozen=True)
class RecordedRequest:
    """A recorded request: when it comes, its tokens, those that a perfect memory of its session lacks, those of its
    answer, and its rewrite if it is one."""

    at_s: float
    prompt: int
    new: int
    answer: int
    rewrite: RecordedRewrite | None


def recorded_sessions(trace: Path) -> Iterator[list[RecordedRequest]]:
    """Yields the recorded sessions of block ids."""
    for session in coding_sessions(trace):
        former: list[list[int]] = []
        requests: list[RecordedRequest] = []
        for request in session["requests"]:
            ids = blocks_of(request)
            known, before = 0, 0
            for earlier in former[-FORMER_MAX:]:
                if (common := common_length(ids, earlier)) >= known:
                    known, before = common, len(earlier)
            former.append(ids)
            new, lost = len(ids) - known, before - known
            rewrite = None
            if min(new, lost) >= LOST_MIN:
                rewrite = RecordedRewrite(*(TRACE_BLOCK * blocks for blocks in (new, len(ids), before)))
            sizes = (len(ids) * TRACE_BLOCK, new * TRACE_BLOCK, request["output"])
            requests.append(RecordedRequest(request["t"], *sizes, rewrite))
        yield requests


def kinds(sessions: Sequence[Sequence[RecordedRequest]]) -> str:
    """Says of what kinds the recorded rewrites are."""
    found: dict[str, list[int]] = {}
    for request in itertools.chain(*sessions):
        if request.rewrite is not None:
            found.setdefault(request.rewrite.kind, []).append(request.rewrite.behind)
    said = "; ".join(f"{kind}: {len(tokens)} with {sum(tokens):,} tokens" for kind, tokens in sorted(found.items()))
    return f"Recorded rewrites of block ids, by the length of the new prompt: {said}."


def delays(sessions: Sequence[Sequence[RecordedRequest]], part: ResultTable) -> None:
    """Notes how much later requests get their first token if preparations never help, in simulated time."""
    said: list[str] = []
    for rate in RATES:
        chunk = max(TOKENS_MIN, int(rate * SHORT_PAUSE_S))
        without, prepared = (sorted(waits(sessions, rate, size)) for size in (0, chunk))
        for share in (50, 95, 99):
            at = share * (len(without) - 1) // 100
            said.append(f"p{share} at {rate:,} tokens/s {without[at]:.3f} s without and {prepared[at]:.3f} s with it")
        at = 99 * (len(without) - 1) // 100
        part.at_most(f"p99 with it over without, at {rate:,} tokens/s", prepared[at] / without[at], 1.02)
    part.notes.append(
        f"Simulated time to the first token, {SESSIONS} recorded sessions at a time, if a whole prompt is prepared in "
        f"vain after every turn: {'; '.join(said)}."
    )


def waits(sessions: Sequence[Sequence[RecordedRequest]], rate: float, chunk: int) -> list[float]:
    """Returns the times to the first token of recorded requests, in seconds. A replica serves one after the other;
    while none is there it prepares a prompt as long as the latest one.

    Args:
        rate: prompt tokens a second.
        chunk: how many tokens are prepared at a time; 0 for none.
    """
    found: list[float] = []
    for start in range(0, len(sessions), SESSIONS):
        arrivals = sorted(itertools.chain(*sessions[start : start + SESSIONS]), key=lambda request: request.at_s)
        now, waiting = 0.0, 0
        for request in arrivals:
            if chunk and request.at_s > now and waiting:
                chunks = min(-(-waiting // chunk), int((request.at_s - now) * rate / chunk) + 1)
                # The chunk that runs when a request comes is computed to its end.
                now += chunks * chunk / rate
            first = max(now, request.at_s) + max(1, request.new) / rate
            found.append(first - request.at_s)
            now, waiting = first + request.answer * STEP_S, request.prompt
    return found
