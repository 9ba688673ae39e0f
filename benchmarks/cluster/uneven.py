"""Two uneven nodes: one that prefills fast and decodes for many, and one that prefills slowly and has nothing to do.

Where a long prompt goes, and whether both answer it together, is the router's choice, by rates that were measured.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from satchel.actors.model_files.source import EMBEDDED
from satchel.cluster.home import Home
from satchel.cluster.keys import OWNER, create_key
from tests.system.hosts import hosts
from tests.worlds.models.families import write_model

from ..parts import Budget, ResultTable, Say, median
from ..programs import ROOT, program
from .arriving import OPENING_TOKENS, text_of
from .pacing import Pace, command_with
from .server import COMMAND, serving
from .splitting import FIRST, ROUTER, SECOND, Said
from .uneven_user import TOKENS
from .worker import Worker

PACES = {FIRST: Pace(1 / 800, 0.012, 0.003), SECOND: Pace(1 / 160, 0.024, 0.003)}
"""The first one prefills five times faster and decodes twice as fast. Its steps of 16 sequences last twice as long as
the other one's steps of a single sequence."""

ROWS = 16
LINK_MBIT = 1000
PORT = 8000
CONTEXT_TOKENS = 8192
WAYS = (ROUTER, "first alone", "second alone")
SPLIT = f"prefill on {FIRST}, decode on {SECOND}"
WARM_TOKENS = 1000
ASK_S = 300.0


@dataclass(frozen=True)
class Asked:
    """An answer.

    Attributes:
        others: tokens a second of the sequences that decoded meanwhile.
        why: the router's reason.
        costs_s: its estimates, as `uneven_user.costs_of`.
    """

    said: Said
    others: float
    why: str
    costs_s: dict[str, Any]


Round = dict[str, Asked]
"""By way."""


class UnevenNodes:
    """A running cluster of both."""

    def __init__(self, user: Worker) -> None:
        self._user = user

    def ask(self, name: str, text: str, way: str, rows: int = ROWS) -> Asked:
        told = self._user.ask({"name": name, "text": text, "way": way, "rows": rows}, ASK_S)
        return Asked(**{**told, "said": Said(**told["said"])})

    def counts(self) -> tuple[int, int]:
        """As `Forced.counts`."""
        split, fell_back = self._user.ask("counts")
        return split, fell_back


@contextmanager
def uneven_nodes(work: Path) -> Iterator[UnevenNodes]:
    """Both, on hosts with a link between them, serving a tiny model of random weights."""
    folder = write_model(work / "tiny", "llama", max_position_embeddings=CONTEXT_TOKENS)
    with hosts.hosts(2) as (head, second):
        slow = [*command_with(PACES[SECOND], work / f"{SECOND}-pace", ROOT), *COMMAND]
        nodes = [
            {"name": FIRST, "address": head.address},
            {
                "name": SECOND,
                "address": second.address,
                "ssh": second.name,
                "home": str(work / SECOND),
                "command": shlex.join(slow),
            },
        ]
        # Its self-test would take the time of the paces.
        model = {"name": "tiny", "source": str(folder), "self_test": False, "kv": "q4"}
        endpoint = {"listen": head.address, "port": PORT}
        # Agents share no KV, so that all may be told the same.
        config = {"models": [model], "nodes": nodes, "endpoint": endpoint, "replication": 0, "share": "agent"}
        # JSON is YAML.
        (work / "config.yaml").write_text(json.dumps(config))
        # An endpoint that others reach needs one.
        create_key(Home(work / FIRST), OWNER, admin=True)
        fast = [*head.command(), *command_with(PACES[FIRST], work / f"{FIRST}-pace", ROOT)]
        arguments, programs = ["--config", str(work / "config.yaml")], hosts.stand_in_ssh(work)
        with serving(arguments, work / FIRST, [work / SECOND], prefix=fast, path=programs):
            second.slow(LINK_MBIT)
            command = head.command(*program("cluster.uneven_user", work / FIRST))
            with Worker(command, work / "user.log") as user:
                yield UnevenNodes(user)


def asked_in_turns(tokens: int, rounds: int, work: Path, budget: Budget, say: Say) -> tuple[list[Round], int, int]:
    """Asks in every way, one after the other.

    Returns:
        The rounds, and how many requests were split and how many of them fell back.
    """
    tokenizer = Tokenizer.from_file(str(EMBEDDED / "recall" / "tokenizer.json"))

    def text(seed: str, tokens: int = tokens) -> str:
        return text_of(lambda text: len(tokenizer.encode(text).ids), tokens - OPENING_TOKENS, seed)

    found: list[Round] = []
    with uneven_nodes(work) as nodes:
        # So that the router knows both.
        for way in WAYS[1:]:
            nodes.ask(f"warm-{way.split()[0]}", text("warm", WARM_TOKENS), way, rows=0)
        for number in budget.rounds(rounds):
            said: Round = {}
            for place, way in enumerate(WAYS):
                agent = hosts.named(f"round{number}x{place}x", SECOND, [FIRST, SECOND])
                said[way] = each = nodes.ask(agent, text(str(number)), way)
                times = f"first token {each.said.first_s:.2f} s, all {each.said.whole_s:.2f} s"
                say(f"  {way}: {times}, others {each.others:.0f} tokens/s; {each.why}")
            found.append(said)
        split, fell_back = nodes.counts()
    return found, split, fell_back


def uneven(tokens: int, rounds: int, work: Path, budget: Budget, say: Say) -> ResultTable:
    """A line for each way."""
    part = ResultTable(f"A prompt of {tokens:,} new tokens on two uneven nodes, sent where the router wants it")
    if (reason := hosts.missing()) is not None:
        part.notes.append(f"Left out: {reason}.")
        return part
    found, split, fell_back = asked_in_turns(tokens, rounds, work, budget, say)
    compare(part, found)
    part.notes.append(f"Of {split} split requests {fell_back} fell back to computing.")
    first, second = PACES[FIRST], PACES[SECOND]
    part.notes.append(
        f"Two nodes as network namespaces of this machine with {LINK_MBIT:,} Mb/s between them, a tiny model of random "
        "weights, and a step that lasts as long as it would on another machine (`pacing.py`): "
        f"{FIRST} prefills {1 / first.prefill_token_s:,.0f} tokens/s and decodes in {1000 * first.step_s:.0f} ms and "
        f"{1000 * first.row_s:.0f} more for each row, {SECOND} {1 / second.prefill_token_s:,.0f} tokens/s and "
        f"{1000 * second.step_s:.0f} ms and {1000 * second.row_s:.0f} more. What the router knows of them it has from "
        f"their reports. Meanwhile {ROWS} rows decode on {FIRST}. All agents are new and at home on {SECOND}; `alone` "
        "leaves the router one of the nodes."
    )
    return part


def compare(part: ResultTable, found: list[Round]) -> None:
    """Writes the lines, medians of the rounds; ratios are taken within a round."""

    def middle(way: str, figure: Callable[[Asked], float]) -> float:
        return median([figure(each[way]) for each in found])

    def against(way: str, figure: Callable[[Asked], float]) -> float:
        return median([figure(each[way]) / figure(each[ROUTER]) for each in found])

    def first_s(each: Asked) -> float:
        return each.said.first_s

    def whole_s(each: Asked) -> float:
        return each.said.whole_s

    for way in WAYS if found else ():
        part.rows.append(
            {
                "way": way,
                "why": ", ".join(dict.fromkeys(each[way].why for each in found)),
                "first token, s": middle(way, first_s),
                "as the router reckoned, s": middle(way, lambda each: estimate_s(each.costs_s)),
                "/ router's way": against(way, first_s),
                f"{TOKENS} tokens, s": middle(way, whole_s),
                f"{TOKENS} tokens / router's way": against(way, whole_s),
                "others, tokens/s": middle(way, lambda each: each.others),
                "rounds": len(found),
            }
        )
    if found:
        chosen = sum(each[ROUTER].why == SPLIT for each in found) / len(found)
        part.at_least(f"rounds in which the router says `{SPLIT}`, of all", chosen, 1.0)
        part.at_least("first token: the second node alone / together", against(WAYS[2], first_s), 2.0)
        part.at_least(f"{TOKENS} tokens: the first node alone / together", against(WAYS[1], whole_s), 1.0)
        part.at_least("rounds in which all ways said the same words, of all", sum(map(same, found)) / len(found), 1.0)


def estimate_s(costs_s: dict[str, Any]) -> float:
    """The router's estimate of the time to the first token where the request went."""
    if split := costs_s["split"]:
        return sum(split[term] for term in ("prefill", "travel", "queue", "restore"))
    best = min(costs_s["alone"].values(), key=lambda each: each["total"])
    return sum(best[term] for term in ("queue", "pull", "restore", "prefill"))


def same(answers: Round) -> bool:
    """Whether all said the same words."""
    return len({each.said.text for each in answers.values()}) == 1
