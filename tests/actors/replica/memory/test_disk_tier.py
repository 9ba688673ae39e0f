"""The KV of agents' sequences is soon on disk, and a new process continues from it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.loading import models
from satchel.actors.replica.memory import disk_tier
from tests.worlds.models.families import write_model
from tests.worlds.replica.bench import load_tiny
from tests.worlds.replica.bench_disk import Node, process, write_down

AGENT = "default/alice"


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path / "kv")
    yield node
    node.store.check()
    node.store.close()


def prompt_of(length: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3000) for _ in range(length)]


@pytest.mark.parametrize("length", [40, 255, 256, 300, 700])
def test_a_new_process_computes_only_what_is_new(loaded: LoadedModel, node: Node, length: int):
    """Cold, hot and warm give the same answer, and neither the prompt nor the answer of the turn is computed again."""
    bench, disk = process(loaded, node)
    first = bench.run("first", prompt_of(length), agent=AGENT, max_tokens=20)
    second = prompt_of(length) + first.tokens + prompt_of(30, seed=2)
    hot = bench.run("hot", second, agent=AGENT)
    write_down(bench, disk)
    assert hot.cached == length + 20
    node.restart()
    bench, disk = process(loaded, node)
    warm = bench.run("warm", second, agent=AGENT)
    assert warm.tokens == hot.tokens
    # All of its own prompt but the last token: the second turn is on the disk too.
    assert warm.cached == len(second) - 1
    cold = process(loaded, Node(node.root.parent / "other"))[0].run("cold", second)
    assert cold.tokens == warm.tokens and cold.cached == 0


def test_a_conversation_that_goes_on_from_memory_asks_nothing_of_the_disk(
    loaded: LoadedModel, node: Node, monkeypatch: pytest.MonkeyPatch
):
    """But for much that is new, which others may have left there, and where it is not all that the agent has had."""
    bench, disk = process(loaded, node)
    prompt = prompt_of(300)
    first = bench.run("first", prompt, agent=AGENT, max_tokens=20)
    write_down(bench, disk)
    asked: list[str] = []
    call = node.call
    monkeypatch.setattr(node, "call", lambda method, *rest: (asked.append(method), call(method, *rest))[1])
    told = prompt + first.tokens

    def looks(name: str, more: list[int], remembered: int, agent: str = AGENT) -> bool:
        asked.clear()
        bench.run(name, more, agent=agent, remembered=remembered)
        return "disk_find" in asked

    assert not looks("little", [*told, *prompt_of(30, seed=2)], len(told))
    assert looks("much", [*told, *prompt_of(300, seed=3)], len(told))
    elsewhere = [*told, *prompt_of(9, seed=4)]
    assert looks("said elsewhere", [*elsewhere, *prompt_of(9, seed=5)], len(elsewhere))
    assert looks("unknown", [*told, *prompt_of(30, seed=6)], 0)
    assert not looks("nobody's", [*told, *prompt_of(30, seed=7)], 0, agent="")
    monkeypatch.undo()
    write_down(bench, disk)


@pytest.mark.parametrize(("known", "more"), [(70, 200), (70, 600), (256, 600), (470, 600)])
def test_what_was_known_is_found_however_much_follows(loaded: LoadedModel, node: Node, known: int, more: int):
    """The open end of what is on the disk lies behind any block of the next prompt, not only behind its last."""
    bench, disk = process(loaded, node)
    bench.run("first", prompt_of(known), agent=AGENT, max_tokens=1)
    write_down(bench, disk)
    node.restart()
    bench, disk = process(loaded, node)
    warm = bench.run("warm", prompt_of(known) + prompt_of(more, seed=2), agent=AGENT)
    assert warm.cached is not None and warm.cached >= known


def test_what_memory_has_is_not_counted_as_read(loaded: LoadedModel, node: Node):
    """Of a prompt whose first block another request has left in memory, only the rest comes from disk."""
    bench, disk = process(loaded, node)
    bench.run("first", prompt_of(600), agent=AGENT, max_tokens=1)
    write_down(bench, disk)
    node.restart()
    bench, disk = process(loaded, node)
    bench.run("another", [*prompt_of(300)[:256], *prompt_of(9, seed=9)], max_tokens=1)
    warm = bench.run("warm", prompt_of(600), agent=AGENT)
    assert (warm.cached, warm.read) == (599, 599 - 256)


@pytest.fixture(scope="module", params=["q4", "fp16"])
def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """The tiny model, by how it keeps KV."""
    return load_tiny(tmp_path_factory.mktemp("tiny"), kv=request.param)


@pytest.mark.parametrize("length", [2, 255, 256, 257, 511, 512, 513])
def test_the_same_prompt_costs_one_token_hot_and_warm(kept: LoadedModel, node: Node, length: int):
    """Around the end of a block too, whose full precision is gone once the answer fills it."""
    bench, disk = process(kept, node)
    prompt = prompt_of(length)
    cold = bench.run("cold", prompt, agent=AGENT)
    write_down(bench, disk)
    hot = bench.run("hot", prompt, agent=AGENT)
    write_down(bench, disk)
    node.restart()
    other, disk = process(kept, node)
    warm = other.run("warm", prompt, agent=AGENT)
    assert (cold.cached, hot.cached, warm.cached) == (0, length - 1, length - 1)
    assert (cold.read, hot.read, warm.read) == (0, 0, length - 1)
    assert cold.tokens == hot.tokens == warm.tokens
    # Neither the blocks nor the tail of the prompt are written a second time.
    write_down(other, disk)
    answer_blocks = (length + 11) // 256 - (length - 1) // 256
    assert disk.counters.written_blocks <= answer_blocks + 1


def test_what_is_restored_has_the_same_bytes(loaded: LoadedModel, node: Node):
    bench, disk = process(loaded, node)
    bench.run("one", prompt_of(600), agent=AGENT)
    write_down(bench, disk)
    other, _ = process(loaded, node)
    other.submit("again", prompt_of(600), agent=AGENT)
    other.turn()
    before, after = bench.engine.prefixes, other.engine.prefixes
    assert before.block_ids() and set(before.block_ids()) <= set(after.block_ids())
    for block in before.block_ids():
        left, right = before.take(block), after.take(block)
        assert left is not None and right is not None
        for one, two in zip(left.value.arrays(), right.value.arrays(), strict=True):
            assert one.dtype == two.dtype and np.array_equal(np.array(one), np.array(two))
    other.drain()


def test_a_store_that_is_silent_or_damaged_costs_work_and_nothing_else(
    loaded: LoadedModel, node: Node, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(disk_tier, "TRIES_S", (0.01,))
    bench, disk = process(loaded, node)
    want = bench.run("one", prompt_of(600), agent=AGENT)
    write_down(bench, disk)
    for file in node.root.rglob("*.kv"):
        data = bytearray(file.read_bytes())
        data[100] ^= 1
        file.write_bytes(data)
    node.restart()
    other, disk = process(loaded, node)
    got = other.run("damaged", prompt_of(600), agent=AGENT)
    assert got.tokens == want.tokens and disk.counters.corrupt_blocks > 0
    node.silent = True
    third, disk = process(loaded, node)
    got = third.run("silent", prompt_of(600), agent=AGENT)
    assert got.tokens == want.tokens and got.cached == 0
    write_down(third, disk)
    assert disk.counters.unwritten_turns == 1
    node.silent = False


def test_sequences_without_an_agent_leave_nothing_on_the_disk(loaded: LoadedModel, node: Node):
    bench, disk = process(loaded, node)
    bench.run("nobody", prompt_of(600))
    write_down(bench, disk)
    assert disk.counters.written_blocks == 0 and not list(node.root.rglob("*.kv"))


def test_more_than_memory_keeps_is_restored_all_the_same(loaded: LoadedModel, node: Node):
    """What is pinned for a sequence may exceed the prefix cache, and leaves it when the sequence has begun."""
    bench, disk = process(loaded, node)
    bench.run("one", prompt_of(1500), agent=AGENT)
    write_down(bench, disk)
    room = 3 * 256 * loaded.spec.bytes_per_token
    other, disk = process(loaded, node, prefix_bytes_max=room)
    sequence = other.run("again", prompt_of(1500), agent=AGENT)
    assert sequence.cached == 1499
    write_down(other, disk)
    assert other.engine.prefixes.nbytes <= room


@pytest.mark.variants(8)
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "gpt_oss", "qwen3_next", "nemotron_h", "deepseek_v2"])
@pytest.mark.parametrize("kv", ["q4", "fp16"])
def test_every_kind_of_layer_comes_back(tmp_path: Path, node: Node, family: str, kv: str):
    folder = write_model(tmp_path / family, family)
    loaded = models.load(
        str(folder), context_tokens_max=None, progress=lambda *_: None, weights="stored", kv=kv, numerics="reproducible"
    )
    bench, disk = process(loaded, node)
    first = bench.run("first", prompt_of(620), agent=AGENT, max_tokens=16)
    write_down(bench, disk)
    longer = prompt_of(620) + first.tokens + [5, 6, 7]
    node.restart()
    other, _ = process(loaded, node)
    warm = other.run("warm", longer, agent=AGENT, max_tokens=1)
    assert warm.cached == 620 + 16


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "qwen3_next", "nemotron_h"])
@pytest.mark.parametrize("kv", ["q4", "fp16"])
def test_every_kind_of_layer_serves_a_prompt_that_ends_a_block(tmp_path: Path, node: Node, family: str, kv: str):
    """Windows have enough before the last token, and recurrent layers a snapshot right there."""
    folder = write_model(tmp_path / family, family)
    loaded = models.load(
        str(folder), context_tokens_max=None, progress=lambda *_: None, weights="stored", kv=kv, numerics="reproducible"
    )
    bench, disk = process(loaded, node)
    cold = bench.run("cold", prompt_of(512), agent=AGENT, max_tokens=5)
    hot = bench.run("hot", prompt_of(512), agent=AGENT, max_tokens=5)
    write_down(bench, disk)
    node.restart()
    other, _ = process(loaded, node)
    warm = other.run("warm", prompt_of(512), agent=AGENT, max_tokens=5)
    assert (cold.cached, hot.cached, warm.cached) == (0, 511, 511)
    assert hot.tokens == warm.tokens
