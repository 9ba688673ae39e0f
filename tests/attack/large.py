"""Bodies as large as they may be: of one text, of everything that costs more than its bytes, and several at a time."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial

from .http import AttackOutcome, ask
from .http import at_a_time as together
from .scene import AttackScene

BYTES = 32 * 2**20 - 1024
"""Of most: what endpoint.body_bytes_max takes."""
_VALUES = 240_000
"""What endpoint.body_values_max takes."""
_USER = {"role": "user", "content": "Hi"}
_BESIDE = b'{"messages":[{"role":"user","content":"Hi"}],"max_tokens":2,"x":'


def _said(content: str) -> bytes:
    return b'{"messages":[{"role":"user","content":"' + content.encode() + b'"}],"max_tokens":2}'


def _fields(**fields: object) -> bytes:
    return json.dumps({"messages": [_USER], "max_tokens": 2, **fields}).encode()


def _filled(head: bytes, item: bytes, tail: bytes, count: int | None = None) -> bytes:
    count = (BYTES - len(head) - len(tail)) // (len(item) + 1) if count is None else count
    return head + b",".join([item] * count) + tail


def _calls(arguments: str) -> bytes:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return _fields(messages=[_USER, {"role": "assistant", "tool_calls": [call]}, _USER])


def _tool(values: int) -> bytes:
    parameters = {f"p{index}": {"type": "string", "description": "x"} for index in range(values // 7)}
    return _fields(tools=[{"type": "function", "function": {"name": "f", "parameters": parameters}}])


def _picture() -> bytes:
    address = "data:image/png;base64," + "A" * (BYTES // 4 * 4 - 512)
    content = [{"type": "image_url", "image_url": {"url": address}}]
    return _fields(model="satchel/shapes", messages=[{"role": "user", "content": content}])


def _keys(count: int, width: int = 6) -> bytes:
    return _BESIDE + json.dumps({f"{index:0{width}x}": 0 for index in range(count)}).encode() + b"}"


_MESSAGES, _CONTENT = b'{"messages":[', b'{"messages":[{"role":"user","content":['
_ONE = json.dumps(_USER).encode()
_CHATS: dict[str, Callable[[], bytes]] = {
    "one text": lambda: _said("a" * BYTES),
    "one text of words": lambda: _said("word " * (BYTES // 5)),
    "escapes": lambda: _said("\\u0000" * (BYTES // 6)),
    "backslashes": lambda: _said("\\\\" * (BYTES // 2)),
    "wide characters": lambda: _said("😀" * (BYTES // 4)),
    "a text beside": lambda: _BESIDE + b'"' + b"," * (BYTES - 100) + b'"}',
    "spaces": lambda: _BESIDE + b" " * (BYTES - 100) + b"1}",
    "small messages": lambda: _filled(_MESSAGES, _ONE, b"]}"),
    "10,000 messages": lambda: _filled(_MESSAGES, _ONE, b"]}", 10_000),
    "empty messages": lambda: _filled(_MESSAGES, b"{}", b"]}"),
    "parts": lambda: _filled(_CONTENT, b'{"type":"text","text":""}', b"]}]}"),
    "keys": lambda: _keys(BYTES // 13),
    "as many keys as may be": lambda: _keys(_VALUES // 2, 200),
    "equal keys": lambda: _filled(_BESIDE + b"{", b'"a":[1]', b"}}"),
    "depth": lambda: _BESIDE + b"[" * (BYTES - 100),
    "long numbers": lambda: _filled(_BESIDE + b"[", b"9" * 4000, b"]}"),
    "a tool": lambda: _tool(_VALUES),
    "arguments": lambda: _calls('{"a":[' + "[1]," * (_VALUES // 2) + "1]}"),
    "too many arguments": lambda: _calls('{"a":[' + "[1]," * (BYTES // 4 - 100) + "1]}"),
    "variables": lambda: _fields(chat_template_kwargs={f"p{index}": 1 for index in range(10**5)}),
    "stop strings": lambda: _fields(stop=[f"s{index}" for index in range(10**5)]),
    "biases": lambda: _fields(logit_bias={str(index): 1 for index in range(10**5)}),
    "a model's name": lambda: _fields(model="m" * (BYTES - 100)),
    "a role": lambda: _fields(messages=[{"role": "r" * (BYTES - 100), "content": "Hi"}]),
    "a picture": _picture,
}
_OTHERS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "token ids": ("/v1/completions", lambda: _filled(b'{"prompt":[', b"1", b"]}", _VALUES)),
    "too many token ids": ("/v1/completions", lambda: _filled(b'{"prompt":[', b"1", b"]}")),
    "prompts": ("/v1/completions", lambda: _filled(b'{"prompt":[', b'"Hi"', b"]}")),
    "an injection": ("/v1/agents/large/inject", lambda: _said("word " * (BYTES // 5))),
    "a fork": ("/v1/agents/large/fork", lambda: _fields(**{"as": "a" * (BYTES - 200)})),
    "a move": ("/v1/agents/large/move", lambda: _filled(b'{"to":[', b"{}", b"]}")),
}
CASES = {name: ("/v1/chat/completions", make) for name, make in _CHATS.items()} | _OTHERS


def run(scene: AttackScene) -> AttackOutcome:
    """Each alone, then four of each at a time until the time is over."""
    # 503: together they are more than endpoint.bodies_bytes_max.
    outcome = AttackOutcome(allowed=(503,))
    until = scene.ends()
    slowest, of = 0.0, ""

    def one(name: str, data: bytes) -> None:
        nonlocal slowest, of
        began = time.monotonic()
        answer = ask(scene.port, CASES[name][0], data)
        outcome.count(answer, f"{name}, {len(data)} bytes")
        if (took := time.monotonic() - began) > slowest:
            slowest, of = took, name

    for name, (_, make) in CASES.items():
        one(name, make())
    outcome.notes.append(f"the slowest answer took {slowest:.1f} s: {of}")
    names = list(CASES)
    while time.monotonic() < until:
        for name in names:
            data = CASES[name][1]()
            together(4, partial(one, name), [data] * 4, until)
    return outcome
