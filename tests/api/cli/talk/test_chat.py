"""`satchel chat` with a real server: what an agent remembers, and what cannot be sent."""

from __future__ import annotations

import json

import pytest

from ..conftest import Served


async def heard(served: Served, agent: str) -> list[str]:
    """Returns the texts of all messages on the branch that continues."""
    transcript = json.loads(await served.store.transcript(f"default/{agent}"))
    return [message["content"] for message in transcript if message["role"] == "user"]


async def test_an_agent_goes_on_from_one_call_to_the_next(served: Served) -> None:
    await served.says("chat", "--agent", "zed", "My name is Zoe.")
    await served.says("chat", "--agent", "zed", "What is my name?")
    assert await heard(served, "zed") == ["My name is Zoe.", "What is my name?"]


async def test_a_new_conversation_is_another_branch(served: Served) -> None:
    for text in ("My name is Zoe.", "What is my name?"):
        await served.says("chat", "--agent", "zed", text)
    await served.says("chat", "--agent", "zed", "--new", "Hello.")
    shown = json.loads(await served.says("agents", "show", "zed", "--json"))
    assert sorted(branch["messages"] for branch in shown["branches"]) == [2, 4]
    assert await heard(served, "zed") == ["My name is Zoe.", "What is my name?"]


@pytest.mark.parametrize("options", [[], ["--agent", "zed"], ["--agent", "zed", "--new"]])
async def test_a_conversation_in_the_terminal_goes_on(served: Served, options: list[str], backend) -> None:
    said = await served.says("chat", *options, input="My name is Zoe.\n\nWhat is my name?\n")
    assert said == "Hello there\n" * 2
    prompt = backend.text.tokenizer.decode(backend.requests[-1]["prompt"])
    assert prompt.index("My name is Zoe.") < prompt.index("Hello there") < prompt.index("What is my name?")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--agent", "zoë", "Hi"], "agent_id must be 1 to 128 of the characters"),
        (["--agent", "a\nb", "Hi"], "agent_id must be 1 to 128 of the characters"),
        (["--agent", "", "Hi"], "agent_id must be 1 to 128 of the characters"),
        (["--agent", "a" * 129, "Hi"], "agent_id must be 1 to 128 of the characters"),
        (["--new", "Hi"], "--new needs --agent"),
        (["--model", "zoë", "Hi"], "the model 'zoë' does not exist"),
        (["\udcff"], "not valid UTF-8"),
        (["--model", "\udcff", "Hi"], "not valid UTF-8"),
    ],
)
async def test_what_cannot_be_sent_is_one_sentence(served: Served, arguments: list[str], sentence: str) -> None:
    assert sentence in await served.refuses("chat", *arguments)
