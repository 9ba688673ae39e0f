"""What becomes of rows, and of what is kept of them, when the device fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from satchel.actors.replica.execution.device_errors import DeviceFailed
from satchel.actors.replica.kv import caches, row_view, sealing
from satchel.actors.replica.kv.paged_cache import PagedKVCache
from satchel.actors.replica.loading.models import LoadedModel
from satchel.actors.replica.tiers.disk_tier import DiskTier
from tests.worlds.bench import Bench, load_tiny
from tests.worlds.bench_disk import Node, write_down
from tests.worlds.device_faults import Fault

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
    """A long row of an agent, a short one beside it, one that comes late, and the agent's next turn."""
    bench.submit("agent", LONG, max_tokens=6, agent=AGENT)
    bench.submit("beside", SHORT, max_tokens=40)
    for _ in range(12):
        bench.turn()
    bench.submit("late", LATE, max_tokens=8)
    bench.drain()
    bench.run("next", [*LONG, *bench.rows["agent"].tokens, 77, 78], max_tokens=8, agent=AGENT)
    bench.run("after", [*LATE, 5], max_tokens=4)


@pytest.mark.parametrize(
    "place, call",
    [("step", 1), ("step", 5), ("prefill", 1), ("cut", 1), ("cut", 2), ("seal", 1), ("seal", 2), ("written", 1)],
)
def test_words_are_right_whatever_the_device_loses(
    place: str, call: int, loaded: LoadedModel, node: Node, monkeypatch: pytest.MonkeyPatch
):
    """Whoever waits first is told, be it another row's prefill or the way to the disk: nothing that was drawn, cut or
    sealed since the last sound wait is believed, told or written."""
    clean = Bench(loaded)
    converse(clean)
    bench = Bench(loaded, disk=(disk := DiskTier(loaded.spec, loaded.model_id, node.client)))
    executor = bench.engine.executor
    if place == "step":
        fault = Fault(executor._model, call, call, is_step)
        monkeypatch.setattr(executor, "_model", fault)
    elif place == "prefill":
        fault = Fault(PagedKVCache.update_and_fetch, call, call, lambda cache, keys, values: keys.shape[2] > 1)
        monkeypatch.setattr(PagedKVCache, "update_and_fetch", lambda *given: fault(*given))
    else:
        module, name = {
            "cut": (row_view, "_stacked"),
            "seal": (sealing, "seal"),
            "written": (caches, "out_of_pool"),
        }[place]
        monkeypatch.setattr(module, name, fault := Fault(getattr(module, name), call, call))
    converse(bench)
    assert fault.calls >= call, "nothing was lost"
    for name, row in clean.rows.items():
        assert (bench.rows[name].tokens, bench.rows[name].finish) == (row.tokens, row.finish), name
    assert bench.engine.counters.device_failures == 1
    # Another process finds only what is right.
    write_down(bench, disk)
    node.restart()
    again = Bench(loaded, disk=DiskTier(loaded.spec, loaded.model_id, node.client))
    row = again.run("next", [*LONG, *clean.rows["agent"].tokens, 77, 78], max_tokens=8, agent=AGENT)
    assert row.tokens == clean.rows["next"].tokens


def test_a_row_at_which_the_device_always_fails_ends_alone(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch):
    clean = Bench(loaded)
    converse(clean)
    bench = Bench(loaded)
    fault = Fault(PagedKVCache.update_and_fetch, 1, 10**9, lambda cache, keys, values: keys.shape[2] == 49)
    monkeypatch.setattr(PagedKVCache, "update_and_fetch", lambda *given: fault(*given))
    bench.submit("poison", [9] * 50, max_tokens=4)
    converse(bench)
    assert bench.rows["poison"].finish == "error"
    for name, row in clean.rows.items():
        assert (bench.rows[name].tokens, bench.rows[name].finish) == (row.tokens, row.finish), name


def test_a_lone_row_is_computed_again(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch):
    """The fault may be nobody's: a GPU ends command buffers for a neighbour's too."""
    bench, clean = Bench(loaded), Bench(loaded)
    monkeypatch.setattr(bench.engine.executor, "_model", Fault(bench.engine.executor._model, 3, 3))
    assert bench.run("row", SHORT).tokens == clean.run("row", SHORT).tokens


def test_a_device_that_does_nothing_right_ends_the_process(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch):
    """Rows go on in another one; told as failed, they would be lost."""
    bench = Bench(loaded)
    monkeypatch.setattr(bench.engine.executor, "_model", Fault(bench.engine.executor._model, 1, 10**9))
    for number in range(4):
        bench.submit(f"row {number}", [*SHORT, number], max_tokens=4)
    with pytest.raises(DeviceFailed):
        bench.drain()
