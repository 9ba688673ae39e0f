"""The agent of a request: the named one, or one found from what programs send anyway, in this order."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from satchel.api.media.sources import PictureSource
from satchel.api.requests.agent_identity import NOBODY, Identity, identify
from satchel.api.requests.requests import agent_key
from satchel.cluster.errors import InvalidRequest

SESSION = "11111111-2222-3333-4444-555555555555"
QWEN = [{"role": "system", "content": "You are Qwen Code."}, {"role": "user", "content": "In /a."}]
QWEN_SUBAGENT = (
    "You are a general-purpose agent.\n\nImportant Rules:\n"
    " - You operate in non-interactive mode: do not ask the user questions; proceed with available context.\n"
)
QWEN_HASH = hashlib.sha256(b'"In /a."').hexdigest()[:32]
QWEN_TEXT = {"type": "text", "text": "In /a."}
QWEN_SEES = [{"role": "user", "content": [PictureSource("messages[0]", "data:"), QWEN_TEXT]}]
QWEN_SEES_HASH = hashlib.sha256(json.dumps([QWEN_TEXT]).encode()).hexdigest()[:32]
CLAUDE = {"x-claude-code-session-id": SESSION}
EVERYTHING: dict[str, Any] = {
    "headers": {
        "x-agent-id": "ann",
        "x-claude-code-agent-id": "a1",
        "x-claude-code-session-id": "s1",
        "thread-id": "t1",
        "x-session-id": "o1",
    },
    "conversation": "conv_1",
    "prompt_cache_key": "key",
    "metadata": {"user_id": "u1"},
}


def of(headers: dict[str, str] | None = None, **fields: Any) -> Identity:
    return identify(list((headers or {}).items()), **fields)


@pytest.mark.parametrize(
    ("headers", "fields", "agent", "program", "parent"),
    [
        ({}, {}, "", "", ""),
        ({"x-agent-id": "ann@home:1"}, {}, "ann@home:1", "", ""),
        ({}, {"agent_id": "ann"}, "ann", "", ""),
        # Claude Code.
        (CLAUDE, {}, f"claude-code:{SESSION}", "claude-code", ""),
        (
            {**CLAUDE, "x-claude-code-agent-id": "a1"},
            *({}, f"claude-code:{SESSION}:a1", "claude-code", f"claude-code:{SESSION}"),
        ),
        (
            {**CLAUDE, "x-claude-code-agent-id": "a2", "x-claude-code-parent-agent-id": "a1"},
            *({}, f"claude-code:{SESSION}:a2", "claude-code", f"claude-code:{SESSION}:a1"),
        ),
        ({"x-claude-code-agent-id": "a1"}, {}, "claude-code:a1", "claude-code", ""),
        (
            *({}, {"metadata": {"user_id": f"user_0f_account__session_{SESSION}"}}),
            *(f"claude-code:{SESSION}", "claude-code", ""),
        ),
        (
            *({}, {"metadata": {"user_id": json.dumps({"device_id": "d", "session_id": SESSION})}}),
            *(f"claude-code:{SESSION}", "claude-code", ""),
        ),
        # Codex: subagents send the key and the session of their root.
        ({"thread-id": "t1", "session-id": "t1"}, {"prompt_cache_key": "t1"}, "codex:t1", "codex", ""),
        (
            {"thread-id": "t2", "session-id": "t1", "x-codex-parent-thread-id": "t1", "x-openai-subagent": "review"},
            *({"prompt_cache_key": "t1"}, "codex:t2", "codex", "codex:t1"),
        ),
        (
            {"thread-id": "t2", "session-id": "t1", "x-openai-subagent": "compact"},
            *({}, "codex:t2", "codex", "codex:t1"),
        ),
        ({"session-id": "t1"}, {}, "", "", ""),
        # OpenCode, and others with a session.
        ({"x-session-id": "ses_1", "user-agent": "opencode/1.2"}, {}, "opencode:ses_1", "opencode", ""),
        (
            {"x-session-id": "ses_2", "x-parent-session-id": "ses_1", "user-agent": "opencode/1.2"},
            *({}, "opencode:ses_2", "opencode", "opencode:ses_1"),
        ),
        ({"x-session-id": "1"}, {}, "session:1", "", ""),
        # Qwen Code, which sends no id.
        ({"user-agent": "QwenCode/1 (linux)"}, {"messages": QWEN}, "qwen-code:" + QWEN_HASH, "qwen-code", ""),
        ({"user-agent": "QwenCode/1 (linux)"}, {"messages": QWEN_SEES}, "qwen-code:" + QWEN_SEES_HASH, "qwen-code", ""),
        ({"user-agent": "QwenCode/1 (linux)"}, {"messages": QWEN[:1]}, "", "", ""),
        ({"user-agent": "qwen"}, {"messages": QWEN}, "", "", ""),
        # Fields.
        ({}, {"conversation": "conv_1"}, "conversation:conv_1", "", ""),
        ({}, {"conversation": {"id": "conv_1"}}, "conversation:conv_1", "", ""),
        ({}, {"prompt_cache_key": "key"}, "cache-key:key", "", ""),
        ({}, {"metadata": {"user_id": "u1"}}, "user:u1", "", ""),
    ],
)
def test_who_it_is(headers, fields, agent, program, parent):
    found = of(headers, **fields)
    assert found == Identity(agent, program, parent, named="agent_id" in fields or "x-agent-id" in headers)


def test_the_order():
    left: dict[str, Any] = {**EVERYTHING, "headers": dict(EVERYTHING["headers"])}
    seen = []
    steps = ("x-agent-id", "x-claude-code-agent-id", "x-claude-code-session-id", "thread-id", "x-session-id")
    for header in steps:
        seen.append(of(**left).agent)
        del left["headers"][header]
    for field in ("conversation", "prompt_cache_key", "metadata"):
        seen.append(of(**left).agent)
        del left[field]
    claude = ["claude-code:s1:a1", "claude-code:s1"]
    assert seen == ["ann", *claude, "codex:t1", "session:o1", "conversation:conv_1", "cache-key:key", "user:u1"]
    assert of(**left) == NOBODY


ODD = ["a b", "ä" * 50, "x" * 5000, "a/b", "a:b", "{", "\ud800", "sha256.0", "\x00", "[]", '{"session_id": 5}']


@pytest.mark.parametrize("odd", ODD)
def test_an_odd_id_is_mapped_to_one_that_agents_may_have(odd):
    names = [
        of({"x-claude-code-session-id": odd, "x-claude-code-agent-id": odd}).agent,
        of({"thread-id": odd}).agent,
        of({"x-session-id": odd}).agent,
        of(conversation=odd).agent,
        of(prompt_cache_key=odd).agent,
        of(metadata={"user_id": odd}).agent,
    ]
    assert len(set(names)) == len(names)
    for name in names:
        assert agent_key(name)
        assert odd.strip("\x00") == "" or odd not in name.partition(":")[2] or odd in ("{", "[]")


def test_different_ids_have_different_names():
    given = [*ODD, "a", "b", "a.b", "x" * 48, "x" * 49]
    names = {of(prompt_cache_key=each).agent for each in given}
    assert len(names) == len(given)
    assert (
        of({"x-claude-code-session-id": "a:b"}).agent
        != of({"x-claude-code-session-id": "a", "x-claude-code-agent-id": "b"}).agent
    )


def test_qwen_codes_subagents_work_for_who_begins_alike():
    agent = {"user-agent": "QwenCode/1 (linux)"}
    task, other = ({"role": "user", "content": [{"type": "text", "text": text}]} for text in ("Do it.", "Do that."))
    rules = {"role": "system", "content": [{"type": "text", "text": QWEN_SUBAGENT}]}
    main = of(agent, messages=[*QWEN, task])
    assert main == of(agent, messages=QWEN) and not main.parent
    first = of(agent, messages=[rules, QWEN[1], task])
    assert first == of(agent, messages=[rules, QWEN[1], task, {"role": "assistant", "content": "Well."}])
    assert first.agent.startswith(f"{main.agent}:") and (first.parent, first.program) == (main.agent, "qwen-code")
    assert first.agent != of(agent, messages=[rules, QWEN[1], other]).agent
    assert agent_key(first.agent)
    for odd in (None, 5, [], [5], [{"type": "text", "text": 5}], "You are Ada."):
        assert of(agent, messages=[{"role": "system", "content": odd}, QWEN[1], task]) == main


def test_qwen_codes_first_message_may_have_the_task_too():
    """Since 0.24 it also lists tools and skills; a subagent gets fewer of them."""

    def asked(system: str, *texts: str) -> Identity:
        parts = [{"type": "text", "text": text} for text in texts]
        spoken = [{"role": "system", "content": system}, {"role": "user", "content": parts}]
        return of({"user-agent": "QwenCode/0.24.4 (linux; x64)"}, messages=spoken)

    context = "<system-reminder>\nThis is the Qwen Code. We are setting up the context for our chat.\nIn /a."
    skills, tools = "<system-reminder>\nSkills", "<system-reminder>\nTools"
    main = asked("You are Ada.", skills, context, tools, "Do it.")
    assert main == asked("You are Ada.", context, "Do that.") != asked("You are Ada.", context + "\nIn /b.", "Do it.")
    works = asked(QWEN_SUBAGENT, skills, context, "Look.")
    assert works.agent.startswith(f"{main.agent}:") and works.parent == main.agent
    assert works == asked(QWEN_SUBAGENT, context, "Look.") != asked(QWEN_SUBAGENT, context, "Read.")


@pytest.mark.parametrize("value", [5, True, [], {}, {"id": 5}, None, "", 1.5])
def test_a_field_of_another_form_names_nobody(value):
    assert of(conversation=value, prompt_cache_key=value, metadata=value) == NOBODY
    assert of(metadata={"user_id": value}) == NOBODY


@pytest.mark.parametrize("agent", ["", " ", "a b", "ä", "x" * 129, "a/b"])
def test_who_is_named_must_be_named_rightly(agent):
    with pytest.raises(InvalidRequest, match=r"^X-Agent-ID"):
        of({**CLAUDE, "x-agent-id": agent})
    with pytest.raises(InvalidRequest, match=r"^agent_id"):
        of(CLAUDE, agent_id=agent)
    with pytest.raises(InvalidRequest, match="different agents"):
        identify([("x-agent-id", "a"), ("x-agent-id", "b")])
