"""KV that is read back from disk: the same bytes, as far as they are verified, and no more memory than is counted."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from satchel.actors.kv_store.disk.segment_reader import read_footer
from satchel.actors.kv_store.disk.segments import grouped, model_folder, write_segment
from satchel.actors.kv_store.disk.store import DiskLimits, DiskStore
from satchel.actors.protocol.block_ids import BLOCK_TOKENS, block_id, block_ids, root_id
from satchel.actors.protocol.entries import Entry, Failure, Location, signature
from satchel.actors.protocol.store_client import StoreClient
from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.kernels import sealing
from satchel.actors.replica.kernels.sealing import POLICIES
from satchel.actors.replica.kv import caches as kv_cache
from satchel.actors.replica.kv.caches import LayerKind, LayerSpec, ModelCacheSpec, PooledBlock, Records, Slab
from satchel.actors.replica.kv.paged_cache import PagedKVCache, Reads
from satchel.actors.replica.kv.pool import BlockPool
from satchel.actors.replica.memory import disk_reading, slab_codec
from satchel.actors.replica.memory.disk_reading import read_blocks, read_slabs
from satchel.actors.replica.memory.slab_codec import Layout

from ....worlds.replica import fake_kernels
from .test_disk_tier import AGENT, Node, node, process, prompt_of, write_down

__all__ = ["node"]

MODEL = bytes(32)
HEADS, DIM, LAYERS = 2, 64, 3


def spec_of(policy: str) -> ModelCacheSpec:
    """`unsealed` is for models that cannot be sealed, and for tails."""
    found = POLICIES.get(policy)
    layer = LayerSpec(LayerKind.FULL, 0, 64, sealed=found is not None)
    window = LayerSpec(LayerKind.WINDOW, 300, 64, sealed=found is not None)
    return ModelCacheSpec((layer, window, *[layer] * (LAYERS - 2)), 64, 64, found)


def slab_of(spec: ModelCacheSpec, seed: int, dtype: mx.Dtype, window_from: int = 0) -> Slab:
    """A block of random KV; its window layer is left out where nothing of it is kept."""
    layers: list[Any] = []
    for number, layer in enumerate(spec.layers):
        if layer.window and window_from == BLOCK_TOKENS:
            layers.append(None)
            continue
        keys, values = (
            mx.random.normal((1, HEADS, BLOCK_TOKENS, DIM), key=mx.random.key(seed * 100 + number * 2 + part)).astype(
                dtype
            )
            for part in (0, 1)
        )
        layers.append(sealing.seal(keys, values, spec.policy) if spec.policy else (keys, values))
    slab = Slab(layers, BLOCK_TOKENS, window_from)
    mx.eval(slab.arrays())
    return slab


class Files:
    """Blocks on disk, and the locations of them."""

    def __init__(self, root: Path, spec: ModelCacheSpec, slabs: list[Slab]) -> None:
        self.spec, self.slabs, parent = spec, slabs, root_id(MODEL, "tenant:test")
        self.failures: list[Failure] = []
        entries = []
        for number, slab in enumerate(slabs):
            tokens = [number] * BLOCK_TOKENS
            parts = slab_codec.to_parts(spec, slab)
            entries.append(Entry(block_id(parent, tokens), parent, tokens, parts, window_from=slab.window_from))
            parent = entries[-1].id
        with DiskStore(root, session="s", limits=DiskLimits(bytes_max=2**30)) as store:
            self.root, self.key = store.root, store.key
            for group in grouped(entries):
                written = {"session": "s", "epoch": store.epoch, "now_s": time.time()}
                store.commit(write_segment(store.root, store.key, MODEL, group, **written))
            located = store.locate(MODEL, [entry.id for entry in entries])
            self.where: list[Location] = [location for location in located if location is not None]

    def read(self) -> list[Slab]:
        """The blocks as slabs."""
        slabs = read_slabs(self.spec, self.root, self.key, self.where, self.failures)
        return [slab for slab in slabs if slab is not None]

    def adopted(self, pool: BlockPool) -> list[PooledBlock]:
        """The blocks in the pool, up to the first that fails."""
        return read_blocks(
            self.spec, self.root, self.key, self.where, self.failures, lambda records: adopt(pool, records)
        )

    def damage(self, block: int, part: str) -> None:
        """Flip one bit of one array of a block."""
        location = self.where[block]
        path = model_folder(self.root, MODEL) / location.name
        footer = read_footer(path, self.key)
        number = [each.name for each in footer.layout.parts].index(part)
        data = bytearray(path.read_bytes())
        data[footer.offset(location.slot) + sum(each.nbytes for each in footer.layout.parts[:number]) + 7] ^= 4
        path.write_bytes(data)


def adopt(pool: BlockPool, records: Records) -> Future[list[PooledBlock]]:
    done: Future[list[PooledBlock]] = Future()
    done.set_result(kv_cache.into_pool(pool, records))
    return done


def bytes_of(array: mx.array) -> bytes:
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array).tobytes()


def same(left: list[mx.array], right: list[mx.array]) -> bool:
    return all(
        one.dtype == two.dtype and one.shape == two.shape and bytes_of(one) == bytes_of(two)
        for one, two in zip(left, right, strict=True)
    )


def filled(
    spec: ModelCacheSpec,
    blocks: Sequence[Slab | PooledBlock],
    tail: Slab | None = None,
    used: int = 0,
    pool: Any = None,
) -> list[list[mx.array]]:
    """The arrays of caches that were opened with the blocks."""
    own: list[Any] = [
        kv_cache.RotatingKVCache(layer.window) if layer.window else kv_cache.KVCache() for layer in spec.layers
    ]
    caches = kv_cache.new_caches(spec, own, pool, Reads.DEQUANTIZED)
    kv_cache.restore(spec, caches, blocks, tail, used)
    if pool is None:
        return [[cache.keys, cache.values] for cache in caches]
    return [sequence_arrays(cache) for cache in caches]


def in_pool(spec: ModelCacheSpec, pool: BlockPool, slabs: Sequence[Slab]) -> list[PooledBlock]:
    """Blocks that were never stored, in the pool."""
    blocks = []
    for slab in slabs:
        slots = []
        for group in pool.groups:
            layers: list[Any] = [slab.layers[layer] for layer in group.layers]
            slot = group.take(1)[0] if layers[0] is not None else None
            if slot is not None:
                for place, layer in enumerate(layers):
                    group.write(place, mx.array([slot.number], mx.uint32), layer)
            slots.append(slot)
        blocks.append(PooledBlock(tuple(slots), slab.nbytes, slab.window_from, slab.states))
    return blocks


def sequence_arrays(cache: PagedKVCache) -> list[mx.array]:
    """The only sequence's sealed blocks in this layer, then its open tail."""
    pool, (tables,) = cache.batch.pool, cache.batch.tables
    group, place = pool.of(cache.layer)
    (table,) = [table for other, table in zip(pool.groups, tables, strict=True) if other is group]
    numbers = [mx.array([slot.number], mx.uint32) + group.written(place) for slot in table.slots]
    arrays = [array[number] for number in numbers for array in group.layer(place)]
    opened = cache.lengths[0] % BLOCK_TOKENS
    return arrays + (list(cache.tail(0, opened)) if opened else [])


def copied(spec: ModelCacheSpec, pool: BlockPool, block: PooledBlock) -> list[mx.array]:
    """The arrays of a block as they are copied for the disk."""
    (record,) = kv_cache.out_of_pool(spec, pool, [block])
    row = record.data[record.row : record.row + 1]
    fields = [field for layer in record.records.layers if layer is not None for field in layer.fields]
    return [field.of(row) for field in fields] + [array for state in record.states or () for array in state]


def opened(spec: ModelCacheSpec, files: Files, *, kernels: bool = False) -> list[list[mx.array]]:
    """The arrays of caches that were opened with what is read back, into a pool that others have blocks in."""
    pool = kv_cache.new_pool(spec, kernels=kernels)
    if pool is None:
        return filled(spec, files.read())
    others = in_pool(spec, pool, files.slabs[-1:])
    blocks = files.adopted(pool)
    for left, right in zip(files.slabs, blocks, strict=True):
        assert same(left.arrays(), copied(spec, pool, right)) and right.nbytes == left.nbytes
    pool.check()
    assert same(files.slabs[-1].arrays(), copied(spec, pool, others[0]))
    return filled(spec, blocks, pool=pool)


@pytest.mark.variants(9)
@pytest.mark.parametrize("policy", ["q4", "k8v4", "fp16", "unsealed"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("count", [1, 18])
def test_blocks_read_back_have_the_bytes_of_those_never_stored(
    tmp_path: Path, policy: str, dtype: mx.Dtype, count: int, monkeypatch: pytest.MonkeyPatch
):
    """18 blocks are two files. The early blocks lack the window layer, whose shapes so differ from file to file. A GPU
    gets whole records, and its kernels cut them."""
    spec = spec_of(policy)
    slabs = [slab_of(spec, seed, dtype, BLOCK_TOKENS if seed < count - 3 else 0) for seed in range(count)]
    files, pool = Files(tmp_path / "kv", spec, slabs), kv_cache.new_pool(spec)
    assert all(same(a.arrays(), b.arrays()) for a, b in zip(slabs, files.read(), strict=True))
    want = filled(spec, slabs if pool is None else in_pool(spec, pool, slabs), pool=pool)
    for gpu, kernels in ((False, False), (True, False), (True, True)):
        monkeypatch.setattr(disk_reading, "on_gpu", lambda gpu=gpu: gpu)
        with fake_kernels.kernels() if kernels else nullcontext():
            for left, right in zip(want, opened(spec, files, kernels=kernels), strict=True):
                assert same(left, right)
    assert not files.failures


@pytest.mark.parametrize("policy", ["unsealed", "q4", "fp16"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_what_leaves_a_card_in_one_piece_is_the_same(policy: str, dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch):
    spec = spec_of(policy)
    slab = slab_of(spec, 1, dtype, BLOCK_TOKENS)
    alone = slab_codec.to_parts(spec, slab)
    monkeypatch.setattr(slab_codec, "on_cuda", lambda: True)
    together = slab_codec.to_parts(spec, slab)
    assert list(together) == list(alone)
    for name, array in alone.items():
        assert (together[name].dtype, together[name].shape) == (array.dtype, array.shape)
        assert np.array_equal(together[name], array, equal_nan=True) and together[name].flags.c_contiguous


def test_numbers_that_begin_anywhere_and_layers_that_lack_a_part():
    """A GPU could not read a number where its record has it, and one that lacks a part is no slab."""
    spec = spec_of("unsealed")
    arrays = {"odd": np.ones((3,), np.uint8), "keys": np.ones((1, 2, 4, 8), np.float32)}
    arrays |= {"values": np.zeros((1, 2, 4, 8), np.float32)}
    recurrent = ModelCacheSpec((LayerSpec(LayerKind.RECURRENT), spec.layers[0]), 64, 64, None)
    named = {"0.state.0": arrays["odd"], "1.keys": arrays["keys"], "1.values": arrays["values"]}
    data = np.frombuffer(b"".join(array.tobytes() for array in named.values()), np.uint8)
    slab = Layout(recurrent, signature(named)).slab(data, 4)
    assert slab.states is not None and same(slab.states[0], [mx.ones((3,), mx.uint8)])
    entry = slab.layers[1]
    assert entry is not None and same(list(entry), [mx.ones((1, 2, 4, 8)), mx.zeros((1, 2, 4, 8))])
    with pytest.raises(ValueError, match="layer 1 has no KV"):
        Layout(recurrent, signature({name: named[name] for name in ("0.state.0", "1.keys")}))


@pytest.mark.parametrize("policy", ["q4", "fp16", "unsealed"])
def test_a_sequence_opened_with_a_part_of_a_tail_has_its_bytes(policy: str):
    spec = spec_of(policy)
    slabs = [slab_of(spec, seed, mx.float16) for seed in range(2)]
    tail, pool = slab_of(spec_of("unsealed"), 3, mx.float16), kv_cache.new_pool(spec)
    blocks = slabs if pool is None else in_pool(spec, pool, slabs)
    for used in (1, 100):
        for arrays, layer in zip(filled(spec, blocks, tail, used, pool), tail.layers, strict=True):
            assert layer is not None
            for array, whole in zip(arrays[-2:], layer, strict=True):
                assert same([array[:, :, -used:]], [whole[:, :, :used]])


@pytest.mark.parametrize("part", ["0.key_codes", "1.value_scales", "2.value_biases"])
@pytest.mark.parametrize("block", [0, 1, 4])
def test_a_damaged_part_of_any_layer_ends_what_can_be_used(tmp_path: Path, part: str, block: int):
    """Parts of the block may have come before the one that fails; none of them is used."""
    spec = spec_of("q4")
    slabs = [slab_of(spec, seed, mx.float16) for seed in range(5)]
    files = Files(tmp_path / "kv", spec, slabs)
    files.damage(block, part)
    pool = kv_cache.new_pool(spec)
    assert pool is not None
    good = files.adopted(pool)
    assert len(good) == block
    (failure,) = files.failures
    assert failure.location == files.where[block] and not failure.missing
    for left, right in zip(slabs, good, strict=False):
        assert same(left.arrays(), copied(spec, pool, right))


def test_a_block_that_stays_keeps_no_other_in_memory(tmp_path: Path):
    """What the prefix cache counts for a block is what it takes, whatever it was read with."""
    spec = spec_of("fp16")
    files = Files(tmp_path / "kv", spec, [slab_of(spec, seed, mx.float16) for seed in range(16)])
    files.slabs.clear()
    gc.collect()
    before = mx.get_active_memory()
    good = files.read()
    whole = mx.get_active_memory() - before
    del good[1:]
    gc.collect()
    kept = mx.get_active_memory() - before
    assert kept <= 1.2 * good[0].nbytes < whole / 8, f"{kept} bytes for a block of {good[0].nbytes}"


def test_a_file_of_another_model_is_no_slab(tmp_path: Path):
    wrong = spec_of("unsealed")
    files = Files(tmp_path / "kv", wrong, [slab_of(wrong, seed, mx.float16) for seed in range(3)])
    layer = wrong.layers[0]
    files.spec = ModelCacheSpec((layer,) * (LAYERS + 2), 64, 64, None)
    assert not files.read() and not any(failure.missing for failure in files.failures)
    files.spec = ModelCacheSpec((layer,), 64, 64, None)
    assert not files.read() and "not a slab of this model" in files.failures[-1].reason
    files.spec = spec_of("q4")
    pool = kv_cache.new_pool(files.spec)
    assert pool is not None and not files.adopted(pool) and "sealed" in files.failures[-1].reason
    pool.check()


def test_blocks_read_back_serve_the_sequence_that_they_were_read_for(
    loaded: LoadedModel, node: Node, monkeypatch: pytest.MonkeyPatch
):
    """A sequence that leaves while it is read back leaves nothing."""
    bench, disk = process(loaded, node)
    want = bench.run("one", prompt_of(800), agent=AGENT)
    write_down(bench, disk)
    other, _ = process(loaded, node)
    opened: list[list[Slab | PooledBlock]] = []
    executor = other.engine.executor
    open_sequence = executor.open
    monkeypatch.setattr(
        executor, "open", lambda name, slabs, *rest: (opened.append(slabs), open_sequence(name, slabs, *rest))
    )
    got = other.run("again", prompt_of(800), agent=AGENT)
    assert (got.tokens, got.cached) == (want.tokens, 799)
    assert all(isinstance(block, PooledBlock) for block in opened[0])
    third, _ = process(loaded, node)
    third.submit("leaves", prompt_of(800), agent=AGENT)
    third.engine.step()
    assert len(third.engine.restores) == 1
    third.engine.abort(("leaves",))
    third.drain()
    assert third.sequences["leaves"].finish == "abort"
    assert not third.engine.restores and not third.engine.prefixes.holders and not third.engine.prefixes.nbytes


def test_blocks_that_memory_has_are_not_read_again_and_the_rest_joins_them(loaded: LoadedModel, node: Node):
    bench, disk = process(loaded, node)
    want = bench.run("one", prompt_of(800), agent=AGENT)
    write_down(bench, disk)
    for hot in (300, 790):
        other, disk = process(loaded, node)
        other.run("begins", [*prompt_of(800)[:hot], 7])
        before = disk.counters.restored_tokens
        again = other.run("again", prompt_of(800), agent=AGENT)
        assert (again.tokens, again.cached) == (want.tokens, 799)
        assert disk.counters.restored_tokens - before <= 800 + 12 - hot // BLOCK_TOKENS * BLOCK_TOKENS


def test_a_tail_that_memory_has_lost_is_read_back_behind_the_blocks_that_it_has(loaded: LoadedModel, node: Node):
    bench, disk = process(loaded, node)
    want = bench.run("one", prompt_of(600), agent=AGENT)
    write_down(bench, disk)
    prefixes = bench.engine.prefixes
    for key in [key for key in prefixes._entries if key[1] is not None]:
        prefixes._remove(key)
    again = bench.run("again", prompt_of(600), agent=AGENT)
    assert (again.tokens, again.cached) == (want.tokens, 599)


@pytest.mark.parametrize("at", [0, 2])
def test_counters_say_what_was_damaged_what_is_gone_and_what_was_read(loaded: LoadedModel, node: Node, at: int):
    """A damaged block is counted once, a missing file is not damage; both shorten the prefix."""
    for damaged in (True, False):
        root = Node(node.root.parent / f"{damaged}")
        bench, disk = process(loaded, root)
        prompt = prompt_of(800)
        want = bench.run("one", prompt, agent=AGENT)
        write_down(bench, disk)
        ids = block_ids(root_id(loaded.model_id, "tenant:test"), prompt)
        location = root.store.locate(loaded.model_id, ids)[at]
        assert location is not None
        path = model_folder(root.root, loaded.model_id) / location.name
        footer = read_footer(path, root.store.key)
        if damaged:
            data = bytearray(path.read_bytes())
            data[footer.offset(location.slot)] ^= 1
            path.write_bytes(data)
        else:
            path.unlink()
        other, disk = process(loaded, root)
        told: list[Failure] = []
        call = root.call

        def listening(method: str, asked: bytes, told=told, call=call) -> bytes:
            if method == "disk_read":
                told += StoreClient.disk_read.asked(asked)[-1]
            return call(method, asked)

        root.call = listening  # type: ignore[method-assign]
        got = other.run("again", prompt, agent=AGENT)
        assert got.tokens == want.tokens
        counters = disk.counters
        usable = at if damaged else 0
        assert (got.cached, counters.restored_tokens) == (usable * BLOCK_TOKENS, usable * BLOCK_TOKENS)
        assert counters.corrupt_blocks == int(damaged)
        if damaged:
            # The store is told of that block and of no other.
            assert [failure.reason for failure in told] == ["its bytes are not as they were written"]
        other.drain()
        root.store.close()


def test_a_request_waits_for_a_turn_to_read_only_so_long(
    loaded: LoadedModel, node: Node, monkeypatch: pytest.MonkeyPatch
):
    """Two prompts are read at a time. A third waits, and is computed when that takes too long, as are those."""
    bench, disk = process(loaded, node)
    want = bench.run("one", prompt_of(600), agent=AGENT)
    write_down(bench, disk)
    go, entered, call = threading.Event(), threading.Semaphore(0), node.call

    def slow(method: str, *arguments: Any) -> Any:
        if method == "disk_find":
            entered.release()
            assert go.wait(20)
        return call(method, *arguments)

    monkeypatch.setattr(node, "call", slow)
    other, _ = process(loaded, node)
    for seed in (1, 2, 3):
        other.submit(f"sequence {seed}", prompt_of(600, seed=seed), agent=AGENT)
    while len(other.engine.restores) < 3:
        other.engine.step()
    for _ in range(2):
        assert entered.acquire(timeout=20)
    assert not entered.acquire(timeout=0.2)
    other.engine.restores.wait_s_max = 0.0
    while len(other.sequences) < 3 or any(sequence.finish is None for sequence in other.sequences.values()):
        other.engine.step()
    assert other.sequences["sequence 1"].tokens == want.tokens
    assert all((sequence.finish, sequence.cached) == ("length", 0) for sequence in other.sequences.values())
    go.set()
    third, _ = process(loaded, node)
    assert third.run("again", prompt_of(600), agent=AGENT).cached == 599
