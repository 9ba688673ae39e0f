"""Sequences whose KV is read back once they are admitted: what others do during that time, and stores and disks that do
not answer."""

from __future__ import annotations

import gc
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.loading import models
from satchel.actors.replica.memory import disk_reading, disk_tier, restores
from satchel.actors.replica.memory.disk_tier import DiskTier, Prompt, WriteJob, Written
from satchel.actors.replica.memory.keeping import Keeping
from satchel.actors.replica.scheduling.limits import Limits
from satchel.actors.replica.scheduling.scheduler import Scheduler
from satchel.actors.replica.scheduling.sequence import ScheduledSequence
from satchel.cluster.errors import Unavailable
from tests.worlds.models.families import write_model
from tests.worlds.replica.bench import Bench

from ..loop.test_encode_queue import Gate, asked, gate, seeing
from .test_disk_tier import AGENT, Node, node, process, prompt_of, write_down
from .test_kept_sequences import blocks

__all__ = ["gate", "node", "seeing"]


def turn_until_all_end(bench: Bench, count: int) -> None:
    ends = time.monotonic() + 60
    while sum(sequence.finish is not None for sequence in bench.sequences.values()) < count:
        assert time.monotonic() < ends
        bench.engine.step()
        time.sleep(0.002)


def test_what_memory_has_of_a_sequence_stays_while_the_rest_is_read(
    loaded: LoadedModel, node: Node, monkeypatch: pytest.MonkeyPatch
):
    """Even if others need the room: otherwise the KV that is read back would have no beginning."""
    bench, disk = process(loaded, node)
    long = prompt_of(2100)
    bench.run("before", long, agent=AGENT, max_tokens=1)
    write_down(bench, disk)
    node.restart()
    bench, disk = process(loaded, node, prefix_bytes_max=blocks(loaded, 4))
    bench.run("hot", long[:600], agent="default/other", max_tokens=1)
    write_down(bench, disk)
    go, load = threading.Event(), disk.load

    def slow(prompt: Prompt, *rest: Any) -> Any:
        assert prompt.request_id != "again" or go.wait(20)
        return load(prompt, *rest)

    monkeypatch.setattr(disk, "load", slow)
    bench.submit("again", [*long, 7], agent=AGENT, max_tokens=1)
    bench.engine.step()
    assert len(bench.engine.restores) == 1
    bench.submit("other", prompt_of(1500, seed=9), max_tokens=4)
    while "other" not in bench.sequences or bench.sequences["other"].finish is None:
        bench.engine.step()
    assert "again" not in bench.sequences
    go.set()
    bench.drain()
    write_down(bench, disk)
    assert bench.sequences["again"].cached == 2100 and not bench.engine.prefixes.holders


def test_sequences_with_one_beginning_are_read_back_together():
    """KV in memory is not computed, and KV that is read back does not count as work, for the router either."""
    scheduler = Scheduler(Limits(8, 100, 512, 100_000))
    for number in range(3):
        keys = (b"system", b"own%d" % number, b"more%d" % number)
        scheduler.add(ScheduledSequence(f"sequence {number}", 2000, 10, keys=keys, known=1990))
    pending = scheduler.pending_tokens
    first = scheduler.admit()
    assert first is not None
    scheduler.await_restore(first, 256)
    assert scheduler.pending_tokens == pending
    assert scheduler.admit() is not None


def test_a_store_that_hangs_is_not_asked_for_every_sequence(
    loaded: LoadedModel, node: Node, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(restores, "AT_ONCE_S", 0.1)
    bench, _ = process(loaded, node)
    asked_for: list[str] = []

    def hung(method: str, *_: Any) -> Any:
        asked_for.append(method)
        time.sleep(0.3)
        raise Unavailable("the store does not answer")

    monkeypatch.setattr(node, "call", hung)
    for number in range(8):
        bench.submit(f"sequence {number}", prompt_of(300, seed=number), max_tokens=2)
    turn_until_all_end(bench, 8)
    assert len(asked_for) <= 4
    monkeypatch.undo()


def test_a_store_that_starts_anew_is_asked_again(loaded: LoadedModel, node: Node, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(restores, "TRIES_S", (0.01, 0.01, 0.01))
    bench, disk = process(loaded, node)
    bench.run("before", prompt_of(600), agent=AGENT, max_tokens=1)
    write_down(bench, disk)
    node.restart()
    bench, disk = process(loaded, node)
    call, missing = node.call, [2]

    def starting(method: str, *arguments: Any) -> Any:
        if missing[0]:
            missing[0] -= 1
            raise Unavailable("the store does not answer")
        return call(method, *arguments)

    monkeypatch.setattr(node, "call", starting)
    assert bench.run("after", [*prompt_of(600), 7], agent=AGENT, max_tokens=1).cached == 600
    write_down(bench, disk)


def test_the_engine_waits_for_no_store(loaded: LoadedModel, node: Node, monkeypatch: pytest.MonkeyPatch):
    """A turn is taken on while another thread asks a store that hangs how to reach the disk."""
    disk, entered, go = DiskTier(loaded.spec, loaded.model_id, node.client), threading.Event(), threading.Event()

    def hung(method: str, *_: Any) -> Any:
        entered.set()
        assert go.wait(20)
        raise Unavailable("the store does not answer")

    monkeypatch.setattr(node, "call", hung)

    def adopt(records: Any) -> Any:
        raise AssertionError("nothing was read")

    def load() -> None:
        with pytest.raises(Unavailable):
            disk.load(Prompt("one", AGENT, b"", [], [1, 2, 3]), 0, adopt)

    thread = threading.Thread(target=load)
    thread.start()
    assert entered.wait(20)
    accepted: list[bool] = []
    other = threading.Thread(target=lambda: accepted.append(disk.accepts(WriteJob(AGENT, [], []))))
    other.start()
    other.join(10)
    assert accepted == [True]
    go.set()
    thread.join(20)


def test_what_fails_is_no_progress(loaded: LoadedModel, node: Node, monkeypatch: pytest.MonkeyPatch):
    """Turns that cannot be written one after the other hold sequences up for `STALLED_S`, and not for as long as they
    are many."""
    monkeypatch.setattr(disk_tier, "STALLED_S", 2.0)
    monkeypatch.setattr(disk_tier, "TRIES_S", ())
    go = threading.Event()

    def failing(method: str, *_: Any) -> Any:
        go.wait(0.1)
        raise Unavailable("the store does not answer")

    monkeypatch.setattr(node, "call", failing)
    disk = DiskTier(loaded.spec, loaded.model_id, node.client, 1000)
    for _ in range(100):
        turn = WriteJob(AGENT, [], [], [Written(b"p" * 32, [1, 2], {"x": mx.zeros((100,))})])
        if disk.accepts(turn):
            disk.write(turn)
    assert not disk.has_room(1) and not disk.stalled
    while not disk.stalled:
        time.sleep(0.01)
    assert disk.waiting_bytes > 1000, "it was not waited for all of them"
    go.set()


def test_what_was_written_is_let_go(loaded: LoadedModel, node: Node):
    bench, disk = process(loaded, node, prefix_bytes_max=1)
    bench.run("one", prompt_of(2100), agent=AGENT, max_tokens=1)
    write_down(bench, disk)
    gc.collect()
    held = [each for each in gc.get_objects() if isinstance(each, WriteJob) and each.unsaved]
    assert not any(each.owner == AGENT and len(each.unsaved) > 8 for each in held)


def test_snapshots_reach_the_disk_however_little_memory_keeps(tmp_path: Path, node: Node):
    """Blocks can be cut out of a sequence again, its recurrent layers' states before its end cannot."""
    folder = write_model(tmp_path / "qwen3_next", "qwen3_next")
    loaded = models.load(
        str(folder), context_tokens_max=None, progress=lambda *_: None, weights="stored", numerics="reproducible"
    )
    found: list[int | None] = []
    for room in (400, 1):
        place = Node(node.root.parent / f"room{room}")
        bench, disk = process(loaded, place, prefix_bytes_max=blocks(loaded, room))
        bench.run("one", prompt_of(2100), agent=AGENT, max_tokens=3)
        write_down(bench, disk)
        place.restart()
        bench, disk = process(loaded, place)
        found.append(bench.run("fork", [*prompt_of(1600), *prompt_of(50, seed=4)], max_tokens=1).cached)
        place.store.close()
    assert found[0] == found[1] and found[0]


def test_snapshots_that_are_on_the_disk_are_not_held_for_it(
    tmp_path: Path, node: Node, monkeypatch: pytest.MonkeyPatch
):
    """Nor those of choices that nobody remembers."""
    folder = write_model(tmp_path / "qwen3_next", "qwen3_next")
    loaded = models.load(
        str(folder), context_tokens_max=None, progress=lambda *_: None, weights="stored", numerics="reproducible"
    )
    bench, disk = process(loaded, node)
    bench.run("one", prompt_of(2100), agent=AGENT, max_tokens=3)
    write_down(bench, disk)
    node.restart()
    held: dict[str, int] = {}
    monkeypatch.setattr(
        Keeping, "_write_all", lambda self, sequence, ended: held.update({sequence.id: len(sequence.snapshots)})
    )
    bench, disk = process(loaded, node)
    read = disk.load

    def too_late(*given: object) -> None:
        read(*given)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(disk, "load", too_late)
    for choice in (0, 1):
        bench.run(f"choice {choice}", prompt_of(2100), agent=AGENT, max_tokens=3, choice=choice)
    assert held == {"choice 0": 0, "choice 1": 0}


def test_pictures_that_kv_was_to_stand_for_are_read_back_where_it_does_not_come(
    seeing: tuple[LoadedModel, Path], gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """No client is asked to send a picture again that is on disk."""
    gate.opened.set()
    loaded, folder = seeing
    place = Node(tmp_path)
    prompt, media = asked(folder, "indigo")
    bench = Bench(loaded, disk=(disk := DiskTier(loaded.spec, loaded.model_id, place.client)))
    bench.run("cold", prompt, media=media, agent=AGENT)
    write_down(bench, disk)
    place.restart()
    disk = DiskTier(loaded.spec, loaded.model_id, place.client)
    monkeypatch.setattr(disk, "load", lambda *_: None)
    bench = Bench(loaded, disk=disk)
    spared = [replace(one, pixels=[]) for one in media]
    sequence = bench.run("late", [*prompt, 5, 6], media=spared, agent=AGENT)
    assert not bench.refused and sequence.finish == "length"
    place.store.close()


def test_a_prompt_that_is_only_computed_needs_room_for_all_of_it(loaded: LoadedModel):
    bench = Bench(loaded, kv_tokens_max=1023, prefill_chunk_tokens=256)
    bench.submit("one", prompt_of(1022), agent=AGENT, max_tokens=0)
    bench.drain()
    assert "one" in bench.refused


def test_a_sequence_whose_last_token_cannot_be_read_ends_alone(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch):
    bench = Bench(loaded, kv_tokens_max=900)

    def broken(sequence_id: str) -> Any:
        raise RuntimeError("the device fails")

    monkeypatch.setattr(bench.engine.executor, "drawn", broken)
    for number in (1, 2):
        bench.submit(f"sequence {number}", prompt_of(300, seed=number), max_tokens=400)
    bench.drain()
    assert sorted(str(sequence.finish) for sequence in bench.sequences.values()) == ["error", "length"]


def test_an_engine_that_nobody_has_any_more_leaves_no_threads(loaded: LoadedModel, node: Node):
    before = {*threading.enumerate()}
    bench, disk = process(loaded, node)
    bench.run("one", prompt_of(600), agent=AGENT)
    write_down(bench, disk)
    names = {"disk", "reader-0", "reader-1"}
    own = [thread for thread in threading.enumerate() if thread not in before and thread.name in names]
    assert len(own) == 3
    del bench, disk
    gc.collect()
    for thread in own:
        thread.join(20)
    assert not any(thread.is_alive() for thread in own)


@pytest.mark.parametrize("why", ["alone", "beside another", "not by much", "slow beside others only"])
def test_what_a_slow_disk_has_is_computed_if_that_is_faster_and_delays_nobody(
    loaded: LoadedModel, node: Node, monkeypatch: pytest.MonkeyPatch, why: str
):
    """What it has is not written again."""
    bench, disk = process(loaded, node)
    prompt = prompt_of(1100)
    bench.run("before", prompt, agent=AGENT, max_tokens=1)
    write_down(bench, disk)
    node.restart()
    bench, disk = process(loaded, node)
    bench.run("other", prompt_of(600, seed=9), max_tokens=1)
    monkeypatch.setattr(disk_reading, "SLOW", 1e9 if why == "not by much" else 1.0)
    # A byte a second.
    (disk._rate if why == "slow beside others only" else disk._rate_alone).note(10**9, 1e9)
    if why == "beside another":
        bench.submit("beside", prompt_of(300, seed=8), max_tokens=1)
    again = bench.run("again", [*prompt, 7], agent=AGENT, max_tokens=1)
    assert again.cached == (0 if why == "alone" else 1100)
    bench.drain()
    write_down(bench, disk)
    assert disk.counters.written_blocks <= 1, "only a tail is new"


def test_what_was_read_long_ago_or_is_far_smaller_says_nothing_about_a_read(monkeypatch: pytest.MonkeyPatch):
    rate, now = disk_reading.ReadRate(), [0.0]
    monkeypatch.setattr(disk_reading.time, "monotonic", lambda: now[0])
    assert rate.seconds(1) == 0
    rate.note(1000, 10.0)
    assert [rate.seconds(nbytes) for nbytes in (10, 4000, 4001)] == [0.1, 40.0, 0.0]
    rate.note(10, 0.1)
    assert rate.seconds(4000) == 40.0
    now[0] += disk_reading.RATE_LASTS_S
    rate.note(0, 5.0)
    assert rate.seconds(10) == 0 and not rate.lasts and rate.bytes_per_s == 100.0
