"""The position law with real weights: what a row computes is the same cold, hot, warm, moved, in parts and in company.

Every row is forced along real text, the source of a module of the standard library, and its logits are compared: with
the cold row's to the last bit where attention is all there is, and with mlx-lm's where no KV is sealed.
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
from satchel.actors.replica.loading import decode_ways, models
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
"""Tokens of an answer that the long row gave in an earlier turn, over the end of a block."""

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


class Rows:
    """A loaded model, and rows of real text.

    Args:
        folder: an empty one, for weights that a GPU multiplies in float32.

    Attributes:
        scripts: by row its tokens, prompt and answer.
        cold: the logits of each row, computed alone by an engine that remembers nothing.
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
        self.scripts = {row: tokens[: prompt + ANSWER] for row, prompt in enumerate(PROMPTS)}
        # Another beginning, so that no row finds another one's KV.
        self.scripts = {row: [*script[:1], 10 + row, *script[1:-1]] for row, script in self.scripts.items()}
        self.cold: Logits = {}

    @property
    def exact(self) -> bool:
        """Whether bits are promised: full attention in float32 on a CPU."""
        spec = self.loaded.spec
        return ON_CPU and spec.rule.window == 0 and not spec.recurrent

    def submit(self, bench: Bench, row: int, agent: str = "") -> None:
        bench.submit(f"row {row}", self.scripts[row][: PROMPTS[row]], seed=row, max_tokens=ANSWER, agent=agent)

    def turn(self, bench: Bench) -> None:
        """An earlier turn of the long row's conversation."""
        bench.submit("turn", self.scripts[0][:TURN], seed=0, max_tokens=SAID, agent=AGENT)
        bench.drain()

    def compare(self, noted: Logits, what: str) -> None:
        """Holds the logits of rows against the cold ones, of all positions of each."""
        of = {row for row, _ in noted}
        expected = {place: one for place, one in self.cold.items() if place[0] in of}
        tally = Tally(SEALED)
        tally.logits(expected, noted)
        tally.close(what)
        if self.exact:
            assert all(np.array_equal(noted[place], one) for place, one in expected.items()), what


Forcing = Callable[[dict[int, list[int]]], Logits]


@pytest.fixture
def force(monkeypatch: pytest.MonkeyPatch) -> Forcing:
    """Makes engines from now on force their rows; returns where they note logits."""

    def forced(scripts: dict[int, list[int]]) -> Logits:
        noted: Logits = {}
        monkeypatch.setattr(executor, "BatchSampler", lambda *_: Forced(scripts, noted))
        return noted

    return forced


@pytest.fixture(scope="module")
def rows(exact: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rows]:
    made = Rows(exact, tmp_path_factory.mktemp("unpacked"))
    noted: Logits = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "BatchSampler", lambda *_: Forced(made.scripts, noted))
        for row in made.scripts:
            bench = Bench(made.loaded)
            made.submit(bench, row)
            bench.drain()
            assert bench.rows[f"row {row}"].cached == 0
    # A step beyond a row's end may have begun.
    made.cold = {place: one for place, one in noted.items() if place[1] < ANSWER}
    yield made


def computed(reference: Reference, rows: Rows, row: int) -> Logits:
    """What mlx-lm computes of a row."""
    prompt, answer = rows.scripts[row][: PROMPTS[row]], rows.scripts[row][PROMPTS[row] :]
    return {(row, drawn): one for drawn, one in enumerate(reference.logits(prompt, answer))}


def test_nothing_sealed_is_what_mlx_lm_computes(exact: Reference, rows: Rows, force: Forcing):
    """Rows within a block always, and every row where KV is kept in full precision."""
    tally = Tally()
    for row in (1, 2):
        tally.logits(computed(exact, rows, row), rows.cold)
    noted = force(rows.scripts)
    bench = Bench(models.resealed(rows.loaded, POLICIES[FULL_PRECISION]))
    rows.submit(bench, 0)
    bench.drain()
    tally.logits(computed(exact, rows, 0), noted)
    tally.close("as mlx-lm")


def test_company_and_chunks_change_nothing(rows: Rows, force: Forcing, monkeypatch: pytest.MonkeyPatch):
    """Short rows join while the long one is read in chunks that fit no block, and one leaves before it ends."""
    noted = force(rows.scripts)
    bench = Bench(rows.loaded)
    monkeypatch.setattr(bench.engine.prefill.pace, "budget", lambda decoding: 150)
    for row in rows.scripts:
        rows.submit(bench, row)
        bench.turn()
    bench.drain()
    rows.compare(noted, "in company")


def test_as_it_is_served_the_same_is_computed(rows: Rows, force: Forcing):
    """By the way that decode steps go by default here, which may add up in another order."""
    loaded = rows.loaded
    way = decode_ways.fastest(loaded.model, loaded.spec, loaded.context_tokens)
    print(f"decode steps: {way.describe()}")
    noted = force(rows.scripts)
    bench = Bench(replace(loaded, way=way, pool=new_pool(loaded.spec, kernels=way.reads is Reads.KERNEL)))
    for row in rows.scripts:
        rows.submit(bench, row)
    bench.drain()
    tally = Tally(SEALED)
    tally.logits(rows.cold, noted)
    tally.close("as it is served")


def kept(bench: Bench, disk: DiskTier, rows: Rows, noted: Logits) -> int | None:
    """Runs the long row and writes it down. Returns how many tokens of it were found."""
    noted.clear()
    rows.submit(bench, 0, AGENT)
    bench.drain()
    rows.compare(noted, "from memory or disk")
    write_down(bench, disk)
    return bench.rows.pop("row 0").cached


def test_memory_and_disk_give_what_was_computed(rows: Rows, force: Forcing, tmp_path: Path):
    """A conversation's next turn goes on from the KV of its last answer, of which a block was sealed while it was
    said, and after a restart from the disk."""
    node, noted = Node(tmp_path / "kv"), force(rows.scripts)
    bench, disk = process(rows.loaded, node)
    rows.turn(bench)
    assert kept(bench, disk, rows, noted) == TURN + SAID, "hot"
    node.restart()
    bench, disk = process(rows.loaded, node)
    assert kept(bench, disk, rows, noted) == PROMPTS[0] - 1, "warm"
    node.store.close()


async def test_what_another_node_computed_gives_the_same(
    rows: Rows, force: Forcing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """One node reads the prompt and another one answers, with the KV that it pulls from there."""
    noted = force({0: rows.scripts[0]})
    async with split_nodes(tmp_path, rows.loaded, monkeypatch, PATIENT) as nodes, asyncio.timeout(ANSWER_S):
        nodes.wait_s = ANSWER_S
        await nodes.answer("moved", rows.scripts[0][: PROMPTS[0]], ANSWER, logprobs=None)
        counters = nodes.disks["air"].counters
        assert (counters.followed_rows, counters.lost_prefills) == (1, 0)
        assert counters.restored_tokens == PROMPTS[0] - 1
    rows.compare(noted, "moved")
