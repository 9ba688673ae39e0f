"""What happens to sequences and their cached KV if the device fails."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from satchel.actors.replica.device.device import as_numpy, settle
from satchel.actors.replica.device.device_errors import DeviceFailed, on_device
from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.execution.sampling.ready import Ready
from satchel.actors.replica.kernels import sealing
from satchel.actors.replica.kv import caches, sequence_view
from satchel.actors.replica.kv.paged_cache import PagedKVCache
from satchel.actors.replica.memory.disk_tier import DiskTier
from satchel.actors.replica.proving.findings import NOWHERE
from satchel.actors.replica.proving.pieces import IN_ONE_PIECE
from satchel.actors.replica.selftest import self_test
from satchel.cluster.errors import Unavailable
from tests.worlds.replica.bench import Bench, load_tiny
from tests.worlds.replica.bench_disk import Node, write_down
from tests.worlds.replica.device_faults import Fault, lost

AGENT = "default/a"
LONG, SHORT, LATE = list(range(5, 305)), list(range(300, 330)), list(range(100, 160))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    place = Node(tmp_path)
    yield place
    place.store.close()


def is_step(tokens, **_) -> bool:
    return tokens.shape[1] == 1


def converse(bench: Bench) -> None:
    """A long sequence of an agent, a short one beside it, one that comes late, and the agent's next turn."""
    bench.submit("agent", LONG, max_tokens=6, agent=AGENT)
    bench.submit("beside", SHORT, max_tokens=40)
    for _ in range(12):
        bench.turn()
    bench.submit("late", LATE, max_tokens=8)
    bench.drain()
    bench.run("next", [*LONG, *bench.sequences["agent"].tokens, 77, 78], max_tokens=8, agent=AGENT)
    bench.run("after", [*LATE, 5], max_tokens=4)


@pytest.fixture(scope="module")
def clean(loaded: LoadedModel) -> Bench:
    """The conversation on a device that loses nothing."""
    bench = Bench(loaded)
    converse(bench)
    return bench


@pytest.mark.variants(9)
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    "place, call",
    [("step", 1), ("step", 5), ("prefill", 1), ("cut", 1), ("cut", 2), ("seal", 1), ("seal", 2), ("written", 1)],
)
def test_answers_are_right_whatever_the_device_loses(
    place: str,
    call: int,
    ahead: bool,
    loaded: LoadedModel,
    clean: Bench,
    node: Node,
    monkeypatch: pytest.MonkeyPatch,
):
    """The first wait gets the error, be it for another sequence's prefill or for the disk: nothing that was drawn, cut
    or sealed since the last sound wait is used, delivered or written."""
    bench = Bench(loaded, disk=(disk := DiskTier(loaded.spec, loaded.model_id, node.client)))
    executor = bench.engine.executor
    executor.runs_ahead = ahead
    if place == "step":
        fault = Fault(executor._model, call, call, is_step)
        monkeypatch.setattr(executor, "_model", fault)
    elif place == "prefill":
        fault = Fault(PagedKVCache.update_and_fetch, call, call, lambda cache, keys, values: keys.shape[2] > 1)
        monkeypatch.setattr(PagedKVCache, "update_and_fetch", lambda *given: fault(*given))
    else:
        module, name = {
            "cut": (sequence_view, "_stacked"),
            "seal": (sealing, "seal"),
            "written": (caches, "out_of_pool"),
        }[place]
        monkeypatch.setattr(module, name, fault := Fault(getattr(module, name), call, call))
    converse(bench)
    assert fault.calls >= call, "nothing was lost"
    for name, sequence in clean.sequences.items():
        assert (bench.sequences[name].tokens, bench.sequences[name].finish) == (sequence.tokens, sequence.finish), name
    assert bench.engine.counters.device_failures == 1
    # Another process finds only what is right.
    write_down(bench, disk)
    node.restart()
    again = Bench(loaded, disk=DiskTier(loaded.spec, loaded.model_id, node.client))
    sequence = again.run("next", [*LONG, *clean.sequences["agent"].tokens, 77, 78], max_tokens=8, agent=AGENT)
    assert sequence.tokens == clean.sequences["next"].tokens


def test_a_sequence_at_which_the_device_always_fails_ends_alone(
    loaded: LoadedModel, clean: Bench, monkeypatch: pytest.MonkeyPatch
):
    bench = Bench(loaded)
    fault = Fault(PagedKVCache.update_and_fetch, 1, 10**9, lambda cache, keys, values: keys.shape[2] == 49)
    monkeypatch.setattr(PagedKVCache, "update_and_fetch", lambda *given: fault(*given))
    bench.submit("poison", [9] * 50, max_tokens=4)
    converse(bench)
    assert bench.sequences["poison"].finish == "error"
    for name, sequence in clean.sequences.items():
        assert (bench.sequences[name].tokens, bench.sequences[name].finish) == (sequence.tokens, sequence.finish), name


def test_a_lone_sequence_is_computed_again(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch):
    """It may be no sequence's fault: a GPU also ends command buffers because of another program's."""
    bench, clean = Bench(loaded), Bench(loaded)
    monkeypatch.setattr(bench.engine.executor, "_model", Fault(bench.engine.executor._model, 3, 3))
    assert bench.run("one", SHORT).tokens == clean.run("one", SHORT).tokens


def test_a_device_that_does_nothing_right_ends_the_process(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch):
    """Sequences fail over to another one; if they ended with an error, they would be lost."""
    bench = Bench(loaded)
    monkeypatch.setattr(bench.engine.executor, "_model", Fault(bench.engine.executor._model, 1, 10**9))
    for number in range(4):
        bench.submit(f"sequence {number}", [*SHORT, number], max_tokens=4)
    with pytest.raises(DeviceFailed):
        bench.drain()


def test_sequences_that_end_together_all_end(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch):
    """Even if the device fails when the first one's KV is cached: nothing else would end the others."""
    bench = Bench(loaded)
    for name in ("a", "b", "c"):
        bench.submit(name, [*SHORT, len(name)], max_tokens=200, agent=f"default/{name}")
    for _ in range(6):
        bench.turn()
    executor = bench.engine.executor
    monkeypatch.setattr(sequence_view, "_stacked", Fault(sequence_view._stacked, 1, 1))
    for name in ("a", "b", "c"):
        sequence = bench.engine.scheduler.sequence(name)
        assert sequence is not None and executor.holds(name)
        sequence.deadline = 0.0
    bench.drain()
    assert not bench.engine.delivery.sequences
    assert {bench.sequences[name].finish for name in ("a", "b", "c")} == {"error"}
    # If nobody waited for the device any more, whoever comes next is told.
    assert bench.run("next", SHORT).tokens == Bench(loaded).run("next", SHORT).tokens
    assert bench.engine.counters.device_failures == 1


def test_what_is_met_while_the_engine_waits_is_met_in_a_step(loaded: LoadedModel):
    """If there are no other sequences, KV that was read back is put into the pool while the engine waits."""
    bench, clean = Bench(loaded), Bench(loaded)

    def fail() -> None:
        with on_device():
            raise RuntimeError("the device failed")

    bench.engine.call(fail)
    bench.engine.wait()
    assert bench.engine.counters.device_failures == 1
    assert bench.run("one", SHORT).tokens == clean.run("one", SHORT).tokens


def test_what_else_is_in_flight_is_waited_for(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch):
    """It mostly fails too, and its errors would end sequences that are computed again, one after another."""
    bench, clean = Bench(loaded), Bench(loaded)
    slow = mx.random.normal((800, 800))
    mx.eval(slow)
    step, calls = bench.engine.executor.step, 0

    def failing() -> list[Ready]:
        nonlocal calls
        calls += 1
        if calls == 3:
            mx.async_eval(lost(mx.zeros((4,)) + (slow @ slow @ slow)[0, :4] * 0))
            raise DeviceFailed("the step before")
        return step()

    monkeypatch.setattr(bench.engine.executor, "step", failing)
    assert bench.run("one", SHORT).tokens == clean.run("one", SHORT).tokens
    assert bench.engine.counters.device_failures == 1


def test_what_is_read_for_a_picture_tells_of_all_sequences(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch):
    """Places of a picture's tokens are read from the device while a request is taken in."""
    clean, bench = Bench(loaded), Bench(loaded)
    words = clean.run("one", SHORT, max_tokens=20).tokens
    executor, pictures = bench.engine.executor, bench.engine.pictures
    fault = Fault(executor._model, 5, 5, is_step)
    begin = pictures.begin

    def reading(*given):
        settle()
        return begin(*given)

    monkeypatch.setattr(executor, "_model", fault)
    bench.submit("one", SHORT, max_tokens=20)
    while fault.calls < 5:
        bench.turn()
    monkeypatch.setattr(pictures, "begin", reading)
    bench.submit("seeing", LATE, max_tokens=2)
    bench.turn()
    monkeypatch.setattr(pictures, "begin", begin)
    bench.drain()
    assert bench.sequences["one"].tokens == words
    # Whoever was told of it is told to ask again, or is served.
    assert "seeing" in bench.sequences or isinstance(bench.refused["seeing"], Unavailable)


def test_what_is_read_by_numpy_was_waited_for():
    """NumPy ignores an error, and then no later wait raises it."""
    slow = mx.random.normal((800, 800))
    mx.eval(slow)
    mx.async_eval(lost(mx.zeros((4,)) + (slow @ slow @ slow)[0, :4] * 0))
    with pytest.raises(RuntimeError):
        as_numpy(mx.arange(8) + 1)


def test_requests_that_fail_again_and_again_end_one_by_one(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch):
    """If something was delivered in between, such as a prompt that another node continues, the process stays."""
    bench = Bench(loaded)
    fault = Fault(PagedKVCache.update_and_fetch, 1, 10**9, lambda cache, keys, values: keys.shape[2] == 49)
    monkeypatch.setattr(PagedKVCache, "update_and_fetch", lambda *given: fault(*given))
    for number in range(3):
        assert bench.run(f"poison {number}", [9] * 50, max_tokens=4).finish == "error"
        assert bench.run(f"prompt {number}", [*LONG, number], max_tokens=0).finish == "length"


def test_a_model_that_fails_in_the_pool_keeps_kv_by_itself(loaded: LoadedModel):
    """The self-test gets the error, and tests the next way."""

    class Failing:
        def __init__(self, model: Any) -> None:
            self.model = model

        def __getattr__(self, name: str) -> Any:
            return getattr(self.model, name)

        def __call__(self, tokens: mx.array, cache: Any = None, **rest: Any) -> mx.array:
            if isinstance(cache[0], PagedKVCache):
                raise RuntimeError("no such kernel")
            return self.model(tokens, cache=cache, **rest)

    assert self_test._try(replace(loaded, model=Failing(loaded.model)), NOWHERE, IN_ONE_PIECE).kv == self_test.OWN
