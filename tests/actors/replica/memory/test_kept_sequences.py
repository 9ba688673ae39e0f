"""A running sequence's KV stays cached until it is on disk, however little memory there is and however the sequence
ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.loading import models
from satchel.actors.replica.memory import disk_tier, keeping
from satchel.actors.replica.memory.disk_tier import DiskTier
from satchel.cluster.errors import DiskFull, SatchelError, StaleEpoch, Unavailable
from tests.worlds.models.families import write_model
from tests.worlds.replica.bench import Bench

from .test_disk_tier import AGENT, Node, node, process, prompt_of, write_down

__all__ = ["node"]


def blocks(loaded: LoadedModel, count: int) -> int:
    """Bytes of so many blocks and a tail."""
    return count * 256 * loaded.spec.bytes_per_token + 2**15


class Gate:
    """Delays the store's commits until it is `opened`."""

    def __init__(self, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.entered, call = threading.Event(), threading.Event(), node.call

        def gated(method: str, *arguments: Any) -> Any:
            if method == "disk_commit":
                self.entered.set()
                assert self.opened.wait(60)
            return call(method, *arguments)

        monkeypatch.setattr(node, "call", gated)


def count_prefilled(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each call of the model prefills."""
    counts: list[int] = []
    prefill = bench.engine.executor.prefill

    def counting(work: Any) -> None:
        counts.append(sum(len(tokens) for _, tokens in work))
        prefill(work)

    monkeypatch.setattr(bench.engine.executor, "prefill", counting)
    return counts


def note_sent_back(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sequences that are preempted."""
    sent: list[str] = []
    send_back = bench.engine.decode.send_back
    monkeypatch.setattr(bench.engine.decode, "send_back", lambda name: (sent.append(name), send_back(name)))
    return sent


@pytest.mark.parametrize("room", [20, 3, 0])
def test_a_conversation_longer_than_memory_keeps_is_never_computed_again(loaded: LoadedModel, node: Node, room: int):
    """Neither by its next turns nor after a restart."""
    bench, disk = process(loaded, node, prefix_bytes_max=blocks(loaded, room), prefill_chunk_tokens=256)
    told, known = prompt_of(2100), 0
    for turn in range(3):
        sequence = bench.run(f"turn {turn}", told, agent=AGENT, max_tokens=10)
        write_down(bench, disk)
        assert sequence.cached == known
        known = len(told) + 10
        told = [*told, *sequence.tokens, *prompt_of(20, seed=turn)]
    node.restart()
    bench, disk = process(loaded, node)
    assert bench.run("after", told, agent=AGENT, max_tokens=1).cached == known
    write_down(bench, disk)


def test_what_is_computed_first_is_on_the_disk_though_others_need_its_room(loaded: LoadedModel, node: Node):
    bench, disk = process(loaded, node, prefix_bytes_max=blocks(loaded, 6), sequences_max=4)
    prompts = [prompt_of(1500, seed=seed) for seed in range(4)]
    for number, prompt in enumerate(prompts):
        bench.submit(f"sequence {number}", prompt, agent=f"default/{number}", max_tokens=30)
    bench.drain()
    write_down(bench, disk)
    node.restart()
    bench, disk = process(loaded, node)
    for number, prompt in enumerate(prompts):
        assert bench.run(f"again {number}", [*prompt, 7], agent=f"default/{number}", max_tokens=1).cached == 1500
    write_down(bench, disk)


def test_a_turn_is_written_however_large_it_is(loaded: LoadedModel, node: Node):
    """Also one that leaves more than may wait to be written."""
    disk = DiskTier(loaded.spec, loaded.model_id, node.client, unwritten_bytes_max=blocks(loaded, 2))
    bench = Bench(loaded, disk=disk)
    sequence = bench.run("one", prompt_of(2100), agent=AGENT, max_tokens=10)
    write_down(bench, disk)
    node.restart()
    bench, disk = process(loaded, node)
    assert bench.run("after", prompt_of(2100) + sequence.tokens + [7], agent=AGENT, max_tokens=1).cached == 2110
    write_down(bench, disk)


def test_nobody_waits_for_a_slow_disk_as_long_as_there_is_memory(
    loaded: LoadedModel, node: Node, monkeypatch: pytest.MonkeyPatch
):
    """What waits longer is pinned in memory without a copy, and all of it is written in the end."""
    gate = Gate(node, monkeypatch)
    disk = DiskTier(loaded.spec, loaded.model_id, node.client, unwritten_bytes_max=blocks(loaded, 2))
    bench = Bench(loaded, disk=disk, prefix_bytes_max=blocks(loaded, 2))
    prompts = [prompt_of(1500, seed=seed) for seed in range(4)]
    for number, prompt in enumerate(prompts):
        bench.run(f"turn {number}", prompt, agent=AGENT, max_tokens=1)
    keeping = bench.engine.keeping
    handed, behind = disk.waiting_bytes, keeping.unwritten_bytes
    assert 0 < handed < behind / 2 and behind > blocks(loaded, 20) and not keeping.behind
    assert bench.run("again", [*prompts[2], 7], agent=AGENT, max_tokens=1).cached == 1500
    gate.opened.set()
    write_down(bench, disk)
    assert not bench.engine.prefixes.holders and disk.counters.unwritten_turns == 0
    node.restart()
    bench, disk = process(loaded, node)
    for number, prompt in enumerate(prompts):
        assert bench.run(f"later {number}", [*prompt, 7], agent=AGENT, max_tokens=1).cached == 1500
    write_down(bench, disk)


def test_no_sequence_begins_while_more_is_pinned_for_the_disk_than_may(
    loaded: LoadedModel, node: Node, monkeypatch: pytest.MonkeyPatch
):
    """Sequences that run go on, and all that they leave is written."""
    gate = Gate(node, monkeypatch)
    disk = DiskTier(loaded.spec, loaded.model_id, node.client, unwritten_bytes_max=blocks(loaded, 2))
    bench = Bench(loaded, disk=disk)
    keeping = bench.engine.keeping
    monkeypatch.setattr(keeping, "_pinned_bytes_max", lambda: blocks(loaded, 3))
    for number in range(2):
        bench.run(f"turn {number}", prompt_of(1500, seed=number), agent=AGENT, max_tokens=1)
    bench.submit("next", prompt_of(300, seed=2), agent=AGENT, max_tokens=1)
    for _ in range(5):
        bench.turn()
    assert keeping.behind and "next" not in bench.sequences and bench.engine.scheduler.waiting == 1
    gate.opened.set()
    while "next" not in bench.sequences or bench.sequences["next"].finish is None:
        bench.turn()
    write_down(bench, disk)
    assert not keeping.behind and disk.counters.unwritten_turns == 0


def test_a_disk_that_hangs_holds_nobody_up_for_long(loaded: LoadedModel, node: Node, monkeypatch: pytest.MonkeyPatch):
    """KV beyond the limit is not written then, neither what was pinned for the disk before nor what comes after."""
    gate = Gate(node, monkeypatch)
    disk = DiskTier(loaded.spec, loaded.model_id, node.client, unwritten_bytes_max=blocks(loaded, 2))
    bench = Bench(loaded, disk=disk)
    keeping = bench.engine.keeping
    monkeypatch.setattr(keeping, "_pinned_bytes_max", lambda: blocks(loaded, 3))
    for number in range(2):
        bench.run(f"turn {number}", prompt_of(1500, seed=number), agent=AGENT, max_tokens=1)
    assert keeping.behind
    monkeypatch.setattr(disk_tier, "STALLED_S", 0.2)
    bench.submit("next", prompt_of(1500, seed=2), agent=AGENT, max_tokens=1)
    ends = time.monotonic() + 30
    while "next" not in bench.sequences or bench.sequences["next"].finish is None:
        bench.turn()
        assert time.monotonic() < ends
    bench.turn()
    assert disk.counters.unwritten_turns == 2 and keeping.unwritten_bytes == disk.waiting_bytes
    gate.opened.set()
    write_down(bench, disk)
    assert not bench.engine.prefixes.holders


def test_what_is_not_written_yet_is_found_in_memory(loaded: LoadedModel, node: Node, monkeypatch: pytest.MonkeyPatch):
    """However small the cache is; once it is written it may be evicted."""
    gate = Gate(node, monkeypatch)
    room = blocks(loaded, 3)
    bench, disk = process(loaded, node, prefix_bytes_max=room)
    sequence = bench.run("one", prompt_of(1500), agent=AGENT, max_tokens=10)
    bench.turn()
    assert gate.entered.wait(20)
    again = bench.run("again", prompt_of(1500) + sequence.tokens + [7], agent=AGENT, max_tokens=1)
    assert again.cached == 1510 and bench.engine.prefixes.nbytes > room
    gate.opened.set()
    write_down(bench, disk)
    assert bench.engine.prefixes.nbytes <= room and not bench.engine.prefixes.holders


@pytest.mark.parametrize("error", [Unavailable, DiskFull, StaleEpoch])
def test_a_store_that_begins_anew_or_makes_room_gets_what_it_missed(
    loaded: LoadedModel, node: Node, error: type[SatchelError], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(disk_tier, "TRIES_S", (0.01,) * 200)
    bench, disk = process(loaded, node)
    call, silent = node.call, [20]

    def missing(method: str, *arguments: Any) -> Any:
        if method == "disk_commit" and silent[0]:
            silent[0] -= 1
            raise error("not now")
        return call(method, *arguments)

    monkeypatch.setattr(node, "call", missing)
    bench.run("one", prompt_of(1500), agent=AGENT, max_tokens=10)
    write_down(bench, disk)
    assert disk.counters.unwritten_turns == 0
    node.restart()
    bench, disk = process(loaded, node)
    assert bench.run("after", [*prompt_of(1500), 7], agent=AGENT, max_tokens=1).cached == 1500
    write_down(bench, disk)


def test_what_a_long_prompt_has_computed_survives_a_kill_in_its_middle(
    loaded: LoadedModel, node: Node, monkeypatch: pytest.MonkeyPatch
):
    """Whole blocks go to the disk while the sequence goes on, once they are worth it."""
    monkeypatch.setattr(keeping, "PIECE_BYTES", 2 * 256 * loaded.spec.bytes_per_token)
    bench, disk = process(loaded, node, prefill_chunk_tokens=256)
    bench.submit("one", prompt_of(2100), agent=AGENT)
    while (sequence := bench.engine.scheduler.sequence("one")) is None or sequence.done < 1792:
        bench.turn()
    bench.engine.keeping.hand_over(computing=False)
    while disk.waiting_bytes:
        time.sleep(0.01)
    assert not bench.sequences["one"].tokens
    node.restart()
    bench, disk = process(loaded, node)
    after = bench.run("after", prompt_of(2100), agent=AGENT)
    write_down(bench, disk)
    assert after.cached is not None and after.cached >= 1792 - 512
    assert disk.counters.written_blocks <= 1 + (2100 - after.cached) // 256 + 1


def stopped(bench: Bench) -> None:
    bench.engine.abort(("turn",))


def late(bench: Bench) -> None:
    sequence = bench.engine.scheduler.sequence("turn")
    assert sequence is not None
    sequence.deadline = 0.0


def shut_down(bench: Bench) -> None:
    bench.engine.end_all()


@pytest.mark.parametrize(
    ("end", "said"),
    [
        *((stopped, 0), (stopped, 40), (late, 1), (shut_down, 40)),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((stopped, 1), (late, 0), (late, 40), (shut_down, 0), (shut_down, 1))
        ),
    ],
)
def test_a_sequence_that_is_taken_out_leaves_what_it_computed(
    loaded: LoadedModel, node: Node, end: Callable[[Bench], None], said: int
):
    """By a stop string, a caller who hangs up, a deadline or the server's end; hot and after a restart."""
    bench, disk = process(loaded, node)
    bench.submit("turn", prompt_of(1500), agent=AGENT, max_tokens=400)
    bench.turn()
    sequence = bench.engine.scheduler.sequence("turn")
    assert sequence is not None
    while sequence.done < 1024 or len(bench.sequences["turn"].tokens) < said:
        bench.turn()
    end(bench)
    bench.drain()
    write_down(bench, disk)
    assert bench.sequences["turn"].finish in ("abort", "error")
    told = [*prompt_of(1500), *bench.sequences["turn"].tokens[:said]]
    known = len(told) if said else 1024
    hot = bench.run("hot", [*told, 5, 6, 7], max_tokens=1)
    assert hot.cached is not None and hot.cached >= known
    node.restart()
    bench, disk = process(loaded, node)
    warm = bench.run("warm", [*told, 5, 6, 7], max_tokens=1)
    assert warm.cached is not None and warm.cached >= known


def test_sequences_that_wait_hold_nothing_that_was_read_back(loaded: LoadedModel, node: Node):
    """They are read back when they have a place, and what of them is in memory then is a running sequence's."""
    bench, disk = process(loaded, node)
    prompts = [prompt_of(1200, seed=seed) for seed in range(8)]
    for number, prompt in enumerate(prompts):
        bench.run(f"before {number}", prompt, agent=f"default/{number}", max_tokens=1)
    write_down(bench, disk)
    node.restart()
    room = blocks(loaded, 2)
    bench, disk = process(loaded, node, prefix_bytes_max=room, sequences_max=1)
    bench.submit("busy", [1, 2, 3], max_tokens=60)
    bench.turn()
    for number, prompt in enumerate(prompts):
        bench.submit(f"sequence {number}", [*prompt, 9], agent=f"default/{number}", max_tokens=1)
    for _ in range(20):
        bench.turn()
        assert bench.engine.prefixes.nbytes <= room and not bench.engine.prefixes.holders
    assert bench.engine.waiting == 8
    bench.drain()
    write_down(bench, disk)
    assert [bench.sequences[f"sequence {number}"].cached for number in range(8)] == [1200] * 8


def test_a_sequence_that_was_sent_back_is_not_computed_again(
    loaded: LoadedModel, node: Node, monkeypatch: pytest.MonkeyPatch
):
    """Its KV goes to the disk, where memory has no room for it, and comes back with it."""
    prompts = {f"sequence {seed}": prompt_of(900, seed=seed) for seed in (1, 2)}
    alone = {name: Bench(loaded).run(name, prompt, max_tokens=200).tokens for name, prompt in prompts.items()}
    bench, disk = process(loaded, node, prefix_bytes_max=blocks(loaded, 1), kv_tokens_max=1930)
    counts, sent = count_prefilled(bench, monkeypatch), note_sent_back(bench, monkeypatch)
    for name, prompt in prompts.items():
        bench.submit(name, prompt, agent=f"default/{name}", max_tokens=200)
    bench.drain()
    assert sent and {name: bench.sequences[name].tokens for name in prompts} == alone
    assert sum(counts) == 1798, "nothing was computed twice"
    write_down(bench, disk)


@pytest.mark.parametrize("family", ["qwen3_next", "nemotron_h"])
def test_what_recurrent_layers_had_at_the_prompt_s_end_is_kept(tmp_path: Path, node: Node, family: str):
    """For messages that are computed without an answer, and for an answer of which not all was taken."""
    folder = write_model(tmp_path / family, family)
    loaded = models.load(
        str(folder), context_tokens_max=None, progress=lambda *_: None, weights="stored", numerics="reproducible"
    )
    bench, disk = process(loaded, node)
    told = prompt_of(700)
    silent = bench.run("inject", told, agent=AGENT, max_tokens=0)
    assert (silent.tokens, silent.finish) == ([], "length")
    sequence = bench.run("next", [*told, *prompt_of(30, seed=2)], agent=AGENT, max_tokens=5)
    assert sequence.cached == 700
    bench.submit("stopped", [*told, *prompt_of(40, seed=3)], agent=AGENT, max_tokens=90)
    while len(bench.sequences["stopped"].tokens if "stopped" in bench.sequences else ()) < 20:
        bench.turn()
    bench.engine.abort(("stopped",))
    bench.drain()
    write_down(bench, disk)
    then = [*told, *prompt_of(40, seed=3), *bench.sequences["stopped"].tokens[:10], 9, 9]
    assert bench.run("hot", then, agent=AGENT, max_tokens=1).cached == 739
    write_down(bench, disk)
    node.restart()
    bench, disk = process(loaded, node)
    assert bench.run("warm", then, agent=AGENT, max_tokens=1).cached == 739
    write_down(bench, disk)


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(each, marks=pytest.mark.slow) for each in ("qwen3_next", "nemotron_h"))]
)
def test_a_sequence_that_is_sent_back_while_it_speaks_goes_on_where_it_was(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
):
    """Nothing that it held is computed again, whatever its layers are."""
    folder = write_model(tmp_path / family, family)
    loaded = models.load(
        str(folder), context_tokens_max=None, progress=lambda *_: None, weights="stored", numerics="reproducible"
    )
    prompts = {f"sequence {seed}": prompt_of(300, seed=seed) for seed in (1, 2)}
    bench = Bench(loaded, kv_tokens_max=900)
    counts, sent = count_prefilled(bench, monkeypatch), note_sent_back(bench, monkeypatch)
    how: dict[str, Any] = {"max_tokens": 250, "temperature": 0.8, "seed": 5, "repetition_penalty": 1.2, "logprobs": 1}
    for name, prompt in prompts.items():
        bench.submit(name, prompt, **how)
    bench.drain()
    assert sent and sum(counts) == 2 * 299
    for name, prompt in prompts.items():
        sequence = bench.sequences[name]
        assert len(sequence.tokens) == len(sequence.logprobs) == 250
        if family == "llama":
            assert sequence.tokens == Bench(loaded).run("alone", prompt, **how).tokens


def test_what_nobody_can_find_is_not_kept(loaded: LoadedModel, node: Node):
    """Neither in memory nor on the disk."""
    bench, disk = process(loaded, node)
    bench.run("one", prompt_of(600), agent=AGENT, max_tokens=200, reusable=False)
    write_down(bench, disk)
    assert disk.counters.written_blocks == 0 and not list(node.root.rglob("*.safetensors"))
    assert bench.engine.prefixes.nbytes == 0
