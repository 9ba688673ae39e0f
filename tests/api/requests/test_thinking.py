"""Every usual switch of thinking has the same effect on a template, in every protocol."""

from __future__ import annotations

from typing import Any

import pytest

from satchel.api.protocols.anthropic.bodies import CountBody, MessagesBody
from satchel.api.protocols.ollama.bodies import OllamaChatBody
from satchel.api.protocols.openai.bodies import ChatBody
from satchel.api.protocols.openai.token_bodies import TokenizeBody
from satchel.api.protocols.responses.bodies import InputTokensBody, ResponseBody
from satchel.api.requests.fields.thinking import read_thinking
from satchel.api.requests.requests import ChatRequest
from satchel.cluster.config.config import Endpoint
from satchel.cluster.errors import InvalidRequest

SAID: list[Any] = [{"role": "user", "content": "Hi"}]
BODIES: dict[Any, dict[str, Any]] = {
    ChatBody: {"messages": SAID},
    TokenizeBody: {"messages": SAID},
    ResponseBody: {"input": "Hi"},
    InputTokensBody: {"input": "Hi"},
    MessagesBody: {"messages": SAID, "max_tokens": 9},
    CountBody: {"messages": SAID},
    OllamaChatBody: {"model": "m", "messages": SAID},
}
OFF: list[dict[str, Any]] = [
    {"enable_thinking": False},
    {"think": False},
    {"thinking": {"type": "disabled"}},
    {"thinking": False},
    {"reasoning": {"enabled": False}},
    {"reasoning": {"effort": "none"}},
    {"reasoning": {"enabled": False, "effort": "high"}},
    {"reasoning": {"max_tokens": 0}},
    {"reasoning_effort": "none"},
    {"reasoning_effort": "minimal"},
    {"thinking_budget": 0},
    {"reasoning_budget": 0},
    {"chat_template_kwargs": {"enable_thinking": False}},
]
ON: list[dict[str, Any]] = [
    {"enable_thinking": True},
    {"think": True},
    {"think": "high"},
    {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    {"thinking": {"type": "adaptive"}},
    {"reasoning": {"enabled": True}},
    {"chat_template_kwargs": {"enable_thinking": True}},
]
LOW: list[dict[str, Any]] = [
    {"reasoning_effort": "low"},
    {"reasoning": {"effort": "low"}},
    {"think": "low"},
    {"output_config": {"effort": "low"}},
    {"chat_template_kwargs": {"reasoning_effort": "low"}},
]


def read(kind: Any, fields: dict[str, Any]) -> Any:
    body = {**BODIES[kind], **fields}
    kind.check_fields(body, 100, Endpoint())
    made = kind.model_validate(body)
    made.check()
    return made


def request_of(kind: Any, fields: dict[str, Any]) -> ChatRequest:
    body = read(kind, fields)
    if kind in (ChatBody, OllamaChatBody):
        return body.request("")
    if kind is TokenizeBody:
        return body.request()
    return body.chat(SAID) if kind in (ResponseBody, InputTokensBody) else body.chat()


def kwargs_of(kind: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the template's variables for a request with these fields."""
    return dict(request_of(kind, fields).template_kwargs)


@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: kind.__name__)
def test_switches_reach_the_template_in_every_protocol(kind: Any):
    for wanted, switches in ((False, OFF), (True, ON)):
        for switch in switches:
            ((name, value),) = switch.items()
            if kind in (MessagesBody, CountBody) and name == "thinking" and value is False:
                continue
            if kind in (ResponseBody, InputTokensBody) and name == "reasoning" and isinstance(value, bool):
                continue
            assert kwargs_of(kind, switch).get("enable_thinking") is wanted, switch
            assert read(kind, switch).ignored == [], switch
    for switch in LOW:
        assert kwargs_of(kind, switch)["reasoning_effort"] == "low", switch


@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    "fields",
    [
        {"enable_thinking": "no"},
        {"think": "often"},
        {"thinking": {"type": "maybe"}},
        {"thinking": 5},
        {"reasoning": {"enabled": "no"}},
        {"reasoning": {"effort": "much"}},
        {"reasoning_effort": 3},
        {"thinking_budget": "all"},
        {"chat_template_kwargs": [1]},
        {"output_config": {"effort": "much"}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_malformed_switch_is_refused_by_name(kind: Any, fields: dict[str, Any]):
    with pytest.raises((InvalidRequest, ValueError)) as caught:
        read(kind, fields)
    assert next(iter(fields)) in str(caught.value)


def test_the_protocols_own_name_counts_first_and_others_are_named():
    said = {"thinking": {"type": "disabled"}, "enable_thinking": True, "think": False}
    body = read(MessagesBody, said)
    assert kwargs_of(MessagesBody, said)["enable_thinking"] is False and body.ignored == ["enable_thinking"]
    body = read(OllamaChatBody, said | {"think": True})
    assert body.request("").template_kwargs["enable_thinking"] is True and body.ignored == ["thinking"]


def test_variables_of_the_template_count_before_all():
    said = {"chat_template_kwargs": {"enable_thinking": True, "other": 1}, "thinking": {"type": "disabled"}}
    assert kwargs_of(MessagesBody, said) == {"enable_thinking": True, "other": 1}
    assert read(MessagesBody, said).ignored == ["thinking"]


def test_what_changes_nothing_is_named():
    given = {"thinking_budget": 500, "reasoning": {"effort": "high", "exclude": True, "max_tokens": 400}}
    assert read_thinking(given).ignored == ["reasoning.exclude", "thinking_budget"]


@pytest.mark.parametrize(
    ("said", "budget"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, 1024),
        ({"reasoning": {"max_tokens": 300}}, 300),
        ({"thinking_budget": 20}, 20),
        ({"reasoning_budget": 0}, 0),
        ({"thinking_budget": -1}, None),
        ({"reasoning": {"effort": "low"}}, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 10}, "thinking_budget": 10}, 10),
    ],
)
@pytest.mark.parametrize("kind", [ChatBody, MessagesBody, ResponseBody, OllamaChatBody])
def test_a_budget_reaches_the_request_in_every_protocol(kind: Any, said: dict[str, Any], budget: int | None):
    assert request_of(kind, said).thinking_budget == budget and read(kind, said).ignored == []
