"""What the processes of a cluster write about a request: one tree of spans, and lines of logs."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from satchel.cluster.bring_up.runtime import LocalCluster
from satchel.cluster.config.config import Config
from tests.worlds.collector import Collector, SeenSpan

from .test_endpoint import user, wait_until

WORDS = "Remember: the code of elmira is 7319."
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = f"00-{TRACE}-00f067aa0ba902b7-01"


WANTED = {
    ("endpoint", "POST /v1/chat/completions"),
    ("router", "Router.route"),
    ("kv_store", "KVStore.recall"),
    ("kv_store", "KVStore.commit"),
    ("replica", "Replica.submit"),
    ("replica", "sequence"),
    ("replica", "queue"),
    ("replica", "prefill"),
    ("replica", "decode"),
}


def tree_of(spans: list[SeenSpan], request_id: str) -> dict[str, SeenSpan]:
    """The spans of one request, by their ids, its own first. Each process sends its own, whenever it likes."""
    tree = {one.id: one for one in spans if one.attributes.get("satchel.request.id") == request_id}
    for _ in spans:
        tree |= {one.id: one for one in spans if one.parent in tree}
    return tree


def kinds(tree: dict[str, SeenSpan]) -> set[tuple[str, str]]:
    return {(one.process.partition(":")[0], one.name) for one in tree.values()}


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_one_tree_over_all_processes(http: httpx.Client, collector: Collector, stream: bool):
    body: dict[str, Any] = {"messages": [user(WORDS)], "agent_id": f"traced-{stream}", "stream": stream}
    answer = http.post("/v1/chat/completions", json=body, headers={"traceparent": CALLER})
    request_id = answer.headers["x-request-id"]
    # The trace is the caller's, and both requests of this test are in it.
    spans = collector.of(request_id, lambda spans: kinds(tree_of(spans, request_id)) >= WANTED)
    tree = tree_of(spans, request_id)
    root = next(iter(tree.values()))
    assert root.trace == TRACE and root.process == "endpoint"
    (sequence,) = [one for one in tree.values() if one.name == "sequence"]
    assert sequence.attributes["satchel.sequence.id"].startswith(f"{request_id}/")
    assert sequence.process == f"replica:{answer.headers['x-satchel-replica']}" and sequence.events == ["first token"]
    (routed,) = [one for one in tree.values() if one.name == "Router.route"]
    assert routed.attributes["satchel.why"] == answer.headers["x-satchel-why"]
    assert routed.attributes["satchel.replica"] == answer.headers["x-satchel-replica"]
    assert "satchel.cost_s.total" in routed.attributes
    assert root.attributes["gen_ai.usage.output_tokens"] == sequence.attributes["satchel.generated_tokens"]
    assert "elmira" not in repr(spans)


def test_every_process_writes_its_own_log(http: httpx.Client, cluster: LocalCluster, config: Config):
    answer = http.post("/v1/chat/completions", json={"messages": [user(WORDS)]}, headers={"traceparent": CALLER})
    request_id = answer.headers["x-request-id"]
    wait_until(lambda: request_id in (cluster.home.logs / "endpoint.log").read_text())
    texts = {path.stem: path.read_text() for path in cluster.home.logs.glob("*.log")}
    replicas = [f"replica-{config.models[0].slug}-{number}" for number in range(2)]
    assert {"endpoint", "router", "kv_store-local", *replicas} <= texts.keys()
    for name, text in texts.items():
        for line in map(json.loads, text.splitlines()):
            assert line["process"].replace(":", "-") == name.partition(".")[0] and line["time"].endswith("Z")
    lines = list(map(json.loads, texts["endpoint"].splitlines()))
    (about,) = [line for line in lines if line.get("request_id") == request_id]
    assert about["message"].startswith("POST /v1/chat/completions: 200 in ") and about["trace_id"] == TRACE
    assert "elmira" not in "".join(texts.values())
    assert "blocking ray.get" not in "".join(texts.values())
