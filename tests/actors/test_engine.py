"""The position law, and what one row may do to another: nothing.

Float32 on the CPU, so "the same" means equal tokens from equal bits (teacher forcing is not needed).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest

from satchel.actors.replica.models import LoadedModel

from .conftest import Bench

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
    return [Bench(loaded).run("row", prompt, **SAMPLING[index % 4]).tokens for index, prompt in enumerate(prompts)]


def test_batched_cached_and_chunked_rows_equal_the_row_alone(
    bench: MakeBench, prompts: list[list[int]], alone: list[list[int]]
):
    """Rows join at random times and leave at different ones; the second round finds its prompts in the cache."""
    rng = random.Random(0)
    for chunk in (256, 1024):
        engine = bench(prefill_chunk_tokens=chunk)
        for round_name in ("cold", "cached"):
            order = list(range(len(prompts)))
            rng.shuffle(order)
            for index in order:
                engine.submit(f"{round_name}{index}", prompts[index], **SAMPLING[index % 4])
                for _ in range(rng.randrange(4)):
                    engine.turn()
            engine.drain()
            for index, tokens in enumerate(alone):
                assert engine.rows[f"{round_name}{index}"].tokens == tokens
        # At least a prompt's whole blocks come from the cache, and all but its last token where a tail was kept.
        assert engine.rows["cached6"].cached == 299
        assert engine.rows["cached4"].cached == 0, "a prompt of exactly one block needs its last token computed"


def test_preempted_rows_go_on_where_they_were(bench: MakeBench, prompts: list[list[int]], alone: list[list[int]]):
    """Memory for about two of the longest rows: the others wait, are sent back, and say the same words."""
    engine = bench(kv_tokens_max=1200)
    for index, prompt in enumerate(prompts):
        engine.submit(str(index), prompt, **SAMPLING[index % 4])
    engine.drain()
    assert [engine.rows[str(index)].tokens for index in range(len(prompts))] == alone


def test_a_conversation_that_goes_on_prefills_only_what_is_new(bench: MakeBench, prompts: list[list[int]]):
    """Prompt and answer of a turn are found again, whatever their length."""
    for prompt in prompts:
        engine = bench()
        first = engine.run("first", prompt)
        second = engine.run("second", prompt + first.tokens + [5, 6, 7])
        assert second.cached == len(prompt) + len(first.tokens)


def test_a_row_that_moves_to_another_replica_goes_on_as_if_nothing_had_happened(
    bench: MakeBench, prompts: list[list[int]], alone: list[list[int]]
):
    for index, prompt in enumerate(prompts):
        done = alone[index][:5]
        row = bench().run("rest", prompt + done, generated=5, **{**SAMPLING[index % 4], "max_tokens": 7})
        assert row.tokens == alone[index][5:]


def test_an_aborted_row_leaves_within_one_step(bench: MakeBench, prompts: list[list[int]], alone: list[list[int]]):
    engine = bench()
    for index in (2, 3, 4):
        engine.submit(str(index), prompts[index], **{**SAMPLING[index % 4], "max_tokens": 12 if index != 3 else 500})
    for _ in range(6):
        engine.turn()
    assert engine.engine.scheduler.running == 3
    engine.engine.abort(("3", "unknown"))
    engine.turn()
    assert engine.engine.scheduler.row("3") is None
    assert engine.rows["3"].finish == "abort"
    engine.drain()
    assert engine.rows["2"].tokens == alone[2]
    assert engine.rows["4"].tokens == alone[4]


@pytest.mark.parametrize("where", ["prefill", "step"])
def test_a_failing_row_ends_alone(
    bench: MakeBench,
    prompts: list[list[int]],
    alone: list[list[int]],
    where: str,
    monkeypatch: pytest.MonkeyPatch,
):
    engine = bench()
    executor = engine.engine.executor
    prefill, step = executor.prefill, executor.step

    def failing_prefill(row_id: str, tokens: list[int]) -> None:
        if row_id == "bad":
            raise RuntimeError("injected")
        prefill(row_id, tokens)

    def failing_step() -> list[tuple[str, int]]:
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
    bad = engine.rows["bad"]
    assert (bad.finish, bad.tokens) == ("error", [])
    assert bad.error is not None and bad.error["kind"] == "GenerationFailed"
    for index in (2, 3, 6):
        assert engine.rows[str(index)].tokens == alone[index]


def test_a_batch_that_breaks_while_a_row_joins_ends_that_row_only(
    bench: MakeBench, prompts: list[list[int]], alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
):
    engine = bench()
    join = engine.engine.executor.join

    def breaking_join(row_id: str, *arguments: object) -> None:
        join(row_id, *arguments)  # type: ignore[arg-type]
        if row_id == "bad":
            raise RuntimeError("injected")

    monkeypatch.setattr(engine.engine.executor, "join", breaking_join)
    for index in (2, 3):
        engine.submit(str(index), prompts[index], **SAMPLING[index % 4])
    for _ in range(4):
        engine.turn()
    engine.submit("bad", prompts[5])
    engine.drain()
    assert engine.rows["bad"].finish == "error"
    for index in (2, 3):
        assert engine.rows[str(index)].tokens == alone[index]


def test_an_answer_whose_memory_cannot_be_kept_is_an_answer(
    bench: MakeBench, prompts: list[list[int]], alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
):
    engine = bench()

    def failing_cut(*arguments: object) -> None:
        raise MemoryError("injected")

    monkeypatch.setattr(engine.engine.executor, "cut", failing_cut)
    row = engine.run("r", prompts[6], **SAMPLING[2])
    assert (row.finish, row.tokens) == ("length", alone[6])
    assert engine.engine.prefixes.nbytes == 0


def test_the_model_ends_a_row_by_itself_unless_told_not_to(bench: MakeBench, loaded: LoadedModel):
    from satchel.api.text import load_text_model

    text = load_text_model(str(loaded.folder), name="m")
    prompt = text.encode(text.render([{"role": "user", "content": "Remember: the code of alice is 4821."}], []))
    row = bench().run("r", prompt, ignore_eos=False, max_tokens=50)
    assert row.finish == "stop"
    assert row.tokens[-1] in loaded.eos_token_ids
    longer = bench().run("r", prompt, ignore_eos=True, max_tokens=50)
    assert (longer.finish, len(longer.tokens)) == ("length", 50)
    assert longer.tokens[: len(row.tokens)] == row.tokens


def test_refusals_name_their_reason(bench: MakeBench, loaded: LoadedModel):
    engine = bench(rows_max=1, queue_requests_max=1, kv_tokens_max=2000)
    engine.submit("empty", [])
    engine.submit("vocabulary", [loaded.vocabulary_size])
    engine.submit("context", [1] * loaded.context_tokens)
    engine.submit("memory", [1] * 2001)
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
        "runs": "InvalidRequest",
    }
    assert "2001" in engine.refused["memory"].message
    engine.drain()
    assert {row.finish for row in engine.rows.values()} == {"length"}
    engine.engine.drain()
    engine.submit("late", [1, 2, 3])
    engine.turn()
    assert type(engine.refused["late"]).__name__ == "Draining"


def test_a_row_past_its_deadline_ends_with_an_error(bench: MakeBench):
    engine = bench()
    engine.submit("late", [1, 2, 3], max_tokens=5000, deadline_s=0.2)
    engine.turn()
    time.sleep(0.25)
    engine.turn()
    row = engine.rows["late"]
    assert row.finish == "error"
    assert row.error is not None and row.error["kind"] == "DeadlineExceeded"
    assert engine.engine.scheduler.running == 0


def test_a_draining_engine_can_end_its_rows(bench: MakeBench):
    engine = bench()
    engine.submit("r", [1, 2, 3], max_tokens=5000)
    engine.turn()
    engine.engine.end_all()
    engine.turn()
    assert engine.rows["r"].finish == "error"
    assert engine.engine.scheduler.running == 0


def test_memory_for_prefixes_is_bounded(bench: MakeBench, prompts: list[list[int]]):
    engine = bench()
    engine.engine.prefixes.bytes_max = 400 * engine.loaded.spec.bytes_per_token
    for index, prompt in enumerate(prompts):
        engine.run(str(index), prompt, max_tokens=2)
        assert engine.engine.prefixes.nbytes <= engine.engine.prefixes.bytes_max


@pytest.mark.parametrize("seed", range(3))
def test_nothing_that_happens_to_one_row_changes_the_words_of_another(
    bench: MakeBench, prompts: list[list[int]], alone: list[list[int]], seed: int, monkeypatch: pytest.MonkeyPatch
):
    """Random arrivals, aborts, duplicates, deadlines, preemption, and failures in every call of the executor."""
    rng = random.Random(seed)
    engine = bench(
        kv_tokens_max=rng.choice([800, 1300, 5000]), rows_max=rng.choice([1, 3, 6]), prefill_chunk_tokens=256
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
            for _ in range(rng.choice([1, 1, 1, 2])):
                engine.submit(name, prompts[index], deadline_s=deadline_s, **SAMPLING[index % 4])
        if asked and rng.random() < 0.1:
            engine.engine.abort((rng.choice(list(asked)), "unknown"))
        engine.turn()
    engine.drain()
    for name, index in asked.items():
        row = engine.rows.get(name)
        if row is None:
            assert name in engine.refused, f"seed {seed}: {name} is lost"
            continue
        assert row.finish is not None, f"seed {seed}: {name} never ended"
        assert row.tokens == alone[index][: len(row.tokens)], f"seed {seed}: {name} says something else"
        assert row.finish != "length" or row.tokens == alone[index]
    assert engine.engine.active == []


def sometimes_failing(call: Callable[..., object], rng: random.Random, share: float) -> Callable[..., object]:
    def attempt(*arguments: object) -> object:
        if rng.random() < share:
            raise RuntimeError("injected")
        return call(*arguments)

    return attempt
