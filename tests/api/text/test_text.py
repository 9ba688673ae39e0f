"""Laws of text: the output does not depend on how the text was cut into pieces."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceTrainer
from tokenizers import Tokenizer

from satchel.api.text.answers.stops import StopMatcher
from satchel.api.text.model import TextModel, load_text_model
from satchel.cluster.errors import InvalidRequest, ModelLoadError
from tests.worlds.models.tiny_tokenizers import write_tokenizer

quick = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def pieces(detokenizer, tokens: Sequence[int]) -> list[str]:
    return [*(detokenizer.add(token) for token in tokens), detokenizer.flush()]


def every_token(text: TextModel) -> int:
    assert text.tokenizer.backend is not None
    return text.tokenizer.backend.get_vocab_size(with_added_tokens=True)


@quick
@given(data=st.data())
def test_pieces_concatenate_to_the_one_shot_decoding_for_any_tokens(data: st.DataObject, text: TextModel):
    """For any tokens, including invalid bytes, half characters and special tokens."""
    tokens = data.draw(st.lists(st.integers(0, every_token(text) - 1), max_size=40))
    assert "".join(pieces(text.tokenizer.detokenizer(), tokens)) == text.tokenizer.decode(tokens)


@quick
@given(string=st.text(max_size=40))
def test_valid_text_never_shows_a_replacement_character(string: str, text: TextModel):
    """Characters of several bytes are split over tokens, and no piece has a part of one."""
    string = string.replace("\ufffd", "")
    shown = pieces(text.tokenizer.detokenizer(), text.tokenizer.encode(string))
    assert "".join(shown) == string
    assert not any("\ufffd" in piece for piece in shown)


def test_incomplete_bytes_show_only_when_nothing_can_complete_them(text: TextModel):
    first, *_ = text.tokenizer.encode("語")
    after = text.tokenizer.encode("a")[0]
    ended = text.tokenizer.detokenizer()
    assert (ended.add(first), ended.flush()) == ("", "\ufffd")
    went_on = text.tokenizer.detokenizer()
    assert (went_on.add(first), went_on.add(after)) == ("", "\ufffda")


def test_ids_past_the_tokenizers_end_have_no_text(text: TextModel):
    assert "".join(pieces(text.tokenizer.detokenizer(), [every_token(text) + 7])) == ""


@quick
@given(words=st.lists(st.sampled_from(["Hello", "world", "!", "a", " ", "é", "日", "😀"]), max_size=12))
def test_the_window_detokenizer_equals_one_shot_decoding_of_valid_text(words: list[str], sentencepiece: TextModel):
    tokens = [token for word in words for token in spell(sentencepiece, word)]
    shown = pieces(sentencepiece.tokenizer.detokenizer(), tokens)
    assert "".join(shown) == sentencepiece.tokenizer.decode(tokens)
    assert not any("\ufffd" in piece for piece in shown)


def spell(text: TextModel, word: str) -> list[int]:
    """Returns the tokens of a word in the SentencePiece-like vocabulary; unknown characters become bytes."""
    assert text.tokenizer.backend is not None
    whole = text.tokenizer.backend.token_to_id({"Hello": "▁Hello", "world": "▁world", " ": "▁"}.get(word, word))
    return [whole] if whole is not None else [byte_token(text, byte) for byte in word.encode()]


def byte_token(text: TextModel, byte: int) -> int:
    assert text.tokenizer.backend is not None
    return text.tokenizer.backend.token_to_id(f"<0x{byte:02X}>")


def test_a_continued_text_keeps_its_first_space(sentencepiece: TextModel):
    hello, world = spell(sentencepiece, "Hello"), spell(sentencepiece, "world")
    assert "".join(pieces(sentencepiece.tokenizer.detokenizer(), world)) == "world"
    assert "".join(pieces(sentencepiece.tokenizer.detokenizer(hello), world)) == " world"


def test_a_long_run_of_invalid_bytes_is_not_held_for_ever(sentencepiece: TextModel):
    detokenizer = sentencepiece.tokenizer.detokenizer()
    shown = [detokenizer.add(byte_token(sentencepiece, 0xFF)) for _ in range(100)]
    assert len("".join(shown)) >= 90


def test_a_token_has_the_bytes_that_it_has_inside_a_text(text: TextModel, sentencepiece: TextModel):
    (first, *rest) = text.tokenizer.encode("語")
    assert b"".join(text.tokenizer.token_bytes(token) for token in [first, *rest]) == "語".encode()
    assert sentencepiece.tokenizer.token_bytes(*spell(sentencepiece, "world")) == b" world"
    assert sentencepiece.tokenizer.token_bytes(byte_token(sentencepiece, 0xE8)) == b"\xe8"


def first_match(text: str, stops: list[str]) -> str | None:
    """The definition: read character by character, stop where the first stop string is complete."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return None


@settings(quick, max_examples=300)
@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
    cuts=st.lists(st.integers(0, 30), max_size=8),
)
def test_stop_strings_are_found_across_any_cut_and_never_leak(text: str, stops: list[str], cuts: list[int]):
    expected = first_match(text, stops)
    edges = [0, *sorted(cut for cut in cuts if cut <= len(text)), len(text)]
    matcher, shown = StopMatcher(stops), ""
    for start, end in pairwise(edges):
        shown += "".join(matcher.add(text[start:end]))
        # No text comes out that a later match would have to take back.
        assert (text if expected is None else expected).startswith(shown)
    assert matcher.matched == (expected is not None)
    assert shown + "".join(matcher.flush()) == (text if expected is None else expected)


def test_only_what_could_begin_a_stop_string_is_held_back():
    matcher = StopMatcher(["</s>"])
    assert matcher.add("one </") == ["one "]
    assert matcher.add("b>") == ["</b>"]
    assert not matcher.matched


def test_special_tokens_are_hidden_and_tool_markers_known(texts: dict[str, TextModel]):
    for markers, text in texts.items():
        ends = {text.tokenizer.encode(token)[0] for token in ("<|im_end|>", "<|endoftext|>")}
        assert ends <= text.tokenizer.hidden_tokens
        assert text.tokenizer.end_tokens == ends
        assert text.calls.known
        (start,) = text.tokenizer.encode("<tool_call>")[:1]
        assert (start in text.tokenizer.call_tokens) and (start in text.tokenizer.hidden_tokens) == (
            markers == "special"
        )


def test_rendered_specials_are_encoded_once(text: TextModel):
    prompt = text.template.render([{"role": "user", "content": "Hi"}])
    assert prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert text.tokenizer.decode(text.tokenizer.encode(prompt)) == prompt


def test_an_unpaired_surrogate_is_the_callers_fault(text: TextModel):
    with pytest.raises(InvalidRequest):
        text.tokenizer.encode("a\ud800")


def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path):
    with pytest.raises(ModelLoadError, match="tokenizer"):
        load_text_model(tmp_path, name="empty")


def test_a_truncating_tokenizer_file_does_not_shorten_prompts(tmp_path: Path, folders: dict[str, Path]):
    for file in folders["added"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    string = "the quick brown fox jumps over the lazy dog"
    text = load_text_model(tmp_path)
    assert text.tokenizer.decode(text.tokenizer.encode(string)) == string


@quick
@given(string=st.text(max_size=200))
def test_the_lower_bound_on_tokens_is_one(string: str, text: TextModel):
    assert text.tokenizer.tokens_min(string, 10**9) <= len(text.tokenizer.encode(string))
    assert text.tokenizer.tokens_min(string, 1) <= len(text.tokenizer.encode(string))


def test_a_text_that_is_far_too_long_is_not_encoded_to_its_end(text: TextModel, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("satchel.api.text.tokenizer._COUNTED_CHARACTERS", 64)
    string = "the quick brown fox, 日本語 " * 200
    assert text.tokenizer.tokens_min(string, 10) >= 10
    assert text.tokenizer.tokens_min(string, 10) < 100
    assert text.tokenizer.tokens_min(string, 100) <= len(text.tokenizer.encode(string))


async def test_encoding_in_a_thread_leaves_the_event_loop_running(text: TextModel):
    work = asyncio.create_task(asyncio.to_thread(text.tokenizer.encode, "the quick brown fox " * 20_000))
    turns = 0
    while not work.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert turns > 10


def test_an_old_processors_template_is_the_tokenizers_too(tmp_path: Path):
    folder = write_tokenizer(tmp_path, markers="none")
    template = (folder / "chat_template.jinja").read_text()
    hello = [{"role": "user", "content": "hello"}]
    shown = load_text_model(folder).template.render(hello)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "other " + template}))
    assert load_text_model(folder).template.render(hello) == shown, "that of its own files counts"
    (folder / "chat_template.jinja").unlink()
    assert load_text_model(folder).template.render(hello) == "other" + shown
    assert load_text_model(folder).template.source == "other " + template


def test_named_templates_are_chosen_by_whether_there_are_tools(tmp_path: Path):
    folder = write_tokenizer(tmp_path, markers="none")
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    named = [{"name": "default", "template": template}, {"name": "tool_use", "template": "tools " + template}]
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": named}))
    text, hello, tools = load_text_model(folder), [{"role": "user", "content": "hello"}], [{"function": {"name": "f"}}]
    assert text.template.render(hello).startswith("<|im_start|>user")
    assert text.template.render(hello, tools).startswith("tools<|im_start|>system")
    assert (text.template.source, text.template.bare.source(tools)) == (template, "tools " + template)


@pytest.mark.parametrize("file", ["chat_template.jinja", "tokenizer_config.json", "chat_template.json"])
def test_a_template_is_found_wherever_it_was_published(file: str, tmp_path: Path):
    folder = write_tokenizer(tmp_path, markers="none")
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    if file.endswith(".jinja"):
        (folder / file).write_text(template)
    else:
        known = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
        (folder / file).write_text(json.dumps(known | {"chat_template": template}))
    text = load_text_model(folder)
    assert text.template.source == template
    assert text.template.render([{"role": "user", "content": "Hi"}]).startswith("<|im_start|>user\nHi<|im_end|>")


def test_an_old_tokenizer_of_words_and_merges_is_enough(tmp_path: Path):
    folder = write_tokenizer(tmp_path, markers="none")
    fast, string = load_text_model(folder), "the lazy dog <|im_end|> héllo 😀"
    kept = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(kept["vocab"]))
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in kept["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    added = {token: fast.tokenizer.encode(token)[0] for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")}
    named = {str(number): {"content": token, "special": True} for token, number in added.items()}
    settings = {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": named, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    text = load_text_model(folder)
    assert list(text.tokenizer.encode(string)) == list(fast.tokenizer.encode(string))
    assert "".join(pieces(text.tokenizer.detokenizer(), text.tokenizer.encode(string))) == string


@pytest.mark.parametrize("kind", ["LlamaTokenizer", "Qwen2Tokenizer", "T5Tokenizer"])
def test_a_tokenizer_without_its_vocabulary_is_refused(kind: str, tmp_path: Path):
    folder = write_tokenizer(tmp_path, markers="none")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
    with pytest.raises(ModelLoadError, match="has no vocabulary: its folder lacks"):
        load_text_model(folder, name="bare")


def test_a_config_that_transformers_does_not_want_is_no_fault_of_a_tokenizer(tmp_path: Path):
    """transformers does not compute the model; its checks of a config are stricter than those of mlx-lm."""
    folder = write_tokenizer(tmp_path, markers="none")
    plain = load_text_model(folder)
    part = {"model_type": "gemma3n_text", "activation_sparsity_pattern": [1, 0]}
    odd = {"model_type": "gemma3n", "text_config": part}
    (folder / "config.json").write_text(json.dumps(odd | {"eos_token_id": plain.tokenizer.encode("<|im_end|>")[0]}))
    text = load_text_model(folder)
    assert list(text.tokenizer.encode("the quick brown fox")) == list(plain.tokenizer.encode("the quick brown fox"))
    assert text.template.source == plain.template.source


@pytest.mark.parametrize("error", [TypeError("no such thing"), SystemExit(1), RuntimeError("no such thing")])
def test_whatever_a_library_raises_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException):
    def load(*_: Any, **named: Any) -> Any:
        raise error

    folder = write_tokenizer(tmp_path, markers="none")
    monkeypatch.setattr("mlx_lm.tokenizer_utils.load", load)
    with pytest.raises(ModelLoadError, match="the tokenizer of 'odd' does not load"):
        load_text_model(folder, name="odd")


def test_an_old_tokenizer_of_one_file_is_enough(tmp_path: Path):
    """Neither PyTorch nor a converted file is needed."""
    folder, file = write_tokenizer(tmp_path, markers="none"), BytesIO()
    (folder / "tokenizer.json").unlink()
    lines = iter(["hello world the quick brown fox jumps over the lazy dog"] * 9)
    SentencePieceTrainer.train(
        sentence_iterator=lines, model_writer=file, vocab_size=60, model_type="bpe", minloglevel=2
    )
    (folder / "tokenizer.model").write_bytes(file.getvalue())
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    text = load_text_model(folder)
    tokens = text.tokenizer.encode("hello lazy fox")
    assert "".join(pieces(text.tokenizer.detokenizer(), tokens)).strip() == "hello lazy fox"
