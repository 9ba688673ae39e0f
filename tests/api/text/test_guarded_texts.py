"""Laws of guarded texts (a lone surrogate in each caller's marker keeps it text), for every kind of tokenizer: a
caller's text never has a control token, whatever is around it, keeps its content, and is tokenized as if the tokenizer
had no control tokens. All other text is tokenized as before."""

from __future__ import annotations

import json
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers
from tokenizers.normalizers import Normalizer

from satchel.api.text.continuation import StoredBranch, continue_text
from satchel.api.text.control_tokens import BREAK, breaks_of, unbroken, with_breaks
from satchel.api.text.model import TextModel
from satchel.api.text.recent import RecentTexts
from satchel.cluster.errors import InvalidRequest

from .test_continuation import END, KINDS, LOSSLESS, PIECES, START, model_of, redrawn, text_model

quick = settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
WORDS = [piece for piece in PIECES if not any(mark in piece for mark in "<|>")]
said = st.lists(st.sampled_from(PIECES), max_size=10).map("".join)
harmless = st.lists(st.sampled_from(WORDS), max_size=10).map("".join)
turns = st.lists(said, min_size=1, max_size=4)


@pytest.fixture(scope="module")
def made() -> dict[str, TextModel]:
    return {}


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest, made: dict[str, TextModel]) -> TextModel:
    return model_of(request.param, made)


def conversation(model: TextModel, texts: list[str], guard: bool = True) -> str:
    """Returns turns of a template that writes control tokens around callers' texts, and joins two of the texts in each
    turn."""
    shown = [model.tokenizer.controls.guarded(text) if guard else text for text in texts]
    return "".join(f"{START}user\n{text}{shown[0]}{END}\n" for text in shown)


def controls(model: TextModel, tokens: list[int], unknown: bool = False) -> list[int]:
    """Returns the control tokens among `tokens`, without the token for unknown characters."""
    own = model.tokenizer.token_of("<unk>")
    return [token for token in tokens if token in model.tokenizer.controls.ids and (unknown or token != own)]


@quick
@given(texts=turns)
def test_no_text_becomes_a_control_token(texts: list[str], model: TextModel):
    """Neither alone nor together with the following text."""
    tokens = model.tokenizer.encode(conversation(model, texts))
    assert controls(model, tokens) == controls(model, model.tokenizer.encode(conversation(model, ["a"] * len(texts))))
    if model.name in LOSSLESS:
        assert (
            model.tokenizer.decode(tokens)
            == unbroken(conversation(model, texts))
            == conversation(model, texts, guard=False)
        )


@quick
@given(texts=st.lists(harmless, min_size=1, max_size=4))
def test_texts_without_marks_are_not_touched(texts: list[str], model: TextModel):
    """The string stays the same, so the tokens do too, and no KV is lost."""
    assert all(model.tokenizer.controls.guarded(text) is text for text in texts)
    assert conversation(model, texts) == conversation(model, texts, guard=False)


def without_control(model: TextModel) -> Tokenizer:
    """Returns the tokenizer that the file would give without its control tokens."""
    state = json.loads(model.tokenizer._tokenizer.backend_tokenizer.to_str())
    state["added_tokens"] = [each for each in state["added_tokens"] if each["id"] not in model.tokenizer.controls.ids]
    state["post_processor"] = None
    return Tokenizer.from_str(json.dumps(state))


@quick
@given(text=said)
def test_a_callers_text_has_the_tokens_of_its_spelling(text: str, model: TextModel):
    """The tokens are those of the vocabulary, also across the borders of markers."""
    if model.name in ("unigram", "wordpiece", "python"):
        # Their vocabularies have markers as ordinary entries, or cannot be read.
        return
    spelling = without_control(model).encode(text, add_special_tokens=False).tokens
    for guarded in (model.tokenizer.controls.guarded(text), with_breaks(text, range(1, len(text)))):
        assert model.tokenizer.written(model.tokenizer.encode(guarded)) == spelling


@quick
@given(text=said, more=said)
def test_what_stands_around_a_callers_mark_is_tokenized_as_without_it(text: str, more: str, model: TextModel):
    """A break at a place without a marker changes no token."""
    plain = f"{START}user\nhello{END}\n{START}a"
    at = plain.index("hello") + 2
    whole = model.tokenizer.encode(f"{plain}{text}{more}")
    if model.name != "python":
        assert model.tokenizer.encode(with_breaks(plain, [at]) + text + more) == whole


@quick
@given(texts=turns)
def test_what_the_tokenizer_puts_around_a_text_is_put_around_a_guarded_one(texts: list[str], model: TextModel):
    prompt = conversation(model, [*texts, END])
    around = [*model.tokenizer.begin_tokens, *model.tokenizer.encode(prompt), *model.tokenizer.closing_tokens]
    assert (
        model.tokenizer.encode(prompt, special_tokens=True)
        == model.recent.encode(prompt, "", special_tokens=True)
        == around
    )


@quick
@given(old=turns, more=turns, cut=st.integers(0, 400))
def test_memory_of_guarded_texts_gives_the_tokens_of_their_whole_encoding(
    old: list[str], more: list[str], cut: int, model: TextModel
):
    """Wherever the text is continued, cut or changed: a control token of the line is one in the new text, or the seam
    is before it."""
    before = conversation(model, old)
    new = conversation(model, [*old[: cut % (len(old) + 1)], *more])
    line = StoredBranch(unbroken(before), model.tokenizer.encode(before))
    assert continue_text(new, [line], model.spelling).tokens == model.tokenizer.encode(new)
    assert continue_text(new, [model.spelling.index(line)], model.spelling).tokens == model.tokenizer.encode(new)


@quick
@given(old=said, new=said, ours=st.booleans(), theirs=st.booleans())
def test_the_same_text_with_other_structure_is_not_continued(
    old: str, new: str, ours: bool, theirs: bool, model: TextModel
):
    """A marker that was a token is not a token if a caller writes it, and vice versa."""
    guard = model.tokenizer.controls.guarded
    before = f"{START}user\n{guard(old) if theirs else old}"
    after = f"{START}user\n{guard(old) if ours else old}{new}"
    line = StoredBranch(unbroken(before), model.tokenizer.encode(before))
    result = continue_text(after, [line], model.spelling)
    assert controls(model, result.tokens) == controls(model, model.tokenizer.encode(after))
    assert unbroken(after)[: result.common_characters] == line.text[: result.common_characters]


def test_a_mark_whose_end_is_another_tokens_begin_is_text_in_memory_too(made: dict[str, TextModel]):
    model = model_of("flags", made)
    before, after = (
        f"{START}user\n{said}" for said in (model.tokenizer.controls.guarded("> <|user|>!hel"), "> <|user|>!hel")
    )
    line = StoredBranch(unbroken(before), model.tokenizer.encode(before))
    assert continue_text(after, [line], model.spelling).tokens == model.tokenizer.encode(after)


def test_a_mark_before_spaces_is_text_in_memory_too(made: dict[str, TextModel]):
    """If a token for several spaces is longer than the spaces there."""
    model = model_of("gemma", made)
    before = f"{START}user\n{model.tokenizer.controls.guarded(START)}  "
    line = StoredBranch(unbroken(before), model.tokenizer.encode(before))
    after = f"{START}user\n{START}  {START}"
    assert continue_text(after, [line], model.spelling).tokens == model.tokenizer.encode(after)


@quick
@given(texts=turns, seed=st.integers(0, 2**32))
def test_drawn_ids_of_guarded_texts_are_kept(texts: list[str], seed: int, model: TextModel):
    """Whatever tokens the model sampled, the prompt has exactly the right control tokens."""
    before = conversation(model, texts)
    line = StoredBranch(unbroken(before), redrawn(model, model.tokenizer.encode(before), Random(seed), 0.5))
    new = f"{before}{START}user\n{model.tokenizer.controls.guarded(texts[-1])}{END}"
    result = continue_text(new, [line], model.spelling)
    assert controls(model, result.tokens) == controls(model, model.tokenizer.encode(new))
    if model.name in LOSSLESS:
        assert model.tokenizer.decode(result.tokens) == unbroken(new)
        # Tokenizers in Python cannot tell invalid bytes from the replacement character.
        assert result.kept_tokens == len(line.tokens) or model.name == "python"


def test_a_tokenizer_written_in_python_finds_lines_again_that_name_control_tokens(made: dict[str, TextModel]):
    model = model_of("python", made)
    before = conversation(model, [f"what is {END} for?", START])
    new = before + conversation(model, [f"{END}{END}"])
    result = continue_text(new, [StoredBranch(unbroken(before), model.tokenizer.encode(before))], model.spelling)
    assert result.tokens == model.tokenizer.encode(new)
    assert result.kept_tokens == len(model.tokenizer.encode(before))


@pytest.mark.parametrize(
    "kind",
    ["gpt2", "unigram", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("qwen", "flags", "gemma", "bos"))],
)
def test_recent_texts_are_guarded_too(kind: str, made: dict[str, TextModel]):
    """Long prompts that continue others, with markers everywhere."""
    model, random = model_of(kind, made), Random(kind)
    recent, texts = RecentTexts(model.spelling), []
    for _ in range(5):
        texts.append("".join(random.choices([*PIECES, *WORDS * 10], k=4000)))
        prompt = conversation(model, texts)
        assert recent.encode(prompt, "") == model.tokenizer.encode(prompt)
        unguarded = conversation(model, texts, guard=False)
        assert recent.encode(unguarded, "") == model.tokenizer.encode(unguarded)


def test_a_mark_that_texts_make_together_is_text(made: dict[str, TextModel]):
    """Templates join the parts of a message, and texts that they have stripped."""
    model = model_of("qwen", made)
    guard = model.tokenizer.controls.guarded
    for cut in range(1, len(END)):
        first, last = END[:cut], END[cut:]
        assert model.tokenizer.encode(f"a{guard(first)}{guard(last)}") == model.tokenizer.encode(guard(f"a{END}"))
        assert END not in guard(f"{first}  \n").strip() + guard(last)
        middle = len(last) // 2
        parts = (first, last[:middle], last[middle:])
        assert not controls(model, model.tokenizer.encode("".join(map(guard, parts))))


def test_breaks_are_places_in_the_unbroken_text():
    text = "añ<|b"
    for places in ([], [0], [2, 3], [0, 1, 5]):
        assert breaks_of(with_breaks(text, places)) == places
        assert unbroken(with_breaks(text, places)) == text


def test_no_caller_can_write_a_break(text: TextModel):
    """Like every lone surrogate it is not valid Unicode."""
    for guard in (text.tokenizer.controls.guarded, lambda said: text.tokenizer.controls.guarded_value({"a": [said]})):
        with pytest.raises(InvalidRequest, match="unpaired surrogate at character 3"):
            guard(f"<|i{BREAK}m_end|>")
    with pytest.raises(InvalidRequest, match="unpaired surrogate"):
        text.tokenizer.encode(text.tokenizer.controls.guarded("\ud800<|im_end|>"))


def test_values_are_guarded_to_the_keys_and_only_where_they_name_a_mark(text: TextModel):
    value = {"a": [1, None, True, {"b": "c"}], "d": "x"}
    assert text.tokenizer.controls.guarded_value(value) is value
    marked = text.tokenizer.controls.guarded_value({f"k{END}": [f"{END}"], "same": ["y"]})
    ((key, listed), (_, same)) = marked.items()
    assert (unbroken(key), unbroken(listed[0]), same) == (f"k{END}", END, ["y"])
    assert BREAK in key and BREAK in listed[0]


def test_a_mark_in_another_spelling_is_text_where_the_tokenizer_folds_it():
    """With a tokenizer that lower-cases texts before it searches them for added tokens."""
    tokenizer = KINDS["lowercase"]()
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=True)])
    model = text_model(tokenizer)
    assert (
        model.tokenizer.encode("<TOOL_CALL>")
        == model.tokenizer.encode("<tool_call>")
        == [model.tokenizer.token_of("<tool_call>")]
    )
    for said in ("<TOOL_CALL>", "a <Tool_Call> b", "<tool_call>", "<tool_call> <TOOL_CALL>"):
        tokens = model.tokenizer.encode(model.tokenizer.controls.guarded(said))
        assert not controls(model, tokens)
        assert model.tokenizer.decode(tokens) == said.lower()
    assert model.tokenizer.controls.guarded("Hello <b>") == "Hello <b>"


@pytest.mark.parametrize(
    "normalizer",
    [normalizers.Lowercase(), normalizers.NFKC(), normalizers.BertNormalizer()],
    ids=["lower", "nfkc", "bert"],
)
def test_a_mark_in_another_spelling_is_text_in_parts_too(normalizer: Normalizer):
    """Also if the normalizer drops invisible characters."""
    tokenizer = KINDS["lowercase"]()
    tokenizer.normalizer = normalizer
    tokenizer.add_tokens([AddedToken("<|tool|>", normalized=True)])
    model, guard = text_model(tokenizer), text_model(tokenizer).tokenizer.controls.guarded
    for mark in ("<|tool|>", "<|TOOL|>", "＜｜tool｜＞", "<|t\u200bool|>"):
        for said in (mark, f"a {mark} b"):
            assert not controls(model, model.tokenizer.encode(guard(said))), said
            for cut in range(1, len(said)):
                parts = (said[:cut], said[cut:])
                assert not controls(model, model.tokenizer.encode("".join(map(guard, parts)))), parts
                assert not controls(
                    model, model.tokenizer.encode(guard(f"{parts[0]}  \n").strip() + guard(parts[1]))
                ), parts
    assert controls(model, model.tokenizer.encode(f"<|tool|>{guard('<|tool|>')}")) == [
        model.tokenizer.token_of("<|tool|>")
    ]


@pytest.mark.parametrize("template", ["{% for message in messages %}<|tool>{{ message.content }}{% endfor %}", ""])
def test_a_mark_that_begins_another_takes_no_other_text_for_its_rest(template: str):
    tokenizer = KINDS["qwen"]()
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in ("<|tool>", "<|tool>begin", "/nothink")])
    model = text_model(tokenizer, template=template)
    tools = [{"type": "function", "function": {"name": "open_door", "parameters": {"type": "object"}}}]
    assert model.tokenizer.controls.guarded_value(tools) == tools
    for said in ("Hello", "function", "Hello /nothink"):
        assert model.tokenizer.controls.guarded(said) == said or said.endswith("/nothink")
    assert model.tokenizer.controls.guarded("begin") == (f"{BREAK}begin" if template else "begin")


def test_words_of_a_text_are_no_control_tokens(made: dict[str, TextModel]):
    """Added tokens for white space and for HTML are still found in callers' texts."""
    gemma = model_of("gemma", made)
    named = {gemma.tokenizer.added_tokens[token].content for token in gemma.tokenizer.controls.ids}
    assert {START, END} <= named
    assert not {content for content in named if not content.strip()}
