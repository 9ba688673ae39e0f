"""The serving benchmark asks for what it says, and counts rightly. How fast anything is, is no test."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import machine
from benchmarks.serve import agents, http_client, report
from benchmarks.serve.measures import level, turns_of
from benchmarks.serve.prompts import WORDS_FILE, Prompts
from benchmarks.serve.protocol import Agents, StreamedTimes, Trace, from_line, to_line
from benchmarks.serve.run import TargetSession
from benchmarks.serve.targets import SERVERS, RunFolder, outside_engine_s
from satchel.cluster.config.config import load_config
from satchel.cluster.devices.cards import Card
from satchel.cluster.devices.devices import with_devices
from tests.worlds.fake_cards import fake_nvidia_smi

_TARGETS = {
    "one": "satchel",
    "replicas": "satchel (a replica a card)",
    "divided": "satchel (divided)",
    "little": "satchel (divided for room)",
}
LOAD = agents.AgentLoad(system_tokens=5, turn_tokens=3, answer_tokens=4, turns=2, block_tokens=2, prompt_max=20)


@pytest.fixture
def prompts(tmp_path: Path) -> Prompts:
    (tmp_path / WORDS_FILE).write_text(json.dumps([[f"w{id}", id] for id in range(50)]))
    return Prompts(tmp_path)


def test_agents_share_a_system_prompt_and_nothing_else(prompts: Prompts) -> None:
    command = agents.growing(prompts, LOAD, 3, "seed", 9.0)
    assert from_line(to_line(command)) == replace(
        command, turns=[[list(turn) for turn in each] for each in command.turns]
    )  # type: ignore[misc]
    assert command.grows and len(command.system.split()) == 5
    said = [text for turns in command.turns for text, most in turns if (len(text.split()), most) == (3, 4)]
    assert len(set(said)) == 6 and len(set(command.names)) == 3
    assert agents.growing(prompts, LOAD, 3, "seed", 9.0) == command
    assert not set(agents.growing(prompts, LOAD, 3, "other", 9.0).names) & set(command.names)


def recording(folder: Path, *sessions: list[dict[str, Any]]) -> Path:
    with gzip.open(folder / agents.RECORDING, "wt") as file:
        file.writelines(json.dumps({"requests": requests}) + "\n" for requests in sessions)
    return folder


def test_recorded_turns_begin_as_they_did(prompts: Prompts, tmp_path: Path) -> None:
    asked = {"output": 9, "input": 1}
    grows = [
        {**asked, "blocks": [[1, 3]]},
        {**asked, "blocks": [[90, 99]], "sub": 1},
        {**asked, "blocks": [[1, 2], [7, 8]], "output": 1},
        {**asked, "blocks": [[1, 9]]},
    ]
    short, long = grows[:1], [{**asked, "blocks": [[1, 11]]}] * 3
    command = agents.recorded(recording(tmp_path, short, grows, long), prompts, LOAD, 2, "seed", 9.0)
    (first, second), again = command.turns
    assert not command.grows and not command.system
    assert [len(text.split()) for text, _ in (first, second)] == [6, 8] and [first[1], second[1]] == [4, 1]
    assert first[0].split()[:4] == second[0].split()[:4] and first[0].split()[4:] != second[0].split()[4:6]
    assert again == command.turns[0], "there is one such session"
    with pytest.raises(ValueError, match="2 prompts of at most 20"):
        agents.recorded(recording(tmp_path, short, long), prompts, LOAD, 2, "seed", 9.0)


def test_what_failed_is_counted_and_not_measured() -> None:
    command = Agents("", ["a", "b"], [[("x", 4), ("y", 4)], [("x", 4), ("y", 4)]], grows=True, timeout_s=1.0)
    streams = [
        StreamedTimes(sent=1.0, ended=2.0, times=[1.5], tokens=4),
        StreamedTimes(sent=2.0, ended=4.0, times=[2.1], tokens=4),
        StreamedTimes(sent=1.0, ended=5.0, times=[1.9], tokens=1, error="HTTP 500"),
        StreamedTimes(error=http_client.NOT_SENT),
    ]
    found = agents.measured("growing", command, streams)
    assert (found.turns, found.failed, found.seconds, found.tokens_per_s) == (4, 2, 4.0, 2.0)
    assert (found.ttft_p50_ms, found.ttft_p99_ms) == pytest.approx((100.0, 500.0))
    assert (found.later_p50_ms, found.later_p99_ms) == pytest.approx((100.0, 100.0))
    assert found.errors == ["HTTP 500", http_client.NOT_SENT]


@asynccontextmanager
async def server(asked: list[dict[str, Any]]) -> AsyncIterator[int]:
    """Says how many messages it got, and refuses the agent `b` its second turn."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next(int(line.split(": ")[1]) for line in head.split("\r\n") if line.startswith("Content-Length"))
        agent = next(line.split(": ")[1] for line in head.split("\r\n") if line.startswith("X-Agent-ID"))
        body = json.loads(await reader.readexactly(length))
        asked.append({"agent": agent, **body})
        count = len(body["messages"])
        if agent == "b" and count > 2:
            writer.write(b"HTTP/1.1 500 No\r\nContent-Length: 2\r\n\r\nno")
        else:
            usage = {"completion_tokens": body["max_tokens"], "prompt_tokens": 9}
            events = ({"choices": [{"delta": {"content": f"{count} "}}]}, {"choices": [], "usage": usage})
            said = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
            writer.write(f"HTTP/1.1 200 OK\r\n\r\n{said}data: [DONE]\n\n".encode())
        await writer.drain()
        writer.close()

    serving = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with serving:
        yield serving.sockets[0].getsockname()[1]


async def test_an_agents_next_turn_has_its_answers_and_a_failed_turn_is_its_last() -> None:
    asked: list[dict[str, Any]] = []
    turns = [("one", 3), ("two", 3)]
    command = Agents("all", ["a", "b"], [turns, turns], grows=True, timeout_s=10.0)
    async with server(asked) as port:
        trace = await http_client.LoadClient(port, "m")._agents(command)
        alone = await http_client.LoadClient(port, "m")._agents(replace(command, grows=False, system=""))
    grown = [each["messages"] for each in asked if each["agent"] == "a"][1]
    assert [message["content"] for message in grown] == ["all", "one", "2 ", "two"]
    assert [message["role"] for message in grown] == ["system", "user", "assistant", "user"]
    assert [stream.tokens for stream in trace.streams] == [3, 3, 3, None]
    errors = [stream.error for stream in trace.streams]
    assert errors[:3] == [None, None, None] and str(errors[3]).startswith("HTTP 500")
    assert [each["messages"] for each in asked[-2:]] == [[{"role": "user", "content": "two"}]] * 2
    assert not any(stream.error for stream in alone.streams)


async def test_turns_that_are_not_sent_are_failed_ones() -> None:
    command = Agents("", ["a"], [[("one", 3), ("two", 3), ("three", 3)]], grows=True, timeout_s=10.0)
    async with server([]) as port:
        pass
    trace = await http_client.LoadClient(port, "m")._agents(command)
    assert len(trace.streams) == 3 and all(stream.error for stream in trace.streams)
    assert [stream.error for stream in trace.streams[1:]] == [http_client.NOT_SENT] * 2


def test_the_time_outside_the_engine_is_what_queue_and_prefill_leave() -> None:
    told = (
        'vllm:time_to_first_token_seconds_sum{engine="a",model_name="m"} 2.5\n'
        'vllm:time_to_first_token_seconds_sum{engine="b",model_name="m"} 0.5\n'
        'vllm:time_to_first_token_seconds_count{engine="a",model_name="m"} 7.0\n'
        'vllm:request_queue_time_seconds_sum{engine="a",model_name="m"} 0.25\n'
        'vllm:request_prefill_time_seconds_sum{engine="a",model_name="m"} 1.5\n'
    )
    assert outside_engine_s(told) == pytest.approx(1.25)


def burst(streams: int, seconds: float, cpu_s: dict[str, float]) -> Any:
    each = StreamedTimes(sent=0.0, ended=seconds, times=[0.1, 0.2], tokens=10, prompt_tokens=128)
    return level(Trace([each] * streams, 0.1), "128", 10, cpu_s)


def test_the_report_says_what_the_way_to_clients_costs_and_what_agents_get() -> None:
    command = Agents("", ["a"], [[("x", 4)]], grows=True, timeout_s=1.0)
    answered = [StreamedTimes(sent=1.0, ended=3.0, times=[1.25], tokens=4)]
    served = TargetSession(levels=[burst(4, 2.0, {"ReplicaActor": 0.004, "ServeReplica": 0.002, "gcs_server": 1e-6})])
    served.agents = [agents.measured("growing", command, answered)]
    traces = [Trace([StreamedTimes(sent=0.0, times=[0.5], tokens=8)])] * 4
    served.turns = [turns_of(traces, 30_000, 8, [0.4, 0.3, 0.011, 0.012])]
    sessions = {"satchel": served, "satchel engine": TargetSession(levels=[burst(4, 1.5, {"engine_driver": 0.002})])}
    options = {"streams": [4], "prompt_tokens": ["128"], "turns": [30_000], "agents": [1], "long_prompt_tokens": 0}
    told = report.markdown(
        {
            "options": {**options, "only": list(sessions), "tokens": 10, "rounds": 1, "together": False},
            "machine": {"gpu": "", "processor": "x", "cores": 2, "memory_gb": 1, "system": "s", "python": "3"}
            | {"load_before": 0.0},
            "versions": {},
            "agent_load": asdict(LOAD),
            "models": {
                "m": {
                    "failures": {},
                    "profile": None,
                    "rounds": [{"round": 0, "target": name, **asdict(each)} for name, each in sessions.items()],
                }
            },
        }
    )
    lines = [line.strip("| ").split(" | ") for line in told.splitlines()]
    assert ["lost of its tokens a second, %", "25.0"] in lines
    assert ["the engine alone", "50"] in lines and ["ReplicaActor", "100"] in lines and ["ServeReplica", "50"] in lines
    assert not any(line[0] == "gcs_server" for line in lines)
    assert ["satchel", "500", "500", "500", "11.0"] in lines, "of a conversation's later turns, outside the engine"
    assert ["satchel", "2.0", "2.0", "250", "250", "250", "–", "–", "–", "0", "1"] in lines


@pytest.mark.parametrize("has_cards", [True, False])
@pytest.mark.parametrize("count", [2, 3])
def test_several_cards_are_asked_for_by_configs_that_are_taken(
    has_cards: bool, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine without cards their nodes have the same names."""
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 7}))
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    monkeypatch.setenv("PATH", str(fake_nvidia_smi(tmp_path / "bin") if has_cards else tmp_path))
    cards = tuple(Card(number, f"GPU-{number}", 0, "") for number in range(count if has_cards else 0))
    found = {}
    for name in ("one", "replicas", "divided", "little"):
        place = RunFolder(tmp_path / f"{name}{count}", {}, None, 1.0, count)
        place.work.mkdir()
        launch = SERVERS[_TARGETS[name]](tmp_path, 8000, place)
        home = place.work / "home-8000"
        found[name] = with_devices(load_config(home / "config.yaml"), cards)
        assert launch.replicas == (count if name == "replicas" else 1)
        names = [node.name for node in found[name].machines]
        assert names == (["local", "local-1", "local-2"][:count] if name != "one" else ["local"])
        assert all((home / "nodes" / each / "kernels").is_dir() for each in names[1:])
    divided = found["divided"].models[0].split
    assert divided is not None and isinstance(divided.pipeline, tuple) and sum(divided.pipeline) == 7
    assert max(divided.pipeline) - min(divided.pipeline) <= 1
    assert found["little"].scheduling.memory_bytes_max == 950 and found["one"].scheduling.memory_bytes_max is None


def test_results_of_a_machine_with_several_gpus_are_named_after_their_number() -> None:
    gpu = machine.counted(["NVIDIA H200, 580.95", "NVIDIA H200, 580.95"])
    assert gpu == "2 × NVIDIA H200, 580.95" and machine.counted([]) == ""
    assert machine.name_of({"device": "gpu", "gpu": gpu}) == "2-nvidia-h200"
    assert machine.name_of({"device": "gpu", "gpu": machine.counted(["NVIDIA H100, 1"])}) == "nvidia-h100"
