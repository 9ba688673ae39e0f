"""The position law, and what one sequence may do to another: nothing.

Float32 on the CPU, so "the same" means equal tokens from equal bits (teacher forcing is not needed).
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.execution.sampling.ready import Ready
from satchel.actors.replica.kv import caches as kv_cache
from satchel.actors.replica.loading import models
from satchel.cluster.errors import Draining, ReplicaLeaves, SatchelError, from_wire
from tests.worlds.models.families import write_model
from tests.worlds.replica.bench import Bench

MakeBench = Callable[..., Bench]

SAMPLING = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 5.0, "seed": 2, "top_p": 0.9},
    {"temperature": 0.7, "seed": 3, "top_k": 20},
]


@pytest.fixture(scope="module")
def alone(loaded: LoadedModel, prompts: list[list[int]]) -> list[list[int]]:
    """Every prompt's tokens from an engine of its own, without any cache."""
    return [Bench(loaded).run("one", prompt, **SAMPLING[index % 4]).tokens for index, prompt in enumerate(prompts)]


def run_twice(engine: Bench, prompts: list[list[int]], alone: list[list[int]]) -> None:
    """Sequences join at random times and leave at different ones; the second round finds its prompts in the cache."""
    rng = random.Random(0)
    for round_name in ("cold", "cached"):
        order = list(range(len(prompts)))
        rng.shuffle(order)
        for index in order:
            engine.submit(f"{round_name}{index}", prompts[index], **SAMPLING[index % 4])
            for _ in range(rng.randrange(4)):
                engine.turn()
        engine.drain()
        for index, tokens in enumerate(alone):
            assert engine.sequences[f"{round_name}{index}"].tokens == tokens
    # All but the last token of a prompt comes from the cache, also of one whose last block the answer filled.
    assert engine.sequences["cached6"].cached == 299
    assert [engine.sequences[f"cached{index}"].cached for index in (3, 4, 5)] == [254, 255, 256]


@pytest.mark.parametrize("chunk", [256, 1024])
def test_batched_cached_and_chunked_sequences_equal_the_sequence_alone(
    bench: MakeBench, prompts: list[list[int]], alone: list[list[int]], chunk: int
):
    run_twice(bench(prefill_chunk_tokens=chunk), prompts, alone)


def test_sequences_that_are_computed_one_by_one_equal_the_sequence_alone(
    loaded: LoadedModel, prompts: list[list[int]], alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(kv_cache, "merge", lambda sequences: pytest.fail("there is no batch"))
    run_twice(Bench(dataclasses.replace(loaded, unbatched=True)), prompts, alone)


def test_preempted_sequences_go_on_where_they_were(bench: MakeBench, prompts: list[list[int]], alone: list[list[int]]):
    """Memory for about two of the longest sequences: the others wait or are preempted, and give the same answers."""
    engine = bench(kv_tokens_max=1200)
    for index, prompt in enumerate(prompts):
        engine.submit(str(index), prompt, **SAMPLING[index % 4])
    engine.drain()
    assert [engine.sequences[str(index)].tokens for index in range(len(prompts))] == alone


def test_sequences_that_give_their_places_to_another_flow_go_on_where_they_were(
    bench: MakeBench, prompts: list[list[int]], alone: list[list[int]]
):
    engine = bench(sequences_max=3)
    for index, prompt in enumerate(prompts):
        engine.submit(str(index), prompt, flow="greedy", **SAMPLING[index % 4])
    while len(engine.engine.scheduler.decoding()) < 3:
        engine.turn()
    for index in (0, 1):
        engine.submit(f"other {index}", prompts[index], flow="other", **SAMPLING[index])
    # They begin where the greedy one stands now; with its next token they are behind.
    engine.turn()
    engine.turn()
    running = engine.engine.scheduler.decoding()
    assert "2" not in running and "other 0" in running
    engine.drain()
    assert [engine.sequences[str(index)].tokens for index in range(len(prompts))] == alone
    assert [engine.sequences[f"other {index}"].tokens for index in (0, 1)] == alone[:2]


def test_a_conversation_that_goes_on_prefills_only_what_is_new(bench: MakeBench, prompts: list[list[int]]):
    """Prompt and answer of a turn are found again, whatever their length."""
    for prompt in prompts:
        engine = bench()
        first = engine.run("first", prompt)
        second = engine.run("second", prompt + first.tokens + [5, 6, 7])
        assert second.cached == len(prompt) + len(first.tokens)


def test_a_sequence_that_moves_to_another_replica_goes_on_as_if_nothing_had_happened(
    bench: MakeBench, prompts: list[list[int]], alone: list[list[int]]
):
    for index, prompt in enumerate(prompts):
        done = alone[index][:5]
        sequence = bench().run("rest", prompt + done, generated=5, **{**SAMPLING[index % 4], "max_tokens": 7})
        assert sequence.tokens == alone[index][5:]


def test_sequences_with_limits_of_tokens_keep_to_them_and_leave_others_alone(
    bench: MakeBench, loaded: LoadedModel, prompts: list[list[int]], alone: list[list[int]]
):
    """In a batch, and from a token on that was drawn elsewhere."""
    words = [alone[1][:1], alone[1][1:3], alone[1][2:5]]
    limits = [{"bad_words": words}, {"allowed_token_ids": [*range(20, 60)]}, {"bad_words": words, "temperature": 5.0}]
    fields = [{**SAMPLING[1], **limit} for limit in limits]
    separate = [Bench(loaded).run("one", prompts[1], **field).tokens for field in fields]
    engine = bench()
    for index, prompt in enumerate(prompts):
        engine.submit(str(index), prompt, **SAMPLING[index % 4])
    for index, field in enumerate(fields):
        engine.submit(f"limited {index}", prompts[1], **field)
    engine.drain()
    assert [engine.sequences[f"limited {index}"].tokens for index in range(len(fields))] == separate
    assert [engine.sequences[str(index)].tokens for index in range(len(prompts))] == alone
    assert {*separate[1]} <= {*range(20, 60)}
    for tokens in (separate[0], separate[2]):
        assert not any(tokens[at : at + len(word)] == word for word in words for at in range(len(tokens)))
    for field, tokens in zip(fields, separate, strict=True):
        left = {**field, "max_tokens": len(tokens) - 5}
        assert bench().run("rest", prompts[1] + tokens[:5], generated=5, **left).tokens == tokens[5:]


def test_a_long_prompt_lets_running_sequences_go_on(
    bench: MakeBench, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
):
    """Between two tokens of a running sequence at most one step's prefill budget is computed."""
    engine = bench()
    engine.submit("runs", prompts[2], max_tokens=200)
    for _ in range(5):
        engine.turn()
    executor = engine.engine.executor
    computed: list[int] = []
    prefill = executor.prefill
    executor.prefill = lambda work: (computed.append(sum(len(tokens) for _, tokens in work)), prefill(work))[1]
    engine.engine.pace.tokens_per_s = 1600.0
    monkeypatch.setattr(engine.engine.pace, "note", lambda tokens, seconds: None)
    rng = random.Random(5)
    for index in range(2):
        engine.submit(f"long{index}", [rng.randrange(3000) for _ in range(1500)], max_tokens=2)
    while engine.engine.scheduler.pending_tokens or not computed:
        before, chunks = len(engine.sequences["runs"].tokens), sum(computed)
        engine.turn()
        assert len(engine.sequences["runs"].tokens) == before + 1
        assert sum(computed) - chunks <= engine.engine.scheduler.limits.prefill_chunk_tokens
        assert sum(computed) - chunks <= 0.25 * 1600.0
    assert sum(computed) == 2 * 1499


def test_the_choices_of_one_request_compute_their_prompt_once(bench: MakeBench, prompts: list[list[int]]):
    """They differ in their noise, and each says what it says alone."""
    for index in (2, 6):
        engine = bench()
        for choice in range(4):
            engine.submit(f"c{choice}", prompts[index], temperature=1.5, seed=9, choice=choice, choices=4)
        engine.drain()
        assert [engine.sequences[f"c{choice}"].cached for choice in range(4)] == [0] + [len(prompts[index]) - 1] * 3
        texts = [engine.sequences[f"c{choice}"].tokens for choice in range(4)]
        assert len({tuple(text) for text in texts}) == 4
        for choice, text in enumerate(texts):
            assert bench().run("alone", prompts[index], temperature=1.5, seed=9, choice=choice).tokens == text


def test_prompts_with_a_common_beginning_compute_it_once(bench: MakeBench, prompts: list[list[int]]):
    """Two whole blocks shared by six sequences that arrive together."""
    engine = bench(prefill_sequences_max=6)
    for sequence in range(6):
        engine.submit(str(sequence), prompts[7][:512] + [sequence + 1] * 30)
    engine.drain()
    assert sorted(engine.sequences[str(sequence)].cached or 0 for sequence in range(6)) == [0] + [512] * 5


def test_stop_tokens_end_a_sequence_and_min_tokens_holds_them_back(
    bench: MakeBench, prompts: list[list[int]], alone: list[list[int]]
):
    """`alone[4]` is greedy, so its tokens say where a stop token comes."""
    words = alone[4]
    at = words.index(words[3])
    sequence = bench().run("r", prompts[4], stop_token_ids=[words[3]])
    assert (sequence.finish, sequence.tokens) == ("stop", words[: at + 1])
    later = bench().run("r", prompts[4], stop_token_ids=[words[3]], min_tokens=8)
    assert words[3] not in later.tokens[:8]
    assert later.tokens[:at] == words[:at]


def test_logprobs_come_with_every_token_and_change_none(
    bench: MakeBench, prompts: list[list[int]], alone: list[list[int]]
):
    """Batched with sequences that ask for none, or for fewer, and that join and leave."""
    engine = bench()
    for index in (2, 3, 4, 6):
        asked = {2: 3, 4: 0}.get(index)
        engine.submit(str(index), prompts[index], logprobs=asked, **SAMPLING[index % 4])
        engine.turn()
    engine.drain()
    for index in (2, 3, 4, 6):
        sequence = engine.sequences[str(index)]
        assert sequence.tokens == alone[index]
        if index in (3, 6):
            assert sequence.logprobs == []
            continue
        assert len(sequence.logprobs) == len(sequence.tokens)
        wanted = {2: 3, 4: 0}[index]
        for token, (chosen, best) in zip(sequence.tokens, sequence.logprobs, strict=True):
            assert chosen <= 0 and len(best) == wanted
            assert [value for _, value in best] == sorted((value for _, value in best), reverse=True)
            if index == 4 or not wanted:
                continue
            assert all(chosen <= best[0][1] for _ in best) and (token != best[0][0] or chosen == best[0][1])


def test_a_model_that_says_nothing_sensible_ends_that_sequence_only(
    bench: MakeBench, prompts: list[list[int]], alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
):
    """Logits that are not numbers, for one sequence of a batch."""
    engine = bench()
    executor = engine.engine.executor
    model = executor._model

    def broken(inputs: mx.array, cache: list) -> mx.array:
        logits = model(inputs, cache=cache)
        names = [sequence.sequence_id for sequence in executor._sequences]
        if inputs.shape[1] == 1 and "bad" in names:
            factor = mx.array([float("nan") if name == "bad" else 1.0 for name in names])
            logits = logits * factor[:, None, None]
        return logits

    monkeypatch.setattr(executor, "_model", broken)
    for name, index in (("2", 2), ("bad", 3), ("6", 6)):
        engine.submit(name, prompts[index], **SAMPLING[index % 4])
    engine.drain()
    assert (engine.sequences["bad"].finish, engine.sequences["bad"].tokens) == ("error", [])
    assert engine.sequences["2"].tokens == alone[2] and engine.sequences["6"].tokens == alone[6]


@pytest.mark.parametrize("numerics", ["reproducible", "fast"])
@pytest.mark.parametrize("padded", [False, True])
def test_what_is_no_number_of_one_sequence_is_never_read_by_another(numerics: str, padded: bool, tmp_path: Path):
    """Not later in its slots, not in its batch, and not as padding where a short sequence has no block."""
    folder, poison = write_model(tmp_path, "llama"), 7
    loaded = models.load(str(folder), context_tokens_max=None, progress=lambda *_: None, numerics=numerics)
    weights: Any = loaded.model.model.embed_tokens
    weights.weight[poison] = mx.nan
    short, long = [11 + number for number in range(100)], [20 + number % 900 for number in range(600)]

    def new() -> Bench:
        made = Bench(loaded)
        made.engine.executor.batched_prefill = padded
        return made

    alone = new().run("short", short, max_tokens=20).tokens
    bench = new()
    bad = bench.run("bad", [20] * 100 + [poison] * 500, max_tokens=5, reusable=False)
    assert bad.finish == "error", "the fault that this is about"
    bench.engine.prefixes.clear()
    bench.run("warm", long, max_tokens=1)
    bench.submit("long", [*long, *range(30, 200)], max_tokens=40)
    bench.submit("bad again", [*long[:300], *[poison] * 300], max_tokens=5, reusable=False)
    bench.submit("short", short, max_tokens=20)
    bench.drain()
    assert bench.sequences["bad again"].finish == "error" and bench.sequences["long"].finish == "length"
    assert bench.sequences["short"].tokens == alone


def test_an_aborted_sequence_leaves_within_one_step(bench: MakeBench, prompts: list[list[int]], alone: list[list[int]]):
    engine = bench()
    for index in (2, 3, 4):
        engine.submit(str(index), prompts[index], **{**SAMPLING[index % 4], "max_tokens": 12 if index != 3 else 500})
    for _ in range(6):
        engine.turn()
    assert engine.engine.scheduler.running == 3
    engine.engine.abort(("3", "unknown"))
    engine.turn()
    assert engine.engine.scheduler.sequence("3") is None
    assert engine.sequences["3"].finish == "abort"
    engine.drain()
    assert engine.sequences["2"].tokens == alone[2]
    assert engine.sequences["4"].tokens == alone[4]


@pytest.mark.parametrize("where", ["prefill", "step"])
def test_a_failing_sequence_ends_alone(
    bench: MakeBench,
    prompts: list[list[int]],
    alone: list[list[int]],
    where: str,
    monkeypatch: pytest.MonkeyPatch,
):
    engine = bench()
    executor = engine.engine.executor
    prefill, step = executor.prefill, executor.step

    def failing_prefill(work: list[tuple[str, list[int]]]) -> None:
        if any(sequence_id == "bad" for sequence_id, _ in work):
            raise RuntimeError("injected")
        prefill(work)

    def failing_step() -> list[Ready]:
        if "bad" in engine.engine.scheduler.decoding():
            raise RuntimeError("injected")
        return step()

    if where == "prefill":
        monkeypatch.setattr(executor, "prefill", failing_prefill)
    else:
        monkeypatch.setattr(executor, "step", failing_step)
    for index in (2, 3):
        engine.submit(str(index), prompts[index], **SAMPLING[index % 4])
    engine.turn()
    engine.submit("bad", prompts[5])
    engine.submit("6", prompts[6], **SAMPLING[2])
    engine.drain()
    bad = engine.sequences["bad"]
    assert (bad.finish, bad.tokens) == ("error", [])
    assert bad.error is not None and bad.error["kind"] == "GenerationFailed"
    for index in (2, 3, 6):
        assert engine.sequences[str(index)].tokens == alone[index]


@pytest.mark.parametrize("together", [False, True])
def test_a_prompt_that_breaks_among_others_ends_alone(
    bench: MakeBench, prompts: list[list[int]], alone: list[list[int]], together: bool, monkeypatch: pytest.MonkeyPatch
):
    """Three prompts share a step; the model fails on one of them after it has changed half of its caches."""
    engine = bench(prefill_chunk_tokens=2048)
    engine.engine.pace.tokens_per_s = 10_000.0
    executor = engine.engine.executor
    executor.batched_prefill = together
    model, bad = executor._model, prompts[6][5:20]

    def breaking(inputs: mx.array, cache: list) -> mx.array:
        sequences: list[list[int]] = inputs.tolist()  # type: ignore[assignment]
        if inputs.shape[1] > 1 and any(sequence[5:20] == bad for sequence in sequences):
            for layer in cache[:3]:
                heads = mx.zeros((inputs.shape[0], 2, inputs.shape[1], 64))
                layer.update_and_fetch(heads, heads)
            raise RuntimeError("injected")
        return model(inputs, cache=cache)

    monkeypatch.setattr(executor, "_model", breaking)
    for name, index in (("2", 2), ("bad", 6), ("4", 4)):
        engine.submit(name, prompts[index], **SAMPLING[index % 4])
    engine.drain()
    assert engine.sequences["bad"].finish == "error"
    assert engine.sequences["2"].tokens == alone[2] and engine.sequences["4"].tokens == alone[4]


def test_a_batch_that_breaks_while_a_sequence_joins_ends_that_sequence_only(
    bench: MakeBench, prompts: list[list[int]], alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
):
    """Half of the layers have the sequence and half do not: the batch cannot be used, and its sequences run again."""
    engine = bench()
    extend = kv_cache.extend
    guilty = []

    def breaking_extend(batch: list, other: list) -> None:
        extend(batch[:3], other[:3])
        if any("bad" in engine.engine.executor._joining() for _ in batch):
            guilty.append("bad")
            raise RuntimeError("injected")
        extend(batch[3:], other[3:])

    monkeypatch.setattr(kv_cache, "extend", breaking_extend)
    for index in (2, 3):
        engine.submit(str(index), prompts[index], **SAMPLING[index % 4])
    for _ in range(4):
        engine.turn()
    engine.submit("bad", prompts[5])
    engine.drain()
    assert guilty
    for index in (2, 3):
        assert engine.sequences[str(index)].tokens == alone[index]
    assert engine.sequences["bad"].finish == "error"


def test_a_first_token_is_told_before_the_next_step_is_made_ready(
    bench: MakeBench, prompts: list[list[int]], alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
):
    """Where that step then fails, the sequence goes on behind that token; of three sequences two do not wait for the
    third."""
    engine = bench()
    executor = engine.engine.executor
    told: list[tuple[int, ...]] = []
    names = ["a", "b"]
    step, failing = executor.step, {2}

    def watched() -> list[Ready]:
        told.append(tuple(len(engine.sequences[name].tokens) if name in engine.sequences else 0 for name in names))
        if len(told) in failing:
            raise RuntimeError("injected")
        return step()

    monkeypatch.setattr(executor, "step", watched)
    engine.submit("a", prompts[1], **SAMPLING[1])
    engine.submit("b", prompts[2], **SAMPLING[2])
    while len(told) < 5:
        engine.turn()
    # The second step failed; suspects run one by one: first `a` from its second token on.
    assert told[:2] == [(0, 0), (1, 1)]
    before = len(told)
    names.append("c")
    engine.submit("c", prompts[3], **SAMPLING[3])
    while not engine.sequences.get("c") or not engine.sequences["c"].tokens:
        engine.turn()
    assert len(engine.sequences["a"].tokens) < 12 and len(engine.sequences["b"].tokens) < 12, "all three are under way"
    assert all(lengths[2] == 0 for lengths in told[before:])
    engine.drain()
    assert [engine.sequences[name].tokens for name in ("a", "b", "c")] == [alone[1], alone[2], alone[3]]


def test_an_answer_whose_memory_cannot_be_kept_is_an_answer(
    bench: MakeBench, prompts: list[list[int]], alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
):
    engine = bench()

    def failing_cut(*arguments: object) -> None:
        raise MemoryError("injected")

    monkeypatch.setattr(engine.engine.executor, "cut", failing_cut)
    sequence = engine.run("r", prompts[6], **SAMPLING[2])
    assert (sequence.finish, sequence.tokens) == ("length", alone[6])
    assert engine.engine.prefixes.nbytes == 0


def test_the_model_ends_a_sequence_by_itself_unless_told_not_to(loaded: LoadedModel, prompts: list[list[int]]):
    longer = Bench(loaded).run("r", prompts[2], ignore_eos=True, max_tokens=50)
    assert (longer.finish, len(longer.tokens)) == ("length", 50)
    ender = longer.tokens[20]
    ending = dataclasses.replace(loaded, eos_token_ids=frozenset({ender}))
    sequence = Bench(ending).run("r", prompts[2], ignore_eos=False, max_tokens=50)
    assert sequence.finish == "stop"
    assert sequence.tokens == longer.tokens[: longer.tokens.index(ender) + 1]
    told = Bench(ending).run("r", prompts[2], ignore_eos=True, max_tokens=50)
    assert told.tokens == longer.tokens


def test_refusals_name_their_reason(bench: MakeBench, loaded: LoadedModel):
    engine = bench(sequences_max=1, queue_requests_max=1, kv_tokens_max=2000)
    engine.submit("empty", [])
    engine.submit("vocabulary", [loaded.vocabulary_size])
    engine.submit("context", [1] * loaded.context_tokens)
    engine.submit("memory", [1] * 2048)
    for name in ("runs", "waits", "too many"):
        engine.submit(name, [1, 2, 3], max_tokens=5)
    engine.submit("runs", [1, 2, 3])
    engine.turn()
    kinds = {name: type(error).__name__ for name, error in engine.refused.items()}
    assert kinds == {
        "empty": "InvalidRequest",
        "vocabulary": "InvalidRequest",
        "context": "ContextLengthExceeded",
        "memory": "ContextLengthExceeded",
        "too many": "QueueFull",
        "runs": "Unavailable",
    }
    message = engine.refused["memory"].message
    assert "2048" in message and "memory holds 2046" in message
    engine.drain()
    assert {sequence.finish for sequence in engine.sequences.values()} == {"length"}
    engine.engine.drain()
    engine.submit("late", [1, 2, 3])
    engine.turn()
    assert type(engine.refused["late"]).__name__ == "Draining"


@pytest.mark.parametrize(("leaves", "kind"), [(False, Draining), (True, ReplicaLeaves)])
def test_sequences_of_a_node_that_leaves_end_differently_from_those_of_a_server_that_ends(
    bench: MakeBench, leaves: bool, kind: type[SatchelError]
):
    """The endpoint fails the former over."""
    engine = bench()
    engine.submit("one", [1, 2, 3], max_tokens=400)
    engine.turn()
    engine.engine.end_all(leaves=leaves)
    engine.drain()
    error = engine.sequences["one"].error
    assert error is not None and type(from_wire(error)) is kind


def test_a_sequence_past_its_deadline_ends_with_an_error(bench: MakeBench):
    engine = bench()
    engine.submit("late", [1, 2, 3], max_tokens=5000, deadline_s=0.2)
    engine.turn()
    time.sleep(0.25)
    engine.turn()
    sequence = engine.sequences["late"]
    assert sequence.finish == "error"
    assert sequence.error is not None and sequence.error["kind"] == "DeadlineExceeded"
    assert engine.engine.scheduler.running == 0


def test_a_draining_engine_can_end_its_sequences(bench: MakeBench):
    engine = bench()
    engine.submit("r", [1, 2, 3], max_tokens=5000)
    engine.turn()
    engine.engine.end_all()
    engine.turn()
    assert engine.sequences["r"].finish == "error"
    assert engine.engine.scheduler.running == 0


def test_memory_for_prefixes_is_bounded(bench: MakeBench, loaded: LoadedModel, prompts: list[list[int]]):
    room = 400 * loaded.spec.bytes_per_token
    engine = bench(prefix_bytes_max=room)
    for index, prompt in enumerate(prompts):
        engine.run(str(index), prompt, max_tokens=2)
        assert engine.engine.prefixes.nbytes <= room


@pytest.mark.parametrize("seed", range(3))
def test_nothing_that_happens_to_one_sequence_changes_the_answer_of_another(
    bench: MakeBench, prompts: list[list[int]], alone: list[list[int]], seed: int, monkeypatch: pytest.MonkeyPatch
):
    """Random arrivals, aborts, duplicates, deadlines, preemption, and failures in every call of the executor."""
    rng = random.Random(seed)
    engine = bench(
        kv_tokens_max=rng.choice([800, 1300, 5000]), sequences_max=rng.choice([1, 3, 6]), prefill_chunk_tokens=256
    )
    executor = engine.engine.executor
    for name in ("open", "prefill", "step", "cut", "join"):
        monkeypatch.setattr(executor, name, sometimes_failing(getattr(executor, name), rng, seed * 0.03))
    asked: dict[str, int] = {}
    for turn in range(70):
        if rng.random() < 0.3:
            index, name = rng.randrange(len(prompts)), f"r{turn}"
            asked[name] = index
            deadline_s = rng.choice([600, 600, 600, 0.05])
            flow = rng.choice(["", "", "other", f"made up {turn}"])
            for _ in range(rng.choice([1, 1, 1, 2])):
                engine.submit(name, prompts[index], deadline_s=deadline_s, flow=flow, **SAMPLING[index % 4])
        if asked and rng.random() < 0.1:
            engine.engine.abort((rng.choice(list(asked)), "unknown"))
        engine.turn()
    engine.drain()
    for name, index in asked.items():
        sequence = engine.sequences.get(name)
        if sequence is None:
            assert name in engine.refused, f"seed {seed}: {name} is lost"
            continue
        assert sequence.finish is not None, f"seed {seed}: {name} never ended"
        assert sequence.tokens == alone[index][: len(sequence.tokens)], f"seed {seed}: {name} says something else"
        assert sequence.finish != "length" or sequence.tokens == alone[index]
    assert engine.engine.active == []


def sometimes_failing(call: Callable[..., object], rng: random.Random, share: float) -> Callable[..., object]:
    def attempt(*arguments: object) -> object:
        if rng.random() < share:
            raise RuntimeError("injected")
        return call(*arguments)

    return attempt
