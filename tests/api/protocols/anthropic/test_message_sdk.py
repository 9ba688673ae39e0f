"""Anthropic's own client, unmodified, against the application with the scripted model on a real engine.

It is imported by the tests that use it: it takes 3 s, in each process that collects tests.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import httpx2
import pytest
import pytest_asyncio

from satchel.cluster.config.config import parse_config
from tests.worlds.api.engine_backend import remembering_app

if TYPE_CHECKING:
    import anthropic
    from anthropic.types import MessageParam, ToolParam

pytestmark = pytest.mark.asyncio(loop_scope="module")

READ: ToolParam = {
    "name": "Read",
    "description": "Reads a file.",
    "input_schema": {"type": "object", "properties": {"file_path": {"type": "string"}}, "required": ["file_path"]},
}
ASKED: MessageParam = {"role": "user", "content": "Please read the file /tmp/note.txt"}
MODEL = "claude-opus-5"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[anthropic.AsyncAnthropic]:
    import anthropic

    config = parse_config({"models": [{"name": "satchel/script", "source": "embedded:script"}]})
    async with remembering_app(config, tmp_path_factory.mktemp("kv")) as app:
        transport = httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://localhost")
        async with anthropic.AsyncAnthropic(api_key="x", base_url="http://localhost", http_client=transport) as made:
            yield made


async def test_a_tool_is_called_and_its_result_answered_from_memory(client: anthropic.AsyncAnthropic) -> None:
    session = {"X-Claude-Code-Session-Id": "one"}
    said = [ASKED]
    first = await client.messages.create(
        model=MODEL, max_tokens=200, tools=[READ], messages=said, extra_headers=session, system="You help. " * 200
    )
    text, call = first.content
    assert first.stop_reason == "tool_use" and text.type == "text" and text.text.strip() == "I read the file."
    assert call.type == "tool_use" and (call.name, call.input) == ("Read", {"file_path": "/tmp/note.txt"})
    result: MessageParam = {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "a heron sleeps"}],
    }
    said += [{"role": "assistant", "content": first.content}, result]
    second = await client.messages.create(
        model=MODEL, max_tokens=200, tools=[READ], messages=said, extra_headers=session, system="You help. " * 200
    )
    (answer,) = second.content
    assert answer.type == "text" and answer.text == "It says: a heron sleeps" and second.stop_reason == "end_turn"
    read, cached = second.usage.input_tokens, second.usage.cache_read_input_tokens or 0
    assert cached >= 0.9 * (read + cached)


async def test_a_stream_becomes_the_same_message(client: anthropic.AsyncAnthropic) -> None:
    async with client.messages.stream(model=MODEL, max_tokens=200, tools=[READ], messages=[ASKED]) as stream:
        kinds = [event.type async for event in stream]
        message = await stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop" and kinds.count("input_json") > 1
    assert [block.type for block in message.content] == ["text", "tool_use"]
    assert message.content[1].input == {"file_path": "/tmp/note.txt"}  # type: ignore[union-attr]


async def test_tokens_are_counted_as_they_are_charged(client: anthropic.AsyncAnthropic) -> None:
    said: list[MessageParam] = [{"role": "user", "content": "Say 'good evening'"}]
    counted = await client.messages.count_tokens(model=MODEL, messages=said)
    answer = await client.messages.create(model=MODEL, max_tokens=50, messages=said)
    usage = answer.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert answer.content[0].text == "good evening"  # type: ignore[union-attr]


async def test_errors_are_the_clients_own(client: anthropic.AsyncAnthropic) -> None:
    from anthropic import BadRequestError

    with pytest.raises(BadRequestError, match="messages"):
        await client.messages.create(model=MODEL, max_tokens=5, messages=[])
    long: list[MessageParam] = [{"role": "user", "content": "word " * 200_000}]
    with pytest.raises(BadRequestError, match=r"prompt is too long: \d+ tokens > \d+ maximum"):
        await client.messages.create(model=MODEL, max_tokens=5, messages=long)


async def test_models_have_what_the_client_shows(client: anthropic.AsyncAnthropic) -> None:
    (listed,) = [model async for model in client.models.list()]
    shown = await client.models.retrieve("satchel/script")
    assert listed.to_dict() == shown.to_dict()
    assert (shown.type, shown.id, shown.display_name) == ("model", "satchel/script", "satchel/script")
    assert shown.lifecycle == "active" and shown.max_input_tokens == shown.to_dict()["max_model_len"]
    assert shown.created_at.timestamp() == shown.to_dict()["created"]
    page = await client.models.list()
    assert (page.has_more, page.first_id, page.last_id) == (False, shown.id, shown.id)
