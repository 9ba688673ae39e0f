"""The scenarios on a real server: agents know what they were told, from phase to phase, and nothing is read twice."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.programs import ROOT, program
from benchmarks.scenarios import gossip, prisoners, replay, story, traces
from benchmarks.scenarios.endpoint import RequestUsage, endpoint_at
from benchmarks.scenarios.ledger import Ledger, table
from satchel.actors.protocol.block_ids import BLOCK_TOKENS
from satchel.cluster.bring_up.ports import free_port
from tests.system.serving import serving_recall

FILLER = "The ferry was late again and nobody knew why. "


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    home, port = tmp_path_factory.mktemp("scenarios"), free_port()
    with serving_recall(home, port):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def endpoint(url: str) -> Iterator[Any]:
    with endpoint_at(url) as found:
        yield found


@pytest.fixture
def run(endpoint: Any) -> Any:
    """Runs a story in the ways named, and returns what came of each."""

    def run(tell: Any, *ways: str) -> list[Any]:
        return list(story.run_all(endpoint, ways, tell, lambda text: None).values())

    return run


def answers(run: Any) -> list[str]:
    return [check.answer for check in run.told.checks]


def left_of(endpoint: Any) -> list[Any]:
    return endpoint._json("GET", "/v1/agents")["data"]


@pytest.mark.slow
def test_the_prisoners_keep_their_pact_and_read_nothing_twice(endpoint: Any, run: Any) -> None:
    """Five phases: each knows his own secrets, no one knows what he was not told, and no token that an agent has read
    or said is computed again. From the disk the answers are the same."""
    kept, disk = run(lambda mind: prisoners.prisoners(mind, seed=1, sentences=12), "memory", "disk")
    assert kept.told.right == len(kept.told.checks) == 12, kept.told.checks
    assert kept.ledger.again_tokens == 0, [entry for entry in kept.ledger.entries if entry.again_tokens]
    later = [entry.usage for entry in kept.ledger.entries if not entry.phase.startswith("1")]
    assert max(usage.prompt_tokens for usage in later) > 2 * BLOCK_TOKENS, "conversations cross blocks"
    assert sum(usage.computed_tokens for usage in later) < 0.12 * sum(usage.prompt_tokens for usage in later)
    assert answers(disk) == answers(kept)
    assert sum(endpoint.counters("satchel_restored_tokens_total").values()) > BLOCK_TOKENS
    assert disk.ledger.computed_tokens < 2 * kept.ledger.computed_tokens, "phases begin from the disk"
    phases = {entry.phase[0] for entry in kept.ledger.entries}
    assert phases == set("12345")
    assert left_of(endpoint) == [], "a run erases its agents"


@pytest.mark.slow
def test_a_rumour_gets_one_neighbour_further_in_a_round(endpoint: Any, run: Any) -> None:
    """Whoever was told knows, in the teller's own words; who is too far away does not. Where nothing is kept the
    answers are the same, and all is read again."""

    def tell(mind: Any) -> Any:
        return gossip.gossip(mind, seed=3, agents=6, rounds=2, rumours=1, shortcuts=0, sentences=4)

    kept, nothing = run(tell, "memory", "nothing")
    assert kept.told.right == len(kept.told.checks) == 6, kept.told.checks
    # Of a ring of six, two rounds leave out the one opposite.
    assert sum("not know" in answer for answer in answers(kept)) == 1
    assert kept.ledger.again_tokens == 0
    assert answers(nothing) == answers(kept)
    assert {entry.usage.cached_tokens for entry in nothing.ledger.entries} == {0}
    assert nothing.ledger.again_tokens > 0
    assert nothing.ledger.computed_tokens > 1.3 * kept.ledger.computed_tokens
    assert left_of(endpoint) == []


def talk(turns: int) -> dict[str, Any]:
    said = [("human", "Sort the parts. " + FILLER * 20)]
    for number in range(turns):
        said.append((("planner", "worker")[number % 2], f"Step {number}. {FILLER * 5}"))
    return {"id": "talk", "messages": [{"agent": agent, "content": content} for agent, content in said]}


def calls(*inputs: str) -> dict[str, Any]:
    each = [{"timestamp": number, "input": text, "output": f"Reply {number}."} for number, text in enumerate(inputs)]
    return {"id": "calls", "calls": each}


def write(path: Path, *records: Any) -> Path:
    text = "\n".join(json.dumps(record) for record in records) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def replayed(endpoint: Any, path: Path, *, served: bool, **limits: Any) -> Any:
    chosen = replay.ReplayLimits(**{"conversations": 9, "calls": 50, "cold": 0, **limits})
    return replay.replay(endpoint, path, chosen, lambda text: None, served=served)


def test_of_a_replay_with_the_models_own_replies_nothing_is_read_twice(endpoint: Any, tmp_path: Path) -> None:
    """Each later prompt extends what its agent remembers, and prompt and reply are found to the last token."""
    path = write(tmp_path / "talk.jsonl", talk(8))
    found = replayed(endpoint, path, served=True, cold=2)
    assert len(found.ledger.entries) == 8 and found.matches == {"new": 2, "extend": 6}
    assert found.ledger.again_tokens == 0, found.ledger.entries
    assert found.summary()["not prefilled"] > 0.6
    assert len(found.pairs) == 2 and found.cut == 0 and not found.refused
    assert left_of(endpoint) == []


@pytest.mark.slow
def test_of_a_replay_with_recorded_replies_only_these_are_new(endpoint: Any, tmp_path: Path) -> None:
    """The reply in memory is not the recorded one; the prompt before it is found all the same, but for at most the
    block that the reply has filled. A prompt that is too long is counted, and others go on."""
    grown = "Fix the bug. " + FILLER * 30
    prompts = [grown, f"{grown}One.", f"{grown}One.Two. {FILLER * 10}", "Something else."]
    long = [f"{FILLER * 1000}", f"{FILLER * 1001}", "Short again."]
    path = write(tmp_path / "calls.jsonl.gz", calls(*prompts), calls(*long))
    found = replayed(endpoint, path, served=False)
    assert found.cut == 2 and len(found.ledger.entries) == 5 and not found.refused
    assert all(entry.again_tokens < BLOCK_TOKENS for entry in found.ledger.entries)
    later = found.ledger.entries[1:3]
    assert all(entry.usage.cached_tokens >= 400 for entry in later), later
    assert sum(found.matches.values()) >= 5 and found.matches.get("extend", 0) == 0
    assert found.summary()["too long"] == 2


@pytest.mark.slow
def test_a_replay_keeps_its_limits(endpoint: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "talk.jsonl", talk(4), talk(4), talk(4))
    found = replayed(endpoint, path, served=True, conversations=2, calls=1, tokens=1)
    assert len(found.ledger.entries) == 2 and found.conversations == 2
    assert replayed(endpoint, path, served=True, time_s=-1.0).out_of_time


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
    rows: dict[Any, Any] = {row["phase"]: row for row in ledger.by_phase()}
    assert rows["all"]["prefilled"] == rows["1"]["prefilled"] + rows["2"]["prefilled"] == ledger.computed_tokens
    assert rows["2"]["of them again"] == rows["all"]["of them again"] == ledger.again_tokens == 79
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
    command = program(f"scenarios.{script}", *arguments)
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == status and said in ended.stderr, ended.stderr
    assert "Traceback" not in ended.stderr
