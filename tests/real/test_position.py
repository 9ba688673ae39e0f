"""The position law with real weights: what a sequence computes is the same cold, hot, warm, moved, in parts and in
company.

Every sequence is forced along real text, the source of a module of the standard library, and its logits are compared:
with the cold sequence's to the last bit where attention is all there is, and with mlx-lm's where no KV is sealed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from satchel.actors.protocol.block_ids import BLOCK_TOKENS
from satchel.actors.replica.execution import executor
from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.kernels.sealing import FULL_PRECISION, POLICIES
from satchel.actors.replica.kv.caches import new_pool
from satchel.actors.replica.kv.paged_cache import Reads
from satchel.actors.replica.loading import models
from satchel.actors.replica.loading.ways import decode_ways
from satchel.actors.replica.memory.disk_tier import DiskTier
from tests.worlds.replica.bench import Bench, Forced, Logits
from tests.worlds.replica.bench_disk import Node, process, write_down
from tests.worlds.split_nodes import TIMING, split_nodes

from .reference import ON_CPU, SEALED_OFF, Allowed, Reference, Tally
from .served import ANSWER_S, own_source

pytestmark = pytest.mark.real

SEALED = Allowed(SEALED_OFF)
ANSWER = 32
PROMPTS = (600, 60, 140)
"""Beyond two blocks and a window of 512, and others that stay within a block."""

SAID = 25
"""Tokens of an answer that the long sequence gave in an earlier turn, over the end of a block."""

TURN = 2 * BLOCK_TOKENS - SAID // 2
"""Tokens of that turn's prompt."""

AGENT = "default/reader"

PATIENT = replace(
    TIMING,
    answer_s=ANSWER_S,
    brief_answer_s=ANSWER_S,
    ask_s=ANSWER_S,
    frame_silence_s=ANSWER_S,
    consumer_lease_s=ANSWER_S,
    block_lease_s=ANSWER_S,
)
"""A step holds up the loop on which both nodes live."""


class Sequences:
    """A loaded model, and sequences of real text.

    Args:
        folder: an empty one, for weights that a GPU multiplies in float32.

    Attributes:
        scripts: by sequence its tokens, prompt and answer.
        cold: the logits of each sequence, computed alone by an engine that remembers nothing.
    """

    def __init__(self, reference: Reference, folder: Path) -> None:
        if not ON_CPU:
            reference.unpack(folder)
        self.loaded: LoadedModel = models.load(
            str(reference.folder if ON_CPU else folder),
            dtype="float32",
            context_tokens_max=None,
            progress=lambda what, fraction: None,
            numerics="reproducible",
        )
        tokens = reference.prompt(own_source("textwrap"))
        self.scripts = {sequence: tokens[: prompt + ANSWER] for sequence, prompt in enumerate(PROMPTS)}
        # Another beginning, so that no sequence finds another one's KV.
        self.scripts = {
            sequence: [*script[:1], 10 + sequence, *script[1:-1]] for sequence, script in self.scripts.items()
        }
        self.cold: Logits = {}

    @property
    def exact(self) -> bool:
        """Whether bits are promised: full attention in float32 on a CPU."""
        spec = self.loaded.spec
        return ON_CPU and spec.rule.window == 0 and not spec.recurrent

    def submit(self, bench: Bench, sequence: int, agent: str = "") -> None:
        bench.submit(
            f"sequence {sequence}",
            self.scripts[sequence][: PROMPTS[sequence]],
            seed=sequence,
            max_tokens=ANSWER,
            agent=agent,
        )

    def turn(self, bench: Bench) -> None:
        """An earlier turn of the long sequence's conversation."""
        bench.submit("turn", self.scripts[0][:TURN], seed=0, max_tokens=SAID, agent=AGENT)
        bench.drain()

    def compare(self, noted: Logits, what: str) -> None:
        """Holds the logits of sequences against the cold ones, of all positions of each."""
        of = {sequence for sequence, _ in noted}
        expected = {place: one for place, one in self.cold.items() if place[0] in of}
        tally = Tally(SEALED)
        tally.logits(expected, noted)
        tally.close(what)
        if self.exact:
            assert all(np.array_equal(noted[place], one) for place, one in expected.items()), what


Forcing = Callable[[dict[int, list[int]]], Logits]


@pytest.fixture
def force(monkeypatch: pytest.MonkeyPatch) -> Forcing:
    """Makes engines from now on force their sequences; returns where they note logits."""

    def forced(scripts: dict[int, list[int]]) -> Logits:
        noted: Logits = {}
        monkeypatch.setattr(executor, "BatchSampler", lambda *_: Forced(scripts, noted))
        return noted

    return forced


@pytest.fixture(scope="module")
def sequences(exact: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sequences]:
    made = Sequences(exact, tmp_path_factory.mktemp("unpacked"))
    noted: Logits = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "BatchSampler", lambda *_: Forced(made.scripts, noted))
        for sequence in made.scripts:
            bench = Bench(made.loaded)
            made.submit(bench, sequence)
            bench.drain()
            assert bench.sequences[f"sequence {sequence}"].cached == 0
    # A step beyond a sequence's end may have begun.
    made.cold = {place: one for place, one in noted.items() if place[1] < ANSWER}
    yield made


def computed(reference: Reference, sequences: Sequences, sequence: int) -> Logits:
    """What mlx-lm computes of a sequence."""
    prompt, answer = sequences.scripts[sequence][: PROMPTS[sequence]], sequences.scripts[sequence][PROMPTS[sequence] :]
    return {(sequence, drawn): one for drawn, one in enumerate(reference.logits(prompt, answer))}


def test_nothing_sealed_is_what_mlx_lm_computes(exact: Reference, sequences: Sequences, force: Forcing):
    """Sequences within a block always, and every sequence where KV is kept in full precision."""
    tally = Tally()
    for sequence in (1, 2):
        tally.logits(computed(exact, sequences, sequence), sequences.cold)
    noted = force(sequences.scripts)
    bench = Bench(models.resealed(sequences.loaded, POLICIES[FULL_PRECISION]))
    sequences.submit(bench, 0)
    bench.drain()
    tally.logits(computed(exact, sequences, 0), noted)
    tally.close("as mlx-lm")


def test_company_and_chunks_change_nothing(sequences: Sequences, force: Forcing, monkeypatch: pytest.MonkeyPatch):
    """Short sequences join while the long one is read in chunks that fit no block, and one leaves before it ends."""
    noted = force(sequences.scripts)
    bench = Bench(sequences.loaded)
    monkeypatch.setattr(bench.engine.prefill.pace, "budget", lambda decoding: 150)
    for sequence in sequences.scripts:
        sequences.submit(bench, sequence)
        bench.turn()
    bench.drain()
    sequences.compare(noted, "in company")


def test_as_it_is_served_the_same_is_computed(sequences: Sequences, force: Forcing):
    """By the way that decode steps go by default here, which may add up in another order."""
    loaded = sequences.loaded
    way = decode_ways.fastest(loaded.model, loaded.spec, loaded.context_tokens)
    print(f"decode steps: {way.describe()}")
    noted = force(sequences.scripts)
    bench = Bench(replace(loaded, way=way, pool=new_pool(loaded.spec, kernels=way.reads is Reads.KERNEL)))
    for sequence in sequences.scripts:
        sequences.submit(bench, sequence)
    bench.drain()
    tally = Tally(SEALED)
    tally.logits(sequences.cold, noted)
    tally.close("as it is served")


def kept(bench: Bench, disk: DiskTier, sequences: Sequences, noted: Logits) -> int | None:
    """Runs the long sequence and writes it down. Returns how many tokens of it were found."""
    noted.clear()
    sequences.submit(bench, 0, AGENT)
    bench.drain()
    sequences.compare(noted, "from memory or disk")
    write_down(bench, disk)
    return bench.sequences.pop("sequence 0").cached


def test_memory_and_disk_give_what_was_computed(sequences: Sequences, force: Forcing, tmp_path: Path):
    """A conversation's next turn goes on from the KV of its last answer, of which a block was sealed while it was
    said, and after a restart from the disk."""
    node, noted = Node(tmp_path / "kv"), force(sequences.scripts)
    bench, disk = process(sequences.loaded, node)
    sequences.turn(bench)
    assert kept(bench, disk, sequences, noted) == TURN + SAID, "hot"
    node.restart()
    bench, disk = process(sequences.loaded, node)
    assert kept(bench, disk, sequences, noted) == PROMPTS[0] - 1, "warm"
    node.store.close()


async def test_what_another_node_computed_gives_the_same(
    sequences: Sequences, force: Forcing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """One node reads the prompt and another one answers, with the KV that it pulls from there."""
    noted = force({0: sequences.scripts[0]})
    async with split_nodes(tmp_path, sequences.loaded, monkeypatch, PATIENT) as nodes, asyncio.timeout(ANSWER_S):
        nodes.wait_s = ANSWER_S
        await nodes.answer("moved", sequences.scripts[0][: PROMPTS[0]], ANSWER, logprobs=None)
        counters = nodes.disks["air"].counters
        assert (counters.followed_sequences, counters.lost_prefills) == (1, 0)
        assert counters.restored_tokens == PROMPTS[0] - 1
    sequences.compare(noted, "moved")
