"""Recorded conversations of agents, replayed through a running endpoint.

    python -m examples.stories.replay TRACE… [--conversations 5] [--calls 20] [--time-s 600] [--cold 10]

TRACE is a file of conversations between agents (`messages` of `agent` and `content`) or of one agent's calls (`calls`
of `input` and `output`), JSON lines, gzipped or not. Requests are sent one after the other, each with its agent's id
and the whole conversation, as OpenAI's clients do. After the recorded prompts come the recorded replies, whatever the
served model says; `--replies served` keeps what it says instead. Prompts that do not fit in the model's context are
left out, with all that follows them in their conversation, and counted.
"""

from __future__ import annotations

import argparse
import secrets
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from openai import APIStatusError

from .endpoint import Message, PromptTooLong, ScenarioEndpoint, assistant, endpoint_at
from .ledger import Cell, Ledger, Say, Seq, median_ms, table
from .story import at_least, common_options
from .traces import RecordedConversation, RecordedRequest, TraceError, read

FIRST, LATER = "an agent's first prompt", "later prompts"
MATCHES, RECOMPUTED = "satchel_prefix_match_total", "satchel_prefix_recomputed_tokens_total"
COLD_SHARE = 0.25
"""Of the time, for measuring prompts with nothing in memory."""

REFUSED_MAX = 20
"""So many refusals other than for length end the replay: something else is wrong."""


@dataclass(frozen=True)
class ReplayLimits:
    """Where a replay stops.

    Args:
        conversations: of a file.
        calls: of a conversation.
        time_s: after which nothing is begun; the last quarter is for `cold`.
        tokens: of an answer.
        cold: how many of the prompts are measured again with nothing in memory.
    """

    conversations: int = 5
    calls: int = 20
    time_s: float = 600.0
    tokens: int = 16
    cold: int = 10


@dataclass
class Replayed:
    """What a replay of one file took.

    Args:
        matches: prompts by how they continue what their agent remembers: new, exact, extend, partial, diverge.
        recomputed: remembered tokens that a prompt could not continue, by reason.
        cut: requests left out because their prompts do not fit.
        refused: requests that the endpoint refused, by its code.
        pairs: time to the first token of the same prompts, in seconds: in the replay, and with nothing in memory.
        out_of_time: whether the time was over before the file's requests.
    """

    ledger: Ledger = field(default_factory=Ledger)
    conversations: int = 0
    matches: dict[str, int] = field(default_factory=dict)
    recomputed: dict[str, int] = field(default_factory=dict)
    cut: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    pairs: list[tuple[float, float]] = field(default_factory=list)
    out_of_time: bool = False

    def summary(self) -> Seq:
        """One sequence of all."""
        entries = self.ledger.entries
        prompt = self.ledger.prompt_tokens
        ratios = [cold / kept for kept, cold in self.pairs if kept > 0]
        found: dict[str, Cell] = {
            "conversations": self.conversations,
            "requests": len(entries),
            "prompt tokens": prompt,
            "not prefilled": 1 - self.ledger.computed_tokens / prompt if prompt else None,
            "prefilled again": self.ledger.again_tokens,
            "longest prompt": max((entry.usage.prompt_tokens for entry in entries), default=0),
            "too long": self.cut,
            "refused": sum(self.refused.values()),
            "first token, ms": median_ms(kept for kept, _ in self.pairs),
            "the same, nothing kept, ms": median_ms(cold for _, cold in self.pairs),
            "times": statistics.median(ratios) if ratios else None,
        }
        return found | {name: self.matches.get(name, 0) for name in ("new", "exact", "extend", "partial", "diverge")}


class TraceReplay:
    """A replay of one file.

    Args:
        served: whether the served model's replies are kept in the prompts, not the recorded ones.
    """

    def __init__(self, endpoint: ScenarioEndpoint, limits: ReplayLimits, *, served: bool, say: Say) -> None:
        self._endpoint = endpoint
        self._limits = limits
        self._served = served
        self._say = say
        self._ends = time.monotonic() + limits.time_s
        self._replay_ends = self._ends - COLD_SHARE * limits.time_s * (limits.cold > 0)
        self._agents: dict[str, None] = {}
        self._sent: list[tuple[list[Message], float]] = []
        self._result = Replayed()

    def run(self, conversations: Iterable[RecordedConversation]) -> Replayed:
        """Send all requests, measure some of them cold, and erase the agents."""
        result, endpoint = self._result, self._endpoint
        endpoint.clear_cache()
        matches, recomputed = endpoint.counters(MATCHES), endpoint.counters(RECOMPUTED)
        try:
            for conversation in conversations:
                if self._over():
                    break
                self._converse(conversation)
                result.conversations += 1
                self._say(f"  {conversation.name}: {len(result.ledger.entries)} requests so far")
            result.matches = _more(matches, endpoint.counters(MATCHES))
            result.recomputed = _more(recomputed, endpoint.counters(RECOMPUTED))
        finally:
            for agent in self._agents:
                endpoint.forget(agent)
        self._measure_cold()
        return result

    def _over(self) -> bool:
        self._result.out_of_time = self._result.out_of_time or time.monotonic() > self._replay_ends
        return self._result.out_of_time

    def _converse(self, conversation: RecordedConversation) -> None:
        run = secrets.token_hex(6)
        heard: dict[int, list[Message]] = {}
        known: dict[int, int] = {}
        full: set[int] = set()
        for request in conversation.requests[: self._limits.calls]:
            if self._over():
                return
            if request.opens:
                heard[request.agent] = []
                full.discard(request.agent)
            messages = heard[request.agent]
            messages.extend(request.new)
            if request.agent in full:
                self._result.cut += 1
                continue
            agent = f"replay-{run}-{request.agent}"
            if agent not in self._agents:
                self._agents[agent] = None
                known[request.agent] = 0
            try:
                known[request.agent] = self._ask(agent, messages, request, known[request.agent])
            except PromptTooLong:
                self._result.cut += 1
                full.add(request.agent)

    def _ask(self, agent: str, messages: list[Message], request: RecordedRequest, known: int) -> int:
        """Send one request. Returns how many tokens the agent's next prompt has in common with what is known now."""
        result = self._result
        try:
            usage = self._endpoint.chat(messages, agent=agent, tokens_max=self._limits.tokens)
        except APIStatusError as error:
            result.refused[str(error.code or error.status_code)] += 1
            if sum(result.refused.values()) >= REFUSED_MAX:
                raise
            messages += [assistant(request.reply)] if request.reply else []
            return known
        result.ledger.add(LATER if known else FIRST, agent, usage, 0 if request.opens else known)
        if usage.first_token_s is not None:
            self._sent.append((list(messages), usage.first_token_s))
        reply = usage.text if self._served else request.reply
        messages += [assistant(reply)] if reply else []
        return usage.prompt_tokens + (usage.completion_tokens if self._served else 0)

    def _measure_cold(self) -> None:
        """Some of the prompts again, for nobody, with nothing in memory, and nothing on the disk: the agents that read
        them are forgotten by now. Where another agent has the same text there, it does not count."""
        count = min(self._limits.cold, len(self._sent))
        step = len(self._sent) / max(1, count)
        for number in range(count):
            if time.monotonic() > self._ends:
                return
            messages, kept_s = self._sent[int((number + 0.5) * step)]
            self._endpoint.clear_cache()
            usage = self._endpoint.chat(messages, tokens_max=1)
            if usage.first_token_s is not None and not usage.cached_tokens:
                self._result.pairs.append((kept_s, usage.first_token_s))


def _more(before: dict[str, float], after: dict[str, float]) -> dict[str, int]:
    return {name: int(value - before.get(name, 0)) for name, value in after.items() if value > before.get(name, 0)}


def replay(endpoint: ScenarioEndpoint, path: Path, limits: ReplayLimits, say: Say, *, served: bool = False) -> Replayed:
    """Replay one file, and say what it took.

    Raises:
        TraceError: a line of it is not what it should be.
        OSError: it cannot be read.
        openai.OpenAIError: the endpoint does not answer, or refuses too much.
    """
    say(f"\n## {path.name}\n")
    result = TraceReplay(endpoint, limits, served=served, say=say).run(read(path, limits.conversations))
    say("\n" + table(result.ledger.by_phase()) + "\n")
    say(table([{"": name, "all": cell} for name, cell in result.summary().items()]))
    if result.recomputed:
        say("\nRemembered tokens not continued: " + _listed(result.recomputed))
    if result.refused:
        say("\nRefused: " + _listed(result.refused))
    if result.out_of_time:
        say("\nThe time was over.")
    return result


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items()))


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = common_options((__doc__ or "").splitlines()[0])
    add, least = parser.add_argument, ReplayLimits()
    add("traces", type=Path, nargs="+", metavar="TRACE")
    add("--conversations", type=at_least(1), default=least.conversations, help="of each file; default %(default)s")
    add("--calls", type=at_least(1), default=least.calls, help="of each conversation; default %(default)s")
    add("--time-s", type=float, default=least.time_s, help="for each file; default %(default)s")
    add("--tokens", type=at_least(1), default=least.tokens, help="of an answer; default %(default)s")
    add("--cold", type=at_least(0), default=least.cold, help="prompts that are also measured with nothing kept")
    add("--replies", choices=("recorded", "served"), default="recorded", help="whose replies the prompts contain")
    return parser.parse_args(arguments)


def main() -> None:
    options = read_options()
    limits = ReplayLimits(options.conversations, options.calls, options.time_s, options.tokens, options.cold)
    with endpoint_at(options.url, options.model) as endpoint:
        for path in options.traces:
            try:
                replay(endpoint, path, limits, print, served=options.replies == "served")
            except (TraceError, OSError) as error:
                raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
