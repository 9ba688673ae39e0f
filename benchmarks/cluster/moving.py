"""Moving KV between two hosts: a pull of blocks beside one raw TCP stream of as many bytes, and Ray's object plane."""

from __future__ import annotations

import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from satchel.actors.kv_store.transfer.block_client import BlockPuller
from satchel.actors.kv_store.transfer.pull_loop import Stop, Wanted
from satchel.actors.protocol.block_ids import BLOCK_TOKENS
from tests.system.hosts import hosts

from ..parts import Budget, ResultTable, Say, median
from ..programs import program
from .source import MODEL, RAW_PIECE_BYTES, ROOT, open_store
from .worker import Worker

OF_RAW_MIN = {"loopback": 0.5, "10 Gb/s": 0.8, "1 Gb/s": 0.95}
OF_RAW_DISK_MIN = {"10 Gb/s": 0.7}
OF_RAY_MIN = 3.0
Address = tuple[str, int]


def raw_s(address: Address, nbytes: int) -> float:
    """Seconds for `nbytes` of one TCP stream into memory."""
    target = memoryview(bytearray(RAW_PIECE_BYTES))
    begun = time.perf_counter()
    with socket.create_connection(address) as sock:
        while nbytes:
            came = sock.recv_into(target, min(nbytes, RAW_PIECE_BYTES))
            if not came:
                raise RuntimeError(f"the raw stream ended {nbytes} bytes early")
            nbytes -= came
    return time.perf_counter() - begun


def pull_s(folder: Path, key: bytes, ids: Sequence[bytes], addresses: Sequence[Address]) -> float:
    """Seconds for a pull of the chain into a new store in `folder`, until it counts there."""
    root = Path(tempfile.mkdtemp(prefix="pulled-", dir=folder))
    try:
        with open_store(root) as store:
            puller = BlockPuller(store, key, store)
            result = puller.pull(Wanted(MODEL, ROOT, tuple(ids)), "source", addresses, deadline_s=600.0)
            puller.close()
        if result.stop is not Stop.COMPLETE:
            raise RuntimeError(f"the pull ended: {result.stop}, {result.reason}")
        return result.seconds
    finally:
        shutil.rmtree(root)


class ServedChain:
    """A chain on a host that serves it. `host` is None for this one, over loopback."""

    def __init__(self, worker: Worker, blocks: int, address: str) -> None:
        self.key = secrets.token_bytes(32)
        told = worker.ask({"key": self.key.hex(), "address": address, "blocks": blocks})
        self.nbytes: int = told["bytes"]
        self._ids = [bytes.fromhex(block) for block in told["ids"]]
        self._raw = tuple(told["raw"])
        self._addresses = [tuple(each) for each in told["addresses"]]
        self._worker = worker

    def raw_s(self) -> float:
        return raw_s(self._raw, self.nbytes)

    def pull_s(self, folder: Path) -> tuple[float, float, float]:
        """Seconds of a pull, and CPU seconds of the source and of this process."""
        source, target = self._worker.ask("cpu"), time.process_time()
        seconds = pull_s(folder, self.key, self._ids, self._addresses)
        return seconds, self._worker.ask("cpu") - source, time.process_time() - target


@contextmanager
def chain_on(host: Any | None, blocks: int, work: Path) -> Iterator[ServedChain]:
    """A chain that `host` serves, a namespace; None is this machine, over loopback."""
    command = program("cluster.source", work / "source")
    with Worker(command if host is None else host.command(*command), work / "source.log") as worker:
        yield ServedChain(worker, blocks, "127.0.0.1" if host is None else host.address)


def moving(tokens: int, gbits: Sequence[float], rounds: int, work: Path, budget: Budget, say: Say) -> ResultTable:
    """The table: a line for loopback, and one for every speed in `gbits` where there can be hosts."""
    blocks = max(1, tokens // BLOCK_TOKENS)
    part = ResultTable(f"Moving {blocks * BLOCK_TOKENS:,} tokens of Llama-3.1-8B's shape")
    with ExitStack() as stack:
        folders = {"disk": work}
        if (shared := Path("/dev/shm")).is_dir():
            made = stack.enter_context(tempfile.TemporaryDirectory(prefix="satchel-", dir=shared))
            folders = {"memory": Path(made), **folders}
        command = program("cluster.object_plane", work / "ray")
        with Worker(command, work / "ray.log") as ray, chain_on(None, blocks, work) as chain:
            times = _times(chain, folders, rounds, budget, ray)
        part.rows.append(row("loopback", chain.nbytes, times, part))
        say(f"  loopback: {_seconds(times)}")
        if (reason := hosts.missing()) is not None:
            part.notes.append(f"Over loopback alone: {reason}.")
        elif gbits:
            (host,) = stack.enter_context(hosts.hosts(1))
            shutil.rmtree(work / "source")
            slow = stack.enter_context(chain_on(host, blocks, work))
            for gbit in gbits:
                host.slow(round(1000 * gbit))
                times = _times(slow, folders, rounds, budget)
                part.rows.append(row(f"{gbit:g} Gb/s", slow.nbytes, times, part))
                say(f"  {gbit:g} Gb/s: {_seconds(times)}")
            part.notes.append("Links are a pair of virtual ones into a network namespace, slowed by a token bucket.")
    part.notes.append(
        "Medians; ratios within a round, to one TCP stream of as many bytes, which nobody keeps or checks. A pull is "
        "timed until it counts in the store: in memory (tmpfs), or on disk and synced. Both ends share the cores."
    )
    part.notes.append("Ray: one array of as many bytes from one raylet's objects into another's, over loopback.")
    return part


def _times(
    chain: ServedChain, folders: dict[str, Path], rounds: int, budget: Budget, ray: Worker | None = None
) -> dict[str, list[float]]:
    """Seconds of every way, in turns."""
    times: dict[str, list[float]] = {"raw": [], **{name: [] for name in folders}, **({"Ray": []} if ray else {})}
    times |= {"CPU source": [], "CPU target": []}
    # What is read first comes from the disk.
    chain.raw_s()
    chain.pull_s(next(iter(folders.values())))
    for _ in budget.rounds(rounds):
        times["raw"].append(chain.raw_s())
        for name, folder in folders.items():
            seconds, source, target = chain.pull_s(folder)
            times[name].append(seconds)
            if folder is next(iter(folders.values())):
                times["CPU source"].append(source)
                times["CPU target"].append(target)
        if ray is not None:
            times["Ray"].append(ray.ask(chain.nbytes))
    return times


def row(link: str, nbytes: int, times: dict[str, list[float]], part: ResultTable) -> dict[str, Any]:
    """A line of the table; its targets go into `part`.

    Args:
        times: seconds of each round, by way: `raw`, `memory` and `disk` (pulls), and `Ray`; and `CPU source` and
            `CPU target` of the first pull.
    """

    def rate(way: str) -> float | None:
        return nbytes / 1e9 / median(times[way]) if times.get(way) else None

    def against(way: str, other: str) -> float | None:
        pairs = list(zip(times.get(way, []), times.get(other, []), strict=False))
        return median([theirs / own for own, theirs in pairs]) if pairs else None

    def cpu(side: str) -> float | None:
        found = times.get(f"CPU {side}")
        return median(found) / nbytes * 1e9 if found else None

    quick = "memory" if "memory" in times else "disk"
    of_raw, of_ray = against(quick, "raw"), against(quick, "Ray")
    if of_raw is not None and link in OF_RAW_MIN:
        part.at_least(f"{link}: a pull into {quick}, of raw TCP", of_raw, OF_RAW_MIN[link])
    of_disk = against("disk", "raw")
    if of_disk is not None and link in OF_RAW_DISK_MIN:
        part.at_least(f"{link}: a pull onto disk, of raw TCP", of_disk, OF_RAW_DISK_MIN[link])
    if of_ray is not None:
        part.at_least(f"{link}: a pull into {quick}, over Ray's object plane", of_ray, OF_RAY_MIN)
    return {
        "link": link,
        "MB": nbytes / 1e6,
        "raw, GB/s": rate("raw"),
        "into memory, GB/s": rate("memory"),
        "of raw": against("memory", "raw"),
        "onto disk, GB/s": rate("disk"),
        "of raw, disk": against("disk", "raw"),
        "Ray, GB/s": rate("Ray"),
        "pull / Ray": of_ray,
        "CPU, s/GB: source": cpu("source"),
        "target": cpu("target"),
        "rounds": len(times["raw"]),
    }


def _seconds(times: dict[str, list[float]]) -> str:
    return ", ".join(f"{name} {min(found):.2f} s" for name, found in times.items() if found)
