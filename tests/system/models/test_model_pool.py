"""Three models in room for one: agents take turns with all of them, while replicas and the pool are killed."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from satchel.cluster.bring_up.ports import free_port
from satchel.cluster.processes import session_members
from tests.system.models.test_models import process_name
from tests.system.serving import COMMAND, serving

# The same weights, but each computes or keeps its KV in its own way, so they are three models.
MODELS = [
    {"name": "one", "source": "embedded:recall", "load": "request", "aliases": ["uno", "the/first"]},
    {"name": "two", "source": "embedded:recall", "load": "request", "numerics": "reproducible"},
    {"name": "three", "source": "embedded:recall", "load": "request", "kv": "fp16", "idle_s": 600},
]
NAMES = [model["name"] for model in MODELS]
# Weights and temporary memory of one take 35 MiB.
SCHEDULING = {"memory_bytes_max": "64 MiB", "prefill_chunk_tokens": 256}
TIMINGS = {"request_s": 300.0}


@dataclass
class Server:
    home: Path
    url: str

    def states(self) -> dict[str, str]:
        with httpx.Client(base_url=self.url, timeout=30, trust_env=False) as http:
            return {model["id"]: model["state"] for model in http.get("/v1/models").json()["data"]}

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*COMMAND, *arguments, "--home", str(self.home)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    def kill(self, kind: str) -> bool:
        """Kills one process of an actor, as the kernel does. Returns whether there was one."""
        session = json.loads((self.home / "run" / "cluster.json").read_text())["ray_sid"]
        pids = [pid for pid in session_members(session) if process_name(pid).startswith(f"ray::{kind}")]
        for pid in pids[:1]:
            os.kill(pid, signal.SIGKILL)
        return bool(pids)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home, port = tmp_path_factory.mktemp("home"), free_port()
    config = {"models": MODELS, "endpoint": {"port": port}, "scheduling": SCHEDULING, "timeouts": TIMINGS}
    (home / "config.yaml").write_text(json.dumps(config))
    with serving(home, "--config", str(home / "config.yaml")):
        yield Server(home, f"http://127.0.0.1:{port}")


@dataclass
class Agent:
    """An agent that sends its whole conversation with every turn, as clients do."""

    name: str
    model: str
    messages: list[dict[str, str]] = field(default_factory=list)
    before: int = 0
    """Tokens of its last turn, with the answer."""
    problems: list[str] = field(default_factory=list)

    async def turn(self, http: httpx.AsyncClient, number: int, *, streamed: bool) -> None:
        self.messages.append({"role": "user", "content": f"Remember: the code of key{number} is {1000 + number}."})
        body = {"model": self.model, "messages": self.messages, "max_tokens": 12, "temperature": 0}
        headers = {"X-Agent-ID": self.name}
        if streamed:
            text, usage = await self._streamed(http, body, headers)
        else:
            answer = await http.post("/v1/chat/completions", json=body, headers=headers)
            if answer.status_code != 200:
                self.problems.append(f"turn {number}: {answer.status_code} {answer.text[:300]}")
                self.messages.pop()
                return
            text, usage = answer.json()["choices"][0]["message"]["content"], answer.json()["usage"]
        if not usage:
            self.problems.append(f"turn {number}: {text[:300]}")
            self.messages.pop()
            return
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        # The last token of an answer is never computed, and marks may follow it.
        if self.before and cached < self.before - 8:
            self.problems.append(f"turn {number}: {cached} tokens from memory of {self.before}")
        self.before = usage["total_tokens"]
        self.messages.append({"role": "assistant", "content": text})

    async def _streamed(self, http: httpx.AsyncClient, body: dict, headers: dict) -> tuple[str, dict]:
        text, usage = "", {}
        asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
        async with http.stream("POST", "/v1/chat/completions", json=asked, headers=headers) as answer:
            if answer.status_code != 200:
                return f"{answer.status_code} {await answer.aread()!r}", {}
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    return str(event["error"]), {}
                usage = event.get("usage") or usage
                text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
        return text, usage


async def talk(
    server: Server, agents: int, turns: int, kills: list[tuple[float, str]], pause_s: float, seed: int
) -> list[Agent]:
    """Has the agents talk at the same time, and kills processes meanwhile: (seconds after the beginning, kind).

    Args:
        pause_s: between two turns of an agent.
    """
    rng = random.Random(seed)
    speakers = [Agent(f"agent-{seed}-{number}", NAMES[number % len(NAMES)]) for number in range(agents)]
    began = time.monotonic()
    seen: list[str] = []

    async def speak(http: httpx.AsyncClient, agent: Agent, streams: list[bool]) -> None:
        for number, streamed in enumerate(streams):
            await agent.turn(http, number, streamed=streamed)
            await asyncio.sleep(pause_s)

    async def watch(http: httpx.AsyncClient) -> None:
        while True:
            states = {model["id"]: model["state"] for model in (await http.get("/v1/models")).json()["data"]}
            # After a kill a replica that restarts may still be listed beside the model that has its room now.
            loaded = [name for name, state in states.items() if state == "loaded"]
            if len(loaded) == 1 and loaded != seen[-1:]:
                seen.extend(loaded)
            await asyncio.sleep(0.5)

    async def kill() -> None:
        for after_s, kind in kills:
            await asyncio.sleep(max(0.0, began + after_s - time.monotonic()))
            while not await asyncio.to_thread(server.kill, kind):
                await asyncio.sleep(0.2)

    async with httpx.AsyncClient(base_url=server.url, timeout=300, trust_env=False) as http:
        others = [asyncio.create_task(kill()), asyncio.create_task(watch(http))]
        await asyncio.gather(*(speak(http, agent, [rng.random() < 0.5 for _ in range(turns)]) for agent in speakers))
        for other in others:
            if other.done():
                other.result()
            other.cancel()
    assert len(seen) > len(NAMES), f"models were swapped again and again: {seen}"
    return speakers


def check(speakers: list[Agent]) -> None:
    problems = [f"{agent.name} ({agent.model}): {problem}" for agent in speakers for problem in agent.problems]
    assert not problems, "\n".join(problems)
    assert {agent.model for agent in speakers if agent.before} == set(NAMES)


@pytest.mark.slow
def test_a_model_is_loaded_by_a_request_and_another_one_goes_for_it(server: Server):
    assert server.states() == dict.fromkeys(NAMES, "unloaded"), "nothing is loaded at the start"
    with httpx.Client(base_url=server.url, timeout=120, trust_env=False) as http:
        assert http.get("/health").status_code == 200
        for name, called in (("one", "uno"), ("two", "two")):
            body = {"model": called, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
            answer = http.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == name
            assert Counter(server.states().values())["loaded"] == 1 and server.states()[name] == "loaded"
        assert [model["name"] for model in http.get("/api/ps").json()["models"]] == ["two"]
        assert {model["name"] for model in http.get("/api/tags").json()["models"]} == {"one", "two"}
        embedded = http.post("/v1/embeddings", json={"model": "three", "input": "Hello"})
        assert embedded.status_code in (200, 400), embedded.text
        assert server.states()["three"] == "loaded", "a request for vectors loads it too"
    script = (
        f"from satchel.api import connect\nwith connect({str(server.home)!r}) as cluster:\n"
        "    print(cluster.generate_sync('Hello', model='the/first', max_tokens=2).finish_reason)"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert ran.stdout.strip() in ("stop", "length"), ran.stderr
    assert server.states()["one"] == "loaded", "so does a Python handle"


@pytest.mark.slow
def test_a_model_is_unloaded_and_loaded_by_its_name_and_stays_in_the_list(server: Server):
    with httpx.Client(base_url=server.url, timeout=120, trust_env=False) as http:
        assert http.post("/v1/models/uno/load").json()["state"] == "loaded"
        unloaded = server.command("models", "unload", "one")
        assert unloaded.returncode == 0, unloaded.stderr
        assert server.states()["one"] == "unloaded"
        loaded = server.command("models", "load", "the/first", "--json")
        assert loaded.returncode == 0 and json.loads(loaded.stdout) == {"model": "one", "loaded": True}, loaded.stderr
        assert server.states()["one"] == "loaded"
        refused = server.command("models", "load", "one", "--dtype", "float32")
        assert refused.returncode == 1 and "two models are called 'one'" in refused.stderr, refused.stderr
        assert http.post("/v1/models/one/unload").json()["state"] == "unloading"
        body = {"model": "one", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        assert http.post("/v1/chat/completions", json=body).status_code == 200, "a request loads it again"


@pytest.mark.slow
def test_every_turn_is_answered_from_memory_while_models_swap_and_processes_die(server: Server):
    kills = [(4.0, "ReplicaActor"), (9.0, "PoolActor"), (15.0, "ReplicaActor"), (24.0, "PoolActor")]
    check(asyncio.run(talk(server, agents=6, turns=4, kills=kills, pause_s=2.0, seed=1)))


@pytest.mark.slow
def test_a_model_that_stays_takes_the_room_of_those_that_come_and_go(server: Server):
    with httpx.Client(base_url=server.url, timeout=120, trust_env=False) as http:
        body = {"model": "one", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        assert http.post("/v1/chat/completions", json=body).status_code == 200
        loaded = server.command("models", "load", "embedded:recall", "--name", "pinned")
        assert loaded.returncode == 0, loaded.stdout + loaded.stderr
        assert {name for name, state in server.states().items() if state == "loaded"} == {"pinned"}
        refused = http.post("/v1/chat/completions", json=body)
        assert refused.status_code == 500 and refused.json()["error"]["code"] == "no_room"
        assert "models that stay loaded take" in refused.json()["error"]["message"]
        assert server.command("models", "remove", "pinned").returncode == 0
        assert "pinned" not in server.states()
        time.sleep(5.0)  # as long as the error is remembered
        assert http.post("/v1/chat/completions", json=body).status_code == 200


@pytest.mark.slow
def test_a_model_that_can_never_fit_says_why(tmp_path: Path):
    port = free_port()
    models = [{"name": "small", "source": "embedded:recall", "load": "request"}]
    scheduling = {"memory_bytes_max": "16 MiB"}
    config = {"models": models, "endpoint": {"port": port}, "scheduling": scheduling}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    with (
        serving(tmp_path, "--config", str(tmp_path / "config.yaml")),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, trust_env=False) as http,
    ):
        body = {"model": "small", "messages": [{"role": "user", "content": "Hello"}]}
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 500 and answer.json()["error"]["code"] == "no_room"
        message = answer.json()["error"]["message"]
        assert "weights take 21 MiB" in message and "16 MiB" in message, "what it needs, and what there is"
        assert http.get("/health").status_code == 200
        (shown,) = http.get("/v1/models").json()["data"]
        assert (shown["state"], shown["error"]) == ("unloaded", message)


@pytest.mark.slow
def test_three_hundred_requests_of_twelve_agents(server: Server):
    rng = random.Random(7)
    kinds = ["ReplicaActor", "ReplicaActor", "PoolActor"]
    kills = [(float(after), rng.choice(kinds)) for after in range(10, 1200, 9)]
    check(asyncio.run(talk(server, agents=12, turns=25, kills=kills, pause_s=0.5, seed=2)))
