"""An agent's memory keeps how messages were shown to the model: calls as the model wrote them, the schema of an answer.
So the next prompt begins with the last prompt and answer, though the client sends neither in that form."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from satchel.api.text.model import load_text_model
from tests.worlds.api.remembering import Remembering
from tests.worlds.api.served_models import served_model
from tests.worlds.models.call_templates import write_family

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
FORM = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
CALL = '{"name": "weather", "arguments": {"city": "Köln"}}'
ASKED = {"role": "user", "content": "Hi"}


@pytest.fixture
async def endpoint(backend, config, tmp_path: Path) -> AsyncIterator[Remembering]:
    folder = write_family(tmp_path / "model", "hermes")
    backend.text = load_text_model(folder)
    backend.served[0] = served_model(folder=folder, context_tokens=4000)
    remembering = Remembering(backend, config)
    yield remembering
    await remembering.client.aclose()


def remembered(endpoint: Remembering) -> int:
    return endpoint.backend.requests[-1]["remembered_tokens"]


@pytest.mark.parametrize(
    "said",
    [
        f"I look.\n\n```json\n{CALL}\n```",
        CALL,
        f"<tool_call>\n{CALL}\n</tool_call>",
        "<tool_call>{'name':'weather','arguments':{'city':'Köln',}}</tool_call>",
    ],
)
async def test_a_call_that_is_sent_back_is_found_as_the_model_wrote_it(endpoint: Remembering, said: str):
    tokens = endpoint.draw(said)
    answer = (await endpoint.post({"messages": [ASKED], "tools": [TOOL]})).json()["choices"][0]["message"]
    (call,) = answer["tool_calls"]
    before = [*endpoint.prompt, *tokens]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "It rains."}
    sent = [ASKED, {"role": "assistant", "content": answer["content"], "tool_calls": [call]}, result]
    endpoint.draw("Take a coat.")
    await endpoint.post({"messages": sent, "tools": [TOOL]})
    assert endpoint.prompt[: len(before)] == before and remembered(endpoint) == len(before)
    more = [*sent, {"role": "assistant", "content": "Take a coat."}, {"role": "user", "content": "Thanks"}]
    before = [*endpoint.prompt, *endpoint.draw("Take a coat.")]
    await endpoint.post({"messages": more, "tools": [TOOL]})
    assert endpoint.prompt[: len(before)] == before
    # The transcript still has the call as a call.
    transcript = await endpoint.transcript()
    assert json.loads(transcript[1]["tool_calls"][0]["function"]["arguments"]) == {"city": "Köln"}


async def test_a_transcript_that_goes_on_shows_calls_as_they_were_written(endpoint: Remembering):
    tokens = endpoint.draw(f"```json\n{CALL}\n```")
    answer = (await endpoint.post({"messages": [ASKED], "tools": [TOOL]})).json()["choices"][0]["message"]
    before = [*endpoint.prompt, *tokens]
    result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "It rains."}
    await endpoint.post({"messages": [result], "tools": [TOOL], "agent_continue": True})
    assert endpoint.prompt[: len(before)] == before


async def test_another_answer_is_not_shown_as_it_was_written(endpoint: Remembering):
    endpoint.draw(f"```json\n{CALL}\n```")
    answer = (await endpoint.post({"messages": [ASKED], "tools": [TOOL]})).json()["choices"][0]["message"]
    (call,) = answer["tool_calls"]
    call["function"]["arguments"] = '{"city": "Bonn"}'
    sent = [ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}]
    await endpoint.post({"messages": [*sent, {"role": "user", "content": "So?"}], "tools": [TOOL]})
    shown = endpoint.backend.text.tokenizer.decode(endpoint.prompt)
    assert "<tool_call>" in shown and "```" not in shown and "Bonn" in shown


async def test_the_schema_of_an_answer_is_told_once_and_stays(endpoint: Remembering):
    told = json.dumps(SCHEMA)
    tokens = endpoint.draw('{"city": "Köln"}')
    await endpoint.post({"messages": [ASKED], "response_format": FORM})
    first = endpoint.backend.text.tokenizer.decode(endpoint.prompt)
    assert first.endswith(f"{told}<|im_end|>\n<|im_start|>assistant\n") and first.count(told) == 1
    before = [*endpoint.prompt, *tokens]
    sent = [ASKED, {"role": "assistant", "content": '{"city": "Köln"}'}, {"role": "user", "content": "And now?"}]
    for form in ({"response_format": FORM}, {}):
        await endpoint.post({"messages": sent, **form})
        shown = endpoint.backend.text.tokenizer.decode(endpoint.prompt)
        assert shown.count(told) == 1 and "And now?<|im_end|>" in shown
        assert endpoint.prompt[: len(before)] == before and remembered(endpoint) >= len(before)


@pytest.mark.parametrize(
    ("said", "form"),
    [
        (f"As {json.dumps(SCHEMA, indent=4)}, please.", FORM),
        ("Some JSON, please.", {"type": "json_object"}),
        ("Hi", {"type": "text"}),
    ],
)
async def test_what_the_prompt_says_is_not_told_again(endpoint: Remembering, said: str, form: dict[str, Any]):
    tokenizer = endpoint.backend.text.tokenizer
    await endpoint.post({"messages": [{"role": "user", "content": said}], "response_format": form})
    assert tokenizer.decode(endpoint.prompt).endswith(f"{said}<|im_end|>\n<|im_start|>assistant\n")


async def test_a_model_may_be_told_of_no_schema(endpoint: Remembering):
    backend = endpoint.backend
    await endpoint.post({"messages": [ASKED], "response_format": {"type": "json_object"}})
    assert "Hi\n\nAnswer with a JSON object" in backend.text.tokenizer.decode(endpoint.prompt)
    backend.served[0] = replace(backend.served[0], schema_in_prompt=False)
    await endpoint.post({"messages": [ASKED], "response_format": FORM})
    assert "Hi<|im_end|>" in backend.text.tokenizer.decode(endpoint.prompt)
