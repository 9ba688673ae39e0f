"""Laws of logprobs: the returned tokens are the shown text, byte for byte, wherever it is cut."""

from __future__ import annotations

import json
import math
from itertools import pairwise, product
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from satchel.actors.protocol.replica_messages import SequenceUpdate, TokenLogprobs
from satchel.api.text.answers.logprobs import ShownToken, completion_logprobs
from satchel.api.text.answers.pipeline import Pipeline
from satchel.api.text.answers.reasoning import ReasoningSplitter
from satchel.api.text.answers.sequence_text import SequenceText, TextDelta, TextEvent
from satchel.api.text.answers.stops import StopMatcher
from satchel.api.text.detokenizing import ByteDetokenizer
from satchel.api.text.model import TextModel
from satchel.api.text.tokenizer import Tokenizer
from satchel.api.tools.answer_pieces import ReasoningDelta, ToolCall, text_of
from satchel.api.tools.call_splitter import ToolCallSplitter, call_parser
from satchel.api.tools.call_stage import CallLimit, CallStage
from satchel.api.tools.lenient.declared import DeclaredTools
from satchel.api.tools.lenient.loose_reader import LooseReader
from satchel.api.tools.lenient.stage import LenientCalls, OwnMarks

thorough = settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])

CALL = '<tool>{"name": "f", "arguments": {"é": 1}}</tool>'
parse = call_parser(lambda text, tools: json.loads(text), [])


class Bytes:
    """A tokenizer in which token `i` is the `i`-th of some pieces of a text, cut between any two bytes."""

    byte_level = True
    end_tokens = hidden_tokens = think_tokens = call_tokens = frozenset()

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token]

    def sequence(self, **how: Any) -> SequenceText:
        return SequenceText(cast(Tokenizer, self), ByteDetokenizer(self.token_bytes), logprobs=True, **how)


def calls_stage() -> CallStage:
    declared = DeclaredTools([{"type": "function", "function": {"name": "f"}}])
    lenient = LenientCalls(LooseReader(declared), OwnMarks())
    return CallStage(ToolCallSplitter("<tool>", "</tool>", parse), lenient, CallLimit())


def stages(*, thinking: bool, stops: list[str], tools: bool) -> dict[str, Any]:
    return {
        "reasoning": ReasoningSplitter("<think>", "</think>", inside=False) if thinking else None,
        "stops": stops,
        "calls": calls_stage() if tools else None,
    }


def logprobs_of(tokens: range) -> list[TokenLogprobs]:
    return [(-float(token), [(token, -float(token))]) for token in tokens]


def run(sequence: SequenceText, updates: list[range]) -> list[TextEvent]:
    """Returns all events of the sequence; after each, at least the bytes of the returned tokens are shown."""
    events: list[TextEvent] = []
    text, given = b"", b""
    for tokens in [*updates, None]:
        if tokens is not None and sequence.stopped:
            continue
        new = sequence.finish() if tokens is None else sequence.add(list(tokens), logprobs_of(tokens))
        events += new
        for event in new:
            if isinstance(event, TextDelta):
                text += event.text.encode()
                given += b"".join(token.data for token in event.logprobs or ())
                assert text.startswith(given)
    assert text == given
    return events


def shown_tokens(events: list[TextEvent]) -> list[ShownToken]:
    return [token for event in events if isinstance(event, TextDelta) for token in event.logprobs or ()]


def content(events: list[TextEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def expected(text: str, pieces: list[bytes], how: dict[str, Any]) -> list[tuple[int, bytes, int]]:
    """The definition: token, bytes and offset of every token with a shown byte, computed from the whole text at
    once."""
    matcher = StopMatcher(how["stops"])
    pipeline = Pipeline([stage for stage in (how["reasoning"], matcher, how["calls"]) if stage is not None])
    mask: list[bool] = []
    for piece in [*(pipeline.add(text) if text else []), *pipeline.flush()]:
        mask += [isinstance(piece, str)] * len(text_of(piece).encode())
    data = text.encode()
    mask += [False] * (len(data) - len(mask))
    out: list[tuple[int, bytes, int]] = []
    start, before = 0, b""
    for token, piece in enumerate(pieces):
        part = bytes(data[at] for at in range(start, start + len(piece)) if mask[at])
        if part:
            out.append((token, part, character_of(before + part[:1])))
        before += part
        start += len(piece)
    return out


def character_of(data: bytes) -> int:
    """The index of the character to which the last byte belongs."""
    return len(data.decode("utf-8", "replace")) - 1


def place_of(token: ShownToken) -> int:
    """Its place in the answer, which is its logprob, negated."""
    assert token.logprob is not None
    return -int(token.logprob)


def check(text: str, pieces: list[bytes], updates: list[range], **how: Any) -> list[TextEvent]:
    events = run(Bytes(pieces).sequence(**stages(**how)), updates)
    found = [(place_of(token), token.data, token.offset) for token in shown_tokens(events)]
    assert found == expected(text, pieces, stages(**how))
    return events


def cut(data: bytes, edges: list[int]) -> list[bytes]:
    return [data[a:b] for a, b in pairwise([0, *sorted({edge for edge in edges if 0 < edge < len(data)}), len(data)])]


def grouped(count: int, edges: list[int]) -> list[range]:
    borders = [0, *sorted(edge for edge in edges if edge < count), count]
    return [range(a, b) for a, b in pairwise(borders)]


@pytest.mark.parametrize("updates", ["one by one", "together"])
@pytest.mark.parametrize("text", ["aé日c", "日<tool>", "<think>é", "xSTOPy", "é😀"])
def test_every_split_of_a_text_into_tokens(text: str, updates: str):
    """Every split, between any two bytes."""
    data = text.encode()
    for marks in product([False, True], repeat=len(data) - 1):
        pieces = cut(data, [i + 1 for i, mark in enumerate(marks) if mark])
        sequences = grouped(len(pieces), list(range(len(pieces))) if updates == "one by one" else [])
        check(text, pieces, sequences, thinking=True, stops=["STOP"], tools=True)


@pytest.mark.parametrize(
    "text", ["<think>\nh日m\n</think>\n\nYé STOP no", f"a é\n{CALL}\n{CALL} 日b", "<think>x</think>STOP", "a<tool>b"]
)
def test_every_place_of_one_or_two_cuts(text: str):
    """Markers, stop strings and characters of several bytes cut in two or three."""
    data = text.encode()
    for first in range(1, len(data)):
        for second in range(first, len(data), 3):
            pieces = cut(data, [first, second])
            check(text, pieces, grouped(len(pieces), [1, 2]), thinking=True, stops=["STOP"], tools=True)


fragments = st.lists(
    st.sampled_from(["<think>", "</think>", CALL, "<tool>", "</tool>", "ST", "OP", "é", "日", "😀", "a", " ", "\n"]),
    max_size=8,
).map("".join)
edges = st.lists(st.integers(0, 200), max_size=40)


@thorough
@given(text=fragments, cuts=edges, groups=edges, thinking=st.booleans(), stop=st.booleans(), tools=st.booleans())
def test_any_text_cut_anywhere(text, cuts, groups, thinking, stop, tools):
    pieces = cut(text.encode(), cuts)
    stops = ["STOP", "é日"] if stop else []
    check(text, pieces, grouped(len(pieces), groups), thinking=thinking, stops=stops, tools=tools)


@thorough
@given(pieces=st.lists(st.binary(max_size=4), max_size=12), groups=edges)
def test_bytes_that_are_no_text_are_the_replacement_characters_that_are_shown(pieces: list[bytes], groups: list[int]):
    """`run` checks the law; here for any bytes, with half characters and tokens without a byte."""
    events = run(Bytes(pieces).sequence(), grouped(len(pieces), groups))
    assert content(events) == b"".join(pieces).decode("utf-8", "replace")


@thorough
@given(data=st.data(), groups=edges)
def test_any_tokens_of_real_tokenizers(
    data: st.DataObject, groups: list[int], text: TextModel, sentencepiece: TextModel
):
    """With both kinds of detokenizer, and special tokens among the tokens, which never come out."""
    model = data.draw(st.sampled_from([text, sentencepiece]))
    size = 262 if model is sentencepiece else 400
    tokens = data.draw(st.lists(st.integers(0, size), max_size=30))
    sequence = SequenceText(model.tokenizer, model.tokenizer.detokenizer(), logprobs=True)
    events: list[TextEvent] = []
    for group in grouped(len(tokens), groups):
        drawn = [tokens[i] for i in group]
        events += sequence.add(drawn, [(-float(i), []) for i in group])
    events += sequence.finish()
    shown = shown_tokens(events)
    assert b"".join(token.data for token in shown) == content(events).encode()
    positions = [place_of(token) for token in shown]
    assert positions == sorted(set(positions))
    assert not any(tokens[position] in model.tokenizer.hidden_tokens for position in positions)


def test_a_character_spelled_in_byte_tokens_keeps_each_tokens_byte(sentencepiece: TextModel):
    assert sentencepiece.tokenizer.backend is not None
    tokens = [sentencepiece.tokenizer.backend.token_to_id(f"<0x{byte:02X}>") for byte in "日".encode()]
    sequence = SequenceText(sentencepiece.tokenizer, sentencepiece.tokenizer.detokenizer(), logprobs=True)
    events = [*sequence.add(tokens, [(-1.0, [])] * 3), *sequence.finish()]
    assert [token.data for token in shown_tokens(events)] == [bytes([byte]) for byte in "日".encode()]


def test_bytes_that_are_no_text_stay_their_tokens_own():
    """A replacement character stands for one to three bytes (Unicode 3.9); the tokens after it are not shifted."""
    for broken in (b"\xff", b"\xe6\x97", b"\xf0\x9f\x98"):
        events = run(Bytes([broken, b"A", "日".encode()]).sequence(), grouped(3, []))
        assert [token.data for token in shown_tokens(events)] == ["\ufffd".encode(), b"A", "日".encode()]


def test_a_space_that_a_decoder_strips_is_no_tokens(sentencepiece: TextModel):
    assert sentencepiece.tokenizer.backend is not None
    tokens = [sentencepiece.tokenizer.backend.token_to_id(word) for word in ("▁", "a", "▁world")]
    sequence = SequenceText(sentencepiece.tokenizer, sentencepiece.tokenizer.detokenizer(), logprobs=True)
    events = [*sequence.add(tokens, logprobs_of(range(3))), *sequence.finish()]
    assert content(events) == "a world"
    assert [(token.logprob, token.data) for token in shown_tokens(events)] == [(-1.0, b"a"), (-2.0, b" world")]


def test_entries_wait_with_the_text_that_waits():
    sequence = Bytes([b"a", b"S", b"T", b"b"]).sequence(stops=["STOP"])
    assert sequence.add([0, 1], logprobs_of(range(2))) == [TextDelta("a", [ShownToken(b"a", 0.0, [(b"a", 0.0)], 0)])]
    assert sequence.add([2], logprobs_of(range(2, 3))) == []
    (event,) = sequence.add([3], logprobs_of(range(3, 4)))
    assert isinstance(event, TextDelta)
    assert event.text == "STb"
    assert [token.data for token in event.logprobs or ()] == [b"S", b"T", b"b"]


def test_a_token_that_a_stop_string_cuts_comes_out_trimmed():
    sequence = Bytes([b"ab", b"cd"]).sequence(stops=["bc"])
    assert sequence.add([0], logprobs_of(range(1))) == [TextDelta("a", [])]
    assert sequence.add([1], logprobs_of(range(1, 2))) == []
    assert sequence.stopped
    (event,) = sequence.finish()
    assert isinstance(event, TextDelta)
    assert (event.text, [token.data for token in event.logprobs or ()]) == ("", [b"a"])


def test_reasoning_and_calls_have_no_entries():
    pieces = [b"<think>", b"h", b"</think>", b"Y", CALL.encode(), b"Z"]
    events = check(b"".join(pieces).decode(), pieces, grouped(6, []), thinking=True, stops=[], tools=True)
    kinds = [type(event) for event in events]
    assert kinds == [ReasoningDelta, TextDelta, ToolCall, TextDelta]
    assert [token.data for token in shown_tokens(events)] == [b"Y", b"Z"]


async def test_a_chats_logprobs(api, backend):
    tokenizer = backend.text.tokenizer
    backend.say("Hé日!")
    tokens = tokenizer.encode("Hé日!")
    choice = (await api.chat(logprobs=True, top_logprobs=2)).json()["choices"][0]
    assert backend.sampling.logprobs == 2
    assert choice["logprobs"]["refusal"] is None
    entries = choice["logprobs"]["content"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == choice["message"]["content"]
    for token, entry in zip(tokens, entries, strict=True):
        drawn, top = backend.logprobs_of(token, 2)
        data = tokenizer.token_bytes(token)
        assert entry["logprob"] == drawn
        assert entry["bytes"] == list(data)
        assert entry["token"] == data.decode("utf-8", "replace")
        assert [one["logprob"] for one in entry["top_logprobs"]] == [value for _, value in top]
        assert [one["bytes"] for one in entry["top_logprobs"]] == [list(tokenizer.token_bytes(t)) for t, _ in top]


@pytest.mark.parametrize("step", [1, 3, 100])
async def test_a_streams_chunks_bring_the_tokens_of_their_text(api, backend, step):
    backend.say("Hello wörld 😀 STOP more", step=step)
    whole = (await api.chat(logprobs=True, top_logprobs=1, stop="STOP")).json()["choices"][0]
    *chunks, _ = await api.stream(logprobs=True, top_logprobs=1, stop="STOP")
    choices = [chunk["choices"][0] for chunk in chunks]
    given = [entry for choice in choices for entry in (choice["logprobs"] or {"content": []})["content"]]
    assert given == whole["logprobs"]["content"]
    assert bytes(byte for entry in given for byte in entry["bytes"]).decode() == "Hello wörld 😀 "
    assert choices[0]["logprobs"] is choices[-1]["logprobs"] is None


async def test_without_the_field_nobody_follows_tokens(api, backend):
    for fields in ({}, {"logprobs": False}, {"logprobs": None, "top_logprobs": 0}):
        assert (await api.chat(**fields)).json()["choices"][0]["logprobs"] is None
        assert backend.sampling.logprobs is None
    *chunks, _ = await api.stream()
    assert all(chunk["choices"][0]["logprobs"] is None for chunk in chunks)
    assert (await api.chat(logprobs=True)).json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert backend.sampling.logprobs == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_completions_logprobs_have_the_older_shape(api, backend, stream):
    """Parts of characters are written as OpenAI writes them; `text_offset` counts characters over all chunks."""
    backend.say("aé日b")
    if stream:
        *chunks, _ = await api.complete_stream("x", logprobs=2)
        found = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        found = {key: [value for one in found if one for value in one[key]] for key in found[0]}
    else:
        found = (await api.complete("x", logprobs=2)).json()["choices"][0]["logprobs"]
    tokens = backend.text.tokenizer.encode("aé日b")
    drawn = [backend.logprobs_of(token, 2)[0] for token in tokens]
    assert found["token_logprobs"] == drawn
    data, offsets = b"", []
    for token, written in zip(tokens, found["tokens"], strict=True):
        piece = backend.text.tokenizer.token_bytes(token)
        whole = len(data.decode("utf-8", "ignore"))
        offsets.append(whole)
        data += piece
        try:
            assert written == piece.decode()
        except UnicodeDecodeError:
            assert written == "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
    assert found["text_offset"] == offsets
    for written, value, top in zip(found["tokens"], drawn, found["top_logprobs"], strict=True):
        assert top[written] == value
        assert len(top) <= 3


async def test_what_is_impossible_is_a_number_in_json(api, backend):
    (token,) = backend.text.tokenizer.encode("a")
    impossible = (-math.inf, [(token, -math.inf), (token + 1, math.nan)])
    backend.play(SequenceUpdate("r", [token], "stop", cached_tokens=0, logprobs=[impossible]))
    (entry,) = (await api.chat(logprobs=True, top_logprobs=2)).json()["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"], *(one["logprob"] for one in entry["top_logprobs"])] == [-9999.0] * 3
    *chunks, _ = await api.stream(logprobs=True)
    assert '"logprob": -9999.0' in json.dumps(chunks)


async def test_a_replica_that_leaves_logprobs_out_is_an_error_and_not_a_wrong_answer(api, backend):
    backend.play(
        SequenceUpdate("r", backend.text.tokenizer.encode("ab"), "stop", cached_tokens=0, logprobs=[(-1.0, [])])
    )
    response = await api.chat(logprobs=True)
    assert (response.status_code, response.json()["error"]["code"]) == (500, "generation_failed")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_token_that_the_caller_stops_at_is_no_text(api, backend, stream):
    """Like an end token it is counted and has no entry."""
    *tokens, last = backend.text.tokenizer.encode("Hello world!")
    backend.play(SequenceUpdate("r", [*tokens, last], "stop", cached_tokens=0))
    if stream:
        *chunks, _ = await api.stream(stop_token_ids=[last], logprobs=True)
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    else:
        body = (await api.chat(stop_token_ids=[last], logprobs=True)).json()
        text = body["choices"][0]["message"]["content"]
        assert len(body["choices"][0]["logprobs"]["content"]) == len(tokens)
        assert body["usage"]["completion_tokens"] == len(tokens) + 1
    assert text == backend.text.tokenizer.decode(tokens)
    assert backend.sampling.stop_token_ids == [last]


def test_a_broken_character_is_one_sign_however_many_tokens_it_has():
    """If a replacement character stands for bytes of several tokens, each has its part, so the next token keeps its own
    text."""
    for broken in ([b"\xf0", b"\x9f", b"\x98"], [b"\xe6", b"\x97"], [b"\xf0\x9f", b"\x98"], [b"\xff"]):
        pieces = [*broken, b"a", b"b"]
        events = run(Bytes(pieces).sequence(**stages(thinking=False, stops=[], tools=False)), [range(len(pieces))])
        assert content(events) == "\ufffdab"
        found = [(place_of(token), token.data) for token in shown_tokens(events)]
        assert found[-2:] == [(len(broken), b"a"), (len(broken) + 1, b"b")]
        assert b"".join(data for _, data in found[:-2]) == "\ufffd".encode()
        assert [token for token, _ in found[:-2]] == list(range(len(broken)))


def test_of_tokens_with_one_spelling_the_likeliest_is_told():
    """A table by text has room for one of them, and the sampled token is already among the others."""
    token = ShownToken(b"a", -3.0, [(b"a", -0.5), (b"b", -1.0), (b"a", -3.0)], 0)
    assert completion_logprobs([token])["top_logprobs"] == [{"a": -0.5, "b": -1.0}]
