"""Three ways for the same agents to keep what they have heard, so that one story can be run with each."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from .endpoint import Message, RequestUsage, ScenarioEndpoint, assistant, user
from .ledger import Ledger

AT_ONCE = 8
"""How many requests of a step run beside each other."""

WRITTEN_S = 1.5
"""KV is on the disk within a second after a turn."""

TOKENS_MAX = 48


class Mind(Protocol):
    """Where the agents of one run keep what they have heard. Agents have plain names."""

    ledger: Ledger
    at_once: int

    def begin(self, phase: str) -> None:
        """A new phase."""
        ...

    def say(self, agent: str, text: str) -> str:
        """The agent's answer to `text`."""
        ...

    def inject(self, agent: str, messages: Sequence[Message]) -> None:
        """Let the agent hear messages that it does not answer."""
        ...

    def close(self) -> None:
        """Erase all agents of this run."""
        ...


class InMemory:
    """Satchel remembers: only what is new is sent, and all KV stays in the replica's memory."""

    at_once = AT_ONCE

    def __init__(self, endpoint: ScenarioEndpoint) -> None:
        self.ledger = Ledger()
        self._endpoint = endpoint
        self._phase = ""
        # Nobody else's agents are touched, and a run finds nothing of another one.
        self._run = secrets.token_hex(4)
        self._agents: set[str] = set()
        endpoint.clear_cache()

    def begin(self, phase: str) -> None:
        self._phase = phase

    def say(self, agent: str, text: str) -> str:
        usage = self._endpoint.chat([user(text)], agent=self._id(agent), continues=True, tokens_max=TOKENS_MAX)
        return self._enter(agent, usage).text

    def inject(self, agent: str, messages: Sequence[Message]) -> None:
        self._enter(agent, self._endpoint.inject(self._id(agent), messages))

    def close(self) -> None:
        for agent in sorted(self._agents):
            self._endpoint.forget(agent)
        self._agents.clear()

    def _id(self, agent: str) -> str:
        name = f"{agent}-{self._run}"
        self._agents.add(name)
        return name

    def _enter(self, agent: str, usage: RequestUsage) -> RequestUsage:
        return self.ledger.add(self._phase, agent, usage).usage


class OnDisk(InMemory):
    """Satchel remembers, and between phases the agents' KV leaves memory: each phase begins from the disk."""

    def begin(self, phase: str) -> None:
        super().begin(phase)
        if self._agents:
            time.sleep(WRITTEN_S)
        for agent in sorted(self._agents):
            self._endpoint.release(agent)


class NoMemory(InMemory):
    """Nothing is kept: the client sends the whole conversation, and every prompt is computed from its beginning."""

    # Dropping the cache for one request must not come between two of another's.
    at_once = 1

    def __init__(self, endpoint: ScenarioEndpoint) -> None:
        super().__init__(endpoint)
        self._heard: dict[str, list[Message]] = {}

    def say(self, agent: str, text: str) -> str:
        heard = self._heard.setdefault(agent, [])
        heard.append(user(text))
        # Without an agent's id nothing goes to the disk; what stays in memory is dropped before it is looked for.
        self._endpoint.clear_cache()
        usage = self._endpoint.chat(heard, tokens_max=TOKENS_MAX)
        heard.append(assistant(usage.text))
        return self._enter(agent, usage).text

    def inject(self, agent: str, messages: Sequence[Message]) -> None:
        self._heard.setdefault(agent, []).extend(messages)


WAYS: dict[str, type[InMemory]] = {"memory": InMemory, "disk": OnDisk, "nothing": NoMemory}


def all_at_once(mind: Mind, steps: Sequence[Callable[[], object]]) -> None:
    """Run what several agents do at the same moment."""
    with ThreadPoolExecutor(mind.at_once) as pool:
        for done in [pool.submit(step) for step in steps]:
            done.result()
