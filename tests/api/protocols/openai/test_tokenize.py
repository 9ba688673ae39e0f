"""`/tokenize` and `/detokenize`: a prompt's tokens, without an answer."""

from __future__ import annotations

import pytest

USER = {"role": "user", "content": "Hi"}
PROMPT = "<|im_start|>user\nHi<|im_end|>\n"
REPLY = "<|im_start|>assistant\n"


@pytest.fixture(params=["/v1", ""])
def post(request, api):
    return lambda path, **body: api.client.post(f"{request.param}/{path}", json=body)


async def test_a_text_becomes_tokens_and_text_again(post, backend):
    tokens = backend.text.tokenizer.encode("Hello wörld <|im_end|>")
    shown = (await post("tokenize", prompt="Hello wörld <|im_end|>")).json()
    assert shown == {"count": len(tokens), "max_model_len": 1000, "tokens": tokens, "token_strs": None}
    assert (await post("detokenize", tokens=tokens)).json() == {"prompt": "Hello wörld <|im_end|>"}
    assert (await post("tokenize", prompt="")).json()["tokens"] == []
    assert (await post("detokenize", tokens=[])).json() == {"prompt": ""}
    assert backend.requests == []


async def test_tokens_are_shown_as_the_vocabulary_writes_them(post, backend):
    shown = (await post("tokenize", prompt="a b", return_token_strs=True)).json()
    assert "".join(shown["token_strs"]) == "aĠb" and len(shown["token_strs"]) == shown["count"]


@pytest.mark.parametrize(
    ("how", "messages", "said"),
    [
        ({}, [USER], PROMPT + REPLY),
        ({"add_generation_prompt": False}, [USER], PROMPT),
        (
            {"add_generation_prompt": False, "continue_final_message": True},
            [USER, {"role": "assistant", "content": "Hel"}],
            f"{PROMPT}{REPLY}Hel",
        ),
    ],
)
async def test_messages_are_shown_as_the_model_is_shown_them(post, backend, how, messages, said):
    shown = (await post("tokenize", messages=messages, **how)).json()
    assert backend.text.tokenizer.decode(shown["tokens"]) == said


async def test_a_text_may_be_longer_than_the_context_but_not_without_end(post):
    assert (await post("tokenize", prompt="word " * 900)).json()["count"] > 1000
    refused = await post("tokenize", prompt="word " * 40_000)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("tokenize", {}, "prompt"),
        ("tokenize", {"prompt": "x", "messages": [USER]}, "prompt"),
        ("tokenize", {"prompt": 5}, "prompt"),
        ("tokenize", {"messages": []}, "messages"),
        ("tokenize", {"messages": [USER], "chat_template": "x"}, "chat_template"),
        ("tokenize", {"messages": [USER], "continue_final_message": True}, "continue_final_message"),
        ("tokenize", {"prompt": "x", "return_token_strs": 1}, "return_token_strs"),
        ("tokenize", {"prompt": "x", "model": "nobody"}, "model"),
        ("detokenize", {}, "tokens"),
        ("detokenize", {"tokens": "x"}, "tokens"),
        ("detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("detokenize", {"tokens": [5, 10**6]}, "tokens[1]"),
        ("detokenize", {"tokens": [True]}, "tokens[0]"),
    ],
)
async def test_what_is_wrong_is_named(post, path, body, param):
    response = await post(path, **body)
    assert response.status_code in (400, 404), response.text
    assert response.json()["error"]["param"] == param
