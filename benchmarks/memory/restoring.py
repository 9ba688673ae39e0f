"""How fast KV comes back from disk, beside reading the same bytes with `cat`."""

from __future__ import annotations

import subprocess
import time
from concurrent.futures import Future
from pathlib import Path

import mlx.core as mx

from satchel.actors.kv_store.disk.segments import grouped, write_segment
from satchel.actors.kv_store.disk.store import DiskStore
from satchel.actors.protocol.block_ids import BLOCK_TOKENS, block_id, root_id
from satchel.actors.protocol.entries import Entry
from satchel.actors.replica.kernels import sealing
from satchel.actors.replica.kernels.sealing import POLICIES
from satchel.actors.replica.kv import caches as kv_cache
from satchel.actors.replica.kv.caches import LayerKind, LayerSpec, ModelCacheSpec, PooledBlock, Records, Slab
from satchel.actors.replica.kv.paged_cache import Reads
from satchel.actors.replica.kv.pool import BlockPool
from satchel.actors.replica.memory.disk_reading import read_blocks
from satchel.actors.replica.memory.slab_codec import to_parts

from ..parts import Budget, ResultTable, Say, median
from .first_token import SESSION, drop_from_page_cache, open_store

LAYERS, KV_HEADS, DIM = 32, 8, 128
"""Of Llama-3.1-8B."""

MODEL = bytes(32)


def restoring(tokens: int, rounds: int, work: Path, budget: Budget, say: Say) -> ResultTable:
    """Blocks of a large model's shape, random, from segment files into caches that a model could go on with."""
    part = ResultTable(f"Restoring {tokens:,} tokens of Llama-3.1-8B's shape")
    root = work / "restore"
    root.mkdir(parents=True)
    times: dict[tuple[str, bool], list[float]] = {}
    with open_store(root) as store:
        started = time.perf_counter()
        ids = _write(store, tokens // BLOCK_TOKENS)
        wrote_s = time.perf_counter() - started
        files = [str(path) for path in root.rglob("*.kv")]
        nbytes = sum(Path(file).stat().st_size for file in files)
        used = new_pool()
        _restore(store, ids, used)
        for _ in budget.rounds(rounds):
            for from_disk in (True, False):
                for name in ("restored", "new pool", "cat"):
                    if from_disk and not drop_from_page_cache(root):
                        continue
                    started = time.perf_counter()
                    if name == "cat":
                        subprocess.run(["cat", *files], stdout=subprocess.DEVNULL, check=True, timeout=600)
                    else:
                        _restore(store, ids, used if name == "restored" else new_pool())
                    times.setdefault((name, from_disk), []).append(time.perf_counter() - started)
            say(f"  {nbytes / 1e6:,.0f} MB: " + ", ".join(f"{key} {found[-1]:.3f} s" for key, found in times.items()))
    for from_disk in (True, False):
        own, new, cat = (median(times.get((name, from_disk), [])) for name in ("restored", "new pool", "cat"))
        part.rows.append(
            {
                "from": "disk" if from_disk else "page cache",
                "MB": nbytes / 1e6,
                "restored, s": own,
                "GB/s": nbytes / 1e9 / own,
                "cat, s": cat,
                "cat, GB/s": nbytes / 1e9 / cat,
                "of cat's speed": cat / own,
                "into a new pool, s": new,
                "new pool, of cat's": cat / new,
            }
        )
    part.notes.append(f"Sealed in memory, written and synced in {wrote_s:.2f} s ({nbytes / 1e9 / wrote_s:.2f} GB/s).")
    part.notes.append(
        "Restoring verifies every block's digest and copies it into the pool, which has room; a new pool is what a "
        "process has that has just begun: the system gives it every page of its memory first."
    )
    return part


def new_pool() -> BlockPool:
    """An empty pool of the model's layers."""
    pool = kv_cache.new_pool(_spec())
    assert pool is not None
    return pool


def _spec() -> ModelCacheSpec:
    policy = POLICIES["q4"]
    token = sealing.sealed_token_bytes(KV_HEADS, DIM, DIM, policy)
    opened = KV_HEADS * DIM * 4 * BLOCK_TOKENS
    layer = LayerSpec(LayerKind.FULL, 0, token, open_bytes=opened, sealed=True)
    return ModelCacheSpec((layer,) * LAYERS, LAYERS * token, LAYERS * opened, policy)


def _write(store: DiskStore, blocks: int) -> list[bytes]:
    """Blocks that differ, each with equal layers: only their bytes matter."""
    spec, parent, entries = _spec(), root_id(MODEL, "tenant:bench"), []
    for number in range(blocks):
        keys = mx.random.normal((1, KV_HEADS, BLOCK_TOKENS, DIM), key=mx.random.key(number)).astype(mx.float16)
        sealed = sealing.seal(keys, keys, POLICIES["q4"])
        mx.eval(sealed)
        tokens = [number] * BLOCK_TOKENS
        block = block_id(parent, tokens)
        slab = Slab([sealed] * LAYERS, BLOCK_TOKENS)
        entries.append(Entry(block, parent, tokens, to_parts(spec, slab)))
        parent = block
    for group in grouped(entries):
        written = {"session": SESSION, "epoch": store.epoch, "now_s": time.time()}
        store.commit(write_segment(store.root, store.key, MODEL, group, **written))
    return [entry.id for entry in entries]


def _restore(store: DiskStore, ids: list[bytes], pool: BlockPool) -> None:
    spec = _spec()
    locations = [location for location in store.locate(MODEL, ids) if location is not None]
    assert len(locations) == len(ids)

    def adopt(records: Records) -> Future[list[PooledBlock]]:
        done: Future[list[PooledBlock]] = Future()
        done.set_result(kv_cache.into_pool(pool, records))
        mx.eval(pool.arrays())
        return done

    blocks = read_blocks(spec, store.root, store.key, locations, [], adopt)
    assert len(blocks) == len(ids), "every block is as it was written"
    caches = kv_cache.new_caches(spec, [None] * LAYERS, pool, Reads.IN_PLACE)
    kv_cache.restore(spec, caches, blocks, None, 0)
