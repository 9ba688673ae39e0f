"""What the stories are made of: recordings, networks, the ledger, and what their commands refuse."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.stories import gossip, story, traces
from examples.stories.endpoint import RequestUsage
from examples.stories.ledger import Ledger, table
from tests.worlds.api.recordings import calls, talk

ROOT = Path(__file__).parents[2]


def test_a_prompt_of_several_agents_is_what_each_has_seen() -> None:
    record = talk(3) | {"system": {"planner": "You plan."}}
    first, second, third = traces.whowhen(record).requests
    planner, worker = first.agent, second.agent
    assert [request.opens for request in (first, second, third)] == [True, True, False]
    assert [message["role"] for message in first.new] == ["system", "user"]
    assert [message["content"][:9] for message in second.new] == ["human: So", "planner: "]
    assert (third.agent, [message["content"][:9] for message in third.new]) == (planner, ["worker: S"])
    assert worker != planner and third.reply.startswith("Step 2.")


def test_calls_go_on_only_where_the_prompt_before_is_their_beginning() -> None:
    requests = traces.agent_text(calls("a", "a b", "a b", "c")).requests
    assert [(request.opens, request.new[0]["content"]) for request in requests] == [
        (True, "a"),
        (False, " b"),
        (True, "a b"),
        (True, "c"),
    ]


@pytest.mark.parametrize("line", ["{", "[]", '{"id": "x"}', '{"id": "x", "calls": [{}]}', '{"messages": [1], "id": 1}'])
def test_a_line_that_is_no_recording_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(talk(2)) + f"\n\n{line}\n")
    with pytest.raises(traces.TraceError, match="line 3"):
        list(traces.read(path, 9))
    assert len(list(traces.read(path, 1))) == 1, "what is not asked for is not read"


def test_networks_are_connected_both_ways_and_rumours_take_the_shortest_way() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        names = story.any_names(rng, rng.randrange(3, 12))
        network = gossip.small_world(rng, names, shortcuts=rng.randrange(6))
        assert all(name in network[other] and name != other for name in names for other in network[name])
        far = gossip.distances(network, names[0])
        assert set(far) == set(names), "a ring holds all of them together"
        known, rounds = {names[0]}, 0
        while known < set(names):
            assert known == {name for name in names if far[name] <= rounds}
            known, rounds = known | {other for name in known for other in network[name]}, rounds + 1


def test_the_ledger_counts_what_is_computed_again() -> None:
    """Of an agent's last prompt and answer, what is not found in the next prompt; another agent's do not count."""
    ledger, usage = Ledger(), RequestUsage
    assert ledger.add("1", "ann", usage(100, 0, 10)).again_tokens == 0
    assert ledger.add("1", "ben", usage(500, 0)).again_tokens == 0
    assert ledger.add("2", "ann", usage(130, 110, 5)).again_tokens == 0
    assert ledger.add("2", "ann", usage(150, 100)).again_tokens == 35
    assert ledger.add("2", "ann", usage(150, 149)).again_tokens == 0, "a prompt's last token is always computed"
    assert ledger.add("2", "ann", usage(400, 256), known_tokens=300).again_tokens == 44
    sequences: dict[Any, Any] = {sequence["phase"]: sequence for sequence in ledger.by_phase()}
    assert (
        sequences["all"]["prefilled"]
        == sequences["1"]["prefilled"] + sequences["2"]["prefilled"]
        == ledger.computed_tokens
    )
    assert sequences["2"]["of them again"] == sequences["all"]["of them again"] == ledger.again_tokens == 79
    assert "| all |" in table(ledger.by_phase())


@pytest.mark.parametrize(
    ("script", "arguments", "status", "said"),
    [
        ("prisoners", ["--url", "http://127.0.0.1:1"], 1, "does not answer"),
        ("prisoners", ["--ways", "memory,hope"], 2, "not among"),
        ("gossip", ["--agents", "3", "--rumours", "4"], 2, "--rumours"),
    ],
)
def test_commands_say_what_is_wrong(script: str, arguments: list[str], status: int, said: str) -> None:
    command = [sys.executable, "-m", f"examples.stories.{script}", *arguments]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == status and said in ended.stderr, ended.stderr
    assert "Traceback" not in ended.stderr
