"""Pictures in Anthropic's messages and in tool results: the replica gets the same request as in OpenAI's form."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from satchel.api.app import create_app
from satchel.api.requests.unsupported_media import UNREAD
from satchel.api.text.model import load_text_model
from satchel.cluster.config.config import Config
from tests.worlds.api.anthropic_client import HELLO, Messages
from tests.worlds.api.fake_backend import FakeBackend
from tests.worlds.api.served_models import served_model
from tests.worlds.models.vision_families import write_model


@pytest.fixture
def backend(tmp_path: Path) -> FakeBackend:
    folder = write_model(tmp_path / "qwen3_vl", "qwen3_vl")
    served = served_model(folder=folder, context_tokens=4000, vocabulary_size=4000)
    return FakeBackend(load_text_model(folder), [served])


@pytest.fixture
async def messages(backend: FakeBackend, config: Config) -> AsyncIterator[Messages]:
    transport = httpx.ASGITransport(create_app(backend, config))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield Messages(client)


def png(color: str = "red") -> str:
    written = BytesIO()
    Image.new("RGB", (64, 48), color).save(written, "PNG")
    return base64.b64encode(written.getvalue()).decode()


def image(data: str) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


async def test_a_picture_is_the_same_in_both_protocols(messages: Messages, backend: FakeBackend):
    await messages.say([{"role": "user", "content": [text("Look: "), image(png()), text(" What is it?")]}])
    ours = backend.requests[-1]
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png()}"}}
    chat = {"messages": [{"role": "user", "content": [text("Look: "), url, text(" What is it?")]}]}
    assert (await messages.client.post("/v1/chat/completions", json=chat)).status_code == 200
    theirs = backend.requests[-1]
    assert ours["prompt"] == theirs["prompt"]
    assert [span.key for span in ours["media"]] == [span.key for span in theirs["media"]] != []
    by_url = {"type": "image", "source": {"type": "url", "url": url["image_url"]["url"]}}
    await messages.say([{"role": "user", "content": [text("Look: "), by_url, text(" What is it?")]}])
    assert backend.requests[-1]["prompt"] == ours["prompt"]


async def test_a_tool_shows_a_picture(messages: Messages, backend: FakeBackend):
    call = {"type": "tool_use", "id": "t", "name": "screenshot", "input": {}}
    for failed in (False, True):
        result = {"type": "tool_result", "tool_use_id": "t", "content": [text("Here:"), image(png())]}
        thread = [*HELLO, {"role": "assistant", "content": [call]}]
        thread.append({"role": "user", "content": [{**result, "is_error": failed}, image(png("blue")), text("Well?")]})
        body = {"messages": thread, "max_tokens": 5}
        counted = (await messages.client.post("/v1/messages/count_tokens", json=body)).json()["input_tokens"]
        assert (await messages.say(thread))["usage"]["input_tokens"] == counted
        request = backend.requests[-1]
        red, blue = request["media"]
        assert red.key != blue.key
        prompt = backend.text.tokenizer.decode(backend.text.plain(request["prompt"]))
        begun = "<|im_start|>tool" + ("Error:" if failed else "") + "Here:<|vision_start|>"
        assert begun in prompt and "<|im_start|>user<|vision_start|>" in prompt


async def test_pictures_of_results_move_with_them(messages: Messages, backend: FakeBackend):
    calls = [{"type": "tool_use", "id": id, "name": "screenshot", "input": {}} for id in ("k1", "k2")]
    results = [
        {"type": "tool_result", "tool_use_id": id, "content": [text(f"{color}:"), image(png(color))]}
        for id, color in (("k1", "red"), ("k2", "blue"))
    ]
    asked = []
    for order in (results, results[::-1]):
        thread = [*HELLO, {"role": "assistant", "content": calls}, {"role": "user", "content": [*order, text("Well?")]}]
        await messages.say(thread)
        asked.append(backend.requests[-1])
    assert asked[0]["prompt"] == asked[1]["prompt"]
    assert [span.key for span in asked[0]["media"]] == [span.key for span in asked[1]["media"]]


async def test_what_is_no_picture_is_named(messages: Messages, backend: FakeBackend):
    for data in ("AAAA", "!"):
        response = await messages.post([{"role": "user", "content": [image(data)]}])
        assert response.status_code == 400, response.text
        assert response.json()["error"]["message"].startswith("messages[0].content[0] "), response.text
    response = await messages.post(
        [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]
    )
    assert response.json()["error"]["message"].startswith("messages[0].content[0].source.url must be")
    assert backend.requests == []


async def test_what_cannot_be_read_is_left_out_of_results_and_history(messages: Messages, backend: FakeBackend):
    """An agent that reads a damaged file goes on; a user who sends one gets an error."""
    call = {"type": "tool_use", "id": "t", "name": "read", "input": {}}
    elsewhere = {"type": "image", "source": {"type": "url", "url": "x"}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [image(png()), image("AAAA"), elsewhere]}
    thread = [*HELLO, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    answer = await messages.post(thread)
    assert answer.status_code == 200 and answer.headers["x-satchel-left-out"] == "image"
    first = backend.requests[-1]
    assert len(first["media"]) == 1 and backend.prompt.count(UNREAD["image"]) == 2
    counted = await messages.client.post("/v1/messages/count_tokens", json={"messages": thread, "model": "x"})
    assert counted.json()["input_tokens"] == len(first["prompt"])
    shown = {"role": "user", "content": [image("AAAA"), text("And this?")]}
    refused = await messages.post([*thread, {"role": "assistant", "content": "Well."}, shown])
    assert refused.status_code == 400 and "messages[4].content[0] " in refused.text
    later = [*thread, {"role": "assistant", "content": "Well."}, shown, {"role": "user", "content": "Never mind."}]
    assert (await messages.post(later)).status_code == 200
    assert backend.prompt.startswith(
        backend.text.tokenizer.decode(first["prompt"]).removesuffix("<|im_start|>assistant")
    )
    assert backend.prompt.count(UNREAD["image"]) == 3 and len(backend.requests[-1]["media"]) == 1
    backend.served[0] = replace(backend.served[0], omits_unseen=False)
    assert (await messages.post(thread)).status_code == 400


async def test_a_pictures_detail_is_the_same_in_chats_and_responses(messages: Messages, backend: FakeBackend):
    """`low` shows a smaller picture; any other word is accepted, even an unknown one."""
    written = BytesIO()
    Image.new("RGB", (900, 600), "red").save(written, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(written.getvalue()).decode()}"

    async def widths(detail: Any) -> list[int]:
        chat = {"type": "image_url", "image_url": {"url": url, "detail": detail}}
        item = {"type": "input_image", "image_url": url, "detail": detail}
        found = []
        for path, body in (
            ("chat/completions", {"messages": [{"role": "user", "content": [chat]}]}),
            ("responses", {"input": [{"role": "user", "content": [item]}]}),
        ):
            answer = await messages.client.post(f"/v1/{path}", json=body)
            if answer.status_code != 200:
                assert answer.status_code == 400 and "detail" in answer.text
                continue
            (span,) = backend.requests[-1]["media"]
            found.append(span.width)
        return found

    whole = await widths("auto")
    assert whole == 2 * whole[:1] and await widths("low") == 2 * [512] and whole[0] > 512
    for word in ("high", "original", "xhigh", "", None):
        assert await widths(word) == whole, word
    assert await widths(5) == []
