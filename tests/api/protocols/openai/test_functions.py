"""OpenAI's older form of tools: functions become tools, and one call is returned in the older form."""

from __future__ import annotations

import json

WEATHER = {"name": "weather", "description": None, "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
TWO = CALL + CALL


async def test_a_call_is_answered_in_the_older_form(api, backend):
    backend.say(TWO)
    choice = (await api.chat(functions=[WEATHER])).json()["choices"][0]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"] == {"name": "weather", "arguments": '{"city": "Bonn"}'}
    assert "tool_calls" not in choice["message"]
    assert '"weather"' in backend.prompt and "null" not in backend.prompt


async def test_a_streamed_call_is_in_the_older_form(api, backend):
    backend.say(CALL)
    *chunks, _ = await api.stream(functions=[WEATHER])
    calls = [call for chunk in chunks if (call := chunk["choices"][0]["delta"].get("function_call"))]
    assert "".join(call.get("name", "") for call in calls) == "weather"
    assert json.loads("".join(call.get("arguments", "") for call in calls)) == {"city": "Bonn"}
    assert chunks[-1]["choices"][0]["finish_reason"] == "function_call"
    assert not any("tool_calls" in chunk["choices"][0]["delta"] for chunk in chunks)


async def test_without_a_call_the_answer_is_text(api, backend):
    backend.say("Hello")
    for how in ({}, {"function_call": "none"}, {"function_call": "auto"}):
        choice = (await api.chat(functions=[WEATHER], **how)).json()["choices"][0]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", "Hello")
        assert ('"weather"' in backend.prompt) == (how.get("function_call") != "none")


async def test_a_named_function_must_be_called(api, backend):
    backend.say(CALL)
    assert (await api.chat(functions=[WEATHER], function_call={"name": "weather"})).status_code == 200
    assert "weather" in backend.sampling.grammar


async def test_calls_and_results_go_back_in(api, backend):
    history = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": '{"city": "Bonn"}'}},
        {"role": "function", "name": "weather", "content": "rain"},
    ]
    response = await api.post({"messages": history, "functions": [WEATHER]})
    assert response.status_code == 200, response.text
    older = backend.prompt
    call = {"id": "x", "type": "function", "function": history[1]["function_call"]}
    newer = [
        history[0],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "x", "content": "rain"},
    ]
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    await api.post({"messages": newer, "tools": [tool]})
    assert backend.prompt == older
