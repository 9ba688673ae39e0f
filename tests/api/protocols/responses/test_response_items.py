"""`/v1/responses`: items that Codex and other clients send back. Tools among them can be called, all kinds of calls are
shown to the model with their results, and unsupported items are left out and named."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.worlds.api.responses_client import Responses

HI, AND_NOW = {"role": "user", "content": "Hi"}, {"role": "user", "content": "And now?"}
READ = {"type": "function", "name": "read", "parameters": {"type": "object"}, "strict": False}
EXEC = {"type": "custom", "name": "exec", "description": "Runs it."}
SEARCH = {
    "type": "tool_search",
    "execution": "client",
    "description": "Finds tools.",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
}


def call_of(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def more(*tools: Any) -> dict[str, Any]:
    return {"type": "additional_tools", "role": "developer", "id": "at_1", "tools": list(tools)}


def space(name: str, *tools: Any) -> dict[str, Any]:
    return {"type": "namespace", "name": name, "description": "d", "tools": list(tools)}


@pytest.fixture
def asking(client: httpx.AsyncClient) -> Responses:
    return Responses(client)


async def shown(asking: Responses, backend: Any, items: list[Any], left_out: str = "") -> str:
    """Returns the text that the model is shown behind the first message; it is the same whole, streamed, counted and in
    the background."""
    prompts: list[str] = []
    for how in ({}, {"stream": True}, {"background": True}):
        answer = await asking.post(items, **how)
        assert answer.status_code == 200, answer.text
        assert answer.headers.get("x-satchel-left-out", "") == left_out
        if how.get("background"):
            ended = await asking.client.get(f"/v1/responses/{answer.json()['id']}?stream=true")
            assert "response.completed" in ended.text
        prompts.append(backend.prompt.partition("<|im_start|>user\nHi<|im_end|>\n")[2])
    counted = await asking.client.post("/v1/responses/input_tokens", json={"input": items})
    assert counted.headers.get("x-satchel-left-out", "") == left_out
    assert counted.json()["input_tokens"] == len(backend.requests[-1]["prompt"])
    assert prompts[0] == prompts[1] == prompts[2]
    return prompts[0].removesuffix("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("tools", "written", "item"),
    [
        ([READ], call_of("read"), {"type": "function_call", "name": "read", "arguments": "{}"}),
        (
            [space("functions", READ)],
            call_of("read"),
            {"type": "function_call", "name": "read", "namespace": "functions", "arguments": "{}"},
        ),
        (
            [space("mcp__git", READ)],
            call_of("mcp__git__read"),
            {"type": "function_call", "name": "read", "namespace": "mcp__git", "arguments": "{}"},
        ),
        (
            [space("functions", EXEC)],
            call_of("exec", '{"input": "ls"}'),
            {"type": "custom_tool_call", "name": "exec", "namespace": "functions", "input": "ls"},
        ),
        (
            [SEARCH],
            call_of("tool_search", '{"query": "git"}'),
            {"type": "tool_search_call", "execution": "client", "arguments": {"query": "git"}},
        ),
    ],
)
async def test_tools_among_the_items_can_be_called(asking, backend, tools, written, item):
    backend.say(written)
    for stream in (False, True):
        asked = [more(*tools), HI]
        answer = (await asking.stream(asked))[-1]["response"] if stream else await asking.say(asked)
        (called,) = answer["output"]
        assert {name: called[name] for name in item} == item and called["status"] == "completed" and called["call_id"]
    first = backend.prompt
    # The client sends back the call as the model wrote it, so its memory is reused.
    result = {"type": "function_call_output", "call_id": called["call_id"], "output": "ok"}
    await asking.say([*asked, called, result])
    assert backend.prompt.startswith(f"{first}{written}<|im_end|>\n<|im_start|>tool\nok")


async def test_of_tools_with_one_name_the_later_counts_and_all_of_a_forced_choice(asking, backend):
    backend.say(call_of("read"))
    newer = {**READ, "description": "Reads better."}
    for items in ([more({**READ, "description": "Old."}), HI, more(newer)], [more(newer), HI]):
        await asking.say(items, tools=[{**READ, "description": "Old."}], tool_choice="required")
        assert "Reads better." in backend.prompt and "Old." not in backend.prompt
        assert backend.prompt.count('"name": "read"') == 1
        assert backend.sampling.grammar
    answer = await asking.post([more(READ), HI], tool_choice={"type": "function", "name": "read"})
    assert answer.status_code == 200


async def test_tools_that_a_search_found_can_be_called(asking, backend):
    backend.say(call_of("mcp__git__read"))
    search = {"type": "tool_search_call", "call_id": "c", "execution": "client", "arguments": {"query": "git"}}
    found = {"type": "tool_search_output", "call_id": "c", "execution": "client", "tools": [space("mcp__git", READ)]}
    answer = await asking.say([HI, search, found], tools=[SEARCH])
    assert [(item["name"], item["namespace"]) for item in answer["output"]] == [("read", "mcp__git")]
    assert "<|im_start|>tool\nTools found: mcp__git__read<|im_end|>" in backend.prompt
    # A search that OpenAI's servers made adds only its tools.
    hosted = [{**search, "call_id": None}, {**found, "call_id": None}]
    answer = await asking.post([HI, *hosted, AND_NOW])
    assert answer.headers["x-satchel-left-out"] == "tool_search_call"
    assert answer.json()["output"][0]["name"] == "read" and "Tools found" not in backend.prompt


async def test_a_chain_keeps_the_tools_among_its_items(asking, backend):
    backend.say("Yes.")
    first = await asking.say([more(READ), HI])
    second = await asking.say([AND_NOW], previous_response_id=first["id"])
    backend.say(call_of("read"))
    third = await asking.say([AND_NOW], previous_response_id=second["id"], tools=[EXEC])
    assert third["output"][0]["name"] == "read" and third["tools"] == [EXEC]
    assert '"exec"' in backend.prompt
    counted = await asking.client.post(
        "/v1/responses/input_tokens", json={"input": [AND_NOW], "previous_response_id": second["id"], "tools": [EXEC]}
    )
    assert counted.json()["input_tokens"] == len(backend.requests[-1]["prompt"])


async def test_hosted_tools_among_the_items_are_left_out_and_named(asking, backend):
    answer = await asking.post([more({"type": "web_search"}, READ, space("s", {"type": "mcp"})), HI])
    assert answer.status_code == 200 and answer.headers["x-satchel-left-out"] == "web_search, mcp"


async def test_what_agents_say_to_each_other_is_read(asking, backend):
    said = {"type": "agent_message", "author": "/lead", "recipient": "/lead/child"}
    parts = [{"type": "input_text", "text": "Say pong."}, {"type": "encrypted_content", "encrypted_content": "x"}]
    seen = await shown(asking, backend, [HI, {**said, "content": parts}], "encrypted_content")
    assert seen == "<|im_start|>user\nMessage from /lead to /lead/child:\nSay pong.<|im_end|>\n"
    assert "user\nSay pong.<" in await shown(asking, backend, [HI, {"type": "agent_message", "content": "Say pong."}])
    await shown(asking, backend, [HI, {**said, "content": parts[1:]}], "encrypted_content, agent_message")


async def test_what_an_agent_thought_is_its_reasoning(asking, thinker):
    history = [HI, {"type": "agent_reasoning", "text": "Hm."}, {"role": "assistant", "content": "Yes."}, AND_NOW]
    await asking.say(history)
    assert "<think>\nHm.\n</think>\n\nYes." in thinker.prompt


CALLS = [
    (
        [
            {"type": "local_shell_call", "call_id": "c", "action": {"type": "exec", "command": ["ls"], "env": None}},
            {"type": "function_call_output", "call_id": "c", "output": "a b"},
        ],
        call_of("local_shell", '{"command": ["ls"]}'),
        "a b",
    ),
    (
        [
            {"type": "local_shell_call", "id": "c", "action": {"type": "exec", "command": ["ls"]}},
            {"type": "local_shell_call_output", "id": "c", "output": "a b"},
        ],
        call_of("local_shell", '{"command": ["ls"]}'),
        "a b",
    ),
    (
        [
            {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}},
            {
                "type": "shell_call_output",
                "call_id": "c",
                "output": [
                    {"stdout": "a", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}},
                    {"stdout": "", "stderr": "no", "outcome": {"type": "exit", "exit_code": 2}},
                    {"stdout": "", "stderr": "", "outcome": {"type": "timeout"}},
                ],
            },
        ],
        call_of("shell", '{"commands": ["ls"]}'),
        "a\nno\nExit code 2\nIt took too long.",
    ),
    (
        [
            {"type": "apply_patch_call", "call_id": "c", "operation": {"type": "delete_file", "path": "a"}},
            {"type": "apply_patch_call_output", "call_id": "c", "status": "failed"},
        ],
        call_of("apply_patch", '{"type": "delete_file", "path": "a"}'),
        "failed",
    ),
    (
        [{"type": "mcp_call", "id": "c", "server_label": "git", "name": "log", "arguments": "{}", "output": "abc"}],
        call_of("git__log"),
        "abc",
    ),
    (
        [{"type": "mcp_call", "id": "c", "server_label": "git", "name": "log", "arguments": "{}", "error": "gone"}],
        call_of("git__log"),
        "Error: gone",
    ),
    (
        [
            {
                "type": "code_interpreter_call",
                "id": "c",
                "code": "1+1",
                "outputs": [{"type": "logs", "logs": "2"}, {"type": "image", "url": "x"}],
            }
        ],
        call_of("code_interpreter", '{"code": "1+1"}'),
        "2",
    ),
    (
        [{"type": "file_search_call", "id": "c", "queries": ["q"], "results": [{"filename": "a.txt", "text": "one"}]}],
        call_of("file_search", '{"queries": ["q"]}'),
        "a.txt\none",
    ),
    (
        [
            {"type": "program", "id": "p", "call_id": "c", "code": "run()", "fingerprint": "f"},
            {"type": "program_output", "id": "o", "call_id": "c", "result": "7", "status": "completed"},
        ],
        call_of("program", '{"code": "run()"}'),
        "7",
    ),
]


@pytest.mark.parametrize(("items", "call", "result"), CALLS)
async def test_calls_of_other_tools_are_shown_with_their_results(asking, backend, items, call, result):
    seen = await shown(asking, backend, [HI, *items, AND_NOW])
    assert seen == (
        f"<|im_start|>assistant\n{call}<|im_end|>\n<|im_start|>tool\n{result}<|im_end|>\n"
        "<|im_start|>user\nAnd now?<|im_end|>\n"
    )


NOTHING = (
    "web_search_call",
    "image_generation_call",
    "compaction",
    "context_compaction",
    "compaction_trigger",
    "ghost_snapshot",
    "configuration_update",
    "mcp_list_tools",
    "mcp_approval_request",
    "computer_call",
    "file_search_call",
    "thing_of_tomorrow",
)


@pytest.mark.parametrize("kind", NOTHING)
async def test_items_that_say_nothing_to_a_model_are_left_out_and_named(asking, backend, kind):
    for items in ([{"type": kind, "id": "x"}, HI], [HI, {"type": kind, "id": "x", "content": 5}]):
        assert (await shown(asking, backend, items, kind)) == ""


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "input_file", "filename": "a.txt", "file_data": "data:text/plain;base64,b25l"}, "File a.txt:\none"),
        ({"type": "document", "source": {"type": "text", "data": "one"}}, "Document:\none"),
    ],
)
async def test_what_is_text_is_shown_as_text(asking, backend, part, words):
    output = {"type": "function_call_output", "call_id": "c", "output": [part]}
    assert f"tool\n{words}<" in await shown(asking, backend, [HI, output])
    assert f"user\n{words}<" in await shown(asking, backend, [HI, {"role": "user", "content": [part]}])


async def test_parts_that_are_not_understood_end_no_conversation(asking, backend):
    pdf = {"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBERg=="}
    wave, text = {"type": "brain_wave"}, {"type": "input_text", "text": "a"}
    asked = {"role": "user", "content": [pdf, text]}
    assert "files" in (await asking.refused([HI, asked]))["message"]
    # The client asks again, with the earlier messages.
    seen = await shown(asking, backend, [HI, asked, AND_NOW], "input_file")
    assert "[The file a.pdf cannot be shown here.]\na<" in seen
    for item in (
        {"role": "assistant", "content": [wave, text]},
        {"type": "function_call_output", "call_id": "c", "output": [wave, text]},
        {"type": "reasoning", "content": [wave], "summary": [wave]},
        {"role": "user", "content": [wave, text]},
    ):
        await shown(asking, backend, [HI, item, AND_NOW], "brain_wave")
    for role in ("user", "developer"):
        await asking.refused([HI, {"role": role, "content": [wave]}])
    # An item without text behind a message does not make it an earlier one.
    await asking.refused([HI, {"role": "user", "content": [wave]}, more(READ), {"type": "compaction_trigger"}])


BROKEN = [
    ({"type": "agent_message", "content": 5}, "content"),
    ({"type": "agent_message", "author": 5, "content": "x"}, "author"),
    ({"type": "agent_reasoning", "text": 5}, "text"),
    ({"type": "additional_tools"}, "tools"),
    ({"type": "additional_tools", "tools": [{"type": "function"}]}, "tools[0].name"),
    ({"type": "additional_tools", "tools": [{"type": "namespace", "name": "s"}]}, "tools[0].tools"),
    ({"type": "tool_search_output", "call_id": "c", "tools": 5}, "tools"),
    ({"type": "tool_search_call", "call_id": "c", "arguments": 5}, "arguments"),
    ({"type": "local_shell_call", "call_id": "c"}, "action"),
    ({"type": "shell_call", "action": {}}, "call_id"),
    ({"type": "shell_call_output", "call_id": "c", "output": 5}, "output"),
    ({"type": "shell_call_output", "call_id": "c", "output": [{"stdout": 5}]}, "output[0].stdout"),
    ({"type": "apply_patch_call", "call_id": "c"}, "operation"),
    ({"type": "mcp_call", "id": "c", "name": "n", "server_label": "s"}, "arguments"),
    ({"type": "mcp_call", "id": "c", "name": "n", "server_label": "s", "arguments": "", "output": 5}, "output"),
    ({"type": "code_interpreter_call", "id": "c", "code": 5}, "code"),
    ({"type": "file_search_call", "id": "c", "results": 5}, "results"),
    ({"type": "program", "call_id": "c"}, "code"),
    ({"type": "program_output", "call_id": "c"}, "result"),
]


@pytest.mark.parametrize(("item", "where"), BROKEN)
async def test_known_items_that_are_broken_are_refused_by_their_place(asking, backend, item, where):
    assert (await asking.refused([HI, item]))["param"] == f"input[1].{where}"
    assert backend.requests == []


async def test_a_conversation_names_what_its_items_have_and_it_does_not(asking, backend, client):
    body = {"items": [more(READ), {"type": "thing_of_tomorrow"}]}
    made = await client.post("/v1/conversations", json=body)
    assert made.status_code == 200, made.text
    assert made.headers["x-satchel-left-out"] == "thing_of_tomorrow, additional_tools"
