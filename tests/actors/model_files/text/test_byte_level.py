"""A tokenizer that writes text as bytes is read as such, whatever decoder its files have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from satchel.actors.model_files.text.grammar_compiler import GrammarCompiler, tokenizer_json
from satchel.api.text.model import TextModel, load_text_model

TEXT = "a small red kite, zwölf Vögel 日本 😀"
SENTENCEPIECE = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
DECODERS = {
    "SentencePiece's": decoders.Sequence(SENTENCEPIECE),
    "WordPiece's": decoders.WordPiece(),
    "none": None,
    "its own in a sequence": decoders.Sequence([decoders.ByteLevel()]),
    "its own": decoders.ByteLevel(),
}
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
SPLITS = {
    "alone": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "behind a split": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\d"), "isolated"), BYTES]),
    "as a normalizer": None,
}


@pytest.fixture(params=[(decoder, split) for decoder in DECODERS for split in SPLITS], ids=" ".join)
def text(request: pytest.FixtureRequest, tmp_path: Path) -> TextModel:
    decoder, split = request.param
    tokenizer = Tokenizer(models.BPE())
    if SPLITS[split] is None:
        tokenizer.normalizer = normalizers.ByteLevel()
    else:
        tokenizer.pre_tokenizer = SPLITS[split]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer: Any = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    if DECODERS[decoder] is not None:
        tokenizer.decoder = DECODERS[decoder]
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    return load_text_model(tmp_path)


def test_text_comes_out_as_it_went_in_whole_and_token_by_token(text: TextModel):
    reader, tokens = text.tokenizer.detokenizer(), text.tokenizer.encode(TEXT)
    assert text.tokenizer.decode(tokens) == TEXT
    assert "".join(map(reader.add, tokens)) + reader.flush() == TEXT
    assert b"".join(map(text.tokenizer.token_bytes, tokens)).decode() == TEXT


def test_grammars_are_followed_in_the_same_bytes(text: TextModel):
    for written in (text.tokenizer.json(), tokenizer_json(text.tokenizer._tokenizer)):
        matcher = GrammarCompiler(written, text.tokenizer.end_tokens).matcher(
            'start: "a small red kite, zwölf Vögel 日本 😀"'
        )
        tokens = text.tokenizer.encode(TEXT)
        assert matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def test_words_of_another_kind_keep_their_decoder(tmp_path: Path):
    tokenizer = Tokenizer(models.BPE({"\u2581": 0, "a": 1, "\u2581a": 2, "<e>": 3}, [("\u2581", "a")]))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence(SENTENCEPIECE)
    tokenizer.add_special_tokens([AddedToken("<e>", special=True)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<e>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    assert load_text_model(tmp_path).tokenizer.decode([1, 2]) == "a a"
