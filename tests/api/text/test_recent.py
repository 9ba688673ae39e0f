"""Prompts that continue earlier ones have the same ids as if encoded whole, and only the new text is encoded."""

from __future__ import annotations

from random import Random

import pytest

from satchel.api.text.model import TextModel
from satchel.api.text.recent import RecentTexts
from satchel.cluster.errors import InvalidRequest

from .test_continuation import END, PIECES, START, model_of


@pytest.fixture(scope="module")
def made() -> dict[str, TextModel]:
    return {}


WORDS = ["the", "quick", "fox,", "over\n", "12345", "été", "日本", "code", "    return x\n", "zork?", "\n\n", "8" * 40]


def say(random: Random, characters: int) -> str:
    said = ""
    while len(said) < characters:
        pieces = WORDS if random.random() < 0.98 else [piece for piece in PIECES if "|" not in piece]
        said += " ".join(random.choices(pieces, k=200))
    return said


class Counted:
    """Counts the characters that a model encodes."""

    def __init__(self, model: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.characters = 0
        encode = model.tokenizer.encode

        def counted(text: str, *, special_tokens: bool = False) -> list[int]:
            self.characters += len(text)
            return encode(text, special_tokens=special_tokens)

        monkeypatch.setattr(model.tokenizer, "encode", counted)


@pytest.mark.parametrize("kind", ["gpt2", "qwen", "right", "whole", "flags", "lowercase", "bos", "gemma", "unigram"])
def test_texts_that_go_on_have_the_ids_of_their_whole_encoding(kind: str, made: dict[str, TextModel]):
    """Appended to, cut, changed near the end and in the middle; with added tokens, and with long stretches without
    any."""
    model, random = model_of(kind, made), Random(kind)
    recent = RecentTexts(model.spelling)
    text = say(random, 60_000)
    for _ in range(2):
        for changed in (text, text[:-3], text[:-9000] + "x" + text[-9000:], text[:20_000] + say(random, 30_000)):
            assert recent.encode(changed, "") == model.tokenizer.encode(changed)
        text += random.choice(["", f"{END}{START}"]) + say(random, random.choice([40, 9000]))


@pytest.mark.parametrize("marked", [True, False])
def test_only_what_is_new_is_encoded(
    marked: bool,
    made: dict[str, TextModel],
    monkeypatch: pytest.MonkeyPatch,
):
    model, random = model_of("llama3", made), Random(1)
    text = say(random, 200_000)
    model.recent.encode(text, "a")
    counted = Counted(model, monkeypatch)
    for _ in range(3):
        text += (f"{END}{START}" if marked else "") + say(random, 300)
        model.recent.encode(text, "a")
    # If no special token is near, the encoding begins up to 16 KB before the new text.
    assert counted.characters < 20_000 * (1 if marked else 3) + 10_000


def test_other_scopes_encode_anew(made: dict[str, TextModel], monkeypatch: pytest.MonkeyPatch):
    model, text = model_of("qwen", made), say(Random(2), 50_000)
    model.recent.encode(text, "one/")
    counted = Counted(model, monkeypatch)
    model.recent.encode(text + "!", "other/")
    assert counted.characters >= len(text)


def test_what_was_used_least_recently_is_forgotten(made: dict[str, TextModel], monkeypatch: pytest.MonkeyPatch):
    model, random = model_of("llama3", made), Random(3)
    texts = [say(random, 50_000) for _ in range(6)]
    recent = RecentTexts(model.spelling, bytes_max=2_000_000)
    for text in texts:
        recent.encode(text, "")
    counted = Counted(model, monkeypatch)
    recent.encode(texts[-1] + f"{START}", "")
    assert counted.characters < 40_000
    recent.encode(texts[0] + f"{START}", "")
    assert counted.characters > 50_000


def test_special_tokens_are_put_around(made: dict[str, TextModel]):
    model, text = model_of("bos", made), say(Random(4), 50_000)
    for _ in range(2):
        assert model.recent.encode(text, "", special_tokens=True) == model.tokenizer.encode(text, special_tokens=True)
        text += "more"


def test_text_that_is_no_unicode_is_refused(made: dict[str, TextModel]):
    with pytest.raises(InvalidRequest, match="surrogate"):
        model_of("qwen", made).recent.encode("a" * 10_000 + "\ud800", "")
