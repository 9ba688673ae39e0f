"""Codex's sessions and chains of responses on a real engine: every turn prefills only new tokens, and a chain outlives
the process that stored it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest

from satchel.api.agents.memory import AgentMemory
from satchel.api.app import create_app
from satchel.api.pipeline.generation import Generator
from satchel.cluster.config.config import parse_config
from tests.worlds.api.engine_backend import EngineBackend
from tests.worlds.api.remembering import LocalStore
from tests.worlds.api.responses_client import Responses

RULES = "Say what you know. " * 60
READ: dict[str, Any] = {
    "type": "function",
    "name": "read",
    "description": "Reads a file.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"path": {"type": "string", "maxLength": 8}},
        "required": ["path"],
        "additionalProperties": False,
    },
}


class Engine:
    def __init__(self, folder: Path) -> None:
        self.config = parse_config({"models": [{"name": "satchel/recall", "source": "embedded:recall"}]})
        self.store = LocalStore(self.config, folder / "kv")
        self.backend = EngineBackend(self.config, self.store)

    def endpoint(self) -> Responses:
        """Returns a new endpoint, which knows only what the stores have."""
        generator = Generator(self.backend, self.config, memory=AgentMemory(self.store.asked))
        transport = httpx.ASGITransport(create_app(self.backend, self.config, generator=generator))
        return Responses(httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=120))


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    made = Engine(tmp_path)
    await made.backend.begin()
    yield made
    await made.backend.at_rest()
    await made.backend.end()
    made.store.actor.close()


class Codex:
    """A session of a program that sends requests as Codex does: nothing is stored, and every request has all items."""

    def __init__(self, asking: Responses, thread: str) -> None:
        self.asking = asking
        self.thread = thread
        self.items: list[dict[str, Any]] = [
            {
                "type": "message",
                "role": "developer",
                "content": [{"type": "input_text", "text": "Ask before you write."}],
            },
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<cwd>/tmp</cwd>"}]},
        ]

    def say(self, text: str) -> None:
        content = [{"type": "input_text", "text": text}]
        self.items.append({"type": "message", "role": "user", "content": content})

    async def ask(self, **fields: Any) -> dict[str, Any]:
        events = await self.asking.stream(
            self.items,
            headers={"thread-id": self.thread, "session-id": self.thread, "originator": "codex_exec"},
            **{
                "model": "satchel/recall",
                "instructions": RULES,
                "tools": [READ, {"type": "web_search", "external_web_access": False}],
                "tool_choice": "auto",
                "parallel_tool_calls": False,
                "reasoning": {"effort": "medium", "summary": "auto"},
                "store": False,
                "include": ["reasoning.encrypted_content"],
                "prompt_cache_key": self.thread,
                "text": {"verbosity": "low"},
                "client_metadata": {"x-codex-installation-id": "1"},
                "max_output_tokens": 48,
                "temperature": 0,
                **fields,
            },
        )
        response = events[-1]["response"]
        # It takes the items from their events, and drops what it does not send.
        for event in events:
            if event["type"] == "response.output_item.done":
                kept = {name: value for name, value in event["item"].items() if name not in ("id", "status")}
                self.items.append(kept)
        return response


def share(response: dict[str, Any]) -> float:
    return response["usage"]["input_tokens_details"]["cached_tokens"] / response["usage"]["input_tokens"]


async def test_a_session_reads_only_what_is_new(engine: Engine):
    asking = engine.endpoint()
    session = Codex(asking, "0198-aa")
    session.say("Remember: the code of ada is 1815.")
    assert share(await session.ask()) == 0
    session.say("Read the note.")
    called = await session.ask(tool_choice="required", max_output_tokens=200)
    assert share(called) > 0.9
    call = called["output"][-1]
    assert (call["type"], call["name"]) == ("function_call", "read")
    jsonschema_rs.validate(READ["parameters"], json.loads(call["arguments"]))
    session.items.append({"type": "function_call_output", "call_id": call["call_id"], "output": "nothing in it"})
    assert share(await session.ask()) > 0.8
    session.say("What is the code of ada?")
    last = await session.ask()
    assert share(last) > 0.9
    assert "1815" in last["output"][-1]["content"][0]["text"]
    agent = (await asking.client.get("/v1/agents/codex:0198-aa")).json()
    assert len(agent["branches"]) == 1


async def test_a_session_with_tools_among_its_items_and_with_other_agents_reads_only_what_is_new(engine: Engine):
    session = Codex(engine.endpoint(), "0198-ab")
    offered = {"type": "namespace", "name": "functions", "description": "d", "tools": [READ]}
    session.items.insert(0, {"type": "additional_tools", "role": "developer", "id": "at_1", "tools": [offered]})
    session.say("Remember: the code of ada is 1815.")
    assert share(await session.ask(tools=[])) == 0
    session.say("Read the note.")
    called = await session.ask(tools=[], tool_choice="required", max_output_tokens=200)
    assert share(called) > 0.9
    call = called["output"][-1]
    assert (call["name"], call["namespace"]) == ("read", "functions")
    session.items.append({"type": "function_call_output", "call_id": call["call_id"], "output": "nothing in it"})
    task = [{"type": "input_text", "text": "Done."}, {"type": "encrypted_content", "encrypted_content": "x"}]
    session.items.append({"type": "agent_message", "author": "/root/sub", "recipient": "/root", "content": task})
    assert share(await session.ask(tools=[])) > 0.8
    shell = {"type": "local_shell_call", "call_id": "c", "action": {"type": "exec", "command": ["ls"]}}
    session.items += [shell, {"type": "function_call_output", "call_id": "c", "output": "a b"}]
    session.items += [{"type": "ghost_snapshot", "id": "g"}, {"type": "thing_of_tomorrow"}]
    session.say("What is the code of ada?")
    last = await session.ask(tools=[])
    assert share(last) > 0.8
    session.say("And again?")
    assert share(await session.ask(tools=[])) > 0.9


async def test_a_chain_goes_on_by_the_id_of_its_last_response(engine: Engine):
    asking = engine.endpoint()
    how: dict[str, Any] = {"instructions": RULES, "max_output_tokens": 24, "temperature": 0}
    first = await asking.say("Remember: the code of ada is 1815.", **how)
    second = await asking.say("What is the code of ada?", previous_response_id=first["id"], **how)
    assert second["previous_response_id"] == first["id"]
    assert share(second) > 0.9 and "1815" in second["output"][0]["content"][0]["text"]
    # Another branch from the same place, and other instructions.
    other = await asking.say("And of bob?", previous_response_id=first["id"], **how)
    assert share(other) > 0.9
    changed = await asking.say("Go on.", previous_response_id=first["id"], **{**how, "instructions": "Be brief."})
    assert changed["usage"]["input_tokens"] < first["usage"]["input_tokens"], "instructions do not carry over"
    (agent,) = (await asking.client.get("/v1/agents")).json()["data"]
    assert agent["id"].startswith("response:") and len(agent["branches"]) == 3


async def test_a_chain_outlives_the_endpoint(engine: Engine):
    how: dict[str, Any] = {"instructions": RULES, "max_output_tokens": 24, "temperature": 0}
    asking = engine.endpoint()
    first = await asking.say("Remember: the code of ada is 1815.", **how)
    second = await asking.say("Well.", previous_response_id=first["id"], **how)
    asking = engine.endpoint()
    for before in (first, second):
        response = await asking.say("What is the code of ada?", previous_response_id=before["id"], **how)
        assert share(response) > 0.9 and "1815" in response["output"][0]["content"][0]["text"]
    fourth = await asking.say("Go on.", previous_response_id=second["id"], max_output_tokens=8)
    assert await engine.endpoint().say("Well.", previous_response_id=fourth["id"], **how), "without instructions"
    place = len("resp_") + 22
    forged = first["id"][:place] + ("0" if first["id"][place] != "0" else "1") + first["id"][place + 1 :]
    error = await asking.refused("Hi", previous_response_id=forged)
    assert error["code"] == "previous_response_not_found"


async def test_an_answer_in_the_background_outlives_the_endpoint(engine: Engine):
    asking = engine.endpoint()
    how: dict[str, Any] = {"max_output_tokens": 16, "temperature": 0, "background": True}
    made = await asking.say("Remember: the code of ada is 1815.", **how)
    while made["status"] in ("queued", "in_progress"):
        await asyncio.sleep(0.02)
        made = (await asking.client.get(f"/v1/responses/{made['id']}")).json()
    later = engine.endpoint()
    found = (await later.client.get(f"/v1/responses/{made['id']}")).json()
    assert found["status"] == "completed"
    assert found["output"][0]["content"] == made["output"][0]["content"] and found["model"] == made["model"]
    assert share(await later.say("Go on.", previous_response_id=made["id"], max_output_tokens=8)) > 0.5


async def test_deleting_the_last_response_of_a_chain_forgets_it(engine: Engine):
    asking = engine.endpoint()
    first = await asking.say("Hi", max_output_tokens=8)
    second = await asking.say("Hi", previous_response_id=first["id"], max_output_tokens=8)
    await asking.client.delete(f"/v1/responses/{first['id']}")
    assert (await asking.client.get("/v1/agents")).json()["data"]
    await asking.refused("Hi", previous_response_id=first["id"])
    await asking.client.delete(f"/v1/responses/{second['id']}")
    assert (await asking.client.get("/v1/agents")).json()["data"] == []
    await asking.refused("Hi", previous_response_id=second["id"])


async def test_a_conversation_is_an_agents_transcript(engine: Engine):
    asking = engine.endpoint()
    how: dict[str, Any] = {"conversation": "conv_1", "max_output_tokens": 24, "temperature": 0}
    first = await asking.say("Remember: the code of ada is 1815.", instructions=RULES, **how)
    assert first["conversation"] == {"id": "conv_1"}
    second = await engine.endpoint().say("What is the code of ada?", **{**how, "conversation": {"id": "conv_1"}})
    assert share(second) > 0.9 and "1815" in second["output"][0]["content"][0]["text"]
    await asking.refused("Hi", conversation="conv_1", previous_response_id=first["id"])
    error = await asking.refused("Hi", previous_response_id=first["id"])
    assert error["param"] == "previous_response_id" and "conversation" in error["message"]
    body = {"input": "Well.", "conversation": "conv_1", "instructions": RULES}
    counted = (await asking.client.post("/v1/responses/input_tokens", json=body)).json()["input_tokens"]
    third = await asking.say("Well.", **how)
    assert abs(counted - third["usage"]["input_tokens"]) < 8
