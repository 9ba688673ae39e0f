"""`satchel ps`, `top` and `status`: the same figures for people and for programs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from satchel.actors.model_files.source import EMBEDDED
from satchel.actors.protocol.pool_messages import LOADING, UNLOADED, PooledModel
from satchel.api.requests.backend import ListedModel, NodeState, ReplicaStats
from tests.worlds.api import figures

from ..conftest import Served

BUSY = ReplicaStats(
    "tiny-0",
    "satchel/tiny",
    True,
    running=2,
    waiting=1,
    node="local",
    folder=str(EMBEDDED / "recall"),
    weights_bytes=11_000_000,
    memory_bytes=3_000_000,
    memory_bytes_max=64_000_000,
    slots_running=4,
    slots_kept=6,
    slots_free=2,
)
IDLE = ReplicaStats(
    "other-0", "other", True, node="local", idle_s=400.0, memory_bytes=1_000_000, memory_bytes_max=64_000_000
)


@pytest.fixture
def one_machine(served: Served, backend: Any) -> Served:
    backend.machines = [
        NodeState("local", "127.0.0.1", (), True, disk_bytes=2_500_000, memory_free_bytes=9**10, agents=2)
    ]
    backend.replicas = [IDLE, BUSY]
    return served


async def test_ps_has_a_line_for_each_model(one_machine: Served) -> None:
    found = json.loads(await one_machine.says("ps", "--json"))
    assert [each["model"] for each in found] == ["satchel/tiny", "other"], "in the config's order"
    tiny, other = found
    assert (tiny["running"], tiny["waiting"], tiny["weights_bytes"], tiny["kv_bytes"]) == (2, 1, 11_000_000, 3_000_000)
    assert (other["idle_s"], other["node"], other["up"]) == (400.0, "local", True)
    assert tiny["context_tokens"] > 0
    lines = (await one_machine.says("ps")).splitlines()
    assert lines[2].split()[:7] == ["satchel/tiny", "local", "11", "MB", "3.0", "MB", "2"]
    assert "1 waiting" in lines[2] and "7 min" in lines[3]


async def test_ps_shows_a_replica_that_does_not_answer(one_machine: Served, backend: Any) -> None:
    backend.replicas = [replace(BUSY, answers=False)]
    assert "does not answer" in await one_machine.says("ps")


async def test_a_model_that_comes_and_goes_is_shown_with_its_state(
    one_machine: Served, backend: Any, cache_is_empty: None
) -> None:
    backend.replicas = [BUSY]
    backend.entries["other"] = ListedModel("other", ("gpt-4o",), True, False, "embedded:script")
    backend.states["other"] = PooledModel("other", LOADING, "reading weights", 0.43)
    tiny, other = json.loads(await one_machine.says("ps", "--json"))
    assert (tiny["state"], tiny["aliases"], tiny["progress"]) == ("loaded", [], None)
    assert (other["state"], other["aliases"], other["replica"]) == ("loading", ["gpt-4o"], None)
    assert other["progress"] == {"what": "reading weights", "fraction": 0.43}
    local = {each["source"]: each for each in json.loads(await one_machine.says("list", "--json"))}
    script = local["embedded:script"]
    assert (script["served_as"], script["state"], script["aliases"]) == ("other", "loading", ["gpt-4o"])
    assert script["progress"] == other["progress"]
    for command in ("ps", "models", "list", "top"):
        text = await one_machine.says(command)
        assert "loading 43%:" in text and "other" in text, command
        assert "gpt-4o" in text or command == "top"
    backend.states["other"] = PooledModel("other", UNLOADED, error="its weights are gone")
    assert "other" not in await one_machine.says("ps"), "it does not run"
    text = await one_machine.says("models")
    assert "unloaded" in text and "other could not be loaded the last time: its weights are gone" in text


@pytest.fixture
def cache_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


async def test_top_agrees_with_the_clusters_view(one_machine: Served) -> None:
    found = json.loads(await one_machine.says("top", "--json"))
    async with httpx.AsyncClient(base_url=one_machine.endpoint_url) as client:
        view = (await client.get("/v1/cluster")).json()
    totals = found.pop("totals")
    assert found == view
    running = sum(each["running"] for each in json.loads(await one_machine.says("ps", "--json")))
    assert (totals["running"], totals["waiting"], totals["agents"]) == (running, 1, view["agents_count"]) == (2, 1, 2)
    assert (totals["memory_bytes"], totals["memory_bytes_max"]) == (4_000_000, 128_000_000)


async def test_every_command_says_the_figures_of_the_clusters_view(one_machine: Served) -> None:
    async with httpx.AsyncClient(base_url=one_machine.endpoint_url) as client:
        view = (await client.get("/v1/cluster")).json()
    top, ps, status = [json.loads(await one_machine.says(name, "--json")) for name in ("top", "ps", "status")]
    expected = figures.of_view(view)
    assert expected["tiny-0"] == ("local", True, 2, 1, 3_000_000, 64_000_000) and len(expected) == 2
    assert figures.of_view(top) == figures.of_ps(ps) == figures.of_status(status) == expected
    assert top["nodes"] == status["nodes"] == view["nodes"]
    states = {model["id"]: (model["state"], model["aliases"]) for model in view["models"]}
    assert {each["model"]: (each["state"], each["aliases"]) for each in ps} == states
    assert states.keys() == status["models"].keys()


async def test_top_shows_one_view_if_it_is_not_in_a_terminal(one_machine: Served) -> None:
    text = await one_machine.says("top")
    assert "2 running, 1 waiting" in text and "2 agents" in text and "KV 4.0 MB of 128 MB in memory" in text
    assert "4/6/2" in text, "slots by state"


async def test_the_status_of_one_machine_has_three_lines(one_machine: Served) -> None:
    text = await one_machine.says("status")
    head, models, memory = text.splitlines()
    assert head.startswith(one_machine.endpoint_url)
    assert models == "satchel/tiny: 2 running, 1 waiting, 0 tokens/s; other: idle for 7 min"
    assert memory == "KV 4.0 MB of 128 MB in memory, 2.5 MB on disk; 2 agents; 3.5 GB of memory free"
    assert "tiny-0" in await one_machine.says("status", "--long")


async def test_what_is_wrong_has_further_lines(one_machine: Served, backend: Any) -> None:
    backend.machines = [replace(backend.machines[0], disk_full=True)]
    backend.replicas = [replace(BUSY, proving="pictures", proving_since=1.0), IDLE]
    lines = (await one_machine.says("status")).splitlines()
    assert "local cannot write KV to disk, and tries again: its disk is full" in lines
    assert "until its self-test ends: pictures" in " ".join(" ".join(lines).split())
