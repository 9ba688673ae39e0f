"""What memory saves a conversation: the first token of a next turn with the conversation in memory, and without.

The conversations are about files of Python's library, so every machine has the same ones for its version of Python.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import httpx

from satchel.actors.replica.loading import real_text

from ..parts import Budget, ResultTable, Say, median
from .server import Message, Server, Streamed, assistant, user

CHARACTERS_A_TOKEN = 4
"""Of code, about."""

QUESTIONS = (
    "What does the first function here do?",
    "Which errors can it raise, and when?",
    "Write a short test for it.",
    "How would you make it faster?",
)
ANSWER_TOKENS = 48
TIE = 0.125
"""Two tokens whose log probabilities differ by no more are a tie: rounding chooses between them. It is bfloat16's step
from 16 to 32, where the likeliest logits are."""

REUSED_MIN = 2000
"""From so many reused tokens on a first token takes at most half of what it takes without."""


@dataclass
class Pairs:
    """The same turns, answered with the conversation in memory and without.

    Attributes:
        gaps: of each pair by how much the token where they part was likelier than the next, in log probability; None
            where they are equal.
    """

    hot: list[Streamed] = field(default_factory=list)
    cold: list[Streamed] = field(default_factory=list)
    gaps: list[float | None] = field(default_factory=list)


def turns(
    name: str, server: Server, lengths: Sequence[int], agents: Sequence[int], budget: Budget, say: Say
) -> ResultTable:
    """Has agents' conversations go on, and asks the same again without an agent, which computes all of it.

    Args:
        lengths: of the files, tokens about.
        agents: how many conversations go on at once.
    """
    table = ResultTable(f"{name}: the first token of a next turn, ms")
    files = itertools.cycle(real_text.sources())
    for length, at_once in itertools.product(lengths, agents):
        if budget.left_s <= 0:
            table.notes.append(f"{length} tokens, {at_once} at once: no time was left.")
            continue
        texts = [_text(files, length * CHARACTERS_A_TOKEN) for _ in range(at_once)]
        pairs = asyncio.run(_conversations(server, texts))
        reused = median([answer.cached for answer in pairs.hot])
        hot, anew = (median([answer.first_s * 1000 for answer in found]) for found in (pairs.hot, pairs.cold))
        table.rows.append(
            {
                "conversations at once": at_once,
                "prompt": round(median([answer.prompt for answer in pairs.hot])),
                "reused": round(reused),
                "hot": hot,
                "cold": anew,
                "hot / cold": hot / anew,
                **_compared(pairs),
            }
        )
        if reused >= REUSED_MIN:
            table.at_most(f"hot / cold, {reused:.0f} tokens reused, {at_once} at once", hot / anew, 0.5)
        say(f"  {length} tokens, {at_once} at once: {hot:.0f} ms hot, {anew:.0f} ms cold")
    table.notes.append(
        f"Greedy answers of {ANSWER_TOKENS} tokens. They part at a tie where the likeliest two tokens differ by at "
        f"most {TIE} in log probability."
    )
    return table


def _text(files: Iterator[str], characters: int) -> str:
    """The next file or files, cut to so many characters."""
    text = ""
    while len(text) < characters:
        text += next(files)
    return text[:characters]


async def _conversations(server: Server, files: Sequence[str]) -> Pairs:
    pairs = Pairs()
    names = [uuid.uuid4().hex for _ in files]
    talks: list[list[Message]] = [[user(f"{text}\n\n{QUESTIONS[0]}")] for text in files]
    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=None)) as client:

        async def all_of(agents: Sequence[str]) -> list[Streamed]:
            asked = zip(talks, agents, strict=True)
            return await asyncio.gather(*[server.stream(client, talk, ANSWER_TOKENS, agent) for talk, agent in asked])

        said = await all_of(names)
        for question in QUESTIONS[1:]:
            for talk, answer in zip(talks, said, strict=True):
                talk += [assistant(answer.text), user(question)]
            said = await all_of(names)
            anew = await all_of([""] * len(files))
            pairs.hot += said
            pairs.cold += anew
            pairs.gaps += [await _gap(server, client, *pair) for pair in zip(talks, said, anew, strict=True)]
    return pairs


async def _gap(
    server: Server, client: httpx.AsyncClient, talk: Sequence[Message], hot: Streamed, cold: Streamed
) -> float | None:
    """As `Pairs.gaps`. Asked for afterwards: it takes time to look for the likeliest tokens."""
    if hot.text == cold.text:
        return None
    both = zip(hot.tokens, cold.tokens, strict=False)
    parted = next((place for place, (one, other) in enumerate(both) if one != other), None)
    if parted is None:
        return math.inf
    again = await server.stream(client, talk, parted + 1, gaps=True)
    told = again.tokens[:parted] == cold.tokens[:parted] and len(again.gaps) > parted
    return again.gaps[parted] if told else math.inf


def _compared(pairs: Pairs) -> dict[str, float]:
    """Returns how many answers are equal, how many of the others part at a tie, and by how much the likelier token led
    where the others do, at most."""
    parted = [gap for gap in pairs.gaps if gap is not None]
    ties = sum(gap <= TIE for gap in parted)
    return {
        "answers": len(pairs.hot),
        "equal": len(pairs.hot) - len(parted),
        "part at a tie": ties,
        "part elsewhere": len(parted) - ties,
        "widest gap": max(parted, default=0.0),
    }
