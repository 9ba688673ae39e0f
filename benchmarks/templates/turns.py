"""A session rendered by a template, turn after turn: how much of each prompt is found in the cache, by Satchel's own
code.

The prompt is continued by its text as for an agent (`continue_text`), and found by its tokens in a replica's prefix
cache, which is filled as a replica fills it. No model runs: answers are written as the template writes them, reasoning
first.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from satchel.actors.protocol.block_ids import BLOCK_TOKENS, block_ids, root_id
from satchel.actors.replica.kv.prefix import PrefixCache, PrefixKV, ReuseRule
from satchel.api.requests.conversation import with_arguments
from satchel.api.requests.history import History
from satchel.api.requests.requests import lasting_tokens
from satchel.api.text.continuation import IndexedLine, Match, StoredBranch, continue_text
from satchel.api.text.model import TextModel
from satchel.api.text.spelling import common_length

from .sessions import TOOL, RecordedSession

UNLIMITED = 2**60
BRANCHES_MAX = 8
SNAPSHOT_TOKENS = 4096
"""Between snapshots of a prompt's recurrent layers: what a replica takes for a model of usual sizes."""

DAY = datetime(2026, 3, 9, 20, 0)
"""When every session begins; the second half of its requests is a day later."""


class Client(StrEnum):
    """What a client sends back of an answer."""

    ALL = "all"
    SAID = "without reasoning"


@dataclass
class Layers:
    """The KV of one kind of layers, without limit.

    Args:
        recurrent: whether a prefix needs a state at its end.
        lasting: whether the state is kept where later prompts leave this one, not at the prompt's end.
    """

    recurrent: bool = False
    lasting: bool = False

    def __post_init__(self) -> None:
        self._cache: PrefixCache[None] = PrefixCache(UNLIMITED, ReuseRule(recurrent=self.recurrent))
        self._root = root_id(bytes(32), "tenant:templates")
        self.found = 0

    def turn(self, prompt: list[int], spoken: list[int], lasting: int) -> None:
        """A prompt that is looked up, computed, answered with `spoken`, and kept."""
        found = self._cache.match(self._root, block_ids(self._root, prompt), prompt, len(prompt) - 1).tokens
        self.found += found
        # Nothing was computed of an answer's last token.
        tokens = [*prompt, *spoken][:-1]
        ends = [len(tokens)]
        if not self.recurrent and (len(prompt) - 1) // BLOCK_TOKENS < len(tokens) // BLOCK_TOKENS:
            # The answer fills, and so seals, the prompt's last block.
            ends.append(len(prompt) - 1)
        if self.recurrent:
            ends += [lasting if self.lasting and found < lasting < len(prompt) else len(prompt) - 1]
            ends += range((found // SNAPSHOT_TOKENS + 1) * SNAPSHOT_TOKENS, len(prompt), SNAPSHOT_TOKENS)
        chain = block_ids(self._root, tokens)
        whole = [
            (at, tokens[at * BLOCK_TOKENS : stop], PrefixKV(None, 1, snapshot=stop in ends))
            for at in range(len(chain))
            for stop in ((at + 1) * BLOCK_TOKENS,)
        ]
        self._cache.put_blocks(chain, whole)
        for end in ends:
            start = end // BLOCK_TOKENS * BLOCK_TOKENS
            self._cache.put_tail(
                self._root, chain[: end // BLOCK_TOKENS], tokens[start:end], PrefixKV(None, 1, snapshot=True)
            )


@dataclass
class Branches:
    """An agent's branches, as the store keeps them: the prompt continues the one that it shares most with."""

    lines: list[IndexedLine] = field(default_factory=list)
    histories: list[History] = field(default_factory=list)

    def keep(self, at: int | None, match: Match | None, line: IndexedLine, messages: list[Any]) -> None:
        history = History(messages)
        goes_on = match in (Match.EXACT, Match.EXTEND)
        if at is not None and (goes_on or self.histories[at].begins(messages)):
            del self.lines[at], self.histories[at]
        self.lines.append(line)
        self.histories.append(history)
        del self.lines[:-BRANCHES_MAX], self.histories[:-BRANCHES_MAX]


@dataclass
class FoundAgain:
    """Tokens over all requests but the first of each session.

    Attributes:
        possible: what earlier prompts and answers have in common with each prompt.
        losses: tokens that are read again, by where the prompt first differs.
        kept: found, by kind of layers.
        examples: for each of these places the texts after the first difference, before and now.
    """

    requests: int = 0
    prompt: int = 0
    possible: int = 0
    losses: Counter[str] = field(default_factory=Counter)
    kept: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, other: FoundAgain) -> None:
        self.requests += other.requests
        self.prompt += other.prompt
        self.possible += other.possible
        self.losses += other.losses
        self.kept += other.kept
        self.examples = other.examples | self.examples


KINDS = {
    "full attention": Layers(),
    "recurrent, state at the prompt's end": Layers(recurrent=True),
    "recurrent": Layers(recurrent=True, lasting=True),
}


class TemplateTurns:
    """One session with one template.

    Args:
        moving: whether the date that the template shows is that of each request, not of the first.
    """

    def __init__(self, text: TextModel, session: RecordedSession, client: Client, *, moving: bool) -> None:
        self._text, self._session, self._client, self._moving = text, session, client, moving
        self._tools = [TOOL] if session.tools else None
        self._layers = {name: Layers(kind.recurrent, kind.lasting) for name, kind in KINDS.items()}
        self._branches = Branches()
        self._said: list[tuple[list[int], str]] = []
        # Where the prompts of the last two turns ended that began them, and where the last prompt did.
        self._began, self._ended = 0, 0

    def run(self) -> FoundAgain:
        """Renders all requests that the template takes."""
        found, messages = FoundAgain(), list[dict[str, Any]]()
        for number, step in enumerate(self._session.steps):
            messages = [*messages, *step.new]
            sent = messages if self._client is Client.ALL else [_said(message) for message in messages]
            later = self._moving and number >= len(self._session.steps) / 2
            at = DAY + timedelta(days=later)
            rendered = self._render(sent, at)
            self._request(rendered, sent, step.answer, at, found if number else FoundAgain(), step.new[-1]["role"])
            messages = [*messages, step.answer]
        return found

    def _render(self, messages: list[Any], at: datetime, *, generation_prompt: bool = True) -> str:
        said = with_arguments(messages)
        return self._text.template.render(said, self._tools, generation_prompt=generation_prompt, at=at)

    def _request(
        self, rendered: str, sent: list[Any], answer: dict[str, Any], at: datetime, found: FoundAgain, role: str
    ) -> None:
        text = self._text
        went_on = continue_text(rendered, self._branches.lines, text.spelling)
        prompt = went_on.tokens
        spoken = text.tokenizer.encode(self._written(rendered, sent, answer, at))
        possible, before = max(
            ((common_length(prompt, tokens), said) for tokens, said in self._said),
            default=(0, ""),
            key=lambda it: it[0],
        )
        possible = min(possible, len(prompt) - 1)
        found.requests += 1
        found.prompt += len(prompt)
        found.possible += possible
        where = self._where(possible)
        if self._said and (lost := len(self._said[-1][0]) - possible) > 0:
            found.losses[where] += lost
            found.examples.setdefault(where, _difference(before, rendered))
        lasting = lasting_tokens(text, prompt, rendered, {}) or len(prompt)
        for name, layers in self._layers.items():
            known = layers.found
            layers.turn(prompt, spoken, lasting)
            found.kept[name] += layers.found - known
        line = text.spelling.index(StoredBranch(rendered + text.tokenizer.decode(spoken), [*prompt, *spoken]))
        self._branches.keep(went_on.line, went_on.match, line, [*sent, answer])
        self._said.append(([*prompt, *spoken], line.text))
        self._ended = lasting
        if role == "user":
            self._began = lasting

    def _where(self, possible: int) -> str:
        """Where a prompt leaves what was said before. A word may be spelled anew up to its beginning."""
        if not self._said:
            return ""
        if abs(possible - self._ended) <= 8:
            return "where the last answer began"
        if possible > self._ended:
            return "in the last answer"
        if abs(possible - self._began) <= 8:
            return "where the last turn's first answer began"
        return "at the beginning" if possible < self._began // 2 or possible < BLOCK_TOKENS else "before the last turn"

    def _written(self, prompt: str, sent: list[Any], answer: dict[str, Any], at: datetime) -> str:
        """Returns the answer as the model writes it: as the template shows it, with the reasoning before it where the
        template leaves that out."""
        text, thought = self._text, answer["reasoning_content"]
        shown = self._render([*sent, answer], at, generation_prompt=False)
        same = common_length(prompt.encode(), shown.encode())
        written = shown.encode()[same:].decode(errors="ignore") if same >= len(prompt) // 2 else answer["content"]
        if text.template.has_thinking and thought not in written:
            opened = "" if text.template.ends_in_thought(prompt) else text.template.think_start
            written = f"{opened}{thought}{text.template.think_end}{written}"
        return written.rstrip()


def _said(message: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name != "reasoning_content"}


def _difference(before: str, now: str) -> str:
    at = common_length(before.encode(), now.encode())
    old, new = (said.encode()[at:].decode(errors="ignore")[:24] for said in (before, now))
    return f"{old!r}, then {new!r}"
