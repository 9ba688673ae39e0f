"""Ranks go on from KV that the whole model has left, and the whole model from that of ranks."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.loading import models
from satchel.actors.replica.memory.other_parts import Remote
from tests.worlds.models.families import write_model
from tests.worlds.replica.bench import Bench, Received
from tests.worlds.replica.bench_disk import Node, disk_of, write_down
from tests.worlds.replica.ranks import ranks_of, turn

AGENT = "default/alice"
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"]}


def tokens_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, 3000) for _ in range(length)]


def whole(folder: Path, kv: str) -> LoadedModel:
    return models.load(
        str(folder), context_tokens_max=None, progress=lambda *_: None, numerics="fast", weights="stored", kv=kv
    )


def alike(found: Received, loaded: LoadedModel, prompt: list[int]) -> None:
    """What is computed from scratch is as likely, within the rounding of sums."""
    cold = Bench(loaded).run("cold", prompt, max_tokens=1, logprobs=2)
    assert found.tokens[0] == cold.tokens[0]
    (drawn, likeliest), (other, others) = found.logprobs[0], cold.logprobs[0]
    assert drawn == pytest.approx(other, abs=5e-3)
    assert likeliest == [(token, pytest.approx(value, abs=5e-3)) for token, value in others]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "more", "kv", "length"),
    [
        ("llama", {}, "q4", 600),
        ("qwen3", {}, "fp16", 40),
        ("gpt_oss", WINDOWS, "q4", 600),
    ],
)
def test_an_agent_talks_with_a_model_whole_then_in_two_shares_and_back(
    tmp_path: Path, family: str, more: dict[str, Any], kv: str, length: int
):
    """Neither computes again what the other has computed. The second node has copies of the first one's KV."""
    folder = write_model(tmp_path / "model", family, **more)
    loaded, homes = whole(folder, kv), [tmp_path / "first", tmp_path / "last"]
    node = Node(homes[0])
    first = turn(Bench(loaded, disk=disk_of(loaded, node)), tokens_of(length, 1), AGENT, 20)
    node.store.close()
    shutil.copytree(homes[0], homes[1])
    prompt = [*tokens_of(length, 1), *first.tokens, *tokens_of(30, 2)]
    with ranks_of(folder, 2, kv=kv, disks=homes) as ranks:
        second = ranks.ask(turn, prompt, AGENT, 300)
        assert ranks.end() == [0, 0]
    assert second.cached == length + 20 and len(second.tokens) == 300
    alike(second, loaded, prompt)
    with ranks_of(folder, 2, kv=kv, disks=homes) as ranks:
        again = ranks.ask(turn, prompt, AGENT, 20)
        assert ranks.end() == [0, 0]
    assert again.tokens == second.tokens[:20] and again.cached >= length + 20
    nodes = [Node(home) for home in homes]
    nodes[0].sources["last"] = nodes[1]
    prompt = [*prompt, *second.tokens, *tokens_of(9, 3)]
    disk = disk_of(loaded, nodes[0], [Remote("last", nodes[1].client)])
    bench = Bench(loaded, disk=disk)
    third = bench.run("third", prompt, agent=AGENT, max_tokens=1, logprobs=2)
    write_down(bench, disk)
    for each in nodes:
        each.store.check()
        each.store.close()
    assert third.cached == len(prompt) - 9
    alike(third, loaded, prompt)
