"""Less common fields of OpenAI and vLLM: each works as documented."""

from __future__ import annotations

from typing import Any

import pytest

from satchel.actors.model_files.text.infill import InfillMarks, infill_marks
from satchel.actors.protocol.replica_messages import SequenceUpdate
from tests.worlds.api.served_models import served_model

USER = {"role": "user", "content": "Hi"}
BEGIN = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


async def test_the_fingerprint_is_the_models_in_bodies_and_chunks(api, backend):
    first = (await api.chat()).json()["system_fingerprint"]
    assert first.startswith("fp_")
    assert (await api.complete("x")).json()["system_fingerprint"] == first
    chunks = [*(await api.stream()), *(await api.complete_stream(["x"]))]
    assert {chunk["system_fingerprint"] for chunk in chunks if chunk != "[DONE]"} == {first}
    backend.served[0] = served_model(backend.served[0], model_id=b"9" * 32)
    assert (await api.chat()).json()["system_fingerprint"] != first


async def test_continuous_usage_is_in_every_chunk(api, backend):
    backend.say("one two three")
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last, _ = await api.stream(stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[0] == 0 < counts[1], "the first one has the role alone"
    assert counts[-1] == last["usage"]["completion_tokens"] == len(backend.text.tokenizer.encode("one two three"))


async def test_a_stop_string_stays_if_it_is_asked_for(api, backend):
    for keeps in (True, False):
        backend.say("line one\n\nline two")
        how: dict[str, Any] = {"stop": ["\n\n"], "include_stop_str_in_output": keeps}
        wanted = "line one\n\n" if keeps else "line one"
        assert (await api.complete("x", **how)).json()["choices"][0]["text"] == wanted
        assert (await api.chat(logprobs=True, **how)).json()["choices"][0]["message"]["content"] == wanted


async def test_a_stop_token_stays_if_it_is_asked_for(api, backend):
    stop = backend.text.tokenizer.encode("!")
    for keeps in (True, False):
        backend.play(
            SequenceUpdate("r", [*backend.text.tokenizer.encode("Hello"), *stop], finish="stop", cached_tokens=0)
        )
        response = await api.chat(stop_token_ids=stop, include_stop_str_in_output=keeps)
        assert response.json()["choices"][0]["message"]["content"] == ("Hello!" if keeps else "Hello")


async def test_special_tokens_are_text_if_they_are_asked_for(api, backend):
    (special,) = backend.text.tokenizer.encode("<|im_start|>")
    (end,) = backend.text.tokenizer.encode("<|im_end|>")
    for skips in (True, False):
        tokens = [*backend.text.tokenizer.encode("a"), special, end]
        backend.play(SequenceUpdate("r", tokens, finish="stop", cached_tokens=0))
        response = await api.complete("x", skip_special_tokens=skips)
        assert response.json()["choices"][0]["text"] == ("a" if skips else "a<|im_start|>")


async def test_token_ids_are_those_of_prompt_and_answer(api, backend):
    backend.say("Hello STOP and more", step=100)
    body = (await api.chat(return_token_ids=True)).json()
    assert body["prompt_token_ids"] == backend.requests[-1]["prompt"]
    assert body["choices"][0]["token_ids"] == backend.text.tokenizer.encode("Hello STOP and more")
    backend.say("Hello")
    body = (await api.complete(["a", "b"], return_token_ids=True)).json()
    assert [choice["prompt_token_ids"] for choice in body["choices"]] == [r["prompt"] for r in backend.requests[-2:]]
    assert [choice["token_ids"] for choice in body["choices"]] == [backend.text.tokenizer.encode("Hello")] * 2
    for body in ((await api.chat()).json(), (await api.complete("a")).json()):
        assert "prompt_token_ids" not in body and "token_ids" not in body["choices"][0]


async def test_token_ids_of_a_stream_come_at_its_beginning_and_end(api, backend):
    backend.say("Hello")
    first, *_, last, _ = await api.stream(return_token_ids=True)
    assert first["prompt_token_ids"] == backend.requests[-1]["prompt"]
    assert last["choices"][0]["token_ids"] == backend.text.tokenizer.encode("Hello")
    *_, last, _ = await api.complete_stream(["a"], return_token_ids=True)
    assert last["choices"][0]["prompt_token_ids"] == backend.requests[-1]["prompt"]


async def test_the_prompts_last_tokens_are_kept(api, backend):
    tokens = backend.text.tokenizer.encode("one two three four")
    await api.complete(tokens, truncate_prompt_tokens=3)
    assert backend.requests[-1]["prompt"] == tokens[-3:]
    await api.complete([7] * 3000, truncate_prompt_tokens=-1, max_tokens=100)
    assert len(backend.requests[-1]["prompt"]) == 900 and backend.sampling.max_tokens == 100
    await api.complete("word " * 700, truncate_prompt_tokens=5)
    assert len(backend.requests[-1]["prompt"]) == 5
    await api.chat("word " * 500, truncate_prompt_tokens=10)
    assert (
        backend.requests[-1]["prompt"]
        == backend.text.tokenizer.encode(BEGIN.partition("Hi")[0] + "word " * 500 + BEGIN[21:])[-10:]
    )
    refused = await api.complete([7] * 3000, truncate_prompt_tokens=1000)
    assert refused.json()["error"]["code"] == "context_length_exceeded"


async def test_limits_of_tokens_reach_the_replica(api, backend):
    await api.chat(allowed_token_ids=[5, 6], bad_words=["one two", " x"])
    encode = backend.text.tokenizer.encode
    assert backend.sampling.allowed_token_ids == [5, 6]
    assert sorted(backend.sampling.bad_words) == sorted([encode("one two"), encode(" one two"), encode(" x")])


@pytest.mark.parametrize(
    ("effort", "said"),
    [
        ("none", ("low", False)),
        ("minimal", ("low", False)),
        ("low", ("low", None)),
        ("medium", ("medium", None)),
        ("high", ("high", None)),
        ("xhigh", ("high", None)),
        ("max", ("high", None)),
    ],
)
async def test_an_effort_is_told_as_templates_know_it(api, monkeypatch, effort, said):
    told: list[Any] = []
    render = "satchel.api.text.templates.template.Template.render"
    monkeypatch.setattr(render, lambda self, messages, tools, kwargs, **how: told.append(kwargs) or "x")
    await api.chat(reasoning_effort=effort)
    assert (told[-1]["reasoning_effort"], told[-1].get("enable_thinking")) == said
    await api.chat(reasoning_effort=effort, chat_template_kwargs={"enable_thinking": True, "reasoning_effort": "x"})
    assert told[-1] == {"reasoning_effort": "x", "enable_thinking": True}


async def test_the_last_message_is_continued(api, backend):
    backend.say(" friend")
    begun = [USER, {"role": "assistant", "content": "Hello"}]
    response = await api.post({"messages": begun, "continue_final_message": True, "add_generation_prompt": False})
    assert response.json()["choices"][0]["message"]["content"] == " friend"
    assert backend.prompt == f"{BEGIN}Hello"


@pytest.mark.parametrize(
    ("messages", "more"),
    [
        ([USER, {"role": "assistant", "content": "x"}], {}),
        ([USER], {"add_generation_prompt": False}),
        ([{"role": "assistant", "content": "x"}], {"add_generation_prompt": False}),
        (
            [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}],
            {"add_generation_prompt": False},
        ),
    ],
)
async def test_what_cannot_be_continued_is_refused(api, backend, messages, more):
    response = await api.post({"messages": messages, "continue_final_message": True, **more})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "continue_final_message")
    assert backend.requests == []


async def test_echo_puts_the_prompt_before_every_answer(api, backend):
    backend.say(" and more")
    body = (await api.complete(["once", "upon a"], echo=True, n=2, stop=["once"])).json()
    assert [choice["text"] for choice in body["choices"]] == ["once and more"] * 2 + ["upon a and more"] * 2
    body = (await api.complete(backend.text.tokenizer.encode("once"), echo=True)).json()
    assert body["choices"][0]["text"] == "once and more"
    chunks = await api.complete_stream(["once"], echo=True)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == "once and more"


async def test_no_tokens_are_only_the_prompt(api, backend):
    backend.play(SequenceUpdate("r", [], finish="length", cached_tokens=0))
    choice = (await api.complete("once", echo=True, max_tokens=0)).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("once", "length")
    assert backend.sampling.max_tokens == 0
    chunks = await api.complete_stream(["once"], echo=True, max_tokens=0)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == "once"


async def test_the_best_answers_are_the_likeliest(api, backend):
    # The fake replica's logprobs decrease with the tokens' ids.
    texts = sorted(["a", "b", "c", "d"], key=lambda text: backend.text.tokenizer.encode(text)[0])
    backend.say(*(texts[at] for at in (2, 0, 3, 1)), *(texts[at] for at in (3, 2, 1, 0)), "x")
    body = (await api.complete(["one", "two"], n=2, best_of=4)).json()
    assert len(backend.requests) == 8
    # The first sequences of all prompts start first.
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in body["choices"])
    for first, second in (body["choices"][:2], body["choices"][2:]):
        assert texts.index(first["text"]) <= texts.index(second["text"])
    assert body["usage"]["completion_tokens"] == 8
    asked = (await api.complete("one", n=1, best_of=2, logprobs=1)).json()
    assert asked["choices"][0]["logprobs"]["token_logprobs"]


async def test_special_tokens_around_a_prompt_can_be_left_out(api, backend, monkeypatch):
    asked: list[bool] = []
    encode = backend.text.tokenizer.encode

    def noting(self, string, scope, *, special_tokens=False):
        asked.append(special_tokens)
        return encode(string)

    monkeypatch.setattr("satchel.api.text.recent.RecentTexts.encode", noting)
    await api.complete("once")
    await api.complete("once", add_special_tokens=False)
    assert asked == [True, False]


async def test_a_suffix_is_what_follows_the_answer(api, backend, monkeypatch):
    monkeypatch.setattr("satchel.api.text.tokenizer.infill_marks", lambda vocabulary: InfillMarks(1, 2, 3))
    encode = backend.text.tokenizer.encode
    assert (await api.complete("once", suffix=" end")).status_code == 200
    assert backend.requests[-1]["prompt"] == [1, *encode("once"), 2, *encode(" end"), 3]
    refused = await api.complete([5, 6], suffix=" end")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "suffix")


def test_marks_are_those_that_a_tokenizer_has():
    qwen = {"<|fim_prefix|>": 7, "<|fim_middle|>": 8, "<|fim_suffix|>": 9, "a": 1}
    assert infill_marks(qwen) == InfillMarks(7, 9, 8)
    assert infill_marks({"<fim_prefix>": 1, "<fim_suffix>": 2, "<fim_middle>": 3}) == InfillMarks(1, 2, 3)
    assert infill_marks({"<|fim_prefix|>": 7, "a": 1}) is None


async def test_null_is_what_is_left_out(api, backend):
    plain = {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f"}}]}
    await api.post(plain)
    nulls = [
        *("temperature", "top_p", "n", "stop", "max_tokens", "max_completion_tokens", "presence_penalty", "logit_bias"),
        *("user", "seed", "tool_choice", "parallel_tool_calls", "response_format", "stream", "stream_options", "store"),
        *(
            "metadata",
            "reasoning_effort",
            "logprobs",
            "top_logprobs",
            "service_tier",
            "modalities",
            "audio",
            "functions",
        ),
        *("function_call", "prediction", "web_search_options", "echo", "suffix", "best_of", "bad_words", "min_tokens"),
    ]
    function = {"name": "f", "description": None, "parameters": None, "strict": None}
    body = dict.fromkeys(nulls) | {"messages": [{**USER, "name": None}]}
    response = await api.post({**body, "tools": [{"type": "function", "function": function}]})
    assert response.status_code == 200, response.text
    assert backend.requests[-1]["prompt"] == backend.requests[0]["prompt"]
    assert (await api.complete("x", **{name: None for name in nulls if name != "stream"})).status_code == 200


async def test_reasoning_has_both_names(api, thinker):
    thinker.say("<think>\nHmm.\n</think>\n\nHello")
    message = (await api.chat()).json()["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == "Hmm."
    deltas = [chunk["choices"][0]["delta"] for chunk in (await api.stream())[:-1]]
    told = ["".join(delta.get(name, "") for delta in deltas) for name in ("reasoning", "reasoning_content")]
    assert told == ["Hmm."] * 2
    await api.post({"messages": [USER, {"role": "assistant", "content": "Hello", "reasoning": "Hmm."}, USER]})
    assert "Hmm." in thinker.prompt
