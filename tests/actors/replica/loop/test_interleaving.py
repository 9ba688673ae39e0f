"""Several agents on one engine: whose turn it is, how long the later one waits, and when all have ended.

The laws are tested in virtual time, over devices and agents drawn from a seed, and on the real engine by counting.
Nothing here measures time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from statistics import fmean
from typing import Any

import pytest

from satchel.actors.replica.loading import models
from satchel.actors.replica.scheduling.prefill_budget import FIRST_CHUNK_TOKENS, TOKENS_MIN
from tests.worlds.models.families import write_model
from tests.worlds.replica.bench import Bench
from tests.worlds.replica.interleaving import (
    DEVICES,
    LIMITS,
    PAUSE_S,
    Agent,
    Costs,
    Turn,
    VirtualEngine,
    any_costs,
    some_agents,
)

STEADY = Costs(call=0.0, token=PAUSE_S / 128, pair=0.0, step=0.01, sequence=0.001)
"""128 tokens take the pause, so every step beside decoding sequences has just these."""


def a_world(seed: int) -> tuple[random.Random, Costs]:
    rng = random.Random(seed)
    kinds: list[Costs | None] = [*DEVICES.values(), None]
    return rng, rng.choice(kinds) or any_costs(rng)


def tokens_between(engine: VirtualEngine, names: Iterable[str], began: float, ended: float) -> int:
    """How many tokens of these agents' prompts were computed in the turns that began in that time."""
    wanted = set(names)
    return sum(
        chunk.stop - chunk.start
        for turn in engine.turns
        if began <= turn.began < ended
        for chunk in turn.chunks
        if chunk.request_id in wanted
    )


def owners(turn: Turn) -> list[str]:
    return [chunk.request_id for chunk in turn.chunks]


def test_two_prompts_alternate_with_a_step_of_the_running_sequences_after_every_chunk():
    engine = VirtualEngine(STEADY)
    agents = [Agent("runs", 0.0, 128, 400), Agent("first", 1.0, 4096, 5), Agent("second", 3.0, 1024, 5)]
    engine.run(agents)
    both = [turn for turn in engine.turns if agents[2].arrival <= turn.began < agents[2].first]
    assert [owners(turn) for turn in both[:-1]] == [["second"], ["first"]] * 7 + [["second"]]
    assert all("runs" in turn.stepped for turn in both)
    assert all(turn.budget == 128 for turn in both)


@pytest.mark.parametrize("prompt", [1, 100, 128, 1000, 2900])
def test_the_second_first_token_does_not_wait_for_the_first_prompt(prompt: int):
    """With chunks of S tokens, the later agent with n tokens (fewer than the earlier has left) waits for the step in
    progress, for its own ceil(n / S) chunks and as many and one of the earlier one, and for two steps."""
    engine = VirtualEngine(STEADY)
    agents = [Agent("runs", 0.0, 128, 400), Agent("first", 1.0, 8000, 5), Agent("second", 4.1, prompt, 5)]
    engine.run(agents)
    second, chunks = agents[2], -(-prompt // 128)
    turn_s = PAUSE_S + STEADY.step + 2 * STEADY.sequence
    assert second.first - second.arrival <= turn_s * (1 + 2 * chunks + 1 + 2)
    assert tokens_between(engine, ["first"], second.arrival, second.first) <= 128 * (chunks + 3)
    assert second.first < agents[1].first


@pytest.mark.parametrize("seed", range(100))
def test_the_second_first_token_on_any_device(seed: int):
    """Until the later prompt is done, the earlier one has no more chunks than it and one, if it has more tokens left;
    the later one's chunks have half of the least budget, but for the last."""
    rng, costs = a_world(seed)
    engine = VirtualEngine(costs)
    first, second = some_agents(rng, costs, 2)
    engine.run([first, second])
    last = max(number for number, turn in enumerate(engine.turns) if second.name in owners(turn))
    waited = [turn for turn in engine.turns[: last + 1] if turn.began >= second.arrival]
    chunks = [chunk for turn in waited for chunk in turn.chunks]
    firsts = [chunk for chunk in chunks if chunk.request_id == first.name]
    seconds = [chunk for chunk in chunks if chunk.request_id == second.name]
    assert len(seconds) <= 2 + 2 * second.prompt // min(turn.budget for turn in waited), f"seed {seed}"
    if firsts and first.prompt - firsts[0].start > second.prompt:
        # What the last turn's budget has left after the later prompt's end may be another chunk of the earlier.
        assert len(firsts) <= len(seconds) + 2, f"seed {seed}"


def one_chunk(engines: Iterable[VirtualEngine]) -> float:
    """The seconds of the longest prefill call."""
    return max(engine.costs.chunk(chunk) for engine in engines for chunk in engine.chunks)


@pytest.mark.parametrize("seed", range(100))
def test_together_they_end_no_later_than_one_after_the_other(seed: int):
    """But for one chunk, and for the fixed part of the calls that are more because chunks beside running sequences are
    cut to the pause: no token is computed twice, and no step has fewer sequences."""
    rng, costs = a_world(seed)
    agents = some_agents(rng, costs, rng.randint(2, 6))
    engine, unbatched = VirtualEngine(costs), VirtualEngine(costs)
    ended = engine.run([replace(agent) for agent in agents])
    apart_ended = unbatched.run_one_by_one(agents)
    assert tokens_between(engine, [agent.name for agent in agents], 0.0, ended) == sum(agent.prompt for agent in agents)
    assert sum(bool(turn.stepped) for turn in engine.turns) <= sum(bool(turn.stepped) for turn in unbatched.turns)
    ends = {agent.name: agent.prompt for agent in agents}
    for chunk in engine.chunks:
        assert chunk.stop - chunk.start >= TOKENS_MIN or chunk.stop == ends[chunk.request_id], f"seed {seed}: {chunk}"
    cut = costs.call * max(0, len(engine.chunks) - len(unbatched.chunks))
    late = ended - apart_ended
    assert late <= one_chunk([engine, unbatched]) + cut, f"seed {seed}: {late:.3f} s late"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("first", "second"), [(512, 512), (1024, 256), (2048, 256), (2048, 512)])
def test_two_agents_that_say_something_end_no_later_at_all(device: str, first: int, second: int):
    """With answers of 64 tokens, the steps that they share pay for the calls that are more."""
    for arrival in (0.0, 0.01, 1.0):
        agents = [Agent("first", 0.0, first - 1, 64), Agent("second", arrival, second - 1, 64)]
        engine, unbatched = VirtualEngine(DEVICES[device]), VirtualEngine(DEVICES[device])
        assert engine.run([replace(agent) for agent in agents]) <= 1.001 * unbatched.run_one_by_one(agents)


@pytest.mark.slow
def test_all_worlds_together_end_sooner():
    """Interleaving is worth it: over many devices and agents, by a sixteenth at least."""
    shares = []
    for seed in range(60):
        rng, costs = a_world(seed)
        agents = some_agents(rng, costs, rng.randint(2, 6))
        alone = VirtualEngine(costs).run_one_by_one(agents)
        shares.append(VirtualEngine(costs).run(agents) / alone)
    assert fmean(shares) < 15 / 16


@pytest.mark.parametrize("seed", range(60))
def test_running_sequences_wait_no_longer_than_the_pause(seed: int):
    """Or than the least chunk takes, or twice a call's fixed part. Text that grows deeper makes single chunks longer
    than was measured before: by half at most, and seldom by a quarter."""
    rng, costs = a_world(seed)
    engine = VirtualEngine(costs)
    engine.run(some_agents(rng, costs, rng.randint(2, 6)))
    waits = []
    for turn in engine.turns:
        # Chunks of several sequences are several calls.
        assert sum(chunk.stop - chunk.start for chunk in turn.chunks) <= turn.budget <= LIMITS.prefill_chunk_tokens
        if turn.decoding and turn.chunks:
            deepest = max(chunk.stop for chunk in turn.chunks)
            least = costs.call * len(turn.chunks) + TOKENS_MIN * (costs.token + costs.pair * deepest)
            waits.append(turn.prefill_s / max(PAUSE_S, least, (1 + len(turn.chunks)) * costs.call))
    assert max(waits, default=0.0) <= 1.5, f"seed {seed}"
    assert sum(wait > 1.25 for wait in waits) <= 1 + len(waits) // 10, f"seed {seed}"


def test_a_stream_of_short_prompts_at_most_doubles_a_long_ones_work():
    """Whatever comes later, and however short: the oldest has every second chunk."""
    engine = VirtualEngine(STEADY)
    long = Agent("long", 0.3, 4000, 2)
    shorts = [Agent(f"short-{number}", 0.1 * number, 100, 1) for number in range(300)]
    engine.run([long, *shorts])
    others = tokens_between(engine, [short.name for short in shorts], long.arrival, long.first)
    assert long.prompt / 4 <= others <= long.prompt + LIMITS.prefill_chunk_tokens


@pytest.mark.parametrize("sequences", [1, 2, 4])
def test_a_short_prompt_behind_all_places_waits_for_one_of_them(sequences: int):
    """Where as many long prompts are prefilled as may be, the queue moves on with the first that is done: after twice
    what the shortest of them has left, since the oldest gets every second chunk."""
    engine = VirtualEngine(STEADY, replace(LIMITS, prefill_sequences_max=sequences))
    agents = [Agent("runs", 0.0, 1, 2000), *(Agent(f"long-{number}", 1.0, 3000, 2) for number in range(sequences))]
    engine.run([*agents, short := Agent("short", 1.5, 100, 2)])
    names = [agent.name for agent in agents]
    assert tokens_between(engine, names, short.arrival, short.first) <= 2 * 3000 + 4 * 128


@pytest.mark.parametrize("seed", range(60))
def test_an_urgent_agent_waits_for_nobody_less_urgent(seed: int):
    """From the turn after its arrival to the end of its prompt, nothing of a calm prompt is computed but with what the
    last turn's budget has left."""
    rng, costs = a_world(seed)
    engine = VirtualEngine(
        costs, replace(LIMITS, sequences_max=rng.randint(1, 4), prefill_sequences_max=rng.randint(1, 3))
    )
    agents = some_agents(rng, costs, 6)
    urgent = agents[-1]
    urgent.priority = 1
    engine.run(agents)
    assert all(agent.said == agent.tokens for agent in agents), f"seed {seed}: {agents}"
    ends = max(number for number, turn in enumerate(engine.turns) if urgent.name in owners(turn))
    for turn in engine.turns[:ends]:
        if turn.began >= urgent.arrival:
            assert set(owners(turn)) == {urgent.name}, f"seed {seed}"
    assert owners(engine.turns[ends])[0] == urgent.name


MakeBench = Callable[..., Bench]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> MakeBench:
    """Engines of a tiny model, whose attention gives the same bits in whatever chunks and company."""
    folder = write_model(tmp_path_factory.mktemp("model"), "qwen3")
    loaded = models.load(
        str(folder), context_tokens_max=None, progress=lambda what, fraction: None, numerics="reproducible"
    )
    return lambda **fields: Bench(loaded, **fields)


class SteadyPace:
    """The same budget in every step, whatever a step takes here."""

    tokens_per_s = 1000.0

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def budget(self, decoding: bool) -> int:
        return self.tokens

    def note(self, tokens: int, seconds: float) -> None:
        pass

    def note_step(self, seconds: float) -> None:
        pass


def steady(bench: Bench, tokens: int) -> list[list[tuple[str, int]]]:
    """Give an engine a constant budget. Returns its prefill calls, as they come: (sequence, tokens) each."""
    calls: list[list[tuple[str, int]]] = []
    executor, prefill = bench.engine.executor, bench.engine.executor.prefill

    def counted(work: Any) -> None:
        calls.append([(name, len(part)) for name, part in work])
        prefill(work)

    bench.engine.prefill.pace = SteadyPace(tokens)  # type: ignore[assignment]
    executor.prefill = counted
    return calls


def prompt_of(tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3000) for _ in range(tokens)]


def test_the_engine_interleaves_and_says_what_it_says_alone(bench: MakeBench):
    """Staggered arrivals: the later one speaks before the earlier one's prompt is done, both say what they say alone,
    every token is computed once, and steps are shared."""
    prompts = {"first": prompt_of(1400, 1), "second": prompt_of(300, 2)}
    alone, steps_alone, calls_alone = {}, 0, 0
    for name, prompt in prompts.items():
        engine = bench()
        calls = steady(engine, 128)
        alone[name] = engine.run(name, prompt, max_tokens=24).tokens
        steps_alone, calls_alone = steps_alone + engine.engine.counters.steps, calls_alone + len(calls)
    engine = bench()
    calls = steady(engine, 128)
    engine.submit("first", prompts["first"], max_tokens=24)
    engine.turn()
    engine.submit("second", prompts["second"], max_tokens=24)
    while not engine.sequences["second"].tokens if "second" in engine.sequences else True:
        engine.turn()
    assert engine.engine.executor.length("first") < 1399, "the earlier prompt is done"
    assert not engine.sequences["first"].tokens
    engine.drain()
    assert {name: engine.sequences[name].tokens for name in prompts} == alone
    order = [name for call in calls for name, _ in call]
    assert order[:6] == ["first", "second", "first", "second", "first", "second"]
    assert sum(tokens for call in calls for _, tokens in call) == 1399 + 299
    assert engine.engine.counters.steps < steps_alone
    assert len(calls) <= calls_alone + 1, "chunks beside running sequences are as large as alone"
    sizes = [tokens for call in calls for _, tokens in call]
    assert sum(tokens < TOKENS_MIN for tokens in sizes) <= 2, "only a prompt's last chunk is a small one"


def test_the_engine_decodes_once_after_every_budget(bench: MakeBench):
    """Three agents come at random turns: while any sequence runs, every turn gives it a token and prefills a budget at
    most; with the first chunk's budget all of this holds before anything was measured."""
    rng = random.Random(4)
    engine = bench()
    calls = steady(engine, FIRST_CHUNK_TOKENS)
    engine.submit("runs", prompt_of(5, 9), max_tokens=60)
    for _ in range(3):
        engine.turn()
    for index in range(3):
        engine.submit(f"agent-{index}", prompt_of(rng.randint(200, 900), index), max_tokens=5)
        for _ in range(rng.randrange(3)):
            before = len(calls), len(engine.sequences["runs"].tokens)
            engine.turn()
            assert sum(tokens for call in calls[before[0] :] for _, tokens in call) <= FIRST_CHUNK_TOKENS
            assert len(engine.sequences["runs"].tokens) == before[1] + 1
    engine.drain()
    assert {sequence.finish for sequence in engine.sequences.values()} == {"length"}


def test_agents_that_wait_for_a_common_beginning_go_on_when_its_owner_leaves(bench: MakeBench):
    """The one that computes it is aborted, the next one is sent back by an urgent agent: all others end, with what
    they say alone, and the blocks that were done are computed once."""
    common = prompt_of(768, 3)
    prompts = {f"agent-{index}": common + prompt_of(20, 10 + index) for index in range(4)}
    alone = {name: bench().run(name, prompt).tokens for name, prompt in prompts.items()}
    engine = bench(prefill_sequences_max=2, sequences_max=2)
    calls = steady(engine, 128)
    for name, prompt in prompts.items():
        engine.submit(name, prompt)
    for _ in range(3):
        engine.turn()
    assert {name for call in calls for name, _ in call} == {"agent-0"}
    engine.engine.abort(("agent-0",))
    for _ in range(2):
        engine.turn()
    for index in range(2):
        engine.submit(f"urgent-{index}", prompt_of(300, 20 + index), priority=1)
    engine.drain()
    assert engine.sequences["agent-0"].finish == "abort"
    for name in list(prompts)[1:]:
        assert engine.sequences[name].tokens == alone[name]
    # The second of the common blocks was half done when its first owner left.
    assert sum(tokens for call in calls for _, tokens in call) <= 768 + 2 * 128 + 3 * 19 + 128 + 2 * 299
    assert all(before != after or len(before) == 1 for before, after in pairwise(calls))
