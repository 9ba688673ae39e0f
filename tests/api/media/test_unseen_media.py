"""Unsupported ("unseen") media, in every protocol: in tool results and earlier messages a text replaces them; in the
user's newest message they are refused. So a session can go on, and its prompts begin with the same tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest

from satchel.api.media.sources import PictureSource
from satchel.api.requests.left_out import LeftOut
from satchel.api.requests.requests import ChatRequest, Past, prepare_chat
from satchel.api.requests.unsupported_media import WORDS, without_unseen
from satchel.api.text.model import TextModel
from tests.worlds.api.fake_backend import FakeBackend

DATA = "R0lGODlhAQABAIAAAP8AAP///yH5BAAAAAAALAAAAAABAAEAAAICRAEAOw=="
URL = f"data:image/gif;base64,{DATA}"
IMAGE = WORDS["image"]
HEADER = "x-satchel-left-out"
SCHEMA = {"type": "object", "properties": {}}


def text(said: str, kind: str = "text") -> dict[str, Any]:
    return {"type": kind, "text": said}


PARTS: dict[str, Any] = {
    "chat/completions": {"type": "image_url", "image_url": {"url": URL}},
    "messages": {"type": "image", "source": {"type": "base64", "media_type": "image/gif", "data": DATA}},
    "responses": {"type": "input_image", "image_url": URL},
}
PLACES = {
    "chat/completions": "messages[{}].content[{}]",
    "messages": "messages[{}].content[{}]",
    "responses": "input[{}].content[{}]",
    "api/chat": "messages[{}].images[0]",
}
ROUTES = list(PLACES)


class Protocol:
    """One protocol's form of turns."""

    def __init__(self, client: httpx.AsyncClient, route: str) -> None:
        self.client = client
        self.route = route

    def user(self, said: str, *, picture: bool = False, last: bool = False) -> list[dict[str, Any]]:
        """Returns a question, with a picture before or behind the text."""
        if self.route == "api/chat":
            return [{"role": "user", "content": said, **({"images": [DATA]} if picture else {})}]
        parts = [text(said, "input_text" if self.route == "responses" else "text")]
        parts = [PARTS[self.route], *parts] if picture else parts
        return [{"role": "user", "content": parts[::-1] if last else parts}]

    def answer(self, said: str) -> list[dict[str, Any]]:
        return [{"role": "assistant", "content": said}]

    def shown(self) -> list[dict[str, Any]]:
        """Returns a call, and a result with a picture."""
        if self.route == "messages":
            use = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
            content = [text("Here:"), PARTS["messages"]]
            result = {"type": "tool_result", "tool_use_id": "t", "content": content}
            return [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
        if self.route == "responses":
            output = [text("Here:", "input_text"), PARTS["responses"]]
            return [
                {"type": "function_call", "call_id": "t", "name": "look", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "t", "output": output},
            ]
        if self.route == "api/chat":
            call = {"function": {"name": "look", "arguments": {}}}
            result = {"role": "tool", "tool_name": "look", "content": "Here:", "images": [DATA]}
            return [{"role": "assistant", "content": "", "tool_calls": [call]}, result]
        call = {"id": "t", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        content = [text("Here:"), PARTS["chat/completions"]]
        return [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "t", "content": content},
        ]

    async def post(self, turns: list[dict[str, Any]], **fields: Any) -> httpx.Response:
        name = "input" if self.route == "responses" else "messages"
        limit = {"max_tokens": 20} if self.route == "messages" else {}
        path = self.route if self.route.startswith("api/") else f"v1/{self.route}"
        body = {"model": "satchel/tiny", "stream": False, name: turns, **limit, **fields}
        return await self.client.post(f"/{path}", json=body)


@pytest.fixture(params=ROUTES)
def protocol(request: pytest.FixtureRequest, client: httpx.AsyncClient) -> Protocol:
    return Protocol(client, request.param)


def without_answer(prompt: str) -> str:
    return prompt.removesuffix("<|im_start|>assistant\n")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_picture_of_a_tool_is_left_out_and_the_session_goes_on(
    protocol: Protocol, backend: FakeBackend, stream: bool
):
    thread, before = protocol.user("Look at /tmp/a.png"), ""
    for _ in range(3):
        thread += protocol.shown()
        answer = await protocol.post(thread, stream=stream)
        assert answer.status_code == 200, answer.text
        assert answer.headers[HEADER] == "image"
        assert backend.requests[-1]["media"] == []
        said = f"{IMAGE}\nHere:" if protocol.route == "api/chat" else f"Here:\n{IMAGE}"
        assert f"{said}<|im_end|>" in backend.prompt
        assert backend.prompt.startswith(before), "prompts go on as they began"
        before = without_answer(backend.prompt)
        thread += [*protocol.answer("I see."), *protocol.user("And again.")]
    assert backend.prompt.count(IMAGE) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_picture_in_the_newest_message_is_refused_and_left_out_later(
    protocol: Protocol, backend: FakeBackend, stream: bool
):
    """The user continues behind it, with or without an answer between."""
    first = protocol.user("Hi")
    await protocol.post(first)
    opening = without_answer(backend.prompt)
    asked = [*first, *protocol.answer("Hello"), *protocol.user("What is this?", picture=True)]
    for _ in range(2):
        refused = await protocol.post(asked, stream=stream)
        assert refused.status_code == 400 and "this model does not support images" in refused.text
        assert PLACES[protocol.route].format(2, 0) in refused.text and HEADER not in refused.headers
    assert len(backend.requests) == 1
    on = [*asked, *protocol.user("Never mind.")]
    assert (await protocol.post(on, stream=stream)).headers[HEADER] == "image"
    assert backend.prompt.startswith(opening) and backend.prompt.count(IMAGE) == 1
    behind = without_answer(backend.prompt)
    assert (await protocol.post([*on, *protocol.answer("Well."), *protocol.user("So?")])).headers[HEADER] == "image"
    assert backend.prompt.startswith(behind)
    other = [*asked, *protocol.answer("I cannot."), *protocol.user("Never mind.")]
    assert (await protocol.post(other)).headers[HEADER] == "image"
    both = [*on, *protocol.answer("Well."), *protocol.user("And this?", picture=True)]
    assert (await protocol.post(both)).status_code == 400


@pytest.mark.parametrize("route", ["messages", "chat/completions", "responses"])
@pytest.mark.parametrize("last", [False, True])
async def test_a_refused_message_that_comes_again_with_more_in_it_is_history(
    client: httpx.AsyncClient, backend: FakeBackend, route: str, last: bool
):
    """Claude Code sends the refused content and the user's next text as one message."""
    protocol = Protocol(client, route)
    thread = [*protocol.user("Hi"), *protocol.answer("Hello")]
    (asked,) = protocol.user("What is this?", picture=True, last=last)
    (more,) = protocol.user("Never mind.")
    assert (await protocol.post([*thread, asked])).status_code == 400
    assert (await protocol.post([*thread, asked])).status_code == 400, "as it is, it is the newest all the same"
    joined = {**asked, "content": [*asked["content"], *more["content"]]}
    answer = await protocol.post([*thread, joined])
    assert answer.status_code == 200 and answer.headers[HEADER] == "image"
    assert backend.prompt.count(IMAGE) == 1 and "Never mind." in backend.prompt
    (again,) = protocol.user("And this?", picture=True)
    refused = await protocol.post([*thread, {**joined, "content": [*joined["content"], *again["content"]]}])
    assert refused.status_code == 400 and f"content[{len(joined['content'])}]" in refused.text, "the new one"
    new = {**joined, "content": [*more["content"], *asked["content"], *more["content"]]}
    assert (await protocol.post([*thread, new])).status_code == 400, "nothing of the kind was refused"


async def test_everywhere_it_is_refused_if_the_config_says_so(protocol: Protocol, backend: FakeBackend):
    backend.served[0] = replace(backend.served[0], omits_unseen=False)
    for thread in (
        [*protocol.user("Look at /tmp/a.png"), *protocol.shown()],
        [*protocol.user("Hi", picture=True), *protocol.answer("Hello"), *protocol.user("Well?")],
    ):
        answer = await protocol.post(thread)
        assert answer.status_code == 400 and "this model does not support images" in answer.text
        assert HEADER not in answer.headers
    assert backend.requests == []


async def test_prompts_are_counted_as_they_are(client: httpx.AsyncClient, backend: FakeBackend):
    protocol = Protocol(client, "messages")
    thread = [*protocol.user("Look at /tmp/a.png"), *protocol.shown()]
    used = (await protocol.post(thread)).json()["usage"]
    counted = await client.post("/v1/messages/count_tokens", json={"model": "x", "messages": thread})
    assert counted.json()["input_tokens"] == used["input_tokens"] + used["cache_read_input_tokens"]
    assert counted.headers[HEADER] == "image"
    refused = await client.post(
        "/v1/messages/count_tokens", json={"model": "x", "messages": protocol.user("", picture=True)}
    )
    assert refused.status_code == 400


async def test_the_answer_may_be_begun(client: httpx.AsyncClient):
    protocol = Protocol(client, "messages")
    thread = [*protocol.user("What is this?", picture=True), *protocol.answer("It is")]
    assert (await protocol.post(thread)).status_code == 400


async def test_videos_and_the_systems_pictures(client: httpx.AsyncClient, backend: FakeBackend):
    video = {"type": "video_url", "video_url": {"url": URL}}
    thread = [
        {"role": "system", "content": [text("Rules."), PARTS["chat/completions"]]},
        {"role": "user", "content": [text("See"), video, text("and"), PARTS["chat/completions"], text("that.")]},
        {"role": "assistant", "content": "No."},
        {"role": "user", "content": "Well?"},
    ]
    answer = await Protocol(client, "chat/completions").post(thread)
    assert answer.status_code == 200 and answer.headers[HEADER] == "image, video"
    assert f"Rules.\n{IMAGE}" in backend.prompt and f"See\n{WORDS['video']}\nand\n{IMAGE}\nthat." in backend.prompt


def test_words_have_lines_of_their_own():
    picture = PictureSource("messages[0].content[0]", URL)
    parts = [picture, picture, text(""), text("a"), text("b\n"), picture, text("\nc")]
    (message,) = without_unseen([{"role": "tool", "content": parts}], LeftOut())
    assert message["content"] == f"{IMAGE}\n{IMAGE}\nab\n{IMAGE}\nc"


def test_a_transcript_of_a_model_that_saw_goes_on_with_one_that_does_not(backend: FakeBackend, text: TextModel):
    shown = {"type": "image_url", "image_url": {"url": f"picture:{'0' * 64}/8x6"}}
    film = {"type": "video", "video": [f"picture:{'0' * 64}/8x6@0.000000"]}
    before: Any = [{"role": "user", "content": [shown, film]}, {"role": "assistant", "content": "A circle."}]
    request = ChatRequest(agent="a", agent_continue=True, messages=[{"role": "user", "content": "And now?"}])
    chat = prepare_chat(text, backend.served[0], request, Past(before))
    assert f"{IMAGE}\n{WORDS['video']}" in chat.text and request.left_out.names == ["image", "video"]
