"""A sequence that is drafted says what it says without drafts, to the last bit, whatever it was asked for, beside whom
it decodes, and whatever happens to it."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import mlx.core as mx
import pytest

from satchel.actors.protocol.block_ids import BLOCK_TOKENS
from satchel.actors.protocol.replica_messages import Sampling, ThinkingBudget
from satchel.actors.replica.drafting.pace import DraftPace
from satchel.actors.replica.execution.executor import BatchExecutor
from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.memory.slab_codec import to_parts
from tests.worlds.replica.bench import Bench, Received
from tests.worlds.replica.drafting import Oracle, oracle

TOKENS = 60
THINKING = ThinkingBudget(tokens=12, closing=[5, 6, 7], start=[], end=[6, 7], inside=True, again=False, breaks=[9])

HOW: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 1, "logprobs": 3},
    {"temperature": 5.0, "seed": 2, "top_p": 0.9, "choice": 1, "choices": 2},
    {"temperature": 0.7, "seed": 3, "top_k": 20, "min_p": 0.01, "logprobs": 0},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"temperature": 2.0, "seed": 4, "repetition_penalty": 1.5, "logit_bias": [(7, 3.0), (9, 2.0)]},
    {"temperature": 1.0, "seed": 5, "allowed_token_ids": [*range(20, 60)], "bad_words": [[21, 22], [23]]},
    {"temperature": 3.0, "seed": 6, "thinking": THINKING},
    {"temperature": 9.0, "seed": 7, "stop_token_ids": [*range(0, 3000, 90)], "min_tokens": 20},
]


@pytest.fixture(scope="module")
def asked(prompts: list[list[int]]) -> list[tuple[list[int], dict[str, Any]]]:
    """Each way of asking with a prompt of its own, some of which fill a block while they are answered."""
    return [(prompts[index % len(prompts)], {"max_tokens": TOKENS - 5 * index, **how}) for index, how in enumerate(HOW)]


@pytest.fixture(scope="module")
def alone(loaded: LoadedModel, asked: list[tuple[list[int], dict[str, Any]]]) -> list[Received]:
    """What each says without drafts."""
    return [Bench(loaded).run("one", prompt, **how) for prompt, how in asked]


def scripts_of(asked: list[tuple[list[int], dict[str, Any]]], alone: list[Received]) -> list[list[int]]:
    return [prompt + received.tokens for (prompt, _), received in zip(asked, alone, strict=True)]


def same(got: Received, expected: Received) -> bool:
    return (got.tokens, got.logprobs, got.finish, got.error) == (
        expected.tokens,
        expected.logprobs,
        expected.finish,
        None,
    )


def together(loaded: LoadedModel, **fields: Any) -> Bench:
    """Sequences that share a batch are drafted where prompts run as padded batches, as on a GPU."""
    bench = Bench(loaded, drafts=True, **fields)
    bench.engine.executor.batched_prefill = True
    return bench


def test_a_drafted_sequence_says_the_same_in_fewer_steps(
    loaded: LoadedModel, asked: list[tuple[list[int], dict[str, Any]]], alone: list[Received]
):
    steps = drafted = right = 0
    for index, (prompt, how) in enumerate(asked):
        with oracle(scripts_of(asked, alone), seed=index):
            bench = Bench(loaded, drafts=True)
            assert same(bench.run("one", prompt, **how), alone[index]), how
        drafts = bench.engine.executor.drafts
        steps, drafted, right = steps + bench.engine.counters.steps, drafted + drafts.drafted, right + drafts.right
        assert 0 < drafts.count <= drafts.drafted and drafts.right, how
    assert steps < 0.7 * sum(len(received.tokens) for received in alone)
    assert 0.3 * drafted < right < 0.9 * drafted


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_drafted_sequences_beside_others_that_come_and_go_say_the_same(
    loaded: LoadedModel, asked: list[tuple[list[int], dict[str, Any]]], alone: list[Received], seed: int
):
    """Some of them have no drafts; the second time their prompts are cached."""
    rng = random.Random(seed)
    drafted = [script for index, script in enumerate(scripts_of(asked, alone)) if (index + seed) % 4]
    with oracle(drafted, seed):
        bench = together(loaded)
        for turn in ("first", "second"):
            order = list(range(len(asked)))
            rng.shuffle(order)
            for index in order:
                prompt, how = asked[index]
                bench.submit(f"{turn}{index}", prompt, **how)
                for _ in range(rng.randrange(4)):
                    bench.turn()
            bench.drain()
            for index, expected in enumerate(alone):
                assert same(bench.sequences[f"{turn}{index}"], expected), (turn, asked[index][1])
    assert bench.engine.executor.drafts.right > 50


def test_preempted_sequences_go_on_where_their_drafts_were_right(
    loaded: LoadedModel, asked: list[tuple[list[int], dict[str, Any]]], alone: list[Received]
):
    with oracle(scripts_of(asked, alone)):
        bench = together(loaded, kv_tokens_max=1200)
        for index, (prompt, how) in enumerate(asked):
            bench.submit(str(index), prompt, **how)
        bench.drain()
    assert all(same(bench.sequences[str(index)], expected) for index, expected in enumerate(alone))


def test_a_sequence_whose_client_leaves_keeps_the_kv_of_what_was_said(
    loaded: LoadedModel, asked: list[tuple[list[int], dict[str, Any]]], alone: list[Received]
):
    """Its next turn finds all of it, and goes on as if there had been no drafts."""
    scripts = scripts_of(asked, alone)
    for index in (0, 2, 3):
        prompt, how = asked[index]
        with oracle(scripts, seed=index):
            bench = Bench(loaded, drafts=True)
            bench.submit("left", prompt, **how)
            while len(bench.sequences.setdefault("left", Received()).tokens) < 12:
                bench.turn()
            bench.engine.abort(("left",))
            bench.turn()
            said = bench.sequences["left"].tokens
            assert said == alone[index].tokens[: len(said)]
            again = bench.run("again", prompt + said, generated=len(said), **how | {"max_tokens": TOKENS - len(said)})
        assert again.cached in (len(prompt) + len(said) - 1, len(prompt) + len(said) - 2)
        assert (said + again.tokens)[: len(alone[index].tokens)] == alone[index].tokens


def test_the_kv_after_drafts_is_that_without_them_to_the_last_byte(
    loaded: LoadedModel, asked: list[tuple[list[int], dict[str, Any]]], alone: list[Received]
):
    """Of blocks that were filled meanwhile, and of the open one."""
    prompt, how = asked[3]
    sampling = Sampling(ignore_eos=True, **{"temperature": 0.0, **how})

    def decoding(drafts: bool) -> BatchExecutor:
        executor = BatchExecutor(loaded, drafts=drafts)
        executor.open("one", [], None, 0)
        executor.prefill([("one", prompt[:-1])])
        executor.join("one", prompt, sampling, 0)
        return executor

    def kept(executor: BatchExecutor) -> list[bytes]:
        length = executor.length("one")
        ends = [*range(0, length, BLOCK_TOKENS), length]
        pieces = executor.cut("one", list(pairwise(ends)))
        copies = executor.copied(pieces)
        return [array.tobytes() for copy in copies for array in to_parts(loaded.spec, copy).values()]

    with oracle(scripts_of(asked, alone)):
        drafted = decoding(drafts=True)
        while drafted.length("one") < len(prompt) + 30:
            drafted.step()
    single = decoding(drafts=False)
    while single.length("one") < drafted.length("one"):
        single.step()
    assert single.length("one") // BLOCK_TOKENS > len(prompt) // BLOCK_TOKENS
    assert kept(drafted) == kept(single)


def test_a_place_after_a_draft_that_is_no_number_is_forgotten(
    loaded: LoadedModel, asked: list[tuple[list[int], dict[str, Any]]], alone: list[Received]
):
    """A drafted token whose KV is no number, and which is wrong, leaves nothing behind."""
    prompt, how = asked[0]
    broken, calls = 3000, []
    plain = loaded.model

    def model(tokens: mx.array, cache: list[Any], **more: Any) -> mx.array:
        logits = plain(tokens, cache=cache, **more)
        given: list[int] = tokens[0].tolist()  # type: ignore[assignment]
        if len(given) > 1 and broken in given:
            calls.append(given)
            for each in cache:
                first = each.lengths[0] % BLOCK_TOKENS - len(given) + given.index(broken)
                # What comes after it attends to it.
                each._keys[:, :, first:] = float("nan")
                each._values[:, :, first:] = float("nan")
            logits[:, given.index(broken) :] = float("nan")
        return logits

    script = prompt + alone[0].tokens
    faulty = [token if at % 7 or at < len(prompt) else broken for at, token in enumerate(script)]
    with oracle([]), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Oracle, "draft", lambda self, most: faulty[self.count : self.count + most])
        bench = Bench(loaded, drafts=True)
        executor = bench.engine.executor
        executor._model = model
        bench.submit("one", prompt, **how)
        while bench.turn():
            # Not every BLAS multiplies numbers that are no numbers by zero.
            caches: Any = executor._caches
            assert all(mx.isfinite(array).all() for cache in caches for array in cache.state[:2])
    assert calls and same(bench.sequences["one"], alone[0])


def test_what_cannot_be_taken_back_is_not_drafted(loaded: LoadedModel):
    spec, identity = loaded.spec, loaded.identity
    fast = replace(identity, computing={**identity.computing, "numerics": "fast"})
    windowed = replace(spec, layers=(replace(spec.layers[0], window=300), *spec.layers[1:]))
    recurrent = replace(spec, layers=(*spec.layers, replace(spec.layers[0], kind=type(spec.layers[0].kind).RECURRENT)))
    assert loaded.undrafted == "" and replace(loaded, identity=fast, spec=windowed).undrafted == ""
    for other in (
        replace(loaded, spec=replace(spec, policy=None)),
        replace(loaded, spec=recurrent),
        replace(loaded, unbatched=True),
        replace(loaded, spec=windowed),
        replace(loaded, weights="both"),
    ):
        assert other.undrafted


def test_nothing_is_drafted_where_it_is_not_wanted_or_not_possible(
    loaded: LoadedModel, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(DraftPace, "lengths", lambda _, hopes, **how: [min(7, hope.most) for hope in hopes])
    for bench in (Bench(loaded), Bench(replace(loaded, unbatched=True), drafts=True)):
        bench.run("one", prompts[2] * 3)
        assert not bench.engine.executor.drafts.drafted
    bench = Bench(loaded, drafts=True)
    bench.run("one", prompts[2] * 3)
    assert bench.engine.executor.drafts.drafted
