"""The phases of a sequence, as a trace shows them."""

from __future__ import annotations

from collections.abc import Callable

from satchel.cluster.telemetry.context import TRACING, span, working_for
from tests.worlds.collector import Collector, SeenSpan, traced
from tests.worlds.replica.bench import Bench

MakeBench = Callable[..., Bench]


def phases(collector: Collector, sequence: SeenSpan) -> list[str]:
    return [one.name for one in collector.spans if one.parent == sequence.id]


def test_a_sequence_waits_is_prefilled_and_decoded(bench: MakeBench, prompts: list[list[int]]):
    engine = bench()
    engine.run("before", prompts[-1])
    with traced("replica:m-0") as collector:
        with working_for("req", TRACING.begin("a request", {})):
            engine.submit("req/1", prompts[-1], max_tokens=5)
            span().end()
        engine.drain()
        TRACING.close()
    sequence = collector.named("sequence")
    assert sequence.parent == collector.named("a request").id and not sequence.failed
    assert sequence.events == ["first token"]
    assert sequence.attributes == {
        "satchel.sequence.id": "req/1",
        "satchel.prompt_tokens": len(prompts[-1]),
        "satchel.generated_tokens": 5,
        "satchel.finish": "length",
        "gen_ai.request.model": "m",
    }
    assert phases(collector, sequence) == ["queue", "prefill", "decode"]
    cached = {"satchel.cached_tokens": engine.sequences["req/1"].cached, "satchel.restored_tokens": 0}
    assert collector.named("prefill").attributes == cached and cached["satchel.cached_tokens"]


def test_a_sequence_that_loses_its_place_waits_again(bench: MakeBench, prompts: list[list[int]]):
    engine = bench(sequences_max=2)
    with traced("replica:m-0") as collector:
        with working_for("req", TRACING.begin("a request", {})):
            for index in range(4):
                engine.submit(str(index), prompts[index], flow="greedy")
            while len(engine.engine.scheduler.decoding()) < 2:
                engine.turn()
            for index in range(2):
                engine.submit(f"other {index}", prompts[index], flow="other")
        engine.drain()
        TRACING.close()
    preempted = [one for one in collector.spans if "preempted" in one.events]
    assert preempted
    for one in preempted:
        assert phases(collector, one)[:3] == ["queue", "prefill", "decode"]
        assert phases(collector, one)[-3:] == ["queue", "prefill", "decode"] and len(phases(collector, one)) > 3


def test_a_sequence_that_is_refused_or_fails_says_so(bench: MakeBench, prompts: list[list[int]]):
    engine = bench()
    with traced("replica:m-0") as collector:
        with working_for("req", TRACING.begin("a request", {})):
            engine.submit("empty", [])
            engine.submit("late", prompts[0], deadline_s=-1.0)
        engine.drain()
        TRACING.close()
    found = {one.attributes["satchel.sequence.id"]: one for one in collector.spans if one.name == "sequence"}
    assert found["empty"].failed and found["empty"].attributes["error.type"] == "InvalidRequest"
    assert found["late"].failed and found["late"].attributes["error.type"] == "DeadlineExceeded"
