"""Ranks of a model on this machine, each in a process of its own, over MLX's ring: a process has one group in its life.

And the same shares' products and sums in one process, for comparison to the bit.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from satchel.actors.protocol.group_messages import FoundPart, ReadPart
from satchel.actors.replica.device import blas
from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.group.division.opened import Opened
from satchel.actors.replica.group.forming import GroupTimes, Member
from satchel.actors.replica.group.loading import load_part
from satchel.actors.replica.group.parts import FollowerParts, GroupDisk
from satchel.actors.replica.group.tensor.joining import join
from satchel.actors.replica.group.tensor.member import Joining
from satchel.actors.replica.group.tensor.model import Share, SharePart
from satchel.actors.replica.group.tensor.ranks import Ranks, in_order
from satchel.actors.replica.memory.disk_tier import DiskTier
from satchel.cluster import environment
from satchel.cluster.config.stages import Split
from tests.worlds.replica.bench import Bench, Received
from tests.worlds.replica.bench_disk import Node, disk_of, wait_written, write_down
from tests.worlds.replica.group import GROUP, KEY, Fault, listener

TIMES = GroupTimes(form_s=30.0, beat_s=0.05, silent_s=3.0)
WAIT_S = 120.0


def ring(count: int) -> Split:
    return Split(tensor=count, backend="ring", trusted_wires=True)


# In one process.


class SplitLinear(nn.Module):
    """A layer in `count` parts, as ranks have them: of its outputs, or of its inputs, whose products are added in the
    order of ranks."""

    def __init__(self, plain: Any, count: int, *, inputs: bool) -> None:
        super().__init__()
        self._inputs, self._count = inputs, count
        self.parts = []
        for weight in mx.split(plain.weight, count, axis=1 if inputs else 0):
            part = nn.Linear(1, 1, bias=False)
            part.weight = mx.contiguous(weight)
            self.parts.append(part)

    def __call__(self, x: mx.array) -> mx.array:
        if not self._inputs:
            return mx.concatenate([part(x) for part in self.parts], axis=-1)
        pieces = mx.split(x, self._count, axis=-1)
        return in_order(mx.stack([part(piece) for part, piece in zip(self.parts, pieces, strict=True)]))


class AllShares(SharePart):
    """All shares of a llama in one process."""

    def __init__(self, count: int) -> None:
        super().__init__(Ranks(0, 1))
        self._count = count

    def cut(self, opened: Opened) -> None:
        whole = opened.whole
        for layer in whole.model.layers:
            for module, names in ((layer.self_attn, "qkvo"), (layer.mlp, ("gate", "up", "down"))):
                for name in (f"{each}_proj" for each in names):
                    inputs = name in ("o_proj", "down_proj")
                    setattr(module, name, SplitLinear(getattr(module, name), self._count, inputs=inputs))
        self._share = Share(whole, self._ranks)


def in_one_process(folder: Path, count: int) -> LoadedModel:
    """A model that computes what so many ranks compute, alone."""
    return load_part(str(folder), AllShares(count))


# In several processes.

Ask = tuple[str, tuple[Any, ...]]


def _member(rank: int, count: int, listens: socket.socket) -> Member:
    joining = Joining(ring(count), TIMES.beat_s, TIMES.silent_s, TIMES.stalled_s)
    return Member(GROUP, rank, KEY, listens, TIMES, broken=lambda why: os._exit(7), joining=joining)


class _Reading:
    """Stands for `StageClient` of a follower in another process, and for a call to it."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    def read(self, part: ReadPart) -> _Reading:
        self._pipe.send(part)
        return self

    def wait(self) -> FoundPart:
        assert self._pipe.poll(WAIT_S), "a follower does not read"
        return self._pipe.recv()


def _read_for_leader(parts: FollowerParts, reads: Pipe) -> None:
    with suppress(EOFError):
        while True:
            reads.send(parts.read(reads.recv()))


def _rank(
    folder: str,
    rank: int,
    count: int,
    fails_at: int | None,
    kv: str,
    disk_folder: str | None,
    reads: Sequence[Pipe],
    asked: Pipe,
) -> None:
    """A rank's process: the last one leads, and does what it is asked. At the model's call `fails_at` it fails.

    Args:
        disk_folder: its node's, on whose disk it keeps its part of KV; None for none.
        reads: to the leader, or to each follower, for what it reads of KV.
    """
    listens = listener()
    loaded = load_part(folder, SharePart(Ranks(rank, count)), kv=kv)
    node = None if disk_folder is None else Node(Path(disk_folder))
    leads = rank == count - 1
    disk = None if node is None else disk_of(loaded, node, kind=GroupDisk if leads else DiskTier)
    asked.send((listens.getsockname()[:2], os.getpid()))
    member = _member(rank, count, listens)
    try:
        if not leads:
            following = member.follow(loaded)
            if fails_at is not None:
                batch: Any = following.batch
                batch._model = Fault(batch._model, fails_at)
            if disk is not None:
                following.batch.parts = parts = FollowerParts(disk, following.batch, loaded.model_id)
                threading.Thread(target=_read_for_leader, args=(parts, reads[0]), daemon=True).start()
            following.run()
            return
        bench = Bench(loaded, disk=disk)
        member.lead(loaded, bench.engine.executor, asked.recv())
        if isinstance(disk, GroupDisk):
            clients: Any = [_Reading(pipe) for pipe in reads]
            disk.serve(bench.engine, clients)
        asked.send("formed")
        while (work := asked.recv()) is not None:
            call, given = work
            asked.send(call(bench, *given))
    finally:
        member.close()
        if disk is not None and node is not None:
            wait_written(disk)
            node.store.close()


class RanksOf:
    """The processes of a model's ranks, of which the first may fail at one of the model's calls.

    Args:
        disks: the folder of each rank's node, if they keep KV.
    """

    def __init__(
        self, folder: Path, count: int, fails_at: int | None = None, kv: str = "q4", disks: Sequence[Path] = ()
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Pipe] = []
        self.processes = []
        reads = [context.Pipe() for _ in range(count - 1)]
        for rank in range(count):
            mine, theirs = context.Pipe()
            self._pipes.append(mine)
            disk = str(disks[rank]) if disks else None
            own = [reads[rank][1]] if rank < count - 1 else [ours for ours, _ in reads]
            given = (str(folder), rank, count, fails_at, kv, disk, own, theirs)
            process = context.Process(target=_rank, args=given, daemon=True)
            # It must multiply as this process does.
            with environment.set_during(SATCHEL_OPENBLAS="1" if blas.chosen().name else ""):
                process.start()
            theirs.close()
            self.processes.append(process)
        for ends in reads:
            for end in ends:
                end.close()
        addresses = [self._hear(pipe)[0] for pipe in self._pipes]
        self._pipes[-1].send(addresses)
        assert self._hear(self._pipes[-1]) == "formed"

    def ask(self, call: Callable[..., Any], *given: Any) -> Any:
        """What the leader's `call(bench, *given)` returns."""
        self.begin(call, *given)
        return self._hear(self._pipes[-1])

    def begin(self, call: Callable[..., Any], *given: Any) -> None:
        self._pipes[-1].send((call, given))

    def end(self) -> list[int | None]:
        """Has the leader end the group. Returns how all processes ended."""
        self._pipes[-1].send(None)
        for process in self.processes:
            process.join(30.0)
        return [process.exitcode for process in self.processes]

    def kill(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join(30.0)
        for pipe in self._pipes:
            pipe.close()

    @staticmethod
    def _hear(pipe: Pipe) -> Any:
        assert pipe.poll(WAIT_S), "a rank says nothing"
        return pipe.recv()


@contextmanager
def ranks_of(folder: Path, count: int, fails_at: int | None = None, **how: Any) -> Iterator[RanksOf]:
    ranks = RanksOf(folder, count, fails_at, **how)
    try:
        yield ranks
    finally:
        ranks.kill()


def conversation(bench: Bench, lengths: Sequence[int], answer: int = 8) -> dict[str, Received]:
    """Sequences of these lengths together, each alone, and turns that go on from memory."""
    rng = random.Random(3)
    prompts = [[rng.randrange(10, 3000) for _ in range(length)] for length in lengths]
    how: dict[str, Any] = {"temperature": 0.8, "logprobs": 2}
    for number, prompt in enumerate(prompts):
        bench.submit(f"cold {number}", prompt, seed=number, max_tokens=answer, **how)
    bench.drain()
    for number, prompt in enumerate(prompts):
        longer = [*prompt, *bench.sequences[f"cold {number}"].tokens, 7, 8]
        bench.submit(f"next {number}", longer, seed=9, max_tokens=answer, **how)
    bench.drain()
    bench.engine.clear_cache()
    for number, prompt in enumerate(prompts):
        bench.run(f"alone {number}", prompt, seed=number, max_tokens=answer, **how)
    return bench.sequences


def turn(bench: Bench, prompt: list[int], agent: str, answer: int) -> Received:
    """An agent's turn, whose KV is on the leader's disk afterwards."""
    found = bench.run(f"turn {len(bench.sequences)}", prompt, agent=agent, max_tokens=answer, logprobs=2)
    disk = bench.engine._disk
    assert disk is not None
    write_down(bench, disk)
    return found


def answer_until_broken(bench: Bench) -> None:
    """Decodes for ever."""
    number = 0
    while True:
        number += 1
        bench.run(str(number), [5] * 40, max_tokens=2000)


def stop(ranks: RanksOf, rank: int, after_s: float = 1.0) -> float:
    """Stops a rank while the leader answers. Returns after how many seconds all processes have ended."""
    ranks.begin(answer_until_broken)
    time.sleep(after_s)
    os.kill(ranks.processes[rank].pid or 0, signal.SIGSTOP)
    began = time.monotonic()
    for process in ranks.processes:
        process.join(30.0)
    return time.monotonic() - began


# Sums alone.


def _sums(rank: int, count: int, ports: Sequence[int], told: Pipe) -> None:
    ranks: Any = Ranks(rank, count)
    join(ranks, ring(count), [("127.0.0.1", port) for port in ports], lambda data: data)
    row = mx.random.normal((257,), key=mx.random.key(rank))
    wide: Any = mx.distributed.all_sum(mx.broadcast_to(row, (7, 257)), group=ranks)
    single: Any = mx.distributed.all_sum(row[None], group=ranks)
    gathered: Any = mx.distributed.all_gather(row[None], group=ranks)
    told.send(([row.tobytes() for row in np.array(wide)], np.array(single[0]).tobytes(), np.array(gathered)))


def sums(count: int) -> list[Any]:
    """Of one row at seven places of a batch, and of the row alone, in bytes; and the row of each rank."""
    context = multiprocessing.get_context("spawn")
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    pipes, processes = [], []
    for rank in range(count):
        mine, theirs = context.Pipe()
        processes.append(context.Process(target=_sums, args=(rank, count, ports, theirs), daemon=True))
        processes[-1].start()
        pipes.append(mine)
    try:
        for pipe in pipes:
            assert pipe.poll(WAIT_S)
        return [pipe.recv() for pipe in pipes]
    finally:
        for process in processes:
            process.join(10.0)
            if process.is_alive():
                process.kill()
                process.join(10.0)
