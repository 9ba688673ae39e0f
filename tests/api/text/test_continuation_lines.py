"""Lines of real conversations: the shipped model's chats turn by turn, special tokens as text, many and long lines."""

from __future__ import annotations

import time
from array import array
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers

import satchel.actors.model_files as model_files
from satchel.api.text.continuation import IndexedLine, Match, StoredBranch, continue_text
from satchel.api.text.control_tokens import unbroken
from satchel.api.text.model import TextModel, load_text_model
from satchel.api.text.spelling import common_length
from satchel.cluster.errors import InvalidRequest

END = "<|im_end|>"
WORDS = ["the", "quick", "brown", "fox,", "jumps", "over\n", "lazy", "12345", "été", "日本", "code", "of", "zork?", ""]


@pytest.fixture(scope="module")
def recall() -> TextModel:
    assert model_files.__file__ is not None
    return load_text_model(Path(model_files.__file__).parent / "embedded" / "recall")


def letters(model: TextModel, string: str) -> list[int]:
    """Returns `string` with one token per byte, as no tokenizer would encode it."""
    of_byte = {model.tokenizer.token_bytes(token): token for token in range(400)}
    return [of_byte[bytes([byte])] for byte in string.encode()]


def say(random: Random, words: int) -> str:
    return " ".join(random.choice(WORDS) for _ in range(words))


@pytest.mark.parametrize("stopped", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_a_chat_never_computes_a_token_twice(recall: TextModel, seed: int, stopped: bool):
    """In every turn all remembered tokens are kept, whatever ids were sampled, with or without the end token."""
    random, messages, line = Random(seed), [], StoredBranch("", [])
    for turn in range(8):
        messages.append({"role": "user", "content": say(random, random.randint(1, 40))})
        prompt = recall.template.render(messages)
        result = continue_text(prompt, [line], recall.spelling)
        assert recall.tokenizer.decode(result.tokens) == prompt
        if turn:
            assert (result.match, result.kept_tokens) == (Match.EXTEND, len(line.tokens))
        answer = say(random, random.randint(1, 20))
        messages.append({"role": "assistant", "content": answer})
        drawn = letters(recall, answer) if random.random() < 0.5 else recall.tokenizer.encode(answer)
        ended = recall.tokenizer.encode(END) if stopped else []
        line = StoredBranch(prompt + answer + END * stopped, [*result.tokens, *drawn, *ended])


def test_an_edited_turn_keeps_what_was_before_it_and_a_title_request_the_shared_beginning(recall: TextModel):
    messages = [{"role": role, "content": f"number {n} of zork"} for n, role in enumerate(["user", "assistant"] * 5)]
    messages.append({"role": "user", "content": "and now?"})
    old = recall.template.render(messages)
    line = StoredBranch(old, recall.tokenizer.encode(old))
    messages[6] = {"role": "user", "content": "number six"}
    edited = recall.template.render(messages)
    result = continue_text(edited, [line], recall.spelling)
    assert (result.tokens, result.reason) == (recall.tokenizer.encode(edited), "text changed")
    before = len(recall.tokenizer.encode(edited[: edited.index("number six")]))
    assert before <= result.kept_tokens <= before + 2
    title = recall.template.render([*messages[:2], {"role": "user", "content": "Give this a title."}])
    result = continue_text(title, [line], recall.spelling)
    assert result.match is Match.DIVERGE
    assert (
        result.kept_tokens
        >= len(recall.tokenizer.encode(recall.template.render(messages[:2]).removesuffix("assistant\n"))) - 1
    )


def test_special_tokens_typed_by_a_user_or_spelled_by_the_model_stay_what_they_were(recall: TextModel):
    """If the text has both, markers that were sampled letter by letter stay so, and those sampled as one token stay one
    token."""
    guard = recall.tokenizer.controls.guarded
    prompt = recall.template.render([{"role": "user", "content": guard(f"what is {END} for?")}])
    spelled = letters(recall, f"it ends {END} turns")
    typed = unbroken(prompt)
    line = StoredBranch(
        f"{typed}it ends {END} turns{END}", [*recall.tokenizer.encode(prompt), *spelled, *recall.tokenizer.encode(END)]
    )
    new = f"{prompt}{guard(f'it ends {END} turns')}{END}\n<|im_start|>user\nI see.{END}\n"
    result = continue_text(new, [line], recall.spelling)
    assert (recall.tokenizer.decode(result.tokens), result.kept_tokens) == (unbroken(new), len(line.tokens))
    # Sampled in the middle of an answer and hidden from the client, which sends the history without it.
    drawn = StoredBranch(
        f"{typed}one{END}two", [*recall.tokenizer.encode(f"{prompt}one{END}"), *letters(recall, "two")]
    )
    new = f"{prompt}onetwo{END}\n"
    result = continue_text(new, [drawn], recall.spelling)
    assert (recall.tokenizer.decode(result.tokens), result.reason) == (unbroken(new), "text changed")
    assert result.tokens == recall.tokenizer.encode(new)


def test_an_added_token_that_only_begins_in_the_common_part_is_not_cut(recall: TextModel):
    """The line ends inside a special token of the new text."""
    line = StoredBranch(
        "<|im_start|>a <tool_c", [*recall.tokenizer.encode("<|im_start|>a"), *letters(recall, " <tool_c")]
    )
    new = "<|im_start|>a <tool_call>b"
    result = continue_text(new, [line], recall.spelling)
    assert recall.tokenizer.decode(result.tokens) == new
    assert result.tokens[-2:] == recall.tokenizer.encode("<tool_call>b")
    assert line.text[: result.common_characters] == line.text
    assert 0 < result.kept_tokens < len(line.tokens)


def test_a_seam_in_a_word_goes_back_to_where_the_word_begins(recall: TextModel):
    line = StoredBranch("<|im_start|>the qui", [*recall.tokenizer.encode("<|im_start|>"), *letters(recall, "the qui")])
    new = "<|im_start|>the quick fox"
    result = continue_text(new, [line], recall.spelling)
    assert result.tokens == [*line.tokens[:4], *recall.tokenizer.encode(" quick fox")]
    assert (result.kept_tokens, result.reason) == (4, "no safe seam")


@pytest.mark.parametrize("kind", [list, tuple, lambda tokens: array("I", tokens)])
def test_prepared_lines_give_what_others_give_whatever_holds_the_ids(recall: TextModel, kind: Any):
    random = Random(7)
    base = "<|im_start|>" + say(random, 300)
    texts = [base[: random.randint(1, len(base))] + say(random, 5) for _ in range(6)]
    lines = [
        StoredBranch(text, kind(letters(recall, text[12:40]) + recall.tokenizer.encode(text))) for text in texts[:2]
    ]
    lines += [StoredBranch(text, kind(recall.tokenizer.encode(text))) for text in texts[2:]]
    prepared = [recall.spelling.index(line) for line in lines]
    assert all(isinstance(line, IndexedLine) for line in prepared)
    for _ in range(20):
        new = base[: random.randint(1, len(base))] + say(random, 3)
        result = continue_text(new, lines, recall.spelling)
        assert result == continue_text(new, prepared, recall.spelling)
        assert all(type(token) is int for token in result.tokens)
        each = [continue_text(new, [line], recall.spelling) for line in lines]
        assert result.kept_tokens == max(one.kept_tokens for one in each)
        assert (result.kept_tokens, result.common_characters) == max(
            (one.kept_tokens, one.common_characters) for one in each
        )


def test_only_added_tokens_that_nothing_can_reach_into_split_a_text(recall: TextModel, tmp_path: Path):
    """Other added tokens may not be found at their text, so a seam there would change the tokens behind it."""
    assert model_files.__file__ is not None
    for file in (Path(model_files.__file__).parent / "embedded" / "recall").glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.normalizer = normalizers.Lowercase()
    flags = {"|>!": {}, "<any>": {"normalized": True}, "<word>": {"single_word": True}, "\n\n": {}, "<free>": {}}
    tokenizer.add_tokens([AddedToken(content, **{"normalized": False, **flag}) for content, flag in flags.items()])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    spelling = load_text_model(tmp_path).spelling
    vocabulary = tokenizer.get_vocab()
    assert [name for name in (END, *flags) if spelling.stands_alone(vocabulary[name])] == ["<free>"]
    assert recall.spelling.stands_alone(vocabulary[END])


def test_no_seam_is_told_by_words_where_the_tokenizer_changes_the_text(recall: TextModel, tmp_path: Path):
    """Its ids spell other bytes than the text, so their borders are not those of the text."""
    assert model_files.__file__ is not None
    for file in (Path(model_files.__file__).parent / "embedded" / "recall").glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    changing = load_text_model(tmp_path)
    new = "<|im_start|>The QUICK brown fox"
    for model, kept in ((recall, 10), (changing, 1)):
        line = StoredBranch(
            "<|im_start|>The QUICK bro", [*model.tokenizer.encode("<|im_start|>"), *letters(recall, "The QUICK bro")]
        )
        result = continue_text(new, [line], model.spelling)
        assert (result.kept_tokens, result.reason) == (kept, "no safe seam")
    assert result.tokens == changing.tokenizer.encode(new)


def test_a_long_text_without_special_tokens_is_continued_at_its_end(recall: TextModel):
    """Words are compared only near the end, and the seam is the same."""
    random = Random(3)
    text = say(random, 12_000)
    line = StoredBranch(text, [*letters(recall, text[:50]), *recall.tokenizer.encode(text[50:])])
    for new in (f"{text}, and more", f"{text[:-1]}abc", f"{text}{END}"):
        result = continue_text(new, [line], recall.spelling)
        assert recall.tokenizer.decode(result.tokens) == new
        assert result.kept_tokens > len(line.tokens) - 10
        rest = len(result.tokens) - result.kept_tokens
        assert result.tokens[-rest:] == recall.tokenizer.encode(new)[-rest:]


def test_a_hundred_thousand_tokens_cost_less_than_tokenizing_them(recall: TextModel):
    """Eight indexed lines cost a fraction of one encoding of the text; eight lines that are not indexed cost about one
    encoding."""
    random = Random(1)
    turns = [f"<|im_start|>user\n{say(random, 400)}{END}\n" for _ in range(100)]
    text = "".join(turns)
    tokens = recall.tokenizer.encode(text)
    lines = [StoredBranch("".join(turns[: 100 - k]) + "x" * k, tokens) for k in range(1, 8)]
    lines.append(StoredBranch(text, tokens))
    prepared = [recall.spelling.index(line) for line in lines]

    def cost(work: Any) -> float:
        times = []
        for _ in range(5):
            began = time.perf_counter()
            work()
            times.append(time.perf_counter() - began)
        return min(times)

    assert len(tokens) > 100_000
    encoding = cost(lambda: recall.tokenizer.encode(text))
    new = f"{text}<|im_start|>more"
    assert continue_text(new, prepared, recall.spelling).kept_tokens == len(tokens)
    assert cost(lambda: continue_text(new, prepared, recall.spelling)) < encoding / 4
    assert cost(lambda: continue_text(new, lines, recall.spelling)) < 2 * encoding


def test_many_threads_share_one_model(recall: TextModel):
    fresh = TextModel(recall.template.bare._wrapper)
    text = "<|im_start|>" + say(Random(2), 500)
    line = StoredBranch(text, recall.tokenizer.encode(text))
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda n: continue_text(f"{text}{n}", [line], fresh.spelling).tokens, range(64)))
    assert results == [recall.tokenizer.encode(f"{text}{n}") for n in range(64)]


@settings(max_examples=200, deadline=None)
@given(one=st.binary(max_size=300), other=st.binary(max_size=300), shared=st.binary(max_size=300))
def test_the_common_length_is_where_the_first_difference_is(one: bytes, other: bytes, shared: bytes):
    one, other = shared + one, shared + other
    expected = next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    expected = min(len(one), len(other)) if expected is None else expected
    assert common_length(one, other) == expected == common_length(list(one), list(other))


def test_the_class_says_how_much_is_common(recall: TextModel):
    line = StoredBranch("0123456789", recall.tokenizer.encode("0123456789"))
    cases = [("0123456789", "exact"), ("0123456789a", "extend"), ("01234567a", "partial"), ("0123456a", "diverge")]
    for new, match in cases:
        result = continue_text(new, [line], recall.spelling)
        assert (result.match, result.line) == (Match(match), 0)
    assert [result.common_characters, result.kept_tokens] == [7, 7]
    for lines in ([], [StoredBranch("xyz", recall.tokenizer.encode("xyz"))], [StoredBranch("", [])]):
        result = continue_text("abc", lines, recall.spelling)
        assert (result.tokens, result.line, result.match, result.kept_tokens) == (
            recall.tokenizer.encode("abc"),
            None,
            None,
            0,
        )


def test_an_unpaired_surrogate_is_the_callers_fault_and_in_a_line_only_a_difference(recall: TextModel):
    with pytest.raises(InvalidRequest):
        continue_text("a\ud800", [StoredBranch("a", recall.tokenizer.encode("a"))], recall.spelling)
    line = StoredBranch("hello \ud800", recall.tokenizer.encode("hello"))
    assert recall.tokenizer.decode(continue_text("hello ?", [line], recall.spelling).tokens) == "hello ?"
