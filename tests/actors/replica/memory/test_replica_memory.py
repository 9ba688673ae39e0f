"""How the replicas of a node share its memory."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from satchel.actors.replica.device.temporary_memory import TEMPORARY
from satchel.actors.replica.memory import claims, replica_memory
from satchel.actors.replica.memory.replica_memory import ReplicaMemory
from satchel.cluster.config.config import Scheduling
from satchel.cluster.config.nodes import Node
from satchel.cluster.errors import ModelLoadError, NoRoom
from tests.worlds.replica.bench import load_tiny

GIB = 2**30


def replica(
    folder: Path,
    name: str,
    memory_bytes_max: int | None = 8 * GIB,
    *,
    comes_and_goes: bool = False,
    kv: bool = True,
    **node: Any,
) -> ReplicaMemory:
    scheduling = Scheduling(memory_bytes_max=memory_bytes_max)
    return ReplicaMemory(folder, name, Node(name="mac0", **node), scheduling, comes_and_goes=comes_and_goes, kv=kv)


def test_replicas_divide_what_their_models_leave(tmp_path: Path) -> None:
    """One that is loaded while another runs takes its weights from the whole, and half of the rest."""
    first = replica(tmp_path, "m-0")
    first.note(2 * GIB, GIB)
    assert first.share_bytes() == 5 * GIB
    second = replica(tmp_path, "n-0")
    second.note(GIB)
    assert first.share_bytes() == second.share_bytes() == 2 * GIB
    second.note(20 * GIB)
    assert first.share_bytes() == 0


def test_one_without_kv_has_what_it_claims_and_may_claim_more_before_it_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_memory, "YIELD_S", 0.0)
    text, images = replica(tmp_path, "m-0"), replica(tmp_path, "n-0", kv=False)
    text.note(2 * GIB, GIB)
    images.make_way(2 * GIB)
    assert images.settle_weights(2 * GIB, GIB // 2) == 3 * GIB - GIB // 2, "half a GiB is left for KV"
    assert text.share_bytes() == 3 * GIB - GIB // 2
    images.grow(GIB)
    assert text.share_bytes() == 2 * GIB and images.workspace_bytes == GIB
    images.grow(GIB // 2)
    assert images.workspace_bytes == GIB


def test_a_claim_of_an_earlier_version_is_one_with_kv(tmp_path: Path) -> None:
    first, other = replica(tmp_path, "m-0"), replica(tmp_path, "n-0")
    written = b'{"weights": 1073741824, "workspace": 0, "device": 0}'
    os.pwrite(other._file, written.ljust(claims.CLAIM_BYTES), 0)
    assert first.share_bytes() == (8 - 1) * GIB // 2


def test_a_node_s_own_figure_goes_before_and_the_deprecated_one_is_divided(tmp_path: Path) -> None:
    first = replica(tmp_path, "m-0", memory_bytes_max=4 * GIB, kv_bytes_max=GIB)
    assert first.share_bytes() == 4 * GIB and first.sequences_bytes_max() == GIB
    replica(tmp_path, "m-1", memory_bytes_max=2 * GIB)
    assert first.share_bytes() == 2 * GIB and first.sequences_bytes_max() == GIB // 2


def _claim_and_die(folder: Path) -> None:
    replica(folder, "other").note(6 * GIB)
    os._exit(9)


def test_the_claim_of_a_replica_that_died_counts_no_more(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_claim_and_die, args=(tmp_path,))
    process.start()
    process.join(60)
    first = replica(tmp_path, "m-0")
    assert process.exitcode == 9 and first.share_bytes() == 8 * GIB
    assert [path.name for path in tmp_path.iterdir()] == [f"m-0-{os.getpid()}.claim"]


def test_without_a_figure_the_device_says_and_a_later_replica_believes_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is free on a card when the second model is loaded lacks what the first one has taken."""
    monkeypatch.setattr(replica_memory, "node_bytes", lambda: 16 * GIB)
    first = replica(tmp_path, "m-0", memory_bytes_max=None)
    monkeypatch.setattr(replica_memory, "node_bytes", lambda: 3 * GIB)
    second = replica(tmp_path, "n-0", memory_bytes_max=None)
    assert first.share_bytes() == second.share_bytes() == 8 * GIB
    second.note(60 * GIB)
    assert first.share_bytes() == GIB, "a sixteenth is left for whoever runs already"


def test_on_metal_the_plan_stays_below_where_mlx_gives_its_buffers_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is 95% of the working set, with the buffers that are kept for later."""
    monkeypatch.setattr(claims, "device_kind", lambda: "metal")
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 100 * GIB})
    assert 85 * GIB <= claims.node_bytes() <= 92 * GIB
    assert claims.usable_bytes("cuda", 16 * GIB) == 15 * GIB
    assert claims.usable_bytes("cpu", 16 * GIB) == 8 * GIB


def test_a_model_waits_until_others_have_made_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no longer than its limit; alone it waits for nobody."""
    free, slept = [GIB, GIB, 3 * GIB], []
    monkeypatch.setattr(replica_memory, "device_bytes", lambda **how: free.pop(0) if len(free) > 1 else free[0])
    # Only there: other threads of this process sleep too.
    monkeypatch.setattr(replica_memory, "time", SimpleNamespace(sleep=slept.append, monotonic=time.monotonic))
    first = replica(tmp_path, "m-0")
    first.make_way(2 * GIB)
    assert not slept
    second = replica(tmp_path, "n-0")
    second.make_way(2 * GIB)
    assert len(slept) == 1 and first.share_bytes() == (8 - 4) * GIB // 2


def test_a_second_model_waits_for_its_own_room_and_leaves_the_first_its_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if another one was loaded at the same moment."""
    slept: list[float] = []
    monkeypatch.setattr(replica_memory, "device_bytes", lambda **how: GIB)
    monkeypatch.setattr(replica_memory, "time", SimpleNamespace(sleep=slept.append, monotonic=time.monotonic))
    first = replica(tmp_path, "m-0")
    replica(tmp_path, "n-0")
    first.note(4 * GIB, GIB // 4)
    first.make_way_beside(GIB)
    assert (first.claimed_bytes, first.workspace_bytes) == (5 * GIB + GIB // 4, GIB // 4) and not slept
    fits = iter([True, False])
    monkeypatch.setattr(first, "_fits", lambda claim: next(fits))
    with pytest.raises(NoRoom):
        first.make_way_beside(GIB)
    assert first.claimed_bytes == 5 * GIB + GIB // 4


def test_what_is_claimed_while_memory_is_watched_stays_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = replica(tmp_path, "m-0")

    class Enough(Exception):
        pass

    def meanwhile() -> int:
        memory.note(2 * GIB)
        return GIB

    def resize(*_: int) -> None:
        raise Enough

    monkeypatch.setattr(replica_memory, "POLL_S", 0.0)
    with pytest.raises(Enough):
        memory.watch(meanwhile, resize)
    assert memory.claimed_bytes == 3 * GIB


def test_a_model_that_leaves_no_memory_is_not_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_tiny(tmp_path / "model")
    # This process has other models too.
    monkeypatch.setattr(mx, "get_active_memory", lambda: 10 * 2**20)
    small = replica(tmp_path / "claims", "m-0", memory_bytes_max=2**16)
    with pytest.raises(ModelLoadError, match="raise memory_bytes_max"):
        small.settle(loaded)
    large = replica(tmp_path / "claims", "m-1", memory_bytes_max=2**31)
    shared = large.settle(loaded)
    small.withdraw()
    assert shared < 2**30 < large.settle(loaded)


def test_a_model_without_room_is_refused_before_its_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the others keep their KV, because it never claims what it does not get."""
    monkeypatch.setattr(replica_memory, "ENDING_S", 0.1)
    first = replica(tmp_path, "m-0", comes_and_goes=True)
    first.make_way(6 * GIB)
    share = first.share_bytes()
    for come in (True, False):
        second = replica(tmp_path, f"n-{come}", comes_and_goes=come)
        with pytest.raises(NoRoom, match=r"3072 MiB.*8192 MiB.*1 other replicas need 6144 MiB"):
            second.make_way(3 * GIB)
        second.withdraw()
    assert first.share_bytes() == share == 2 * GIB
    pinned, squeezed = replica(tmp_path, "p-0"), replica(tmp_path, "q-0", comes_and_goes=True)
    pinned.make_way(GIB + GIB // 2)
    assert first.share_bytes() == GIB // 2 // 3, "one that stays may squeeze in, as before"
    with pytest.raises(NoRoom):
        squeezed.make_way(1)


def test_a_model_that_comes_and_goes_waits_until_the_one_that_goes_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = replica(tmp_path, "m-0"), replica(tmp_path, "n-0", comes_and_goes=True)
    first.make_way(6 * GIB)
    clock = SimpleNamespace(sleep=lambda seconds: first.withdraw(), monotonic=time.monotonic)
    monkeypatch.setattr(replica_memory, "time", clock)
    second.make_way(6 * GIB)
    assert second.share_bytes() == 2 * GIB and second.claimed_bytes == 6 * GIB and second.bytes_max == 8 * GIB


def test_without_a_configured_figure_the_device_s_is_the_limit_of_what_comes_and_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_memory, "ENDING_S", 0.0)
    monkeypatch.setattr(replica_memory, "node_bytes", lambda: 8 * GIB)
    first = replica(tmp_path, "m-0", memory_bytes_max=None, comes_and_goes=True)
    first.make_way(6 * GIB)
    with pytest.raises(NoRoom):
        replica(tmp_path, "n-0", memory_bytes_max=None, comes_and_goes=True).make_way(3 * GIB)


def test_temporary_memory_counts_before_it_is_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_tiny(tmp_path / "model")
    monkeypatch.setattr(mx, "get_active_memory", lambda: 10 * 2**20)
    first = replica(tmp_path / "claims", "m-0")
    first.note(7 * GIB)
    second = replica(tmp_path / "claims", "n-0", comes_and_goes=True)
    share = first.share_bytes()
    with pytest.raises(NoRoom):
        second.settle(loaded)
    assert first.share_bytes() > share // 2, "it claims its weights alone"


def test_the_engine_is_told_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, told = replica(tmp_path, "m-0"), []

    class Enough(Exception):
        pass

    def resize(*sizes: int) -> None:
        told.append(sizes)
        raise Enough

    monkeypatch.setattr(replica_memory, "POLL_S", 0.0)
    with pytest.raises(Enough):
        memory.watch(lambda: GIB, resize)
    assert told[0][0] == 7 * GIB and memory.share_bytes() == 7 * GIB, "what prefills needed is measured"


def test_weights_and_the_part_for_kv_are_wired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the load on, and again if the part changes."""
    memory, held, loaded = replica(tmp_path / "claims", "m-0"), [], load_tiny(tmp_path / "model")
    monkeypatch.setattr(memory._wired, "keep", held.append)
    monkeypatch.setattr(TEMPORARY, "bytes_max", None)
    share = memory.settle(loaded)
    weights = memory._own.weights
    assert held == [weights + share]
    assert TEMPORARY.bytes_max == max(share // replica_memory.TEMPORARY_PART, memory.workspace_bytes)

    class Enough(Exception):
        pass

    def resize(*_: int) -> None:
        raise Enough

    other = replica(tmp_path / "claims", "n-0")
    other.note(GIB)
    monkeypatch.setattr(replica_memory, "POLL_S", 0.0)
    with pytest.raises(Enough):
        memory.watch(lambda: 0, resize)
    assert held[1] == weights + memory.share_bytes() < held[0]
