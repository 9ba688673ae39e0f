"""How fast KV comes back from disk, beside reading the same bytes with `cat`."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import mlx.core as mx

from satchel.actors.kv_store.disk.segments import grouped, write_segment
from satchel.actors.kv_store.disk.store import DiskStore
from satchel.actors.protocol.block_ids import BLOCK_TOKENS, block_id, root_id
from satchel.actors.protocol.entries import Entry, Failure
from satchel.actors.replica.kv import caches as kv_cache
from satchel.actors.replica.kv import sealing
from satchel.actors.replica.kv.caches import LayerKind, LayerSpec, ModelCacheSpec, Slab
from satchel.actors.replica.kv.paged_cache import Reads
from satchel.actors.replica.kv.sealing import POLICIES
from satchel.actors.replica.tiers.disk_tier import read_slabs
from satchel.actors.replica.tiers.slab_codec import to_parts

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
        files = [str(path) for path in root.rglob("*.safetensors")]
        nbytes = sum(Path(file).stat().st_size for file in files)
        for _ in budget.rounds(rounds):
            for from_disk in (True, False):
                for name in ("restored", "cat"):
                    if from_disk and not drop_from_page_cache(root):
                        continue
                    started = time.perf_counter()
                    if name == "cat":
                        subprocess.run(["cat", *files], stdout=subprocess.DEVNULL, check=True, timeout=600)
                    else:
                        _restore(store, ids)
                    times.setdefault((name, from_disk), []).append(time.perf_counter() - started)
            say(f"  {nbytes / 1e6:,.0f} MB: " + ", ".join(f"{key} {found[-1]:.3f} s" for key, found in times.items()))
    for from_disk in (True, False):
        own, cat = (median(times.get((name, from_disk), [])) for name in ("restored", "cat"))
        part.rows.append(
            {
                "from": "disk" if from_disk else "page cache",
                "MB": nbytes / 1e6,
                "restored, s": own,
                "GB/s": nbytes / 1e9 / own,
                "cat, s": cat,
                "cat, GB/s": nbytes / 1e9 / cat,
                "of cat's speed": cat / own,
            }
        )
    part.notes.append(f"Sealed in memory, written and synced in {wrote_s:.2f} s ({nbytes / 1e9 / wrote_s:.2f} GB/s).")
    part.notes.append(
        "Restoring verifies every part's digest, makes arrays of each block, and writes them into the pool."
    )
    return part


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


def _restore(store: DiskStore, ids: list[bytes]) -> None:
    spec = _spec()
    locations = [location for location in store.locate(MODEL, ids) if location is not None]
    assert len(locations) == len(ids)
    slabs = read_slabs(spec, store.root, store.key, locations, joins=True)
    good = [slab for slab in slabs if not isinstance(slab, Failure)]
    assert len(good) == len(slabs), "every part is as it was written"
    pool = kv_cache.new_pool(spec)
    assert pool is not None
    caches = kv_cache.new_caches(spec, [None] * LAYERS, pool, Reads.IN_PLACE)
    kv_cache.restore(spec, caches, kv_cache.into_pool(pool, good), None, 0)
    mx.eval(pool.arrays())
