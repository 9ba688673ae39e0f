"""Stages compute pieces of prompts and micro-batches at the same time, and nothing in an answer changes by that."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from satchel.actors.protocol.replica_messages import Sampling
from satchel.actors.replica.execution import prefilling
from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.execution.micro_batches import AGAIN_STEPS, TRIAL_STEPS, MicroBatchRule
from satchel.actors.replica.execution.padding import SHAPE_TOKENS, pieces_of
from satchel.actors.replica.execution.sampling.sampling import BatchSampler
from satchel.actors.replica.group.calls.following import Following
from satchel.actors.replica.group.calls.leading import Leading
from satchel.actors.replica.group.division import pipeline
from satchel.actors.replica.group.division.pipeline import RecordedStage
from satchel.actors.replica.group.forming import Member
from satchel.actors.replica.group.link.broken import GroupBroken, Wholeness
from satchel.actors.replica.group.loading import load_stage
from satchel.actors.replica.loading import models
from tests.actors.replica.group.test_group import FAMILIES
from tests.worlds.models.families import write_model
from tests.worlds.replica import fake_kernels, fake_rings
from tests.worlds.replica.bench import Bench, Received
from tests.worlds.replica.group import GROUP, KEY, TIMES, Fault, Led, listener, on_a_thread

LAYERS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "llama", "llama", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def whole(folder: Path) -> LoadedModel:
    return models.load(
        str(folder), context_tokens_max=None, progress=lambda *_: None, numerics="reproducible", weights="stored"
    )


def noted(following: Following, calls: Counter[str]) -> None:
    """Counts the calls that a follower does."""
    do = following._do

    def counting(call: str, given: list[Any], named: dict[str, Any]) -> None:
        calls[f"{call} {given[0]}" if call == "select" else call] += 1
        do(call, given, named)

    following._do = counting  # type: ignore[method-assign]


@contextmanager
def group(
    folder: Path, stops: list[int], piece_tokens: int, change: Callable[[Following], object] = lambda following: None
) -> Iterator[Led]:
    """A group of stages that end at these layers. `change` is done to its first follower."""
    listens = [listener() for _ in stops[:-1]]
    starts = [0, *stops[:-1]]

    def load(number: int) -> LoadedModel:
        return replace(load_stage(str(folder), starts[number], stops[number]), piece_tokens=piece_tokens)

    def follow(number: int) -> None:
        member = Member(GROUP, number, KEY, listens[number], TIMES)
        try:
            following = member.follow(load(number))
            if number == 0:
                change(following)
            following.run()
        finally:
            member.close()

    def opened(number: int) -> Iterator[Led]:
        if number < len(listens):
            with on_a_thread(lambda: follow(number)) as done:
                yield from opened(number + 1)
            assert done.exception() is None or isinstance(done.exception(), GroupBroken)
            return
        led = Led(load(number), *(each.getsockname()[:2] for each in listens), sequences_max=16)
        try:
            yield led
        finally:
            led.member.close()

    yield from opened(0)


class Whims(MicroBatchRule):
    """Chooses at random, for some steps each time."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng, self._chosen, self._left = rng, 1, 0

    def choose(self, sequences: int) -> int:
        self._left -= 1
        if self._left < 0:
            self._chosen, self._left = self._rng.choice((1, 2, 2)), self._rng.randrange(12)
        return self._chosen


def live(
    bench: Bench, seed: int, lengths: Sequence[int] = (3, 60, 255, 300, 700), count: int = 14
) -> dict[str, Received]:
    """Sequences of random lengths and samplings come and go at random steps; some are left in mid-answer. Returns what
    those that ended by themselves received."""
    rng = random.Random(seed)
    left, names = set[str](), list[str]()
    prompts = [[rng.randrange(10, 3000) for _ in range(rng.choice(lengths))] for _ in range(8)]
    while len(names) < count:
        for _ in range(rng.choice((1, 1, 2, 5))):
            prompt = rng.choice(prompts)[: rng.choice((None, 100))]
            names.append(str(len(names)))
            penalty = rng.choice((1.0, 1.0, 1.3))
            bench.submit(
                names[-1],
                prompt,
                temperature=rng.choice((0.0, 0.8)),
                seed=len(names),
                logprobs=rng.choice((None, 2)),
                repetition_penalty=penalty,
                max_tokens=rng.choice((1, 4, 25, 60)),
            )
        for _ in range(rng.choice((1, 3, 12))):
            bench.turn()
        going = [name for name in names if name in bench.sequences and bench.sequences[name].finish is None]
        if going and rng.random() < 0.4:
            gone = rng.choice(going)
            left.add(gone)
            bench.engine.abort((gone,))
    bench.drain()
    return {name: bench.sequences[name] for name in names if name not in left}


def same(
    one: dict[str, Received], other: dict[str, Received], fields: Sequence[str] = ("tokens", "finish", "logprobs")
) -> None:
    # Which of them are left differs with the time that steps take.
    common = one.keys() & other.keys()
    assert len(common) >= 4
    for name in common:
        for what in fields:
            assert getattr(one[name], what) == getattr(other[name], what), f"{what} of {name}"


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_sequences_that_come_and_go_are_answered_as_by_one_process_to_the_bit(
    folder: Path, whole: LoadedModel, seed: int
):
    """Whatever the stages and the pieces are."""
    rng, calls = random.Random(seed), Counter[str]()
    stops = [*sorted(rng.sample(range(1, LAYERS), rng.choice((1, 2)))), LAYERS]
    piece_tokens = rng.choice((64, 100, 300))
    print(f"seed {seed}: stages end at {stops}, pieces of {piece_tokens} tokens")
    with group(folder, stops, piece_tokens, lambda following: noted(following, calls)) as led:
        led.bench.engine.executor.rule = Whims(rng)
        same(live(Bench(whole, sequences_max=16), seed), live(led.bench, seed))
    assert calls["move"] and calls["select 0"] > 5 and calls["select 1"] > 5


def load_stored(folder: Path) -> LoadedModel:
    """The whole model, with weights as stages have them."""
    return models.load(
        str(folder),
        context_tokens_max=None,
        progress=lambda *_: None,
        dtype="float32",
        weights="stored",
        warm=False,
    )


def test_stages_record_their_steps_where_a_gpu_has_kernels_and_answer_as_one_process(folder: Path):
    recorded = list[str]()
    run = RecordedStage.__call__

    def noted_run(stage: RecordedStage, *given: Any) -> mx.array | None:
        states = run(stage, *given)
        recorded.append("declined" if states is None else str(stage._stage.stage.start))
        return states

    with fake_kernels.kernels(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecordedStage, "__call__", noted_run)
        loaded = load_stored(folder)
        expected = live(Bench(loaded, sequences_max=16), 3)
        with group(folder, [1, 3, LAYERS], 100) as led:
            way = replace(loaded.way, drafts=False, summed=False, gated=False, alike=0)
            assert led.bench.engine.executor._loaded.way == way
            led.bench.engine.executor.rule = Whims(random.Random(3))
            found = live(led.bench, 3)
    assert loaded.way.compiled and {"0", "1", "3"} <= {*recorded}
    same(expected, found, ("tokens",))


@contextmanager
def launching() -> Iterator[None]:
    """Lets stages hand on what is not computed yet, and prompts run ahead, as on CUDA."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "on_cuda", lambda: True)
        patch.setattr(prefilling, "on_gpu", lambda: True)
        patch.setattr(prefilling, "on_cuda", lambda: True)
        yield


@pytest.mark.variants(1)
@pytest.mark.parametrize("through_rings", [False, True])
@pytest.mark.parametrize("stops", [[2, LAYERS], pytest.param([1, 3, LAYERS], marks=pytest.mark.slow)])
def test_what_is_handed_on_before_it_is_computed_answers_as_one_process(
    folder: Path, stops: list[int], through_rings: bool
):
    """Tokens and hidden states pass on threads of their own, or by devices, and nobody waits for what only its own wait
    holds up."""
    with fake_kernels.kernels(), launching(), fake_rings.rings() if through_rings else nullcontext([]) as passed:
        loaded = load_stored(folder)
        expected = live(Bench(loaded, sequences_max=16), 3, (3, 60, 300), 8)
        with group(folder, stops, 100) as led:
            led.bench.engine.executor.rule = Whims(random.Random(3))
            found = live(led.bench, 3, (3, 60, 300), 8)
            assert led.bench.engine.executor.runs_ahead
    same(expected, found, ("tokens",))
    passed = [nbytes for what, nbytes in passed if what == "received"]
    # Of tokens, and of hidden states.
    assert not through_rings or ({4, 8} <= {*passed} and max(passed) > 10_000)


@pytest.mark.slow
@pytest.mark.parametrize("family, layers, more", FAMILIES)
def test_layers_of_every_kind_are_moved_between_micro_batches(
    tmp_path: Path, family: str, layers: int, more: dict[str, Any]
):
    """With prompts of a single chunk: scans in chunks of other lengths round otherwise."""
    folder, rng, calls = (
        write_model(tmp_path / family, family, num_hidden_layers=layers, **more),
        random.Random(1),
        Counter(),
    )
    how: dict[str, Any] = {"context_tokens_max": None, "progress": lambda *_: None, "weights": "stored"}
    loaded = models.load(str(folder), numerics="reproducible", **how)
    expected = live(Bench(loaded, sequences_max=16), 5, (3, 20, 60))
    with group(folder, [layers // 2, layers], 64, lambda following: noted(following, calls)) as led:
        led.bench.engine.executor.rule = Whims(rng)
        same(expected, live(led.bench, 5, (3, 20, 60)))
    assert calls["move"] > 1


def test_stages_compute_two_sequences_in_turns_and_one_alone_as_a_whole(folder: Path):
    """A micro-batch whose sequence has left gets one of the other's."""
    calls = Counter[str]()
    with group(folder, [2, LAYERS], 64, lambda following: noted(following, calls)) as led:
        bench = led.bench
        for name, tokens in (("a", 3), ("one", 60), ("b", 3), ("two", 50)):
            bench.submit(name, [5, 6, 7], max_tokens=tokens)
        bench.drain()
        # The last two began in the same micro-batch, so one of them was moved.
        assert calls["move"] >= 1 and calls["select 1"] >= 40
        before = calls["compute"]
        bench.run("alone", [5, 6, 7], max_tokens=10)
        # The step after the last token had been launched.
        assert calls["compute"] - before <= 11


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("fails_at", [2, 5, 12])
def test_what_fails_within_a_prompt_breaks_the_group(folder: Path, stage: int, fails_at: int):
    """While other pieces are under way: the second of a prompt, the last one, and a step of two micro-batches."""
    faults = []

    def put(batch: Any) -> None:
        batch._model = fault = Fault(batch._model, fails_at)
        faults.append(fault)

    first: Callable[[Following], object] = lambda following: put(following._batch) if stage == 0 else None  # noqa: E731
    with group(folder, [2, LAYERS], 64, first) as led:
        if stage == 1:
            put(led.bench.engine.executor)
        led.bench.submit("one", [5] * 300, max_tokens=20)
        led.bench.submit("two", [6] * 100, max_tokens=20)
        with pytest.raises(GroupBroken, match="ValueError: injected"):
            led.bench.drain()
    assert faults[0].calls >= fails_at


class Told:
    """Takes the place of a connection to a follower."""

    def __init__(self) -> None:
        self.calls = list[str]()

    def send(self, kind: str, dropped: list[int], told: list[Any], arrays: int) -> None:
        self.calls += [call for call, _, _ in told]

    def send_behind(self, arrays: list[Any]) -> None:
        assert not arrays


def test_a_step_that_followers_were_told_is_done_here_too_or_the_group_breaks():
    """Else the next hidden states would be those of the step that was left."""
    told, ended = Told(), list[str]()
    leading = Leading([told], Wholeness(lambda: ended.append("ended")))  # type: ignore[list-item]
    for number in range(2):
        leading.lead("select", [number], {}, lambda: None)
        leading.tell_ahead("compute", [mx.array([number])])
    assert told.calls == ["select", "compute"] * 2
    assert leading.lead("compute", [mx.array([0])], {}, lambda: "logits") == "logits"
    leading.lead("advance", [[1]], {}, lambda: None)
    assert told.calls == ["select", "compute"] * 2 and not ended
    with pytest.raises(GroupBroken, match="a step was left"):
        leading.lead("clear_batch", [], {}, lambda: None)
    assert ended == ["ended"]


def test_two_micro_batches_are_used_unless_one_is_measured_to_be_faster():
    """And what was slower once is measured again."""
    rule = MicroBatchRule()

    def steps(count: int, one_s: float, two_s: float) -> list[int]:
        chosen = []
        for _ in range(count):
            chosen.append(rule.choose(9))
            rule.note(9, chosen[-1], one_s if chosen[-1] == 1 else two_s)
        return chosen

    assert rule.choose(1) == 1 and rule.choose(2) == 2
    assert steps(TRIAL_STEPS, 0.02, 0.025) == [2] * TRIAL_STEPS
    assert steps(200, 0.02, 0.025) == [1] * 200
    # Other numbers of sequences are measured by themselves.
    assert rule.choose(3) == 2 and rule.choose(15) == 1
    # Now the contexts are so long that attention takes most of a step.
    found = steps(AGAIN_STEPS + 100, 0.03, 0.02)
    assert found[-1] == 2 and found.count(1) < AGAIN_STEPS


def test_pieces_have_all_tokens_in_order_and_are_nearly_equal():
    rng = random.Random(1)
    for _ in range(300):
        most = rng.choice((7, 64, 100, 512))
        work = [
            (str(number), [*range(rng.choice((1, 5, 63, 64, 200, 513, 1400)))]) for number in range(rng.randrange(4))
        ]
        pieces = pieces_of(work, most)
        for sequence_id, tokens in work:
            parts = [part for piece in pieces for name, part in piece if name == sequence_id]
            assert [token for part in parts for token in part] == tokens
            sizes = [len(part) for part in parts]
            assert len(parts) == -(-len(tokens) // most) and sizes[-1] > 0
            assert all(size == sizes[0] for size in sizes[:-1]) and sizes[-1] <= sizes[0]
            assert sizes[0] == min(most, -(-sizes[0] // SHAPE_TOKENS) * SHAPE_TOKENS) or len(sizes) == 1
        for piece in pieces:
            assert 0 < sum(len(part) for _, part in piece) <= most
            assert len({name for name, _ in piece}) == len(piece)
    assert pieces_of([("one", [1] * 2000), ("two", [2])], None) == [[("one", [1] * 2000), ("two", [2])]]


def test_a_moved_sequence_is_sampled_as_if_it_had_stayed():
    """With what penalties count, and from the same position."""
    rng = np.random.default_rng(0)
    asked = [Sampling(temperature=0.9, seed=seed, repetition_penalty=1.5 * (seed % 2) or 1.0) for seed in range(5)]
    stays, source, target = (BatchSampler(50, frozenset({1})) for _ in range(3))
    for sampling in asked:
        stays.add(sampling, [3, 4], [5])
        source.add(sampling, [3, 4], [5])
    target.add(Sampling(seed=9, presence_penalty=1.0), [7], [])
    logits = mx.array(rng.normal(size=(5, 50)).astype(np.float32))
    assert stays(logits).tokens.tolist() == source(logits).tokens.tolist()
    target(logits[:1])
    for moved in (3, 1, 0):
        target.add_state(source.state_of(moved))
    for _ in range(6):
        logits = mx.array(rng.normal(size=(5, 50)).astype(np.float32))
        expected: Any = stays(logits).tokens.tolist()
        found: Any = target(mx.concatenate([logits[:1], logits[mx.array([3, 1, 0])]])).tokens.tolist()
        assert found[1:] == [expected[3], expected[1], expected[0]]
