"""A replica that dies: streams go on elsewhere, new requests avoid it, and it comes back by itself."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

import httpx
import ray

from satchel.actors.messages import Sampling
from satchel.actors.replica.consumers import LEASE_S
from satchel.api.client import Cluster
from satchel.api.dispatch import RayBackend

from .test_endpoint import ENDLESS, running, user, wait_until


def test_a_stream_survives_the_death_of_its_replica(handles: Cluster, http: httpx.Client):
    """Sampled, not greedy: noise belongs to seed and position, so the text is the same to the letter."""
    body = {
        "messages": [user("Say the numbers from one to fifty.")],
        "temperature": 1.2,
        "seed": 11,
        "agent_id": "survivor",
        "max_tokens": 120,
        "ignore_eos": True,
    }
    undisturbed = http.post("/v1/chat/completions", json=body)
    expected = undisturbed.json()["choices"][0]["message"]["content"]
    home = undisturbed.headers["x-satchel-replica"]
    pid = process_id(handles, home)
    text, lines = "", 0
    with http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        assert response.headers["x-satchel-replica"] == home
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunk = response_chunk(line)
                text += chunk["choices"][0]["delta"].get("content") or ""
                lines += 1
                if lines == 20:
                    os.kill(pid, signal.SIGKILL)
    assert text == expected
    again = http.post("/v1/chat/completions", json={**body, "max_tokens": 5})
    assert again.status_code == 200
    wait_until(lambda: answering(http) == 2, timeout_s=60)
    assert process_id(handles, home) != pid


def process_id(handles: Cluster, replica: str) -> int:
    info: Any = ray.get(handles.replicas()[replica].info.remote(), timeout=30)
    return info["pid"]


def response_chunk(line: str) -> dict:
    chunk = json.loads(line.removeprefix("data: "))
    assert "error" not in chunk, chunk
    return chunk


def answering(http: httpx.Client) -> int:
    return sum(
        line.endswith(" 1.0")
        for line in http.get("/metrics").text.splitlines()
        if line.startswith("satchel_replica_up{")
    )


async def test_rows_of_a_consumer_that_vanishes_are_taken_out(handles: Cluster, http: httpx.Client):
    """A driver that dies cannot abort its rows; its lease at the replica ends instead."""
    wait_until(lambda: running(http) == 0)
    backend = RayBackend(handles.config)
    (model,) = await backend.models()
    sampling = Sampling(temperature=1.0, seed=1, max_tokens=ENDLESS["max_tokens"], ignore_eos=True)
    await backend.generate(model, agent="", prompt=[1, 2, 3], sampling=sampling, request_id="orphan")
    assert running(http) == 1
    for link in backend._links.values():
        link.close()
    started = time.monotonic()
    wait_until(lambda: running(http) == 0, timeout_s=LEASE_S * 3)
    assert time.monotonic() - started > 1, "it was the lease that ended it"
