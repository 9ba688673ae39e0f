"""Constrained decoding: a sequence's text follows its grammar, whatever happens to it, and other sequences do not
change."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import jsonschema_rs
import pytest
from tokenizers import Tokenizer

from satchel.actors.model_files.text.grammar_compiler import GrammarCompiler
from satchel.actors.replica.drafting.pace import DraftPace
from satchel.actors.replica.execution import executor
from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.execution.sampling.grammar import PARALLEL_SEQUENCES_MIN, MaskMaker, SequenceGrammar
from satchel.actors.replica.kernels import gpu_kernels
from satchel.actors.replica.loading import models
from satchel.cluster.errors import InvalidRequest
from tests.worlds.replica import fake_kernels
from tests.worlds.replica.bench import Bench, Received
from tests.worlds.replica.drafting import oracle

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "colour": {"enum": ["red", "green", "blue"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 4},
        "kept": {"type": "boolean"},
    },
    "required": ["name", "colour", "sizes", "kept"],
    "additionalProperties": False,
}
GRAMMAR = "start: form\nform: %json " + json.dumps({**SCHEMA, "x-guidance": {"whitespace_flexible": False}})
LONG = "start: /[a-d]{60}/"
HOW: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 5.0, "seed": 2, "top_p": 0.9, "presence_penalty": 1.0},
    {"temperature": 0.7, "seed": 3, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.2},
]


@pytest.fixture(scope="module")
def recall() -> LoadedModel:
    return models.load(str(models.EMBEDDED / "recall"), context_tokens_max=None, progress=lambda what, fraction: None)


@pytest.fixture(scope="module")
def tokenizer(recall: LoadedModel) -> Tokenizer:
    return Tokenizer.from_file(str(recall.folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def prompt(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode("<|im_start|>user\nTell me about ada.<|im_end|>\n<|im_start|>assistant\n").ids


def text_of(tokenizer: Tokenizer, sequence: Received) -> str:
    return tokenizer.decode(sequence.tokens, skip_special_tokens=True)


def submit(bench: Bench, name: str, prompt: list[int], **fields: Any) -> None:
    bench.submit(name, prompt, **{"max_tokens": 200, "grammar": GRAMMAR, **fields})


def alone(recall: LoadedModel, prompt: list[int], **fields: Any) -> Received:
    bench = Bench(recall)
    submit(bench, "alone", prompt, **fields)
    bench.drain()
    return bench.sequences["alone"]


@pytest.mark.parametrize("how", HOW)
def test_what_is_drawn_is_in_the_grammar_and_ends_where_it_ends(
    recall: LoadedModel, tokenizer: Tokenizer, prompt: list[int], how: dict[str, Any]
):
    """With `ignore_eos` as the bench has it, because nothing could come after the end."""
    sequence = alone(recall, prompt, **how)
    assert sequence.finish == "stop" and sequence.tokens[-1] in recall.eos_token_ids
    jsonschema_rs.validate(SCHEMA, json.loads(text_of(tokenizer, sequence)))
    assert alone(recall, prompt, **how).tokens == sequence.tokens


@pytest.mark.slow
def test_sequences_with_and_without_grammars_do_not_notice_each_other(
    recall: LoadedModel, tokenizer: Tokenizer, prompt: list[int]
):
    """Tokens and logprobs to the bit; the sequences join and leave at different times."""
    plain = [{"grammar": "", "max_tokens": 40, "logprobs": 3, **how} for how in HOW]
    bound = [{"logprobs": 2, **how} for how in HOW]
    expected = [alone(recall, prompt, **fields) for fields in (*plain, *bound)]
    rng = random.Random(3)
    bench, order = Bench(recall), list(enumerate((*plain, *bound)))
    rng.shuffle(order)
    for index, fields in order:
        submit(bench, str(index), prompt, **fields)
        for _ in range(rng.randrange(5)):
            bench.turn()
    bench.drain()
    for index, sequence in enumerate(expected):
        got = bench.sequences[str(index)]
        assert (got.tokens, got.logprobs, got.finish) == (sequence.tokens, sequence.logprobs, sequence.finish)


def test_sequences_with_grammars_do_not_notice_that_others_are_drafted(
    recall: LoadedModel, tokenizer: Tokenizer, prompt: list[int]
):
    """They are not drafted themselves. The last ones are alone then, and get forced tokens together."""
    plain = [{"grammar": "", "max_tokens": 40, "logprobs": 3, **how} for how in HOW]
    bound = [{"logprobs": 2, **HOW[0]}, HOW[1]]
    expected = [alone(recall, prompt, **fields) for fields in (*plain, *bound)]
    bench = Bench(recall, drafts=True)
    bench.engine.executor.batched_prefill = True
    with oracle([prompt + sequence.tokens for sequence in expected]):
        for index, fields in enumerate((*plain, *bound)):
            submit(bench, str(index), prompt, **fields)
        bench.drain()
        drafted = bench.engine.executor.drafts.drafted
        for index, fields in enumerate(bound):
            submit(bench, f"again {index}", prompt, **fields)
            bench.drain()
    assert drafted > 20 and bench.engine.executor.drafts.drafted == drafted
    for index, sequence in enumerate([*expected, *expected[-2:]]):
        got = bench.sequences[str(index) if index < 6 else f"again {index - 6}"]
        assert (got.tokens, got.logprobs, got.finish) == (sequence.tokens, sequence.logprobs, sequence.finish)


@pytest.fixture(scope="module")
def by_kernel() -> Iterator[LoadedModel]:
    """The same model, whose steps are computed by a kernel that takes drafts."""
    with nullcontext() if gpu_kernels.is_available() else fake_kernels.kernels():
        loaded = models.load(
            str(models.EMBEDDED / "recall"), context_tokens_max=None, progress=lambda *_: None, warm=False
        )
        assert loaded.way.compiled
        yield loaded


@pytest.mark.slow
def test_what_a_grammar_forces_is_drafted_and_changes_nothing(
    by_kernel: LoadedModel, prompt: list[int], monkeypatch: pytest.MonkeyPatch
):
    """Tokens and logprobs, beside sequences that are drafted otherwise or not at all, and after a preemption."""
    monkeypatch.setattr(DraftPace, "lengths", lambda _, hopes, **how: [hope.most for hope in hopes])
    plain = [{"grammar": "", "max_tokens": 40, "logprobs": 3, **how} for how in HOW[:2]]
    bound = [{"logprobs": 2, **how} for how in HOW]
    asked = (*plain, *bound)
    expected = [alone(by_kernel, prompt, **fields) for fields in asked]
    for limit in (None, 700):
        bench = Bench(by_kernel, drafts=True, kv_tokens_max=limit)
        bench.engine.executor.batched_prefill = True
        for index, fields in enumerate(asked):
            submit(bench, str(index), prompt, **fields)
            bench.turn()
        bench.drain()
        for index, sequence in enumerate(expected):
            got = bench.sequences[str(index)]
            assert (got.tokens, got.logprobs, got.finish) == (sequence.tokens, sequence.logprobs, sequence.finish)
    bench = Bench(by_kernel, drafts=True)
    bench.engine.executor.batched_prefill = True
    submit(bench, "one", prompt, **bound[0])
    bench.drain()
    steps, drafts = bench.engine.counters.steps, bench.engine.executor.drafts
    assert bench.sequences["one"].tokens == expected[2].tokens
    assert drafts.right == drafts.drafted > len(expected[2].tokens) / 5
    assert steps < 0.8 * len(expected[2].tokens)


def test_several_choices_follow_one_grammar_each_in_its_own_way(
    recall: LoadedModel, tokenizer: Tokenizer, prompt: list[int]
):
    bench = Bench(recall)
    for choice in range(3):
        submit(bench, str(choice), prompt, temperature=1.5, seed=9, choice=choice, choices=3)
    bench.drain()
    texts = {text_of(tokenizer, bench.sequences[str(choice)]) for choice in range(3)}
    assert len(texts) == 3
    for text in texts:
        jsonschema_rs.validate(SCHEMA, json.loads(text))


@pytest.mark.parametrize("how", HOW)
def test_a_sequence_that_moves_to_another_replica_goes_on_in_its_grammar(
    recall: LoadedModel, prompt: list[int], how: dict[str, Any]
):
    whole = alone(recall, prompt, **how).tokens
    for done in (1, 2, len(whole) // 2, len(whole) - 1):
        bench = Bench(recall)
        submit(bench, "rest", prompt + whole[:done], generated=done, **how)
        bench.drain()
        assert bench.sequences["rest"].tokens == whole[done:]


@pytest.mark.slow
def test_preempted_sequences_go_on_in_their_grammars(recall: LoadedModel, tokenizer: Tokenizer, prompt: list[int]):
    """Another flow takes places in the middle of their texts."""
    expected = [alone(recall, prompt, grammar=LONG, temperature=1.0, seed=seed).tokens for seed in range(5)]
    bench = Bench(recall, sequences_max=3)
    sent_back: list[str] = []
    send_back = bench.engine.decode.send_back
    bench.engine.decode.send_back = lambda request_id: (sent_back.append(request_id), send_back(request_id))[1]
    for seed in range(3):
        submit(bench, str(seed), prompt, grammar=LONG, temperature=1.0, seed=seed, flow="greedy")
    for _ in range(12):
        bench.turn()
    for seed in (3, 4):
        submit(bench, str(seed), prompt, grammar=LONG, temperature=1.0, seed=seed, flow="other")
    bench.drain()
    assert [bench.sequences[str(seed)].tokens for seed in range(5)] == expected
    assert sent_back
    assert all(set(text_of(tokenizer, bench.sequences[str(seed)])) <= set("abcd") for seed in range(5))


CALL = 'start: "{\\"name\\": \\"str_replace_based_edit\\", \\"arguments\\": " form "}"\nform: %json ' + json.dumps(
    {**SCHEMA, "x-guidance": {"whitespace_flexible": False}}
)


@pytest.mark.parametrize("how", [HOW[2], pytest.param(HOW[1], marks=pytest.mark.slow)])
def test_a_sequence_that_is_alone_gets_tokens_together_where_its_grammar_leaves_no_choice(
    recall: LoadedModel, prompt: list[int], how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """In fewer steps, also where blocks become full; and its next turn finds the same."""

    def said(tokens: list[int]) -> tuple[list[int], int, list[int]]:
        bench = Bench(recall)
        submit(bench, "one", tokens, grammar=CALL, **how)
        bench.drain()
        sequence = bench.sequences["one"]
        submit(bench, "next", [*tokens, *sequence.tokens, *prompt], grammar="", max_tokens=5)
        bench.drain()
        last = bench.sequences["next"]
        assert last.cached is not None and last.cached >= len(tokens) + len(sequence.tokens) - 1
        return sequence.tokens, bench.engine.counters.steps, last.tokens

    prompts = [prompt, (prompt * 20)[:215], (prompt * 20)[:250]]
    together = [said(tokens) for tokens in prompts]
    monkeypatch.setattr(executor, "FORCED_MAX", 0)
    one_by_one = [said(tokens) for tokens in prompts]
    for (tokens, steps, last), (expected, more, also) in zip(together, one_by_one, strict=True):
        assert tokens == expected and last == also and steps < 0.8 * more


def test_mates_that_come_and_go_change_no_word_of_a_sequence_that_got_tokens_together(
    recall: LoadedModel, prompt: list[int]
):
    expected = [alone(recall, prompt, grammar=CALL, **how).tokens for how in HOW]
    rng = random.Random(5)
    bench = Bench(recall)
    for index, how in enumerate(HOW):
        submit(bench, str(index), prompt, grammar=CALL, **how)
        for mate in range(4):
            for _ in range(rng.randrange(9)):
                bench.turn()
            submit(bench, f"{index}, {mate}", prompt, grammar="", max_tokens=rng.randrange(1, 6))
        bench.drain()
    assert [bench.sequences[str(index)].tokens for index in range(len(HOW))] == expected


def test_tokens_that_come_together_end_where_a_limit_or_a_stop_token_is(recall: LoadedModel, prompt: list[int]):
    whole = alone(recall, prompt, grammar=CALL).tokens
    for most in range(1, 12):
        sequence = alone(recall, prompt, grammar=CALL, max_tokens=most)
        assert (sequence.finish, sequence.tokens) == ("length", whole[:most])
    for token in whole[2:9]:
        sequence = alone(recall, prompt, grammar=CALL, stop_token_ids=[token])
        assert (sequence.finish, sequence.tokens) == ("stop", whole[: whole.index(token) + 1])


def test_a_token_limit_cuts_the_text(recall: LoadedModel, tokenizer: Tokenizer, prompt: list[int]):
    whole = alone(recall, prompt)
    sequence = alone(recall, prompt, max_tokens=5)
    assert (sequence.finish, sequence.tokens) == ("length", whole.tokens[:5])


def test_min_tokens_holds_the_end_back_while_something_else_may_follow(
    recall: LoadedModel, tokenizer: Tokenizer, prompt: list[int]
):
    """`a+` can go on for ever; `yes` cannot."""
    for ignore_eos in (False, True):
        sequence = alone(recall, prompt, grammar="start: /(a|b)+/", min_tokens=30, max_tokens=60, ignore_eos=ignore_eos)
        assert len(sequence.tokens) > 30 and (sequence.finish == "length" or not ignore_eos)
        sequence = alone(recall, prompt, grammar='start: "yes"', min_tokens=30, max_tokens=60, ignore_eos=ignore_eos)
        assert sequence.finish == "stop" and text_of(tokenizer, sequence) == "yes"


def test_a_bias_does_not_lead_out_of_the_grammar(recall: LoadedModel, tokenizer: Tokenizer, prompt: list[int]):
    (other,) = tokenizer.encode("x").ids
    sequence = alone(recall, prompt, grammar='start: "yes" | "no"', logit_bias=[(other, 100.0)])
    assert text_of(tokenizer, sequence) in ("yes", "no")


def test_logprobs_are_the_models_own(recall: LoadedModel, prompt: list[int]):
    """The first token is `{`, which the model would not have said."""
    sequence = alone(recall, prompt, logprobs=2)
    chosen, best = sequence.logprobs[0]
    assert chosen < best[0][1] and sequence.tokens[0] not in [token for token, _ in best]


def test_a_grammar_that_becomes_too_complex_ends_its_sequence_alone(
    recall: LoadedModel, prompt: list[int], monkeypatch: pytest.MonkeyPatch
):
    mate = alone(recall, prompt, grammar="", max_tokens=30)
    follow = SequenceGrammar.follow

    def fails(self: SequenceGrammar, token: int) -> None:
        follow(self, token)
        if len(self._followed) == 7:
            self.error = "too complex"

    monkeypatch.setattr(SequenceGrammar, "follow", fails)
    bench = Bench(recall)
    submit(bench, "mate", prompt, grammar="", max_tokens=30)
    submit(bench, "bound", prompt)
    bench.drain()
    assert bench.sequences["mate"].tokens == mate.tokens
    sequence = bench.sequences["bound"]
    assert sequence.finish == "error" and sequence.error is not None and sequence.error["message"] == "too complex"
    assert len(sequence.tokens) == 7


def test_what_does_not_compile_is_refused(recall: LoadedModel, prompt: list[int]):
    with pytest.raises(InvalidRequest, match="unknown name"):
        submit(Bench(recall), "one", prompt, grammar="start: nothing")


@pytest.fixture(scope="module")
def compiler(recall: LoadedModel, tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer.to_str(), recall.eos_token_ids, recall.vocabulary_size)


def test_sequences_of_one_grammar_have_places_of_their_own(compiler: GrammarCompiler, tokenizer: Tokenizer):
    """Masks made together are those made one by one."""
    words = tokenizer.encode('{"name":"ann","colour":"red","sizes":[1').ids
    assert len(words) >= PARALLEL_SEQUENCES_MIN
    sequences = [SequenceGrammar(compiler.matcher(GRAMMAR), compiler.tokens) for _ in words]
    for index, sequence in enumerate(sequences):
        sequence.resume(words[:index])
    together = MaskMaker()(list(enumerate(sequences)))
    assert together is not None and together.sequences == list(range(len(words)))
    for index, sequence in enumerate(sequences):
        single = MaskMaker()([(index, sequence)])
        assert single is not None and (single.words[0] == together.words[index]).all()


def test_a_sequence_that_comes_back_with_other_tokens_begins_again(compiler: GrammarCompiler, tokenizer: Tokenizer):
    """A step that failed may have followed a token that nobody got."""
    sequence = SequenceGrammar(compiler.matcher("start: /[a-z]+/"), compiler.tokens)
    sequence.resume(tokenizer.encode("ab").ids)
    sequence.follow(tokenizer.encode("c").ids[0])
    sequence.resume(tokenizer.encode("ab").ids)
    fresh = SequenceGrammar(compiler.matcher("start: /[a-z]+/"), compiler.tokens)
    fresh.resume(tokenizer.encode("ab").ids)
    masks = [MaskMaker()([(0, each)]) for each in (sequence, fresh)]
    assert masks[0] is not None and masks[1] is not None and (masks[0].words == masks[1].words).all()


def test_a_model_without_an_end_token_follows_no_grammar(tokenizer: Tokenizer):
    with pytest.raises(InvalidRequest, match="no end-of-sequence token"):
        GrammarCompiler(tokenizer.to_str(), [])


@pytest.mark.parametrize("kind", ["rules", "definitions"])
def test_a_grammar_as_deep_as_may_be_does_not_overflow_the_stack(compiler: GrammarCompiler, kind: str):
    """llguidance compiles by recursion; on a usual stack the process would end here."""
    if kind == "rules":
        count = 20_000
        grammar = "start: x0\n" + "".join(f"x{index:x}:x{index + 1:x}\n" for index in range(count))
        grammar += f'x{count:x}:"a"\n'
    else:
        count = 4_000
        definitions = {f"{index:x}": {"$ref": f"#/$defs/{index + 1:x}"} for index in range(count)}
        schema = {"$ref": "#/$defs/0", "$defs": {**definitions, f"{count:x}": {"type": "null"}}}
        grammar = f"start: form\nform: %json {json.dumps(schema)}"
    place = SequenceGrammar(compiler.matcher(grammar), compiler.tokens)
    masks = MaskMaker()([(0, place)])
    assert masks is not None and masks.words.any() and not place.error


def test_a_grammar_that_is_too_long_is_refused(compiler: GrammarCompiler):
    with pytest.raises(InvalidRequest, match="longer than"):
        compiler.matcher("start: " + '"a" ' * 100_000)
