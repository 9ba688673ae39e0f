"""Recorded sessions as conversations that any chat template can render. Pure, but for reading files.

Recordings have no reasoning, and those of coding agents only lengths. What is missing is made of words, the same at
every run: an answer's reasoning is as long as what it says.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.stories.traces import RecordedConversation, read

from ..recorded import coding_sessions, own_requests

Messages = list[dict[str, Any]]

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "run",
        "description": "Runs a command and returns what it prints.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "A line of a shell."}},
            "required": ["command"],
        },
    },
}

PERSON_S = 30.0
"""Who thinks longer before a request is a person, not a tool."""

COMMAND_WORDS = 24
THOUGHT_WORDS_MIN = 24


@dataclass(frozen=True)
class RecordedStep:
    """One request: the messages that are new in it, and the answer with its reasoning."""

    new: Messages
    answer: dict[str, Any]


@dataclass(frozen=True)
class RecordedSession:
    """The requests of one agent, and whether it has a tool."""

    name: str
    steps: list[RecordedStep]
    tools: bool


class Words:
    """Text of a given number of words, each about a token."""

    def __init__(self, words: Sequence[str], seed: int) -> None:
        self._words, self._rng = words, random.Random(seed)

    def text(self, count: int) -> str:
        return " ".join(self._rng.choices(self._words, k=max(1, count)))


def answer(said: str, thought: str, command: str, number: int) -> dict[str, Any]:
    """An assistant's message. With a `command` it is a call, and what is said is reasoning: some templates refuse
    both."""
    message: dict[str, Any] = {"role": "assistant", "content": said, "reasoning_content": thought}
    if command:
        message |= {"content": "", "reasoning_content": f"{thought} {said}"}
        function = {"name": "run", "arguments": json.dumps({"command": command})}
        message["tool_calls"] = [{"id": f"call{number:05}", "type": "function", "function": function}]
    return message


def result(content: str, number: int) -> dict[str, Any]:
    """A tool's message."""
    return {"role": "tool", "name": "run", "tool_call_id": f"call{number:05}", "content": content}


def coding_agents(trace: Path, words: Sequence[str], most: int, steps: int, tokens: int) -> Iterator[RecordedSession]:
    """The first `most` recorded sessions of coding agents with several turns, without their subagents', to the first
    request of more than `tokens`, after which a conversation was made shorter, or as many as `steps`."""
    found = 0
    for seed, session in enumerate(coding_sessions(trace)):
        requests = list(_growing(own_requests(session), tokens))[:steps]
        if sum(_from_a_person(request) for request in requests[1:]) < 2:
            continue
        yield _coding(f"coding agent {seed}", session, requests, Words(words, seed))
        found += 1
        if found == most:
            return


def _growing(requests: Sequence[dict[str, Any]], tokens: int) -> Iterator[dict[str, Any]]:
    said = 0
    for request in requests:
        if request["input"] > tokens or request["input"] < said:
            return
        said = request["input"] + request["output"]
        yield request


def _from_a_person(request: dict[str, Any]) -> bool:
    return request["think"] > PERSON_S


def _coding(name: str, session: dict[str, Any], requests: Sequence[dict[str, Any]], words: Words) -> RecordedSession:
    system = min(session["system_tokens"] + session["tool_tokens"], requests[0]["input"] - 100)
    steps: list[RecordedStep] = []
    said = system
    for number, request in enumerate(requests):
        text = words.text(request["input"] - said)
        new: Messages = [{"role": "user", "content": text}]
        if number and not _from_a_person(request):
            new = [result(text, number - 1)]
        if not number:
            new = [{"role": "system", "content": words.text(system)}, *new]
        then = requests[number + 1] if number + 1 < len(requests) else None
        calls = then is not None and not _from_a_person(then)
        half = request["output"] // 2
        said = request["input"] + request["output"]
        command = words.text(min(COMMAND_WORDS, half)) if calls else ""
        thought = words.text(max(THOUGHT_WORDS_MIN, half))
        steps.append(RecordedStep(new, answer(words.text(half), thought, command, number)))
    return RecordedSession(name, steps, tools=True)


def told(trace: Path, words: Sequence[str], most: int, steps: int) -> Iterator[RecordedSession]:
    """The first `most` agents whose conversations are recorded as text and go on, with at most `steps` requests. Where
    the prompt of one call only grows, what is new in it is what its tool printed; elsewhere it is a user's."""
    found = 0
    for seed, conversation in enumerate(read(trace, 1_000)):
        session = _told(conversation, Words(words, seed), steps)
        if session is not None:
            yield session
            found += 1
            if found == most:
                return


def _told(conversation: RecordedConversation, words: Words, most: int) -> RecordedSession | None:
    # The agent that is asked most often.
    counts: dict[int, int] = {}
    for request in conversation.requests:
        counts[request.agent] = counts.get(request.agent, 0) + (not request.opens)
    if not counts or max(counts.values()) < 2:
        return None
    busiest = max(counts, key=lambda agent: counts[agent])
    asked = [request for request in conversation.requests if request.agent == busiest and request.new]
    tools = all(len(request.new) == 1 for request in asked)
    steps: list[RecordedStep] = []
    for number, request in enumerate(asked[:most]):
        new: Messages = [dict(message) for message in request.new]
        if tools and number:
            new = [result(new[0]["content"], number - 1)]
        said, _, command = request.reply.partition("```bash\n") if tools else (request.reply, "", "")
        calls = tools and number + 1 < len(asked[:most])
        command = command.partition("\n```")[0] or ("ls" if calls else "")
        thought = words.text(max(THOUGHT_WORDS_MIN, len(request.reply.split())))
        message = answer(said.strip() or "Yes.", thought, command if calls else "", number)
        steps.append(RecordedStep(_joined(new), message))
    return RecordedSession(conversation.name, steps, tools)


def _joined(messages: Messages) -> Messages:
    """With what several others said as one message, for templates that want turns."""
    joined: Messages = []
    for message in messages:
        if joined and joined[-1]["role"] == message["role"] == "user":
            joined[-1] = {**message, "content": f"{joined[-1]['content']}\n{message['content']}"}
        else:
            joined.append(message)
    return joined
