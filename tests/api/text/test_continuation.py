"""Laws of continuation by text, for any texts and every kind of tokenizer: the ids spell the text, the part behind the
seam is tokenized as in the whole text, and a line of the tokenizer's own ids changes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from satchel.api.text.continuation import Continuation, Match, StoredBranch, continue_text
from satchel.api.text.model import TextModel

START, END = "<|im_start|>", "<|im_end|>"
CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "hello world, hello there   now\n\n",
    "日本語 12345 😀 été",
] * 8
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Digits in groups of three from the right: where a group ends depends on how many digits follow.
RIGHT = r"""\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
SPECIAL = [AddedToken(content, special=True) for content in ("<unk>", "<s>", START, END)]
FLAGGED = [
    AddedToken("<|user|>", special=True, rstrip=True),
    AddedToken("<mask>", special=True, lstrip=True),
    AddedToken("<word>", single_word=True),
    AddedToken("<tool_call>", normalized=False),
    # An added token that begins where other tokens end, and where other tokens begin.
    AddedToken("<tool_call>s", normalized=False),
    AddedToken("|>!", normalized=False),
    AddedToken("<|im_start|>a", normalized=False),
    AddedToken("\n\n", normalized=False),
]
PIECES = [
    *(START, END, "<s>", "<|user|>", "<mask>", "<word>", "<tool_call>", "|>!", "<|im_end", "im_end|>", "!", "<"),
    *(
        "hello",
        " hello",
        "hel",
        "lo",
        " world",
        "the",
        "a",
        "b",
        "'s",
        " été",
        "e\u0301",
        "日本",
        "語",
        "😀",
        "👩‍👩‍👧",
        "\ufffd",
    ),
    *(" ", "  ", "    ", "\n", "\n\n", " \n", "\t", "\u2581", "1", "12", "345", "67", ".", ", ", "Ab", "ß", "\u00a0"),
]


def train(model: Any, trainer: Callable[..., Any], **how: Any) -> Tokenizer:
    """Returns a trained tokenizer with this model. `how` has its parts and the trainer's options."""
    added = how.pop("added", [])
    parts = {part: how.pop(part) for part in ("normalizer", "pre_tokenizer", "decoder") if part in how}
    tokenizer = finished(Tokenizer(model), **parts)
    tokenizer.train_from_iterator(CORPUS, trainer(show_progress=False, **how))
    return finished(tokenizer, added=added)


def finished(tokenizer: Tokenizer, added: Sequence[AddedToken] = (), **parts: Any) -> Tokenizer:
    for part, value in parts.items():
        setattr(tokenizer, part, value)
    for entry in [*SPECIAL, *added]:
        (tokenizer.add_special_tokens if entry.special else tokenizer.add_tokens)([entry])
    return tokenizer


def byte_level(pattern: str = "", *, prefix: bool = False, ignore_merges: bool = False, **how: Any) -> Tokenizer:
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=pattern == "gpt2")]
    if pattern not in ("gpt2", ""):
        steps = [pre_tokenizers.Split(Regex(pattern), "isolated"), *steps]
    parts = {"pre_tokenizer": pre_tokenizers.Sequence(steps), "decoder": decoders.ByteLevel(), "vocab_size": 350}
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    model = models.BPE(ignore_merges=ignore_merges)
    return train(model, trainers.BpeTrainer, initial_alphabet=alphabet, **parts, **how)


def sentencepiece(normalizer: Any = None, pre_tokenizer: Any = None, *, strip: bool = True, **how: Any) -> Tokenizer:
    """Returns BPE over whole texts, with `▁` for spaces, and bytes for characters that the vocabulary does not have."""
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    parts = {"decoder": decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if strip else [])])}
    parts |= {name: part for name, part in (("normalizer", normalizer), ("pre_tokenizer", pre_tokenizer)) if part}
    normalized = Tokenizer(models.BPE())
    normalized.normalizer = normalizers.Replace(" ", "\u2581")
    normalized.train_from_iterator(CORPUS, trainers.BpeTrainer(show_progress=False, vocab_size=140))
    state = json.loads(normalized.to_str())["model"]
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *state["vocab"]]
    vocabulary = {word: place for place, word in enumerate(words)}
    merges = [tuple(pair) for pair in state["merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    return finished(tokenizer, **parts, **how)


def unigram() -> Tokenizer:
    parts = {"pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="always"), "decoder": decoders.Metaspace()}
    how = {"unk_token": "<unk>", "special_tokens": ["<unk>"], "vocab_size": 120}
    return train(models.Unigram(), trainers.UnigramTrainer, **parts, **how)


def wordpiece() -> Tokenizer:
    parts = {"pre_tokenizer": pre_tokenizers.BertPreTokenizer(), "decoder": decoders.WordPiece()}
    normalizer = normalizers.BertNormalizer()
    model = models.WordPiece(unk_token="<unk>")
    return train(model, trainers.WordPieceTrainer, normalizer=normalizer, special_tokens=["<unk>"], **parts)


def with_bos() -> Tokenizer:
    tokenizer = byte_level(QWEN)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


class PythonTokenizer(PreTrainedTokenizerFast):
    """A tokenizer whose own encoding must be used, as for tokenizers written in Python."""

    def encode(self, *args: Any, **how: Any) -> list[int]:
        return super().encode(*args, **how)  # type: ignore[return-value]


LEGACY = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
GEMMA_ADDED = [AddedToken(content, normalized=False) for content in ("\n\n", "\n\n\n", "\u2581\u2581")]
KINDS: dict[str, Callable[[], Tokenizer]] = {
    "gpt2": lambda: byte_level("gpt2"),
    "qwen": lambda: byte_level(QWEN, normalizer=normalizers.NFC()),
    "llama3": lambda: byte_level(QWEN, ignore_merges=True),
    "right": lambda: byte_level(RIGHT),
    "whole": byte_level,
    "prefix": lambda: byte_level("gpt2", prefix=True),
    "flags": lambda: byte_level(QWEN, added=FLAGGED),
    "lowercase": lambda: byte_level(
        "gpt2", normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    ),
    "bos": with_bos,
    "metaspace": lambda: sentencepiece(None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
    "legacy": lambda: sentencepiece(LEGACY),
    "gemma": lambda: sentencepiece(normalizers.Replace(" ", "\u2581"), strip=False, added=GEMMA_ADDED),
    "unigram": unigram,
    "wordpiece": wordpiece,
    "python": lambda: byte_level(QWEN),
}
SPACED = ("prefix", "metaspace", "legacy", "unigram")
LOSSLESS = ("gpt2", "llama3", "right", "whole", "bos", "python")


def text_model(tokenizer: Tokenizer, kind: type = PreTrainedTokenizerFast, template: str = "") -> TextModel:
    names = ("tool_parser", "tool_call_start", "tool_call_end", "think_start", "think_end", "tool_call_start_tokens")
    silent: dict[str, Any] = dict.fromkeys((*names, "tool_call_end_tokens", "think_start_tokens", "think_end_tokens"))
    inner = kind(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, chat_template=template or None)
    return TextModel(
        SimpleNamespace(
            _tokenizer=inner,
            has_chat_template=bool(template),
            _chat_template=None,
            eos_token_ids={tokenizer.token_to_id(END)},
            has_tool_calling=False,
            has_thinking=False,
            **silent,
        )
    )


@pytest.fixture(scope="module")
def made() -> dict[str, TextModel]:
    return {}


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest, made: dict[str, TextModel]) -> TextModel:
    return model_of(request.param, made)


def model_of(kind: str, made: dict[str, TextModel]) -> TextModel:
    if kind not in made:
        made[kind] = text_model(KINDS[kind](), PythonTokenizer if kind == "python" else PreTrainedTokenizerFast)
        made[kind].name = kind
    return made[kind]


quick = settings(
    max_examples=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
texts = st.lists(st.sampled_from(PIECES), max_size=14).map("".join)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[str, str]:
    """Draws a line's text and a new text with a common beginning: appended to, cut, or changed in the middle."""
    old, tail = draw(texts), draw(texts)
    cut = draw(st.one_of(st.just(len(old)), st.integers(0, len(old))))
    return old, old[:cut] + tail + draw(st.sampled_from(["", old[cut:]]))


def redrawn(model: TextModel, tokens: list[int], random: Random, share: float) -> list[int]:
    """Returns other ids for the same text: a share of the tokens is split into smaller ones, except control tokens,
    which would be another text then."""
    tokenizer = model.tokenizer._tokenizer.backend_tokenizer
    vocabulary, added = tokenizer.get_vocab(), tokenizer.get_added_tokens_decoder()
    out: list[int] = []
    for token in tokens:
        written = tokenizer.id_to_token(token)
        single = token in model.tokenizer.controls.ids or written in ("<unk>",) or written.startswith("<0x")
        if (
            single
            or random.random() >= share
            or (token in added and (not model.tokenizer.byte_level or model.name == "prefix"))
        ):
            out.append(token)
            continue
        cut = random.randint(1, max(1, len(written) - 1))
        for part in (written[:cut], written[cut:]):
            if part in vocabulary and vocabulary[part] not in added:
                out.append(vocabulary[part])
            elif all(character in vocabulary for character in part):
                out.extend(vocabulary[character] for character in part)
            else:
                return tokens
    return out


def held(model: TextModel, result: Continuation, new: str, line: StoredBranch) -> Continuation:
    """Checks what must hold for every result, and returns it."""
    plain = model.tokenizer.encode(new)
    kept, rest = result.tokens[: result.kept_tokens], result.tokens[result.kept_tokens :]
    assert kept == list(line.tokens[: result.kept_tokens])
    says, plainly = model.tokenizer.decode(result.tokens), model.tokenizer.decode(plain)
    # Ids without the space that the tokenizer puts before a text spell the same text.
    assert says == plainly or (model.name in SPACED and says.replace(" ", "") == plainly.replace(" ", ""))
    assert rest == plain[len(plain) - len(rest) :]
    assert new[: result.common_characters] == line.text[: result.common_characters]
    assert (result.reason == "") == (result.kept_tokens == len(line.tokens) and result.line is not None)
    return result


@quick
@given(pair=pairs())
def test_a_line_of_the_tokenizers_own_ids_gives_the_tokenizers_own_ids(pair: tuple[str, str], model: TextModel):
    """No drift: if the memory was tokenized by the tokenizer itself, no id changes, wherever the texts begin to
    differ."""
    old, new = pair
    line = StoredBranch(old, model.tokenizer.encode(old))
    result = held(model, continue_text(new, [line], model.spelling), new, line)
    assert result.tokens == model.tokenizer.encode(new)


@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [
        # The space that is put before the first text is not put before a special token.
        ("legacy", "<|user|>", START),
        # White space gets other words if a special token follows.
        ("qwen", "lo  <|user|>", f"lo  {START}"),
        ("prefix", "lo  <|user|>", f"lo  {START}"),
        # A longer added token begins like the one in the line.
        ("flags", "a<tool_call>", "a<tool_call>s"),
        # An added token that must be a whole word.
        ("flags", "a <word>", "a <word>b"),
        ("right", "1234567 ", "12345678 "),
    ],
)
def test_a_line_that_only_looks_alike_changes_no_id(kind: str, old: str, new: str, made: dict[str, TextModel]):
    model = model_of(kind, made)
    line = StoredBranch(old, model.tokenizer.encode(old))
    assert held(model, continue_text(new, [line], model.spelling), new, line).tokens == model.tokenizer.encode(new)


@quick
@given(pair=pairs(), seed=st.integers(0, 2**32), share=st.sampled_from([0.1, 0.5, 1.0]))
def test_drawn_ids_are_kept_and_the_rest_is_tokenized_as_in_the_whole_text(
    pair: tuple[str, str], seed: int, share: float, model: TextModel
):
    """Whatever ids the model sampled for its text, the result spells the text, and no merge crosses the seam."""
    old, new = pair
    line = StoredBranch(old, redrawn(model, model.tokenizer.encode(old), Random(seed), share))
    result = held(model, continue_text(new, [line], model.spelling), new, line)
    if model.name in LOSSLESS:
        assert model.tokenizer.decode(result.tokens) == new


@quick
@given(pair=pairs(), tokens=st.lists(st.integers(-1, 700), max_size=20))
def test_ids_that_do_not_spell_the_lines_text_never_become_a_prompt(
    pair: tuple[str, str], tokens: list[int], model: TextModel
):
    """A wrong memory costs work, but never gives a wrong prompt."""
    old, new = pair
    held(model, continue_text(new, [StoredBranch(old, tokens)], model.spelling), new, StoredBranch(old, tokens))


@quick
@given(words=st.lists(st.sampled_from([0, *range(256)]), max_size=12), tail=texts, more=texts)
def test_bytes_that_are_no_text_are_never_kept(words: list[int], tail: str, more: str, made: dict[str, TextModel]):
    """U+FFFD in the line's text and in the client's echo are the same character but not the same bytes."""
    model = model_of("gpt2", made)
    byte_of = {model.tokenizer.token_bytes(token): token for token in range(400)}
    line_tokens = [
        *model.tokenizer.encode("ab "),
        *(byte_of[bytes([word])] for word in words),
        *model.tokenizer.encode(tail),
    ]
    line = StoredBranch(model.tokenizer.decode(line_tokens), line_tokens)
    result = held(model, continue_text(line.text + more, [line], model.spelling), line.text + more, line)
    spelled = b"".join(map(model.tokenizer.token_bytes, result.tokens[: result.kept_tokens]))
    assert (line.text + more).encode().startswith(spelled)


def test_the_reason_names_bytes_that_are_no_text(made: dict[str, TextModel]):
    model = model_of("gpt2", made)
    (half, *_) = model.tokenizer.encode("語")
    line = StoredBranch("ab \ufffd", [*model.tokenizer.encode("ab "), half])
    result = continue_text(f"ab \ufffd{END}", [line], model.spelling)
    assert (result.kept_tokens, result.reason) == (len(line.tokens) - 1, "bytes that are no text")
    written = StoredBranch("ab \ufffd", model.tokenizer.encode("ab \ufffd"))
    assert continue_text(f"ab \ufffd{END}", [written], model.spelling).kept_tokens == len(written.tokens)


@pytest.mark.parametrize("ended", ["with the end token", "without it", "in a word", "with more behind it"])
def test_what_a_template_appends_keeps_every_token(ended: str, model: TextModel):
    """Whether or not the end token was sampled, the history begins with the whole line, and all of it is kept."""
    answer = {"with the end token": f"hello world{END}", "in a word": "hello wor"}.get(ended, "hello world")
    old = f"{START}user\nthe 123 dogs{END}\n{START}assistant\n"
    plain, drawn = (
        model.tokenizer.encode(old),
        redrawn(model, model.tokenizer.encode(f"{START}{answer}")[1:], Random(5), 1.0),
    )
    if model.name in ("prefix", "metaspace", "legacy", "unigram"):
        # Here the text behind an added token is tokenized together with the text before it.
        plain, drawn = model.tokenizer.encode(old + answer), []
    line = StoredBranch(old + answer, [*plain, *drawn])
    new = line.text + ("" if END in answer else END) + f"\n{START}user\nand now?{END}\n{START}assistant\n"
    if model.name == "wordpiece":
        # Its lines can only be aligned at added tokens.
        line = StoredBranch(old, model.tokenizer.encode(old))
    result = held(model, continue_text(new, [line], model.spelling), new, line)
    assert (result.kept_tokens, result.match, result.reason) == (len(line.tokens), Match.EXTEND, "")


@pytest.mark.parametrize("kind", ["gpt2", "qwen", "llama3", "gemma", "legacy", "python"])
def test_history_that_a_template_changes_is_kept_up_to_the_change(kind: str, made: dict[str, TextModel]):
    """Reasoning is left out of the history: everything before it is kept, including the earlier sampled answer."""
    model = model_of(kind, made)
    before = (
        f"{START}user\nthe dog{END}\n{START}assistant\nhello world{END}\n{START}user\nand?{END}\n{START}assistant\n"
    )
    own = redrawn(model, model.tokenizer.encode(before), Random(3), 0.0 if kind == "legacy" else 0.5)
    line = StoredBranch(
        f"{before}<s>over the fox<s>lazy{END}", [*own, *model.tokenizer.encode(f"<s>over the fox<s>lazy{END}")]
    )
    result = held(model, continue_text(f"{before}lazy{END}\n", [line], model.spelling), f"{before}lazy{END}\n", line)
    assert result.match is Match.PARTIAL
    turn = len(before) - len("assistant\n")
    kept = model.tokenizer.decode(result.tokens[: result.kept_tokens])
    assert kept.startswith(model.tokenizer.decode(model.tokenizer.encode(before[:turn])))
    assert result.reason in ("text changed", "no safe seam")


@pytest.mark.parametrize("kind", ["prefix", "legacy", "metaspace", "gemma"])
def test_a_text_that_changes_in_a_message_is_kept_up_to_there(kind: str, made: dict[str, TextModel]):
    """Also behind a space that the tokenizer inserted, behind bytes, and before ids that spell something else."""
    model = model_of(kind, made)
    old, new = (model.tokenizer.encode(f"{START}hello 語 the{word}") for word in (" world", "\nlazy"))
    for tail in (model.tokenizer.encode(" world")[-1:] * 3, []):
        line = StoredBranch(f"{START}hello 語 the world", [*old[:-1], *tail] if tail else old)
        result = held(
            model,
            continue_text(f"{START}hello 語 the\nlazy", [line], model.spelling),
            f"{START}hello 語 the\nlazy",
            line,
        )
        assert result.kept_tokens == next(n for n, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1])


def test_white_space_that_a_template_trims_costs_only_itself(made: dict[str, TextModel]):
    for kind in ("gpt2", "qwen", "llama3", "gemma"):
        model = model_of(kind, made)
        drawn = redrawn(model, model.tokenizer.encode(f"{START}hello the world"), Random(1), 1.0)
        line = StoredBranch(
            f"{START}hello the world \n", [*drawn, *model.tokenizer.encode(" "), *model.tokenizer.encode("\n")]
        )
        result = held(
            model, continue_text(f"{line.text.rstrip()}{END}", [line], model.spelling), line.text.rstrip() + END, line
        )
        assert result.kept_tokens == len(drawn), kind


def test_the_line_of_which_most_is_kept_is_continued_and_the_first_of_equals(made: dict[str, TextModel]):
    model = model_of("qwen", made)
    short, long = (
        StoredBranch(text, model.tokenizer.encode(text)) for text in (f"{START}the dog", f"{START}the dog jumps{END}")
    )
    other = StoredBranch(f"{START}over", model.tokenizer.encode(f"{START}over"))
    new = f"{START}the dog jumps{END}\n"
    assert continue_text(new, [other, short, long, long], model.spelling).line == 2
    assert continue_text(new, [model.spelling.index(line) for line in (other, short, long)], model.spelling).line == 2
    # The same text in more ids: more of them are kept.
    finer = StoredBranch(long.text, redrawn(model, list(long.tokens), Random(2), 1.0))
    assert continue_text(new, [long, finer], model.spelling).line == 1
