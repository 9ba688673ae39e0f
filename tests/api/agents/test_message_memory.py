"""A coding agent's session on a real engine: every turn sends the whole conversation, and only new tokens are
prefilled."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from satchel.cluster.config.config import parse_config
from tests.worlds.api.anthropic_client import Messages, gathered
from tests.worlds.api.engine_backend import remembering_app

HINT = {"cache_control": {"type": "ephemeral"}}
TOOLS = [
    {"name": "read", "description": "Reads a file.", "input_schema": {"type": "object", "properties": {"path": {}}}},
    {"name": "write", "description": "Writes a file.", "input_schema": {"type": "object"}},
]
RULES = "Say what you know. " * 60


class Session:
    """One session of a program that sends requests as Claude Code does."""

    def __init__(self, messages: Messages, id: str) -> None:
        self.messages = messages
        self.id = id
        self.thread: list[dict[str, Any]] = []

    def fields(self) -> dict[str, Any]:
        """The whole conversation, with cache hints at its ends."""
        billing = f"x-anthropic-billing-header: cc_version=2.1.{self.id}; cc_entrypoint=cli; cch=0{self.id};"
        *before, last = self.thread
        blocks = last["content"] if isinstance(last["content"], list) else [{"type": "text", "text": last["content"]}]
        return {
            "messages": [*before, {**last, "content": [*blocks[:-1], {**blocks[-1], **HINT}]}],
            "system": [{"type": "text", "text": billing}, {"type": "text", "text": RULES, **HINT}],
            "tools": [TOOLS[0], {**TOOLS[1], **HINT}],
            "temperature": 0,
            "max_tokens": 24,
        }

    async def ask(self, content: Any, *, stream: bool = False) -> dict[str, Any]:
        self.thread.append({"role": "user", "content": content})
        headers = {"X-Claude-Code-Session-Id": self.id}
        if stream:
            answer = gathered(await self.messages.stream(headers=headers, **self.fields()))
        else:
            answer = await self.messages.say(headers=headers, **self.fields())
        self.thread.append({"role": "assistant", "content": answer["content"]})
        return answer

    async def count(self) -> int:
        fields = {name: value for name, value in self.fields().items() if name not in ("max_tokens", "temperature")}
        return (await self.messages.client.post("/v1/messages/count_tokens", json=fields)).json()["input_tokens"]


@pytest.fixture
async def messages(tmp_path: Path) -> AsyncIterator[Messages]:
    config = parse_config({"models": [{"name": "satchel/recall", "source": "embedded:recall"}]})
    async with remembering_app(config, tmp_path / "kv") as app:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=120) as client:
            yield Messages(client)


SQUARE = {
    "type": "base64",
    "media_type": "image/gif",
    "data": "R0lGODlhAQABAIAAAP8AAP///yH5BAAAAAAALAAAAAABAAEAAAICRAEAOw==",
}


def share(answer: dict[str, Any]) -> float:
    usage = answer["usage"]
    return usage["cache_read_input_tokens"] / (usage["cache_read_input_tokens"] + usage["input_tokens"])


async def test_a_session_with_blocks_from_elsewhere_reads_only_what_is_new(messages: Messages):
    session = Session(messages, "9")
    await session.ask("Remember: the code of ada is 1815.")
    use = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "ada"}}
    page = {"type": "web_search_result", "title": "Ada", "url": "https://x", "encrypted_content": "e"}
    found = {"type": "web_search_tool_result", "tool_use_id": "s", "content": [page]}
    session.thread[-1] = {"role": "assistant", "content": [use, found, {"type": "text", "text": "Yes."}]}
    note = {"type": "document", "title": "note", "source": {"type": "text", "media_type": "text/plain", "data": "Hm."}}
    assert share(await session.ask([note, {"type": "text", "text": "Look at this."}])) > 0.8
    search = {"type": "tool_use", "id": "t", "name": "read", "input": {"path": "a"}}
    session.thread[-1] = {"role": "assistant", "content": [{"type": "brain_wave"}, search]}
    results: list[dict[str, Any]] = [{"type": "tool_reference", "tool_name": "write"}, {"type": "brain_wave"}]
    await session.ask([{"type": "tool_result", "tool_use_id": "t", "content": results}])
    again = await session.ask("What is the code of ada?", stream=True)
    assert share(again) > 0.9


async def test_a_session_reads_only_what_is_new(messages: Messages):
    session = Session(messages, "1")
    first = await session.ask("Remember: the code of ada is 1815.")
    assert first["usage"]["cache_read_input_tokens"] == 0
    second = await session.ask("What is the code of ada?", stream=True)
    assert share(second) > 0.9
    assert "1815" in second["content"][0]["text"]
    # A tool loop: calls and their results.
    session.thread.append({"role": "user", "content": "Read the note."})
    call = {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {"path": "note.txt"}}
    session.thread.append({"role": "assistant", "content": [call]})
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "nothing in it"}]}
    third = await session.ask([result])
    assert share(third) > 0.8
    fourth = await session.ask("What is the code of ada?", stream=True)
    assert share(fourth) > 0.9
    listed = (await messages.client.get("/v1/agents/claude-code:1")).json()
    assert [branch["messages"] for branch in listed["branches"]] == [len(session.thread) + 1], "one branch"


async def test_sessions_share_what_they_begin_with(messages: Messages):
    await Session(messages, "1").ask("Hello")
    other = await Session(messages, "2").ask("Good day")
    assert other["usage"]["cache_read_input_tokens"] >= 256, "their billing headers differ, and are not read"


async def test_a_subagents_program_and_parent_are_known_and_stay_in_copies(messages: Messages):
    body = {"model": "satchel/recall", "max_tokens": 1, "messages": [{"role": "user", "content": "Hello"}]}
    for headers in ({}, {"X-Claude-Code-Agent-Id": "a1"}):
        headers = {"X-Claude-Code-Session-Id": "1", **headers}
        assert (await messages.client.post("/v1/messages", json=body, headers=headers)).is_success
    assert (await messages.client.post("/v1/agents/claude-code:1:a1/fork", json={"as": "copy"})).is_success
    listed = (await messages.client.get("/v1/agents")).json()["data"]
    (branch,) = [each["branch"] for each in listed[0]["branches"]]
    assert [tuple(agent[name] for name in ("id", "program", "parent", "parent_branch")) for agent in listed] == [
        ("claude-code:1", "claude-code", None, None),
        ("claude-code:1:a1", "claude-code", "claude-code:1", branch),
        ("copy", "claude-code", "claude-code:1", branch),
    ]
    # If the parent continues on another branch, `parent_branch` does not change.
    other = {**body, "messages": [{"role": "user", "content": "Another matter"}]}
    for headers in ({}, {"X-Claude-Code-Agent-Id": "a1"}):
        headers = {"X-Claude-Code-Session-Id": "1", **headers}
        assert (await messages.client.post("/v1/messages", json=other, headers=headers)).is_success
    again = (await messages.client.get("/v1/agents/claude-code:1:a1")).json()
    assert len(again["branches"]) == 2 and again["parent_branch"] == branch
    assert len((await messages.client.get("/v1/agents/claude-code:1")).json()["branches"]) == 2


async def test_counting_agrees_with_the_usage(messages: Messages):
    session = Session(messages, "1")
    session.thread.append({"role": "user", "content": "Hello"})
    counted = await session.count()
    session.thread.clear()
    assert (await session.ask("Hello"))["usage"]["input_tokens"] == counted


async def test_a_session_with_pictures_that_the_model_cannot_see_reads_only_what_is_new(messages: Messages):
    """One picture comes from a tool; one is the user's, was refused, and is sent again with the user's next text."""
    session = Session(messages, "9")
    await session.ask("Remember: the code of ada is 1815.")
    use = {"type": "tool_use", "id": "t1", "name": "read", "input": {"path": "/tmp/a.png"}}
    session.thread[-1]["content"].append(use)
    picture = {"type": "image", "source": SQUARE}
    read = {"type": "tool_result", "tool_use_id": "t1", "content": [picture]}
    assert share(await session.ask([read, {"type": "text", "text": "Go on."}])) > 0.8
    assert share(await session.ask("Say the numbers from one to nine.")) > 0.9
    shown = [picture, {"type": "text", "text": "What is in the picture?"}]
    refused = await messages.post([*session.thread, {"role": "user", "content": shown}])
    assert refused.status_code == 400
    headers = {"X-Claude-Code-Session-Id": session.id}
    session.thread.append({"role": "user", "content": shown})
    assert (await messages.post(headers=headers, **session.fields())).status_code == 400
    session.thread.pop()
    joined = await session.ask([*shown, {"type": "text", "text": "What is the code of ada?"}])
    assert share(joined) > 0.8
    assert share(await session.ask("And of ada?")) > 0.9
