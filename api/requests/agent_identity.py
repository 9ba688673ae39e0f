"""Which agent a request belongs to: the one that the caller names, or one found from what agent programs send anyway.

Pure. The first of these that a request has counts: `X-Agent-ID` or `agent_id`; Claude Code's headers; Codex's;
`X-Session-ID`, which OpenCode and others send; the fields `conversation` and `prompt_cache_key`; `metadata.user_id`;
the beginning of a conversation of Qwen Code, which sends no id.

An agent that the caller did not name is called PROGRAM:ID, such as `claude-code:4f2c…`, so that it differs from named
ones. If an ID is too long or has characters that an agent's id may not have, its hash is used instead.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...cluster.errors import InvalidRequest
from .requests import agent_key

CLAUDE_CODE, CODEX, OPENCODE, QWEN_CODE = "claude-code", "codex", "opencode", "qwen-code"
SESSION, CONVERSATION, CACHE_KEY, USER = "session", "conversation", "cache-key", "user"
"""The PROGRAM in the names of agents whose program is unknown."""

_PLAIN = re.compile(r"[A-Za-z0-9._@-]{1,48}", re.ASCII)
_HASH = "sha256."
# As Claude Code writes it: user_HASH_account_UUID_session_UUID, or JSON with the session's id.
_CLAUDE_USER = re.compile(r"user_.*_session_([0-9A-Za-z-]{8,64})", re.ASCII)
_USER_JSON_CHARACTERS_MAX = 4096
# Versions 0.5, 0.15 and 0.24 of Qwen Code write the first sentence into the instructions of subagents only, and the
# second one into the first message of every conversation.
_QWEN_SUBAGENT = "You operate in non-interactive mode: do not ask the user questions; proceed with available context."
_QWEN_CONTEXT = "This is the Qwen Code. We are setting up the context for our chat."
_QWEN_REMINDER = "<system-reminder>"
_RULES_CHARACTERS = 64


@dataclass(frozen=True)
class Identity:
    """The agent of a request.

    Attributes:
        agent: its id, "" for none.
        program: the program that sent it, "" if unknown or if the caller named the agent.
        parent: the agent that a subagent works for, "" if there is none.
        named: whether the caller named the agent.
    """

    agent: str = ""
    program: str = ""
    parent: str = ""
    named: bool = False


NOBODY = Identity()


def identify(
    headers: Sequence[tuple[str, str]],
    *,
    agent_id: str | None = None,
    conversation: Any = None,
    prompt_cache_key: Any = None,
    metadata: Any = None,
    messages: Sequence[Mapping[str, Any]] = (),
) -> Identity:
    """Returns the agent of a request. Only an explicit name is checked; everything else is used if possible, and never
    refused.

    Args:
        headers: of the request, names in lower case. If a header comes several times, the first counts, except for
            `x-agent-id`.
        agent_id: a field of the body, as are the other arguments.

    Raises:
        InvalidRequest: `X-Agent-ID` or `agent_id` is not an agent id, or they differ; `param` names the wrong one.
    """
    named = _named_by_caller([value for name, value in headers if name == "x-agent-id"], agent_id)
    if named:
        return Identity(named, named=True)
    given = _Headers(headers)
    user_id = metadata.get("user_id") if isinstance(metadata, Mapping) else None
    found = (
        _claude_code(given)
        or _codex(given)
        or _session(given)
        or _by_field(CONVERSATION, conversation.get("id") if isinstance(conversation, Mapping) else conversation)
        or _by_field(CACHE_KEY, prompt_cache_key)
        or _user(user_id)
        or _qwen_code(given, messages)
    )
    return found or NOBODY


class _Headers:
    def __init__(self, headers: Sequence[tuple[str, str]]) -> None:
        self._values: dict[str, str] = {}
        for name, value in headers:
            self._values.setdefault(name, value.strip())

    def __getitem__(self, name: str) -> str:
        """Returns the first header's value, "" without one."""
        return self._values.get(name, "")


def _named_by_caller(headers: Sequence[str], agent_id: str | None) -> str:
    ids = [("X-Agent-ID", value) for value in headers]
    if agent_id is not None:
        ids.append(("agent_id", agent_id))
    for name, value in ids:
        if not value:
            raise InvalidRequest(f"{name} is empty", param=name)
        try:
            agent_key(value)
        except InvalidRequest as error:
            raise InvalidRequest(error.message.replace("agent_id", name, 1), param=name) from None
    if len({value for _, value in ids}) > 1:
        raise InvalidRequest("X-Agent-ID and agent_id name different agents", param="agent_id")
    return ids[0][1] if ids else ""


def _claude_code(headers: _Headers) -> Identity | None:
    """A subagent's id is only unique within its session, so its name has both."""
    session, agent = headers["x-claude-code-session-id"], headers["x-claude-code-agent-id"]
    within = [session] if session else []
    if not agent:
        return Identity(_name(CLAUDE_CODE, session), CLAUDE_CODE) if session else None
    parent = headers["x-claude-code-parent-agent-id"]
    above = [*within, parent] if parent else within
    return Identity(_name(CLAUDE_CODE, *within, agent), CLAUDE_CODE, _name(CLAUDE_CODE, *above) if above else "")


def _codex(headers: _Headers) -> Identity | None:
    """Subagents send the `session-id` and `prompt_cache_key` of their root agent."""
    if not (thread := headers["thread-id"]):
        return None
    parent = headers["x-codex-parent-thread-id"]
    if not parent and headers["x-openai-subagent"] and headers["session-id"] != thread:
        parent = headers["session-id"]
    return Identity(_name(CODEX, thread), CODEX, _name(CODEX, parent) if parent else "")


def _session(headers: _Headers) -> Identity | None:
    if not (session := headers["x-session-id"]):
        return None
    parent = headers["x-parent-session-id"]
    program = OPENCODE if headers["user-agent"].lower().startswith(OPENCODE) else ""
    kind = program or SESSION
    return Identity(_name(kind, session), program, _name(kind, parent) if parent else "")


def _by_field(kind: str, value: Any) -> Identity | None:
    return Identity(_name(kind, value)) if isinstance(value, str) and value else None


def _user(user_id: Any) -> Identity | None:
    if not isinstance(user_id, str) or not user_id:
        return None
    if session := _claude_session(user_id):
        return Identity(_name(CLAUDE_CODE, session), CLAUDE_CODE)
    return _by_field(USER, user_id)


def _qwen_code(headers: _Headers, messages: Sequence[Mapping[str, Any]]) -> Identity | None:
    """Qwen Code's first user message names the folder and the day; conversations with the same folder and day are
    branches of one agent. A subagent's conversation begins with the same message; its instructions say that it is a
    subagent, and its task follows. Users may write instructions too, so only the known sentence marks a subagent."""
    if not headers["user-agent"].lower().startswith("qwencode/"):
        return None
    said = [_spoken(message) for message in messages if message.get("role") == "user"]
    if not said or not said[0]:
        return None
    context, task = _context_and_task(said)
    main = _name(QWEN_CODE, _hashed(context))
    rules = _text(messages[0]) if messages[0].get("role") == "system" else ""
    if not task or _QWEN_SUBAGENT not in rules:
        return Identity(main, QWEN_CODE)
    return Identity(f"{main}:{_hashed([rules[:_RULES_CHARACTERS], task])}", QWEN_CODE, main)


def _context_and_task(said: Sequence[Any]) -> tuple[Any, Any]:
    """Returns the context, with which all conversations of a folder and a day begin, and a conversation's first task.
    Since 0.24 both are parts of one message, which also lists tools and skills."""
    parts = said[0] if isinstance(said[0], list) else []
    texts = [_text({"content": [part]}) for part in parts]
    known = [index for index, text in enumerate(texts) if _QWEN_CONTEXT in text]
    if len(parts) == 1 or not known:
        return said[0], said[1] if len(said) > 1 else None
    task = [part for part, text in zip(parts, texts, strict=True) if not text.startswith(_QWEN_REMINDER)]
    return [parts[known[0]]], task or (said[1] if len(said) > 1 else None)


def _spoken(message: Mapping[str, Any]) -> Any:
    """Returns a message's content, without its pictures."""
    content = message.get("content")
    return [part for part in content if isinstance(part, Mapping)] if isinstance(content, list) else content


def _text(message: Mapping[str, Any]) -> str:
    said = _spoken(message)
    parts = said if isinstance(said, list) else [{"text": said}]
    return "".join(part["text"] for part in parts if isinstance(part.get("text"), str))


def _hashed(said: Any) -> str:
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:32]


def _claude_session(user_id: str) -> str:
    """Returns the session that Claude Code puts into the user id, "" if another program made the id."""
    if (written := _CLAUDE_USER.fullmatch(user_id)) is not None:
        return written[1]
    if not user_id.startswith("{") or len(user_id) > _USER_JSON_CHARACTERS_MAX:
        return ""
    try:
        fields = json.loads(user_id)
    except (ValueError, RecursionError):
        return ""
    session = fields.get("session_id") if isinstance(fields, dict) else None
    return session if isinstance(session, str) else ""


def _name(program: str, *ids: str) -> str:
    """Returns an agent's id for the ids that a program gave. Different ids have different names."""
    return ":".join([program, *map(_plain, ids)])


def _plain(given: str) -> str:
    if _PLAIN.fullmatch(given) and not given.startswith(_HASH):
        return given
    # Half of the hash, so that a name with three parts fits into an agent's id.
    return _HASH + hashlib.sha256(given.encode("utf-8", "surrogatepass")).hexdigest()[:32]
