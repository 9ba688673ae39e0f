"""A prompt that one node prefills and another decodes, with everything between them except Ray: the answer is that of a
single node, to the bit, whatever happens on the way."""

from __future__ import annotations

import asyncio
import random

import pytest

from satchel.actors.protocol.block_ids import BLOCK_TOKENS
from satchel.actors.protocol.replica_messages import SequenceUpdate
from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.loading import models
from tests.worlds.models.families import write_model
from tests.worlds.replica.bench import load_tiny
from tests.worlds.split_nodes import SplitNodes, split_nodes


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_tiny(tmp_path_factory.mktemp("tiny"))


def prompt_of(loaded: LoadedModel, tokens: int, seed: int = 5) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(loaded.vocabulary_size - 20) for _ in range(tokens)]


def words(updates: list[SequenceUpdate]) -> tuple[list[int], list[object], str | None]:
    said = [token for update in updates for token in update.tokens]
    return said, [each for update in updates for each in update.logprobs or []], updates[-1].finish


def cached(updates: list[SequenceUpdate]) -> int | None:
    return next(update.cached_tokens for update in updates if update.cached_tokens is not None)


async def alone(nodes: SplitNodes, prompt: list[int], tokens: int = 12) -> list[SequenceUpdate]:
    """Generates on the decoding node alone, without KV of another agent's sequence."""
    before, nodes.decision = nodes.decision, nodes.alone("air")
    updates = await nodes.answer("alone", prompt, tokens)
    await nodes.written("air")
    nodes.decision = before
    assert cached(updates) == 0
    return updates


def splits(nodes: SplitNodes) -> tuple[int, int]:
    counters = nodes.disks["air"].counters
    return counters.followed_sequences, counters.lost_prefills


@pytest.mark.parametrize("tokens", [1100, 1025, 1024, 130])
async def test_the_words_are_those_of_one_node_and_the_decoding_one_computes_nothing(
    tmp_path, loaded, monkeypatch, tokens
):
    """With an open tail, without one, with a full one, and with only a tail."""
    prompt = prompt_of(loaded, tokens)
    async with split_nodes(tmp_path, loaded, monkeypatch) as nodes:
        reference = await alone(nodes, prompt)
        updates = await nodes.answer("alice", prompt)
        assert words(updates) == words(reference) and splits(nodes) == (1, 0)
        assert cached(updates) == 0, "it was computed, by another node"
        assert nodes.disks["air"].counters.restored_tokens == tokens - 1
        assert sorted(nodes.released) == [("air", "alice"), ("air", "alone"), ("studio", "alice/prefill")]


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", {"kv": "fp16"}),
        ("gemma3_text", {}),
        ("qwen3_next", {}),
    ],
)
async def test_of_layers_with_windows_or_states_the_words_are_equal_too(tmp_path, monkeypatch, family, more):
    model = models.load(
        str(write_model(tmp_path / "model", family)), context_tokens_max=None, numerics="reproducible",
        progress=lambda what, fraction: None, **more,
    )  # fmt: skip
    prompt = prompt_of(model, 900)
    async with split_nodes(tmp_path, model, monkeypatch) as nodes:
        reference, updates = await alone(nodes, prompt), await nodes.answer("alice", prompt)
        assert words(updates)[0] == words(reference)[0] and splits(nodes) == (1, 0)
        assert nodes.disks["air"].counters.restored_tokens == len(prompt) - 1


async def begun(nodes: SplitNodes, prompt: list[int], blocks: int) -> asyncio.Task[list[SequenceUpdate]]:
    """Returns a waiting sequence of which this many blocks have come; no more come for now."""
    before = nodes.entries_on("air")
    nodes.pause_s["studio"] = 0.15
    task = asyncio.create_task(nodes.answer("alice", prompt))
    await nodes.until(lambda: nodes.entries_on("air") >= before + blocks)
    nodes.held.add("studio")
    assert not task.done() and nodes.entries_on("air") < before + len(prompt) // BLOCK_TOKENS
    return task


@pytest.mark.parametrize("dies", ["replica", "store"])
async def test_the_prefilling_node_dies_in_the_middle(tmp_path, loaded, monkeypatch, dies):
    """The KV that has come is used, and the rest is computed."""
    prompt = prompt_of(loaded, 2000)
    async with split_nodes(tmp_path, loaded, monkeypatch) as nodes:
        reference = await alone(nodes, prompt)
        task = await begun(nodes, prompt, 2)
        if dies == "store":
            await nodes.kill_store("studio")
        else:
            nodes.processes["studio"].kill()
        updates = await asyncio.wait_for(task, 30)
        assert words(updates) == words(reference) and splits(nodes) == (1, 1)
        came = nodes.disks["air"].counters.restored_tokens
        assert 2 * BLOCK_TOKENS <= came < len(prompt) - 1 and came % BLOCK_TOKENS == 0


async def test_a_prefill_that_stands_still_is_waited_for_no_longer_than_the_decision_says(
    tmp_path, loaded, monkeypatch
):
    """Other sequences of the decoding node go on meanwhile."""
    prompt = prompt_of(loaded, 600)
    async with split_nodes(tmp_path, loaded, monkeypatch) as nodes:
        reference = await alone(nodes, prompt)
        nodes.held.add("studio")
        nodes.wait_s = 1.5
        task = asyncio.create_task(nodes.answer("alice", prompt))
        await nodes.until(lambda: bool(nodes.processes["air"].actor._following))
        nodes.decision = nodes.alone("air")
        await nodes.answer("bob", prompt_of(loaded, 40, 6), tokens=40)
        assert not task.done(), "the other one was answered while this one waited"
        assert words(await asyncio.wait_for(task, 30)) == words(reference) and splits(nodes) == (1, 1)


async def test_a_client_that_leaves_while_it_waits_leaves_nothing(tmp_path, loaded, monkeypatch):
    async with split_nodes(tmp_path, loaded, monkeypatch) as nodes:
        task = await begun(nodes, prompt_of(loaded, 2000), 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        nodes.held.clear()
        await nodes.until(lambda: not nodes.engines["studio"].active)


async def test_the_next_turn_is_remembered_where_it_was_decoded(tmp_path, loaded, monkeypatch):
    prompt = prompt_of(loaded, 1100)
    async with split_nodes(tmp_path, loaded, monkeypatch) as nodes:
        said = words(await nodes.answer("alice", prompt))[0]
        nodes.decision = nodes.alone("air")
        again = await nodes.answer("alice", [*prompt, *said, *prompt_of(loaded, 30, 8)])
        assert (cached(again) or 0) >= len(prompt), "its KV is in this node's memory"


async def test_splits_of_many_agents_at_once_say_what_each_says_alone(tmp_path, loaded, monkeypatch):
    """More splits than a store pulls at a time."""
    prompts = {f"agent{number}": prompt_of(loaded, 500 + 37 * number, number) for number in range(6)}
    async with split_nodes(tmp_path, loaded, monkeypatch) as nodes:
        together = await asyncio.gather(*(nodes.answer(name, prompt) for name, prompt in prompts.items()))
        nodes.decision = nodes.alone("studio")
        for number, (updates, prompt) in enumerate(zip(together, prompts.values(), strict=True)):
            assert words(updates) == words(await nodes.answer(f"alone{number}", prompt))
        assert splits(nodes) == (6, 0)
