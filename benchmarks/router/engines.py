"""Simulated nodes: a simulated clock, no model.

A node: one replica computes a prefill chunk of 512 tokens between decode steps, first come first served, at a constant
rate; a decode step takes longer the more sequences it has. It keeps finished prompts' blocks in memory, least recently
used first out, and its node's disk keeps more of them in the same way. KV is read from the disk and pulled before the
sequence waits for its place; pulls from one node come after each other, each at the rate of the link. The rates are
made up; what is compared are the rules.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from satchel.actors.protocol.block_ids import BLOCK_TOKENS
from satchel.actors.protocol.router_messages import Decision, ReplicaReport, StoreReport

from .workloads import WorkloadTurn

CHUNK_TOKENS = 512
RESTORE_S = 0.005
PULL_S = 0.03
"""What restoring and pulling take besides the bytes."""


@dataclass(frozen=True)
class Machine:
    """What every simulated replica can do."""

    prefill_tokens_per_s: float = 2000.0
    step_s: float = 0.02
    """A decode step of one sequence."""
    step_sequence_s: float = 0.002
    """What each further sequence adds to it."""
    sequences_max: int = 16
    blocks_max: int = 2000
    disk_blocks_max: int = 0
    """0 for a node without a disk."""
    restore_bytes_per_s: float = 3e9
    link_bytes_per_s: float = 1e9
    """What 10 Gb/s Ethernet or a Thunderbolt bridge carries."""
    kv_bytes_per_token: float = 36_864
    """Of Llama 3.1 8B in 4 bits."""


@dataclass(eq=False)
class SimulatedSequence:
    request_id: str
    turn: WorkloadTurn
    arrived_s: float
    left_tokens: int
    """To be prefilled."""
    cached_tokens: int = 0
    decoded: int = 0
    first_token_s: float = 0.0
    ended_s: float = 0.0
    ready_s: float = 0.0
    """When what is restored and pulled is there."""
    restored: int = 0
    """Blocks from the beginning that are in memory or were brought there."""
    looked_up: bool = False


class Replica:
    """A simulated engine. `advance` brings it to a time; what ended by then is returned."""

    def __init__(self, name: str, machine: Machine) -> None:
        self.name = name
        self.assigned = 0
        self._machine = machine
        self._now = 0.0
        self._waiting: list[SimulatedSequence] = []
        self._prefilling: list[SimulatedSequence] = []
        self._decoding: list[SimulatedSequence] = []
        self._cache = Blocks(machine.blocks_max)
        self.disk = Blocks(machine.disk_blocks_max)
        self.links: dict[str, float] = {}
        self._sent_s = 0.0
        self._sequence = 0

    @property
    def has_disk(self) -> bool:
        return self._machine.disk_blocks_max > 0

    def submit(self, sequence: SimulatedSequence, decision: Decision, source: Replica | None) -> int:
        """Take a sequence. Returns how many tokens were pulled for it."""
        self.assigned += 1
        if not (self._waiting or self._prefilling or self._decoding):
            self._now = max(self._now, sequence.arrived_s)
        self._waiting.append(sequence)
        machine, blocks = self._machine, sequence.turn.blocks
        token_bytes, pulled, sequence.ready_s = machine.kv_bytes_per_token, 0, sequence.arrived_s
        hot, disk = self._cache.run(blocks), self.disk.run(blocks)
        if source is not None:
            wanted = blocks[: decision.cached_tokens // BLOCK_TOKENS]
            pulled = max(0, source.disk.run(wanted) - max(hot, disk)) * BLOCK_TOKENS
            if pulled:
                source._sent_s = (
                    max(source._sent_s, sequence.arrived_s) + pulled * token_bytes / machine.link_bytes_per_s
                )
                sequence.ready_s = source._sent_s + PULL_S
                disk = source.disk.run(wanted)
                self.disk.keep(wanted[:disk])
                self.links[source.name] = machine.link_bytes_per_s
        if disk > hot:
            sequence.restored = disk
            sequence.ready_s += (disk - hot) * BLOCK_TOKENS * token_bytes / machine.restore_bytes_per_s + RESTORE_S
        return pulled

    def advance(self, until_s: float) -> list[SimulatedSequence]:
        ended: list[SimulatedSequence] = []
        while self._now < until_s:
            places = self._machine.sequences_max - len(self._decoding) - len(self._prefilling)
            admitted = [sequence for sequence in self._waiting if sequence.ready_s <= self._now][:places]
            self._waiting = [sequence for sequence in self._waiting if sequence not in admitted]
            self._prefilling += admitted
            ready_s = min(
                (sequence.ready_s for sequence in self._waiting if sequence.ready_s > self._now), default=until_s
            )
            if not self._prefilling and not self._decoding:
                if ready_s >= until_s:
                    break
                self._now = ready_s
                continue
            self._step(min(ready_s, until_s), ended)
        return ended

    def report(self) -> ReplicaReport:
        announced, retracted = self._cache.take_events()
        self._sequence += 1
        machine = self._machine
        sequences = self._waiting + self._prefilling + self._decoding
        return ReplicaReport(
            replica=self.name,
            model="m",
            incarnation="1",
            sequence=self._sequence,
            running=len(self._prefilling) + len(self._decoding),
            waiting=len(self._waiting),
            pending_tokens=sum(sequence.left_tokens for sequence in sequences),
            sequences_max=self._machine.sequences_max,
            prefill_tokens_per_s=self._machine.prefill_tokens_per_s,
            active=[sequence.request_id for sequence in sequences],
            announced=sorted(announced),
            retracted=sorted(retracted),
            full=self._sequence == 1,
            node=self.name if machine.disk_blocks_max else "",
            decode_token_s=machine.step_s,
            restore_bytes_per_s=machine.restore_bytes_per_s,
            kv_bytes_per_token=machine.kv_bytes_per_token,
        )

    def store_report(self) -> StoreReport:
        announced, retracted = self.disk.take_events()
        links, self.links = self.links, {}
        first = self._sequence == 1
        return StoreReport(self.name, "1", self._sequence, sorted(announced), sorted(retracted), first, links=links)

    def _step(self, until_s: float, ended: list[SimulatedSequence]) -> None:
        """One step; many at once while the same sequences only decode."""
        machine, sequences = self._machine, len(self._decoding)
        step_s = machine.step_s + machine.step_sequence_s * sequences if sequences else 0.0
        steps = 1
        if self._prefilling:
            step_s += self._prefill(self._prefilling[0]) / machine.prefill_tokens_per_s
        else:
            left = min(sequence.turn.output_tokens - sequence.decoded for sequence in self._decoding)
            steps = max(1, min(left, int((until_s - self._now) / step_s)))
        self._now += steps * step_s
        for sequence in self._decoding:
            sequence.decoded += steps
        if self._prefilling and not self._prefilling[0].left_tokens:
            sequence = self._prefilling.pop(0)
            sequence.first_token_s, sequence.decoded = self._now, 1
            self._cache.keep(sequence.turn.blocks)
            self._decoding.append(sequence)
        for sequence in [sequence for sequence in self._decoding if sequence.decoded >= sequence.turn.output_tokens]:
            sequence.ended_s = self._now
            ended.append(sequence)
            self._decoding.remove(sequence)
            self.disk.keep(sequence.turn.blocks)

    def _prefill(self, sequence: SimulatedSequence) -> int:
        if not sequence.looked_up:
            sequence.looked_up = True
            # Blocks that were restored for the sequence are its own until it begins.
            held = max(sequence.restored, self._cache.run(sequence.turn.blocks)) * BLOCK_TOKENS
            sequence.cached_tokens = min(held, sequence.turn.prompt_tokens - 1)
            sequence.left_tokens = sequence.turn.prompt_tokens - sequence.cached_tokens
        tokens = min(CHUNK_TOKENS, sequence.left_tokens)
        sequence.left_tokens -= tokens
        return tokens


class Blocks:
    """A cache of blocks, least recently used first out, and what came and went."""

    def __init__(self, blocks_max: int) -> None:
        self._blocks: OrderedDict[bytes, None] = OrderedDict()
        self._max = blocks_max
        self._events: tuple[set[bytes], set[bytes]] = (set(), set())

    def run(self, blocks: tuple[bytes, ...]) -> int:
        """How many of `blocks` are there, up to the first that is not."""
        return next((index for index, block in enumerate(blocks) if block not in self._blocks), len(blocks))

    def take_events(self) -> tuple[set[bytes], set[bytes]]:
        events, self._events = self._events, (set(), set())
        return events

    def keep(self, blocks: tuple[bytes, ...]) -> None:
        came, went = self._events
        for block in reversed(blocks) if self._max else ():
            if block not in self._blocks:
                came.add(block)
                went.discard(block)
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._max:
            block, _ = self._blocks.popitem(last=False)
            went.add(block)
            came.discard(block)
