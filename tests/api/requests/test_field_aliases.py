"""Raw fields under other protocols' names become a body's own, and ignored fields are named."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from satchel.api.protocols.anthropic.bodies import MessagesBody
from satchel.api.protocols.ollama.bodies import OllamaChatBody, OllamaGenerateBody
from satchel.api.protocols.openai.bodies import ChatBody, CompletionBody
from satchel.api.protocols.responses.bodies import ResponseBody
from satchel.api.requests.field_aliases import names_for_header
from satchel.api.requests.options import invalid
from satchel.cluster.config.config import Endpoint
from satchel.cluster.errors import InvalidRequest

SAID: list[Any] = [{"role": "user", "content": "Hi"}]
BODIES: dict[Any, dict[str, Any]] = {
    ChatBody: {"messages": SAID},
    CompletionBody: {"prompt": "Hi"},
    ResponseBody: {"input": "Hi"},
    MessagesBody: {"messages": SAID, "max_tokens": 99},
    OllamaChatBody: {"model": "m", "messages": SAID},
    OllamaGenerateBody: {"model": "m", "prompt": "Hi"},
}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}
FLAT = {"type": "json_schema", "name": "n", "schema": SCHEMA}


def read(kind: Any, **fields: Any) -> Any:
    body = {**BODIES[kind], **fields}
    kind.check_fields(body, 100, Endpoint())
    try:
        made = kind.model_validate(body)
    except ValidationError as error:
        raise invalid(error) from None
    made.check()
    return made


def options_of(body: Any) -> Any:
    if isinstance(body, ChatBody | CompletionBody):
        return body.request("").options
    return body.sampling if isinstance(body, OllamaChatBody | OllamaGenerateBody) else body.options


EVERY = pytest.mark.parametrize("kind", BODIES, ids=lambda kind: kind.__name__)


@EVERY
@pytest.mark.parametrize(
    ("fields", "option", "value"),
    [
        ({"stop": "x"}, "stop", ("x",)),
        ({"stop": ["x", "y"]}, "stop", ("x", "y")),
        ({"stop_sequences": ["x"]}, "stop", ("x",)),
        ({"options": {"stop": ["x"]}}, "stop", ("x",)),
        ({"temperature": 0.5}, "temperature", 0.5),
        ({"options": {"temperature": 0.5}}, "temperature", 0.5),
        ({"top_k": 7}, "top_k", 7),
        ({"options": {"top_k": 7}}, "top_k", 7),
        ({"min_p": 0.5}, "min_p", 0.5),
        ({"repetition_penalty": 1.5}, "repetition_penalty", 1.5),
        ({"repeat_penalty": 1.5}, "repetition_penalty", 1.5),
        ({"options": {"repeat_penalty": 1.5}}, "repetition_penalty", 1.5),
        ({"presence_penalty": 0.5}, "presence_penalty", 0.5),
        ({"seed": 7}, "seed", 7),
        ({"options": {"seed": 7}}, "seed", 7),
        ({"options": {"seed": -1}}, "seed", None),
        ({"logit_bias": {"5": 1}}, "logit_bias", ((5, 1.0),)),
        ({"stop_token_ids": [5]}, "stop_token_ids", (5,)),
        ({"ignore_eos": True}, "ignore_eos", True),
        ({"priority": 3}, "priority", 3),
    ],
    ids=str,
)
def test_a_way_to_draw_tokens_is_the_same_under_every_name(kind: Any, fields: Any, option: str, value: Any):
    body = read(kind, **fields)
    assert getattr(options_of(body), option) == value and body.ignored == []


@EVERY
@pytest.mark.parametrize(
    "name",
    ["max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens", "num_predict", "n_predict",
     "options.num_predict"],
)  # fmt: skip
def test_a_limit_of_tokens_is_the_same_under_every_name(kind: Any, name: str):
    outer, _, inner = name.partition(".")
    fields: dict[str, Any] = {outer: {inner: 7}} if inner else {outer: 7}
    body = read(kind, **fields)
    if kind is MessagesBody and name != "max_tokens":
        # The protocol's own name is required.
        assert (options_of(body).max_tokens, body.ignored) == (99, [name])
    else:
        assert (options_of(body).max_tokens, body.ignored) == (7, [])
    wrong: dict[str, Any] = {outer: {inner: "7"}} if inner else {outer: "7"}
    if kind is not MessagesBody or name == "max_tokens":
        with pytest.raises(InvalidRequest, match=name):
            read(kind, **wrong)


@EVERY
@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
        {"response_format": FLAT},
        {"guided_json": SCHEMA},
        {"structured_outputs": {"json": SCHEMA}},
        {"json_schema": SCHEMA},
        {"text": {"format": FLAT}},
        {"format": SCHEMA},
        {"format": FLAT},
        {"output_format": {"type": "json_schema", "schema": SCHEMA}},
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_form_is_the_same_under_every_name(kind: Any, fields: Any):
    body = read(kind, **fields)
    assert body.form is not None and body.form.value == SCHEMA and body.ignored == []
    assert body.form.where.startswith(next(iter(fields)))


@EVERY
@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"format": "xml"}, "format"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"output_format": {"type": "json_schema"}}, "output_format.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, "response_format.json_schema"),
        ({"stop_sequences": 5}, "stop_sequences"),
        ({"options": {"temperature": "x"}}, "options.temperature"),
        ({"repeat_penalty": 0}, "repeat_penalty"),
    ],
    ids=str,
)
def test_a_wrong_value_is_named_as_the_caller_names_it(kind: Any, fields: Any, place: str):
    with pytest.raises(InvalidRequest) as caught:
        read(kind, **fields)
    assert caught.value.message.startswith(place), caught.value.message


def test_what_the_system_says_has_two_names():
    system = {"role": "system", "content": "Be kind."}
    assert read(ChatBody, system="Be kind.").request("").messages == [system, *SAID]
    assert read(ChatBody, instructions="Be kind.").request("").messages == [system, *SAID]
    assert read(OllamaChatBody, instructions="Be kind.").request("").messages == [system, *SAID]
    assert read(MessagesBody, instructions="Be kind.").chat().messages == [system, *SAID]
    blocks = [{"type": "text", "text": "Be kind."}]
    assert read(ResponseBody, system=blocks).chat(SAID).messages == [system, *SAID]
    assert read(ChatBody, system=blocks).request("").messages == [system, *SAID]
    joined = read(ChatBody, messages=[{"role": "system", "content": "Be brief."}, *SAID], system="Be kind.")
    assert joined.request("").messages[0]["content"] == "Be kind.\n\nBe brief."
    continued = read(ChatBody, system="Be kind.", agent_continue=True).request("a")
    assert (continued.opening, continued.messages) == ([system], SAID)


def test_the_own_name_counts_and_another_value_is_named():
    body = read(ResponseBody, max_output_tokens=5, max_tokens=7, max_completion_tokens=5)
    assert options_of(body).max_tokens == 5 and body.ignored == ["max_tokens"]
    body = read(OllamaChatBody, options={"temperature": 0.5}, temperature=0.9)
    assert options_of(body).temperature == 0.5 and body.ignored == ["temperature"]
    body = read(ChatBody, response_format={"type": "json_object"}, format=SCHEMA, guided_json=None)
    assert body.form.where == "response_format" and body.ignored == ["format"]
    body = read(MessagesBody, stop_sequences=["a"], stop="b")
    assert options_of(body).stop == ("a",) and body.ignored == ["stop"]


def test_a_null_says_nothing():
    body = read(ResponseBody, max_output_tokens=None, max_tokens=7, stop=None, unheard_of=None)
    assert options_of(body).max_tokens == 7 and body.ignored == []


@EVERY
def test_an_unknown_field_is_named(kind: Any):
    body = read(kind, unheard_of=1, options={"num_gone": 4})
    assert sorted(body.ignored) == ["options.num_gone", "unheard_of"]
    assert read(kind).ignored == []
    if kind not in (OllamaChatBody, OllamaGenerateBody):
        assert read(kind, options=5).ignored == ["options"]


def test_a_switch_that_is_off_is_not_named():
    assert read(ChatBody, documents=[], echo=False, mirostat=0).ignored == []


def test_less_than_one_token_is_no_limit_only_under_its_own_name():
    assert options_of(read(ChatBody, num_predict=-1)).max_tokens is None
    assert options_of(read(ChatBody, options={"num_predict": -2})).max_tokens is None
    with pytest.raises(InvalidRequest, match="max_tokens"):
        read(OllamaChatBody, max_tokens=0)


def test_names_fit_into_a_header():
    assert names_for_header(["a", "b", "a"]) == "a, b"
    assert names_for_header(["a\r\nx: y", "ü", "", "a,b"]) == "a??x:?y, ?, ?, a?b"
    assert names_for_header(["x" * 1000]) == "x" * 64
    many = names_for_header([f"{number:03}{'x' * 60}" for number in range(100)])
    assert len(many) < 1024 and many.endswith("and 87 more")
