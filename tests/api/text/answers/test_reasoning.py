"""Laws of reasoning: reasoning and content are separated wherever the text is cut, and nothing gets lost."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from satchel.actors.protocol.replica_messages import SequenceUpdate
from satchel.api.text.answers.pipeline import Pipeline
from satchel.api.text.answers.reasoning import ReasoningSplitter
from satchel.api.text.answers.stops import StopMatcher
from satchel.api.tools.answer_pieces import Piece, ReasoningDelta, Skipped, text_of

START, END = "<think>", "</think>"
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'

thorough = settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def split(pieces: list[str], *, inside: bool) -> list[Piece]:
    splitter = ReasoningSplitter(START, END, inside=inside)
    return [item for piece in pieces if piece for item in splitter.add(piece)] + splitter.flush()


def both(pieces: list[Piece]) -> tuple[str, str]:
    thought = "".join(piece.text for piece in pieces if isinstance(piece, ReasoningDelta))
    return thought, "".join(piece for piece in pieces if isinstance(piece, str))


def definition(text: str, *, inside: bool) -> tuple[str, str]:
    """The definition: reasoning and content of a whole text, as templates separate them when they print an earlier
    answer."""
    if not inside:
        if not text.lstrip().startswith(START):
            return "", text
        text = text.lstrip().removeprefix(START)
    thought, closed, said = text.partition(END)
    return thought.strip("\n"), said.lstrip("\n") if closed else ""


fragments = st.lists(
    st.sampled_from([START, END, "<thi", "nk>", "</", "think>", "\n", "\n\n", " ", "so", "日", "<", ">"]), max_size=9
).map("".join)
all_cuts = st.lists(st.integers(0, 60), max_size=10)


def parts(text: str, cuts: list[int]) -> list[str]:
    return [text[a:b] for a, b in pairwise([0, *sorted(cut for cut in cuts if cut <= len(text)), len(text)])]


@thorough
@given(text=fragments, cuts=all_cuts, inside=st.booleans())
def test_reasoning_and_content_do_not_depend_on_the_pieces(text: str, cuts: list[int], inside: bool):
    expected = definition(text, inside=inside)
    assert both(split(parts(text, cuts), inside=inside)) == both(split(list(text), inside=inside)) == expected


@thorough
@given(text=fragments, cuts=all_cuts, inside=st.booleans())
def test_every_character_comes_out_once_and_in_order(text: str, cuts: list[int], inside: bool):
    out = [text_of(piece) for piece in split(parts(text, cuts), inside=inside)]
    assert "".join(out) == text
    assert all(out), "no piece is empty"


@thorough
@given(text=fragments, cuts=all_cuts, inside=st.booleans(), stops=st.lists(st.sampled_from(["so", "\n", "<"])))
def test_stop_strings_end_the_content_and_are_not_looked_for_in_the_reasoning(
    text: str, cuts: list[int], inside: bool, stops: list[str]
):
    thought, said = definition(text, inside=inside)
    matcher = StopMatcher(stops)
    pipeline = Pipeline([ReasoningSplitter(START, END, inside=inside), matcher])
    out = [item for part in parts(text, cuts) if part for item in pipeline.add(part)] + pipeline.flush()
    ends = [said.index(stop) for stop in stops if stop in said]
    assert both(out) == (thought, said[: min(ends)] if ends else said)
    assert matcher.matched == bool(ends)


def test_thoughts_and_plain_text_are_not_delayed():
    splitter = ReasoningSplitter(START, END, inside=True)
    assert splitter.add("\nFirst") == [Skipped("\n"), ReasoningDelta("First")]
    assert splitter.add(", <b") == [ReasoningDelta(", <b")]
    assert splitter.add("\n") == []
    assert splitter.add("</think>\n") == [Skipped("\n</think>"), Skipped("\n")]
    assert splitter.add("Yes") == ["Yes"]
    assert splitter.add(" \n</thi") == [" \n</thi"]
    assert ReasoningSplitter(START, END, inside=False).add("Yes") == ["Yes"]


THOUGHT = "<think>\nHe says hi.\n</think>\n\nHello"


@pytest.mark.parametrize("step", [1, 2, 100])
async def test_a_whole_answer_and_a_stream_tell_reasoning_apart(api, thinker, step):
    thinker.say(THOUGHT, step=step)
    body = (await api.chat()).json()
    message = body["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("He says hi.", "Hello")
    *chunks, usage, _ = await api.stream(stream_options={"include_usage": True})
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "He says hi."
    assert "".join(delta.get("content", "") for delta in deltas) == "Hello"
    assert not any({"content", "reasoning_content"} <= set(delta) for delta in deltas)
    block, _, _ = THOUGHT.partition("\n\n")
    for counted in (body["usage"], usage["usage"]):
        assert counted["completion_tokens"] == len(thinker.text.tokenizer.encode(THOUGHT))
        assert counted["completion_tokens_details"] == {"reasoning_tokens": len(thinker.text.tokenizer.encode(block))}


async def test_an_answer_without_reasoning_has_no_such_field(api, thinker):
    for text in ("Hello", "\n Hello", "<think>\n\n</think>\n\nHello"):
        thinker.say(text)
        body = (await api.chat()).json()
        assert "reasoning_content" not in body["choices"][0]["message"]
        assert body["choices"][0]["message"]["content"].endswith("Hello")
        *chunks, _ = await api.stream()
        assert not any("reasoning_content" in chunk["choices"][0]["delta"] for chunk in chunks)


async def test_a_prompt_may_have_opened_the_block(api, thinker):
    thinker.say("\nHmm.\n</think>\n\nHello")
    body = (await api.chat(chat_template_kwargs={"open_thought": True})).json()
    assert thinker.prompt.endswith("<think>\n")
    message = body["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hmm.", "Hello")
    # After a prompt that has closed the block the same text is content, and so are markers in a user's text.
    for fields in ({"chat_template_kwargs": {"enable_thinking": False}}, {"content": "what is <think>"}):
        thinker.say("Hmm. Hello")
        message = (await api.chat(**fields)).json()["choices"][0]["message"]
        assert (message.get("reasoning_content"), message["content"]) == (None, "Hmm. Hello")
    assert "</think>" not in thinker.prompt


async def test_a_block_that_is_never_closed_is_all_reasoning(api, thinker):
    thinker.say("<think>\nOn and on", finish="length")
    body = (await api.chat(stop="on")).json()
    message = body["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("On and on", "")
    assert body["choices"][0]["finish_reason"] == "length"
    details = body["usage"]["completion_tokens_details"]
    assert details["reasoning_tokens"] == body["usage"]["completion_tokens"]


async def test_a_stop_string_cuts_the_content_after_the_reasoning(api, thinker):
    tokens = thinker.text.tokenizer.encode("<think>a STOP b</think>c STOP d")
    thinker.play(*[SequenceUpdate("r", [token], cached_tokens=0) for token in tokens], asyncio.Event())
    message = (await api.chat(stop="STOP")).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("a STOP b", "c ")
    assert thinker.generations[0].aborts == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_calls_follow_reasoning(api, thinker, stream):
    thinker.say(f"<think>\nI look.\n</think>\n\n{CALL}")
    if stream:
        *chunks, _ = await api.stream(tools=[WEATHER])
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        thought = "".join(delta.get("reasoning_content", "") for delta in deltas)
        content = "".join(delta.get("content", "") for delta in deltas)
        (call,) = [call for delta in deltas for call in delta.get("tool_calls", [])]
        reason = chunks[-1]["choices"][0]["finish_reason"]
    else:
        (choice,) = (await api.chat(tools=[WEATHER])).json()["choices"]
        message, reason = choice["message"], choice["finish_reason"]
        thought, content, (call,) = message["reasoning_content"], message["content"], message["tool_calls"]
    assert (thought, content, reason) == ("I look.", "", "tool_calls")
    assert call["function"]["name"] == "weather"


async def test_markers_inside_an_answer_are_text(api, thinker):
    """If they are special tokens they stay hidden, as all special tokens."""
    thinker.say("Write <think>x</think> so.")
    shown = (await api.chat()).json()["choices"][0]["message"]["content"]
    special = bool(thinker.text.tokenizer.think_tokens & thinker.text.tokenizer.hidden_tokens)
    assert shown == ("Write x so." if special else "Write <think>x</think> so.")


async def test_completions_are_raw_text(api, thinker):
    thinker.say("Hm</think>Hi")
    text = (await api.complete("<think>")).json()["choices"][0]["text"]
    assert text.startswith("Hm")
    assert text.endswith("Hi")


async def test_earlier_reasoning_and_template_variables_reach_the_template(api, thinker):
    earlier = {"role": "assistant", "content": "Hi.", "reasoning_content": "He greets."}
    user = {"role": "user", "content": "x", "reasoning_content": "not his"}
    await api.post({"messages": [earlier, user], "reasoning_effort": "low"})
    assert "<think>\nHe greets.\n</think>\n\nHi.<|im_end|>" in thinker.prompt
    assert "effort: low" in thinker.prompt
    assert "not his" not in thinker.prompt
    await api.chat(reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "own", "enable_thinking": False})
    assert "effort: own" in thinker.prompt
    assert thinker.prompt.endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize("end", ["", "\n", "\n</think>", "\n</think>\n\n"])
async def test_a_call_that_an_open_thought_ends_with_is_one(api, thinker, step: int, end: str):
    thinker.say(f"<think>\nThe weather first.\n{CALL}{end}", step=step)
    choice = (await api.chat(tools=[WEATHER])).json()["choices"][0]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather"]
    assert choice["message"]["reasoning_content"] == "The weather first." and choice["finish_reason"] == "tool_calls"
    chunks = [
        each["delta"] for chunk in await api.stream(tools=[WEATHER]) if chunk != "[DONE]" for each in chunk["choices"]
    ]
    assert "".join(delta.get("reasoning_content") or "" for delta in chunks) == "The weather first."
    assert (
        "".join(call["function"].get("name") or "" for delta in chunks for call in delta.get("tool_calls", ()))
        == "weather"
    )


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize(
    "thought", [f"So:\n{CALL}\nThen.", f"So:\n{CALL}", "I could write <tool_call> here.", "<tool_call>\n{"]
)
async def test_a_call_in_a_thought_that_goes_on_or_has_an_answer_is_thought(api, thinker, step: int, thought: str):
    thinker.say(f"<think>\n{thought}\n</think>\n\nNo.", step=step)
    message = (await api.chat(tools=[WEATHER])).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (thought, "No.") and not message.get("tool_calls")
