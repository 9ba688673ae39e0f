"""`truncation: auto`: which messages are left out of a conversation that does not fit."""

from __future__ import annotations

import json
from copy import copy
from itertools import pairwise
from typing import Any

import httpx
import pytest

from satchel.api.pipeline.truncation import truncated
from satchel.api.requests.options import Options
from satchel.api.requests.requests import ChatRequest, count_prompt
from satchel.api.text.templates.template import Template
from satchel.cluster.errors import InvalidRequest
from tests.worlds.api.responses_client import Responses
from tests.worlds.api.served_models import served_model

MODEL = served_model()
RULES = {"role": "system", "content": "Rules."}


def words(count: int, about: str) -> str:
    return f"{about} " + "word " * count


def turns(count: int, size: int = 8) -> list[Any]:
    said = []
    for i in range(count):
        said += [
            {"role": "user", "content": words(size, f"q{i}")},
            {"role": "assistant", "content": words(size, f"a{i}")},
        ]
    return [RULES, *said, {"role": "user", "content": "And now?"}]


def call(id: str) -> dict[str, Any]:
    function = {"name": "f", "arguments": json.dumps({"x": words(8, id)})}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": id, "type": "function", "function": function}],
    }


def result(id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": words(8, f"result {id}")}


def cut(text: Any, messages: list[Any], **options: Any) -> tuple[list[Any], int]:
    request = ChatRequest(messages=messages, options=Options(**options))
    left = truncated(text, MODEL, request, [])
    assert left.truncated_messages == len(messages) - len(left.request.messages)
    return list(left.request.messages), count_prompt(text, MODEL, left.request)


def test_what_fits_stays(text):
    assert cut(text, turns(3))[0] == turns(3)


@pytest.mark.parametrize("tokens", [None, 100, 600])
def test_the_oldest_goes_until_an_answer_fits(text, tokens):
    left, count = cut(text, turns(40), max_tokens=tokens)
    assert left[0] == RULES and left[-1]["content"] == "And now?"
    assert left[1:] == turns(40)[-len(left) + 1 :]
    assert count + min(tokens or 125, 500) <= 1000


def test_a_conversation_that_grows_begins_alike(text):
    firsts = [cut(text, turns(count))[0][1] for count in range(20, 40)]
    moved = sum(one != other for one, other in pairwise(firsts))
    grown = count_prompt(text, MODEL, ChatRequest(messages=turns(39))) - count_prompt(
        text, MODEL, ChatRequest(messages=turns(20))
    )
    assert moved <= grown // 250 + 1, "the beginning moves in steps of a quarter of the context"


def test_calls_stay_with_their_results(text):
    steps = [each for i in range(30) for each in (call(f"c{i}"), result(f"c{i}"))]
    messages = [RULES, {"role": "user", "content": "Do it."}, *steps]
    left, count = cut(text, messages)
    assert left[:2] == messages[:2] and count < 1000
    assert left[2]["role"] == "assistant" and left[2:] == messages[-len(left) + 2 :]
    parallel = [call("a"), call("b"), {"role": "user", "content": words(8, "aside")}, result("a"), result("b")]
    left, _ = cut(text, [*parallel, *turns(8)[1:]])
    assert not any("tool_calls" in message or message["role"] == "tool" for message in left)


def test_what_is_said_last_is_not_left_out(text):
    huge = [RULES, *turns(3)[1:-1], {"role": "user", "content": words(3000, "now")}]
    assert cut(text, huge)[0] == huge
    assert cut(text, [{"role": "system", "content": words(3000, "rules")}, *turns(3)[1:]])[1] > 1000


class AsksFirst(Template):
    """A template that requires a user message at the beginning."""

    def render(self, messages: Any, *args: Any, **how: Any) -> str:
        if next(message["role"] for message in messages if message["role"] != "system") != "user":
            raise InvalidRequest("a user begins")
        return super().render(messages, *args, **how)


def test_a_template_that_wants_a_user_first_gets_one(text):
    asking = copy(text)
    asking.template = AsksFirst(text.template.bare, text.template.tools)
    for count in range(12, 20):
        left, tokens = cut(asking, turns(count))
        assert left[1]["role"] == "user" and tokens < 1000


async def test_the_answer_says_so(client: httpx.AsyncClient, backend):
    asking = Responses(client)
    said = turns(40)[1:]
    assert (await asking.refused(said))["code"] == "context_length_exceeded"
    answer = await asking.post(said, truncation="auto", instructions="Rules.")
    count = answer.json()["satchel"]["truncated_messages"]
    assert count and answer.json()["truncation"] == "auto" and answer.headers["x-satchel-truncated"] == str(count)
    assert "Rules." in backend.prompt and "q0 " not in backend.prompt and "And now?" in backend.prompt
    events = await asking.stream(said, truncation="auto", instructions="Rules.")
    assert events[-1]["response"]["satchel"] == {"truncated_messages": count}
    assert "satchel" not in await asking.say("Hi", truncation="auto")
