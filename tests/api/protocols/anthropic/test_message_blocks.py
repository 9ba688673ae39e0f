"""`/v1/messages`: blocks of conversations that began at another server. Supported ones are shown to the model as text,
others are left out and named in a header. Unsupported blocks are an error only in the user's newest message."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.worlds.api.anthropic_client import HELLO, Messages

SEARCH = {"name": "ToolSearch", "input_schema": {"type": "object"}}
GREP = {"name": "grep", "input_schema": {"type": "object"}, "defer_loading": True}
AND_NOW = {"role": "user", "content": "And now?"}
PDF = {"type": "document", "title": "a.pdf", "source": {"type": "base64", "media_type": "application/pdf", "data": "J"}}
PLAIN = {"type": "text", "media_type": "text/plain", "data": "first\nsecond"}


@pytest.fixture
def messages(client: httpx.AsyncClient) -> Messages:
    return Messages(client)


def called(*results: Any) -> list[dict[str, Any]]:
    """Returns a conversation with a tool call, and the blocks of its result."""
    use = {"type": "tool_use", "id": "t", "name": "ToolSearch", "input": {"q": "g"}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": list(results)}
    return [*HELLO, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]


def answered(*blocks: Any) -> list[dict[str, Any]]:
    return [*HELLO, {"role": "assistant", "content": list(blocks)}, AND_NOW]


async def shown(messages: Messages, backend: Any, thread: list[dict[str, Any]], left_out: str = "") -> str:
    """Returns the text that the model is shown behind the first message; it is the same whole and streamed."""
    prompts: list[str] = []
    for stream in (False, True):
        response = await messages.post(thread, tools=[SEARCH, GREP], stream=stream)
        assert response.status_code == 200, response.text
        assert response.headers.get("x-satchel-left-out", "") == left_out
        prompts.append(backend.prompt.partition("<|im_start|>user\nHi<|im_end|>\n")[2])
    assert prompts[0] == prompts[1]
    body = {"model": "x", "messages": thread, "tools": [SEARCH, GREP]}
    counted = await messages.client.post("/v1/messages/count_tokens", json=body)
    assert counted.headers.get("x-satchel-left-out", "") == left_out
    assert counted.json()["input_tokens"] == len(backend.requests[-1]["prompt"])
    return prompts[0].removesuffix("<|im_start|>assistant\n")


async def test_a_tool_that_was_found_is_named_and_can_be_called(messages, backend):
    found = await shown(messages, backend, called({"type": "tool_reference", "tool_name": "grep"}))
    assert found.endswith("<|im_start|>tool\nTool found: grep<|im_end|>\n")
    assert '"grep"' in backend.prompt.partition("</tools>")[0]


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"type": "document", "source": PLAIN}, "Document:\nfirst\nsecond"),
        ({"type": "document", "source": PLAIN, "title": "a", "context": "b"}, "Document a (b):\nfirst\nsecond"),
        (
            {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "one"}]}},
            "Document:\none",
        ),
        ({"type": "document", "source": {"type": "content", "content": "one"}}, "Document:\none"),
        (
            {"type": "document", "source": {"type": "base64", "media_type": "text/csv", "data": "YSxi"}},
            "Document:\na,b",
        ),
        (
            {
                "type": "search_result",
                "title": "T",
                "source": "https://x",
                "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
            },
            "Search result T (https://x):\none\ntwo",
        ),
    ],
)
async def test_documents_of_text_are_text(messages, backend, block, words):
    in_result = await shown(messages, backend, called(block, {"type": "text", "text": "Done."}))
    assert in_result.endswith(f"<|im_start|>tool\n{words}\nDone.<|im_end|>\n")
    said = await shown(
        messages, backend, [*HELLO, {"role": "assistant", "content": "."}, {**AND_NOW, "content": [block]}]
    )
    assert said.endswith(f"<|im_start|>user\n{words}<|im_end|>\n")


@pytest.mark.parametrize(
    "source", [PDF["source"], {"type": "url", "url": "https://x"}, {"type": "file", "file_id": "f"}]
)
async def test_a_document_that_cannot_be_read_is_refused_once_and_ends_no_conversation(messages, backend, source):
    block = {**PDF, "source": source}
    thread = [{"role": "user", "content": [block, {"type": "text", "text": "What is it?"}]}]
    response = await messages.post(thread)
    assert response.status_code == 400 and "only text documents" in response.json()["error"]["message"]
    # The client asks again, with the earlier messages.
    assert (await messages.post([*thread, AND_NOW])).headers["x-satchel-left-out"] == "document"
    assert "user\n[The file a.pdf cannot be shown here.]\nWhat is it?\nAnd now?<" in backend.prompt
    assert (await shown(messages, backend, called(block), "document")).endswith(
        "tool\n[The file a.pdf cannot be shown here.]<|im_end|>\n"
    )
    # An agent program that reads a file for the model puts it beside the result.
    read = called({"type": "text", "text": "Read."})
    read[-1]["content"].append(block)
    assert (await shown(messages, backend, read, "document")).endswith(
        "tool\nRead.<|im_end|>\n<|im_start|>user\n[The file a.pdf cannot be shown here.]<|im_end|>\n"
    )


async def test_what_servers_tools_did_is_shown_as_calls_and_results(messages, backend):
    use = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}}
    page = {"type": "web_search_result", "title": "T", "url": "https://x", "encrypted_content": "e"}
    result = {"type": "web_search_tool_result", "tool_use_id": "s", "content": [page]}
    before, behind = {"type": "text", "text": "Let me see."}, {"type": "text", "text": "Here."}
    assert await shown(messages, backend, answered(before, use, result, behind)) == (
        "<|im_start|>assistant\nLet me see."
        '<tool_call>\n{"name": "web_search", "arguments": {"query": "q"}}\n</tool_call>'
        "<|im_end|>\n<|im_start|>tool\nT (https://x)<|im_end|>\n<|im_start|>assistant\nHere.<|im_end|>\n"
        "<|im_start|>user\nAnd now?<|im_end|>\n"
    )
    # A call that was cut off has no result, so the model cannot continue from it.
    cut = await shown(messages, backend, answered(before, use), "server_tool_use")
    assert cut.startswith("<|im_start|>assistant\nLet me see.<|im_end|>\n")
    # A result without its call is useless.
    await shown(messages, backend, answered(before, result), "web_search_tool_result")


async def test_an_answer_that_waits_behind_a_servers_tool_goes_on(messages, backend):
    use = {"type": "mcp_tool_use", "id": "m", "name": "log", "server_name": "git", "input": {}}
    result = {"type": "mcp_tool_result", "tool_use_id": "m", "content": [{"type": "text", "text": "abc"}]}
    paused = [*HELLO, {"role": "assistant", "content": [use, {**result, "is_error": True}]}]
    assert (await shown(messages, backend, paused)).endswith("<|im_start|>tool\nError: abc<|im_end|>\n")
    assert '"name": "git__log"' in backend.prompt


@pytest.mark.parametrize(
    ("kind", "content", "words"),
    [
        ("web_search", {"type": "web_search_tool_result_error", "error_code": "unavailable"}, "Error: unavailable"),
        (
            "web_fetch",
            {"type": "web_fetch_result", "url": "https://x", "content": {"type": "document", "source": PLAIN}},
            "https://x\nDocument:\nfirst\nsecond",
        ),
        ("web_fetch", {"type": "web_fetch_result", "url": "https://x", "content": PDF}, "https://x"),
        (
            "code_execution",
            {"type": "code_execution_result", "stdout": "out", "stderr": "err", "return_code": 1, "content": []},
            "out\nerr\nExit code 1",
        ),
        ("bash_code_execution", {"type": "r", "stdout": "out", "stderr": "", "return_code": 0, "content": []}, "out"),
        (
            "text_editor_code_execution",
            {"type": "text_editor_code_execution_view_result", "content": "line", "file_type": "text"},
            "line",
        ),
        (
            "tool_search",
            {
                "type": "tool_search_tool_search_result",
                "tool_references": [{"type": "tool_reference", "tool_name": name} for name in ("grep", "cat")],
            },
            "Tool found: grep\nTool found: cat",
        ),
        ("advisor", {"type": "advisor_result", "text": "Do."}, "Do."),
    ],
)
async def test_results_of_servers_tools_are_told_in_words(messages, backend, kind, content, words):
    use = {"type": "server_tool_use", "id": "s", "name": kind, "input": {}}
    result = {"type": f"{kind}_tool_result", "tool_use_id": "s", "content": content}
    seen = await shown(messages, backend, answered(use, result))
    assert f"<|im_start|>tool\n{words}<|im_end|>\n" in seen


async def test_a_summary_stands_for_all_before_it(messages, backend):
    thread = [
        *HELLO,
        {"role": "assistant", "content": "Old."},
        {"role": "user", "content": "More"},
        {
            "role": "assistant",
            "content": [{"type": "compaction", "content": "They met."}, {"type": "text", "text": "So?"}],
        },
        AND_NOW,
    ]
    await messages.say(thread)
    assert backend.prompt == (
        "<|im_start|>user\nSummary of the conversation so far:\n\nThey met.<|im_end|>\n"
        "<|im_start|>assistant\nSo?<|im_end|>\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"
    )
    # A failed one has no text.
    failed = {"type": "compaction", "content": None, "encrypted_content": "e"}
    assert "Hello" not in await shown(messages, backend, answered(failed, {"type": "text", "text": "a"}), "compaction")
    assert "user\nHi<" in backend.prompt


async def test_unknown_blocks_of_earlier_turns_are_left_out_and_named(messages, backend):
    hm, text = {"type": "brain_wave", "x": [1]}, {"type": "text", "text": "a"}
    for thread in (
        answered(hm, text),
        [{"role": "user", "content": [hm, text]}, {"role": "assistant", "content": "b"}, AND_NOW],
        called(hm, text),
    ):
        response = await messages.post(thread)
        assert response.status_code == 200 and response.headers["x-satchel-left-out"] == "brain_wave"
        assert "brain_wave" not in backend.prompt
    response = await messages.post([*HELLO, {"role": "assistant", "content": "b"}, {"role": "user", "content": [hm]}])
    assert response.status_code == 400 and "messages[2].content[0].type" in response.json()["error"]["message"]


async def test_tools_that_are_added_among_the_messages_can_be_called(messages, backend):
    backend.say('<tool_call>\n{"name": "late", "arguments": {}}\n</tool_call>')
    late = {"type": "tool_definition", "definition": {"name": "late", "input_schema": {"type": "object"}}}
    change = [{"type": "tool_addition", "tool": late}, {"type": "text", "text": "There is more."}]
    answer = await messages.say([*HELLO, {"role": "system", "content": change}, AND_NOW])
    assert [block["name"] for block in answer["content"]] == ["late"]
    assert "There is more." in backend.prompt
    known = {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "grep"}}
    gone = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "grep"}}
    await shown(messages, backend, [*HELLO, {"role": "system", "content": [known]}, AND_NOW])
    await shown(messages, backend, [*HELLO, {"role": "system", "content": [gone]}, AND_NOW], "tool_removal")


BROKEN = [
    (answered({"type": "server_tool_use", "name": "x", "input": {}}), "messages[1].content[0].id"),
    (answered({"type": "compaction", "content": 5}), "messages[1].content[0].content"),
    (
        answered(
            {"type": "server_tool_use", "id": "s", "name": "x", "input": 5},
            {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        ),
        "messages[1].content[0].input",
    ),
    (
        answered(
            {"type": "server_tool_use", "id": "s", "name": "x", "input": {}},
            {"type": "web_search_tool_result", "tool_use_id": "s", "content": 5},
        ),
        "messages[1].content[1].content",
    ),
    (called({"type": "tool_reference"}), "messages[2].content[0].content[0].tool_name"),
    (called({"type": "document", "source": {"type": "text"}}), "messages[2].content[0].content[0].source.data"),
    (called({"type": "search_result", "title": "t"}), "messages[2].content[0].content[0].source"),
    (called({"type": 5}), "messages[2].content[0].content[0].type"),
    ([*HELLO, {"role": "system", "content": [{"type": "tool_addition"}]}], "messages[1].content[0].tool"),
    (
        [
            *HELLO,
            {
                "role": "system",
                "content": [{"type": "tool_addition", "tool": {"type": "tool_definition", "definition": {}}}],
            },
        ],
        "messages[1].content[0].tool.definition.name",
    ),
]


@pytest.mark.parametrize(("thread", "where"), BROKEN)
async def test_known_blocks_that_are_broken_are_refused_by_their_place(messages, backend, thread, where):
    response = await messages.post(thread, tools=[SEARCH])
    assert response.status_code == 400 and response.json()["error"]["message"].startswith(where)
    assert backend.requests == []


async def test_the_input_of_an_earlier_call_may_be_text(messages, backend):
    use = {"type": "tool_use", "id": "t", "name": "ToolSearch", "input": '{"q": "g"}'}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]}
    await messages.say([*HELLO, {"role": "assistant", "content": [use]}, result])
    assert '{"name": "ToolSearch", "arguments": {"q": "g"}}' in backend.prompt
