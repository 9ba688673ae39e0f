"""How much of recorded agents' prompts need not be computed, by the tokens alone: no model runs.

Every message of an agent is a request of that agent: the prompt is all that was said before, its own messages as the
assistant's and everybody else's as the user's, and the reply is the message. Three rules are compared:

- ours: blocks of 256 tokens, the open tail token by token, and the replies' KV is kept;
- blocks of 16 tokens of prompts only, in memory;
- nothing is kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from satchel.actors.model_files.source import EMBEDDED
from satchel.actors.protocol.block_ids import BLOCK_TOKENS, block_ids, root_id
from satchel.actors.replica.kv.prefix import PrefixCache, PrefixKV

from ..parts import Budget, ResultTable, Say

SMALL_BLOCK = 16
USERS = ("human", "user")
"""Who writes and is not asked."""

UNLIMITED = 2**60


@dataclass(frozen=True)
class ReplayedTurn:
    """A request's prompt and reply in tokens, and whose it is."""

    agent: str
    prompt: list[int]
    reply: list[int]


@dataclass
class SmallBlocks:
    """A prefix cache of 16-token blocks, without limit; a block is known by its number and that of the one before."""

    _known: dict[tuple[int, tuple[int, ...]], int] = field(default_factory=dict)

    def reuse(self, prompt: Sequence[int]) -> int:
        """How many of the first tokens are known; all whole blocks are from now on. The last token is computed."""
        parent, known = 0, 0
        for start in range(0, len(prompt) - SMALL_BLOCK + 1, SMALL_BLOCK):
            key = (parent, tuple(prompt[start : start + SMALL_BLOCK]))
            # A block is known only together with those before it.
            known += SMALL_BLOCK * (key in self._known)
            parent = self._known.setdefault(key, len(self._known) + 1)
        return min(known, (len(prompt) - 1) // SMALL_BLOCK * SMALL_BLOCK)


class OurBlocks:
    """A replica's own prefix cache, without limit, filled as its memory fills it when a turn has ended."""

    def __init__(self) -> None:
        self._cache: PrefixCache[None] = PrefixCache(UNLIMITED)
        self._root = root_id(bytes(32), "tenant:replay")

    def reuse(self, prompt: list[int]) -> int:
        """How many of the first tokens are known."""
        return self._cache.match(self._root, block_ids(self._root, prompt), prompt, len(prompt) - 1).tokens

    def keep(self, tokens: list[int]) -> None:
        """The KV of a prompt and its reply, but for the last token, which nothing was computed of."""
        tokens = tokens[:-1]
        chain = block_ids(self._root, tokens)
        spans = ((index, tokens[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS]) for index in range(len(chain)))
        self._cache.put_blocks(chain, ((index, span, PrefixKV(None, 1)) for index, span in spans))
        self._cache.put_tail(self._root, chain, tokens[len(chain) * BLOCK_TOKENS :], PrefixKV(None, 1))


class Writer:
    """Conversations as the embedded model's chat template renders them."""

    def __init__(self) -> None:
        self._tokenizer = Tokenizer.from_file(str(EMBEDDED / "recall" / "tokenizer.json"))
        self._kept: dict[str, list[int]] = {}

    def message(self, role: str, content: str) -> list[int]:
        """A message's tokens. They depend on no other message: each begins and ends with a control token."""
        text = f"<|im_start|>{role}\n{content}<|im_end|>\n"
        if text not in self._kept:
            self._kept[text] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return self._kept[text]

    def turns(self, conversation: dict[str, Any]) -> Iterator[ReplayedTurn]:
        self._kept.clear()
        messages, system = conversation["messages"], conversation.get("system") or {}
        ask = self._tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False).ids
        views: dict[str, list[int]] = {}
        for agent in dict.fromkeys(message["agent"] for message in messages):
            views[agent] = self.message("system", str(system[agent])) if system.get(agent) else []
        for message in messages:
            agent, content = message["agent"], message["content"]
            own = self.message("assistant", content)
            if agent.lower() not in USERS and views[agent]:
                # The reply ends with the token that ends a message; the line break after it is the template's.
                end = len(own) - 1
                yield ReplayedTurn(agent, views[agent] + ask, own[len(ask) : end])
            for other, view in views.items():
                view += own if other == agent else self.message("user", f"{agent}: {content}")


def replay(traces: Path | None, budget: Budget, say: Say) -> ResultTable:
    part = ResultTable("Reuse on recorded conversations of several agents")
    if traces is None or not traces.is_file():
        part.notes.append("Left out: no recorded conversations; --traces FOLDER has them.")
        return part
    lines = traces.read_text(encoding="utf-8").splitlines()
    totals, done, writer = _Totals(), 0, Writer()
    for number, line in enumerate(lines):
        if budget.left_s <= 0:
            part.notes.append(f"Only {number} of {len(lines)} conversations: the time was over.")
            break
        totals.add(writer.turns(json.loads(line)))
        done = number + 1
        if done % 20 == 0:
            say(f"  {done} of {len(lines)} conversations")
    part.rows = totals.rows()
    part.notes.append(
        f"{done} conversations, {totals.requests:,} requests of {totals.agents:,} agents, {totals.prompt:,} prompt "
        f"tokens and {totals.replies:,} of replies; the longest prompt has {totals.longest:,}. "
        "All that is kept stays in memory; each conversation begins with none."
    )
    return part


@dataclass
class _Totals:
    requests: int = 0
    agents: int = 0
    prompt: int = 0
    replies: int = 0
    longest: int = 0
    ours: int = 0
    small: int = 0

    def add(self, turns: Iterator[ReplayedTurn]) -> None:
        """A conversation. Others have nothing in common with it but system prompts; each is replayed alone."""
        ours, small, agents = OurBlocks(), SmallBlocks(), set[str]()
        for turn in turns:
            agents.add(turn.agent)
            self.requests += 1
            self.prompt += len(turn.prompt)
            self.replies += len(turn.reply)
            self.longest = max(self.longest, len(turn.prompt))
            self.ours += ours.reuse(turn.prompt)
            self.small += small.reuse(turn.prompt)
            ours.keep(turn.prompt + turn.reply)
        self.agents += len(agents)

    def rows(self) -> list[dict[str, str | int | float | None]]:
        rules = {
            "blocks of 256, tails, replies kept": self.ours,
            f"blocks of {SMALL_BLOCK}, prompts only": self.small,
            "nothing kept": 0,
        }
        return [
            {
                "rule": rule,
                "prompt tokens not computed": known,
                "share": known / max(1, self.prompt),
                "computed": self.prompt - known,
                "computed, of ours": (self.prompt - known) / max(1, self.prompt - self.ours),
            }
            for rule, known in rules.items()
        ]
