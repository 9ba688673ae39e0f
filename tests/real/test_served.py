"""What a server of a real model says: mlx-lm's words, whole and in pieces, alone, in company and after a power cut."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema_rs
import numpy as np
import pytest

from .reference import Reference, Tally, Words
from .served import SAID, Answer, Asked, Server, own_source, user

pytestmark = pytest.mark.real

TEXTS: dict[str, Asked] = {
    "code": own_source("textwrap")[:500],
    "function": 'def is_leap_year(year: int) -> bool:\n    """Whether a year has 366 days."""\n',
    "prose": "The lighthouse had been dark for eleven years when the old keeper came back. He put down his bag, looked "
    "at the rusty lamp and said to himself:",
    "other letters": "Der Fährmann rief über den Fluß: „Wer da?“ — 船夫听见有人回答 🚣 und",
}
CHATS: dict[str, Asked] = {
    "question": [user("Write a Python function that adds two numbers.")],
    "turns": [
        {"role": "system", "content": "You are a terse assistant."},
        user("What is the capital of France?"),
        {"role": "assistant", "content": "Paris."},
        user("And of Japan? Say also what river or sea is near."),
    ],
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": {field: {"type": "string"}}, "required": [field]},
        },
    }
    for name, description, field in (
        ("read_file", "Reads a file of the project.", "path"),
        ("run_tests", "Runs the tests of a folder.", "folder"),
    )
]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "languages": {"type": "array", "items": {"enum": ["Python", "C", "Rust"]}, "maxItems": 3},
    },
    "required": ["name", "age", "languages"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
LONG_TOKENS, LONG_SAID = 1500, 8


@pytest.fixture(scope="session")
def told(reference: Reference) -> dict[str, Asked]:
    """What is asked: texts to go on with, and of a model that has a chat template also conversations."""
    return {**TEXTS, **CHATS} if reference.chats else TEXTS


@pytest.fixture(scope="session")
def alone(server: Server, told: dict[str, Asked]) -> dict[str, Answer]:
    """The greedy answers of a server that is asked for nothing else."""
    return {name: server.ask(said) for name, said in told.items()}


@pytest.fixture
def chat(reference: Reference) -> None:
    if not reference.chats:
        pytest.skip("it has no chat template")


def hold(reference: Reference, prompt: list[int], words: dict[str, list[int]], what: str) -> None:
    """Holds tokens of greedy answers to a prompt against mlx-lm's logits."""
    tally = Tally(reference.allowed)
    for name, tokens in words.items():
        tally.words(reference.logits(prompt, tokens), tokens, name)
    tally.close(what)


def test_the_words_are_mlx_lm_s(reference: Reference, told: dict[str, Asked], alone: dict[str, Answer]):
    """The prompt's tokens are mlx-lm's. So are the answer's, and its text, up to a tie; after one the server's own
    words are what mlx-lm takes for the likeliest. No block of KV is full here, so none is sealed."""
    tally = Tally(reference.allowed)
    for name, said in told.items():
        answer = alone[name]
        assert answer.prompt == reference.prompt(said), name
        own: Words = reference.greedy(answer.prompt, SAID)
        if answer.tokens == own.tokens:
            # mlx-lm leaves out a space at the beginning.
            assert own.text in (answer.text, answer.text.removeprefix(" ")), name
        tally.words(reference.logits(answer.prompt, answer.tokens), answer.tokens, name)
    tally.close("as mlx-lm's greedy answers")


def test_four_at_once_say_what_each_says_alone(reference: Reference, server: Server, alone: dict[str, Answer]):
    """Other agents with the same prompts, so that memory is shared too."""
    asked = {name: TEXTS[name] for name in list(TEXTS)[:4]}
    with ThreadPoolExecutor(4) as pool:
        asking = {name: pool.submit(server.ask, said, f"agent-{name[:4]}") for name, said in asked.items()}
        answers = {name: one.result() for name, one in asking.items()}
    for name, answer in answers.items():
        assert answer.prompt == alone[name].prompt
        if answer.tokens != alone[name].tokens:
            hold(reference, answer.prompt, {name: answer.tokens}, "four at once")


def test_the_pieces_of_a_stream_are_the_whole_answer(
    reference: Reference, server: Server, told: dict[str, Asked], alone: dict[str, Answer]
):
    for name, said in told.items():
        streamed = server.stream(said)
        if streamed.tokens != alone[name].tokens:
            hold(reference, streamed.prompt, {name: streamed.tokens}, "streamed")
            continue
        assert (streamed.text, streamed.finish) == (alone[name].text, alone[name].finish), name
        assert (streamed.prompt, streamed.total) == (alone[name].prompt, alone[name].total), name


def test_an_answer_ends_before_a_stop_string(
    reference: Reference, server: Server, told: dict[str, Asked], alone: dict[str, Answer]
):
    """Whole and streamed, wherever tokens end: the string begins within a word."""
    for name, said in told.items():
        text = alone[name].text
        stop = text[len(text) // 2 :][:5]
        for answer in (server.ask(said, stop=[stop]), server.stream(said, stop=[stop])):
            if answer.tokens != alone[name].tokens[: len(answer.tokens)]:
                hold(reference, answer.prompt, {name: answer.tokens}, "with a stop string")
                assert stop not in answer.text
                continue
            assert (answer.text, answer.finish) == (text[: text.index(stop)], "stop"), (name, stop)


def test_logprobs_are_those_of_mlx_lm(reference: Reference, server: Server, alone: dict[str, Answer]):
    """Of the said token and the five likeliest ones, in their order."""
    for name in ("code", "prose"):
        answer = server.ask(TEXTS[name], logprobs=5)
        if answer.tokens != alone[name].tokens:
            hold(reference, answer.prompt, {name: answer.tokens}, "with logprobs")
        # In float32 the sum over a large vocabulary is off by a thousandth.
        logits = reference.logits(answer.prompt, answer.tokens).astype(np.float64)
        exact = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
        # Of both logits, and of the sum of all.
        allowed = 2 * reference.allowed.off * np.abs(logits).max(axis=1)
        for at, token in enumerate(answer.tokens):
            said, top = answer.logprobs[at].said, list(answer.logprobs[at].top.values())
            assert abs(said - exact[at, token]) <= allowed[at], (name, at)
            assert top == sorted(top, reverse=True) and said <= top[0] + allowed[at]
            # Two tokens may be spelled alike.
            best = np.sort(exact[at])[::-1][:5]
            assert len(top) < 5 or np.abs(np.array(top) - best).max() <= allowed[at], (name, at)


def test_a_long_prompt_leaves_short_sequences_their_words(
    reference: Reference, server: Server, alone: dict[str, Answer]
):
    """They are answered while it is read; asked again it is found in memory, and the answer is the same up to a tie."""
    source = own_source("argparse")
    long = reference.tokenizer.decode(reference.prompt(source)[:LONG_TOKENS], skip_special_tokens=True)
    asked = {"max_tokens": LONG_SAID, "logprobs": 5}
    with ThreadPoolExecutor(4) as pool:
        reading = pool.submit(server.ask, long, "reader", **asked)
        short = {name: pool.submit(server.ask, TEXTS[name], "other") for name in ("code", "function", "prose")}
        answers = {name: one.result() for name, one in short.items()}
        first = reading.result()
    for name, answer in answers.items():
        if answer.tokens != alone[name].tokens:
            hold(reference, answer.prompt, {name: answer.tokens}, "beside a long prompt")
    again = server.ask(long, "reader", **asked)
    assert len(first.prompt) > LONG_TOKENS - 10 and again.cached >= len(first.prompt) - 1
    hold_tie(reference, first, again)


def hold_tie(reference: Reference, first: Answer, second: Answer) -> None:
    """Two greedy answers to a text are equal until a tie by the first one's logprobs."""
    pairs = zip(first.tokens, second.tokens, strict=False)
    parted = next((at for at, (one, other) in enumerate(pairs) if one != other), None)
    if parted is None:
        return
    top, said = first.logprobs[parted].top, second.logprobs[parted].token
    print(f"two answers part at token {parted}: {top}, {said!r}")
    assert said in top and max(top.values()) - top[said] <= reference.allowed.tie_nats


def well_formed(reference: Reference, answer: Answer, what: str) -> None:
    """Calls are of tools that there are, with arguments that fit; an answer without one is all that the model wrote."""
    for call in answer.calls:
        (tool,) = [tool["function"] for tool in TOOLS if tool["function"]["name"] == call["function"]["name"]]
        jsonschema_rs.validate(tool["parameters"], json.loads(call["function"]["arguments"]))
        assert call["id"], what
    wrote = reference.tokenizer.decode(answer.tokens, skip_special_tokens=True)
    if not answer.calls:
        assert answer.text == wrote, what
    elif answer.finish != "length":
        assert answer.finish == "tool_calls" and "tool_call>" not in answer.text, what


@pytest.mark.usefixtures("chat")
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_answers_with_tools_are_well_formed(reference: Reference, server: Server, choice: str):
    """Whatever the model writes, whole and streamed; where it must call, there is a call."""
    for text in ("Read the file setup.py.", "Run the tests in tests/unit, please.", "What is 2 + 2?"):
        more: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 64}
        whole, streamed = server.ask([user(text)], **more), server.stream([user(text)], **more)
        for answer in (whole, streamed):
            well_formed(reference, answer, text)
            assert choice == "auto" or answer.calls, text
        if whole.tokens == streamed.tokens:
            told = [[call["function"] for call in answer.calls] for answer in (whole, streamed)]
            assert told[0] == told[1] and whole.finish == streamed.finish, text
            assert whole.text == streamed.text, text


def test_an_answer_fits_its_schema(reference: Reference, server: Server):
    """It ends by itself and fits, or at the limit, and is the beginning of one that does."""
    said: Asked = [user("Make up a programmer, as JSON.")] if reference.chats else "A programmer, as JSON:\n"
    for answer in (
        server.ask(said, max_tokens=96, response_format=FORM),
        server.stream(said, max_tokens=96, response_format=FORM),
    ):
        assert answer.finish in ("stop", "length")
        if answer.finish == "stop":
            jsonschema_rs.validate(PERSON, json.loads(answer.text))
        else:
            assert answer.text.lstrip().startswith("{") or not answer.text.strip()


def test_a_model_without_a_template_says_what_a_chat_lacks(reference: Reference, server: Server):
    """In every protocol; and texts are gone on with."""
    if reference.chats:
        pytest.skip("it has a chat template")
    said = {"model": "m", "max_tokens": 8}
    for route, body in (
        ("/v1/chat/completions", {**said, "messages": [user("Hello")]}),
        ("/v1/messages", {**said, "messages": [user("Hello")]}),
        ("/v1/responses", {"model": "m", "input": "Hello"}),
        ("/api/chat", {"model": "m", "messages": [user("Hello")], "stream": False}),
    ):
        refused = server.http.post(route, json=body)
        assert refused.status_code == 400, (route, refused.text)
        assert "no chat template" in refused.text and "/v1/completions" in refused.text, (route, refused.text)


def test_memory_outlives_a_power_cut(reference: Reference, server: Server):
    """The next turn after a restart finds all that was said, and is answered as from the beginning, up to a tie."""
    start = own_source("argparse")[2000:3200]
    more: dict[str, Any] = {"logprobs": True, "top_logprobs": 5} if reference.chats else {"logprobs": 5}
    first: Asked = [user(f"What does this do?\n{start}")] if reference.chats else start
    before = server.ask(first, "writer", **more)
    server.written()
    server.kill_and_restart()
    if isinstance(first, str):
        second: Asked = first + before.text + "\n\n    def"
    else:
        second = [*first, {"role": "assistant", "content": before.text}, user("Shorter, please.")]
    after = server.ask(second, "writer", **more)
    # The last token was said and not read.
    assert after.cached >= before.total - 1, (before.total, after.cached)
    fresh = server.ask(second, cache_salt="nobody's", **more)
    assert fresh.cached == 0 and fresh.prompt == after.prompt
    hold_tie(reference, fresh, after)
