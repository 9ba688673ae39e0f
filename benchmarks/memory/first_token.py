"""Time to the first token, on the engine: cold, hot (the prefix in memory), warm (the prefix on disk)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

from satchel.actors.kv_store.disk.segments import grouped, write_segment
from satchel.actors.kv_store.disk.store import DiskLimits, DiskStore
from satchel.actors.protocol.block_ids import BLOCK_TOKENS, block_ids
from satchel.actors.protocol.entries import Entry, Location, unpack_tokens
from satchel.actors.replica.kv.caches import PooledBlock, Record, Records, Slab
from satchel.actors.replica.memory.disk_reading import read_blocks, read_slabs
from satchel.actors.replica.memory.sequence_memory import kept_of
from satchel.actors.replica.memory.slab_codec import to_parts

from ..parts import Budget, ResultTable, Say, median
from .desk import WARM_UP_ROUNDS, Desk, on_gpu

SESSION = "bench"
DISK_BYTES_MAX = 16 * 2**30
HOT_MIN, WARM_MIN, TARGET_TOKENS = 40.0, 15.0, 4000


@contextmanager
def open_store(root: Path) -> Iterator[DiskStore]:
    with DiskStore(root, session=SESSION, limits=DiskLimits(bytes_max=DISK_BYTES_MAX)) as store:
        yield store


def drop_from_page_cache(folder: Path) -> bool:
    """Let the next reading of the files come from the disk; False where a system cannot be told to."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in folder.rglob("*.kv"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    return True


def write_prefix(desk: Desk, prompt: list[int], store: DiskStore) -> list[bytes]:
    """Put what the engine knows of the prompt on disk. Returns the entries' ids, in order."""
    ids, spec = block_ids(desk.root, prompt), desk.loaded.spec
    # As a row finds it: its last token is computed.
    hit = desk.engine.prefixes.match(desk.root, ids, prompt, len(prompt) - 1)
    entries: list[Entry] = []
    for index, slab in enumerate(desk.engine.executor.copied(hit.blocks)):
        tokens = prompt[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS]
        parent = ids[index - 1] if index else desk.root
        entries.append(_entry(ids[index], parent, tokens, slab, to_parts(spec, slab)))
    if hit.tail is not None:
        parent = ids[len(hit.blocks) - 1] if hit.blocks else desk.root
        start = len(hit.blocks) * BLOCK_TOKENS
        tokens = prompt[start : start + hit.tail.tokens]
        (tail,) = desk.engine.executor.copied([hit.tail])
        entries.append(Entry.of_tail(parent, tokens, to_parts(spec, tail), window_from=tail.window_from))
    for group in grouped(entries):
        written = {"session": SESSION, "epoch": store.epoch, "now_s": time.time()}
        store.commit(write_segment(store.root, store.key, desk.loaded.model_id, group, **written))
    return [entry.id for entry in entries]


def _entry(block: bytes, parent: bytes, tokens: list[int], slab: Slab | Record, parts: dict) -> Entry:
    return Entry(block, parent, tokens, parts, window_from=slab.window_from, snapshot=slab.states is not None)


def restore_prefix(desk: Desk, store: DiskStore, entry_ids: Sequence[bytes]) -> None:
    """Brings entries from the disk into the engine's memory, as a replica does: looked up, read, verified, put into the
    pool."""
    found = store.locate(desk.loaded.model_id, list(entry_ids))
    locations: list[Location] = [location for location in found if location is not None]
    whole, ends = ([location for location in locations if location.tail is tail] for tail in (False, True))
    chain = [location.id for location in whole]
    spec, read = desk.loaded.spec, (store.root, store.key)

    def adopt(records: Records) -> Future[list[PooledBlock]]:
        done: Future[list[PooledBlock]] = Future()
        done.set_result(desk.engine.executor.adopt(records))
        return done

    pieces = read_blocks(spec, *read, whole, [], adopt) if spec.policy else read_slabs(spec, *read, whole, [])
    tails = read_slabs(spec, *read, ends, [])
    if len(pieces) < len(whole) or None in pieces or None in tails:
        raise RuntimeError("an entry is damaged")
    blocks = [
        (number, unpack_tokens(location.tokens), kept_of(piece))
        for number, (location, piece) in enumerate(zip(whole, pieces, strict=True))
        if piece is not None
    ]
    desk.engine.prefixes.put_blocks(chain, blocks)
    for location, slab in zip(ends, tails, strict=True):
        if slab is not None:
            desk.engine.prefixes.put_tail(desk.root, chain, unpack_tokens(location.tokens), kept_of(slab))


def first_token(
    desk: Desk, name: str, lengths: Sequence[int], rounds: int, work: Path, budget: Budget, say: Say
) -> ResultTable:
    """Every round has a prompt of its own, which is asked cold, then hot, then warm in a new engine."""
    part = ResultTable(f"Time to the first token, {name}")
    dropped = True
    for length in sorted(lengths):
        times: dict[str, list[float]] = {"cold": [], "hot": [], "warm": [], "cached": []}
        nbytes = 0
        desk.clear()
        for number in budget.rounds(rounds):
            if number == 0 and on_gpu():
                # It prepares itself for every new shape, so that a whole round goes before those that count.
                for warm_up in range(WARM_UP_ROUNDS):
                    _stored_round(desk, length, f"warm-up-{warm_up}", work, {key: [] for key in times})
            elif number == 0:
                desk.ask(desk.prompt(min(length, 2 * BLOCK_TOKENS + 9), f"warm-up/{length}"))
            nbytes, dropped = _stored_round(desk, length, str(number), work, times)
            say(f"  {length:,} tokens: " + ", ".join(f"{key} {found[-1]:,.1f} ms" for key, found in times.items()))
        if not times["cold"]:
            part.notes.append(f"There was no time for {length:,} tokens.")
            continue
        ratios = {key: median([c / t for c, t in zip(times["cold"], times[key], strict=True)]) for key in times}
        part.rows.append(
            {
                "tokens": length,
                **{f"{key}, ms": median(found) for key, found in times.items()},
                **{f"cold / {key}": ratios[key] for key in ("hot", "warm", "cached")},
                "KV, MB": nbytes / 1e6,
                "rounds": len(times["cold"]),
            }
        )
        if length == TARGET_TOKENS:
            part.at_least(f"{length:,} tokens: cold / hot", ratios["hot"], HOT_MIN)
            part.at_least(f"{length:,} tokens: cold / warm", ratios["warm"], WARM_MIN)
    where = "after the files were dropped from the page cache" if dropped else "with the page cache as it was"
    part.notes.append(
        f"On the engine, without Ray and HTTP; medians, ratios within a round. Warm is from disk {where}, `cached` the "
        "same with the files in the page cache; both include the look-up, reading, checking and making arrays."
    )
    if on_gpu():
        part.notes.append(f"{WARM_UP_ROUNDS} whole rounds of each length, which do not count, came before.")
    return part


def _stored_round(desk: Desk, length: int, name: str, work: Path, times: dict[str, list[float]]) -> tuple[int, bool]:
    """`_round` of a prompt and a folder of that name."""
    folder = work / f"kv-{length}-{name}"
    folder.mkdir(parents=True)
    with open_store(folder) as store:
        return _round(desk, desk.prompt(length, f"{length}/{name}"), store, times)


def _round(desk: Desk, prompt: list[int], store: DiskStore, times: dict[str, list[float]]) -> tuple[int, bool]:
    """One prompt's times. Returns the bytes on disk, and whether the page cache could be emptied."""
    desk.clear()
    # The last token is always computed.
    most = len(prompt) - 1
    for key, reused in (("cold", 0), ("hot", most)):
        answer = desk.ask(prompt)
        assert answer.cached == reused, f"{answer.cached} tokens are reused instead of {reused}"
        times[key].append((answer.first - answer.sent) * 1e3)
    entry_ids = write_prefix(desk, prompt, store)
    nbytes, dropped = sum(path.stat().st_size for path in store.root.rglob("*.kv")), True
    for key in ("warm", "cached"):
        desk.clear()
        if key == "warm":
            dropped = drop_from_page_cache(store.root)
        started = time.perf_counter()
        restore_prefix(desk, store, entry_ids)
        answer = desk.ask(prompt)
        assert answer.cached == most, f"{answer.cached} tokens are reused instead of {most}"
        times[key].append((answer.first - started) * 1e3)
    return nbytes, dropped
