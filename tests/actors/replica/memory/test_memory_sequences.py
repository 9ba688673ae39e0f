"""What sequences leave in memory, what of it is reused, and that an idle engine checks the counts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from satchel.actors.replica.kv import prefix
from satchel.actors.replica.loop import intake
from satchel.actors.replica.loop.engine import Engine
from satchel.actors.replica.scheduling.sequence import ScheduledSequence
from tests.worlds.replica.bench import Bench

MakeBench = Callable[..., Bench]


@pytest.mark.parametrize("start", [3, 255, 256])
def test_a_conversation_computes_no_more_than_its_tokens(bench: MakeBench, start: int):
    """Over all turns at most the last prompt is prefilled, and a block a turn; here, where every prompt goes on from
    the last answer, nothing twice. Prompts end before, at and after the end of a block."""
    rng = random.Random(start)
    engine = bench()
    said: list[int] = [rng.randrange(3000) for _ in range(start)]
    prefilled = prompt_tokens = 0
    for turn, answer in enumerate([1, 12, 2, 5]):
        sequence = engine.run(f"turn{turn}", said, max_tokens=answer)
        assert sequence.cached is not None
        prompt_tokens, prefilled = len(said), prefilled + len(said) - sequence.cached
        said = said + sequence.tokens
        said += [rng.randrange(3000) for _ in range([1, -len(said) % 256, 256 - 5][turn % 3])]
    assert prefilled <= prompt_tokens


def test_the_tail_of_a_prompt_is_kept_once_and_only_where_its_block_fills(bench: MakeBench, prompts: list[list[int]]):
    """Nothing is copied where the open tail will do; the same prompt again, or four at once, copy nothing more."""
    engine = bench()
    cut, cuts = engine.engine.executor.cut, []

    def counting(sequence_id: str, spans: list[tuple[int, int]]) -> object:
        cuts.extend(stop - start for start, stop in spans)
        return cut(sequence_id, spans)

    engine.engine.executor.cut = counting  # type: ignore[method-assign]
    engine.run("stays", prompts[6])
    assert cuts == [256, 56], "the block, and the open tail with what was fed of the answer"
    cuts.clear()
    engine.run("fills", prompts[4])
    assert cuts == [255, 256, 12]
    cuts.clear()
    engine.run("again", prompts[4])
    for sequence in range(3):
        engine.submit(f"choice{sequence}", prompts[4])
    engine.drain()
    assert 255 not in cuts and not any(count == 256 for count in cuts)
    assert all(engine.sequences[f"choice{sequence}"].cached == 255 for sequence in range(3))


def idle_engine(make: MakeBench, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(intake, "IDLE_S", 0.0)
    engine = make()
    engine.run("one", prompts[7])
    monkeypatch.setattr(engine.engine._inbox, "wait", lambda timeout_s: None)
    return engine


def break_bytes(engine: Engine) -> None:
    engine.prefixes.nbytes += 1


def break_pins(engine: Engine) -> None:
    engine.prefixes.pin("gone", b"r" * 32, [], [[1]])


def break_tails(engine: Engine) -> None:
    engine.prefixes._tails.clear()


def break_scheduler(engine: Engine) -> None:
    engine.scheduler.add(ScheduledSequence("nobody's", 5, 5, deadline=1e9))


@pytest.mark.parametrize("damage", [break_bytes, break_pins, break_tails, break_scheduler])
def test_an_idle_engine_counts_again_and_forgets_what_does_not_add_up(
    bench: MakeBench,
    prompts: list[list[int]],
    damage: Callable[[Engine], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    """It logs that, continues without cached KV, and reports to the router that its blocks are gone."""
    engine = idle_engine(bench, prompts, monkeypatch)
    announced, _ = engine.engine.prefixes.drain_events()
    damage(engine.engine)
    engine.engine._wait()
    assert engine.engine.failed_checks == 1 and "tables are wrong" in caplog.text
    assert engine.engine.prefixes.nbytes == engine.engine.prefixes.blocks == 0
    assert engine.engine.prefixes.drain_events() == ([], announced)
    assert engine.engine.scheduler.waiting == engine.engine.scheduler.running == 0
    sequence = engine.run("after", prompts[7])
    assert (sequence.cached, sequence.tokens) == (0, engine.sequences["one"].tokens)


def test_it_counts_once_in_every_idle_time_and_not_before(
    bench: MakeBench, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
):
    engine = idle_engine(bench, prompts, monkeypatch)
    counts: list[int] = []
    recount = engine.engine.memory.recount
    monkeypatch.setattr(engine.engine.memory, "recount", lambda: (counts.append(1), recount())[1])
    for _ in range(3):
        engine.engine._wait()
    assert len(counts) == 1 and engine.engine.failed_checks == 0 and engine.engine.prefixes.blocks
    engine.run("next", prompts[2])
    monkeypatch.setattr(intake, "IDLE_S", 1000.0)
    engine.engine._wait()
    assert len(counts) == 1, "it is not idle long enough"
    monkeypatch.setattr(intake, "IDLE_S", 0.0)
    engine.engine._wait()
    assert len(counts) == 2


def test_counting_gives_way_to_a_request(bench: MakeBench, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch):
    """If a request comes between two steps of counting, the rest is not counted."""
    monkeypatch.setattr(prefix, "RECOUNT_STEP", 1)
    engine = idle_engine(bench, prompts, monkeypatch)
    steps: list[int] = []
    recount = engine.engine.memory.recount

    def counting() -> Iterator[None]:
        for step in recount():
            steps.append(1)
            engine.engine.abort(("unknown",))
            yield step

    monkeypatch.setattr(engine.engine.memory, "recount", counting)
    engine.engine._wait()
    assert len(steps) == 1 and engine.engine.failed_checks == 0
