"""Models, health, metrics and the API's own description."""

from __future__ import annotations

import re
from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from satchel.api.requests.backend import NodeState, ReplicaStats
from tests.worlds.api.served_models import served_model


async def test_models_are_listed_the_default_first(api, backend):
    body = (await api.client.get("/v1/models")).json()
    assert body["object"] == "list"
    assert [model["id"] for model in body["data"]] == ["satchel/tiny", "other"]
    assert {model["object"] for model in body["data"]} == {"model"}
    assert body["data"][0]["created"] == 1_700_000_000
    one = await api.client.get("/v1/models/satchel/tiny")
    assert one.json() == body["data"][0]
    assert (await api.client.get("/v1/models/satchel%2Ftiny")).json() == body["data"][0]


async def test_a_model_says_what_of_it_is_still_being_proven(api, backend):
    first, *others = backend.served
    backend.served = [served_model(first, proving="how it keeps its KV", proving_since=1_700_000_000.5), *others]
    models = (await api.client.get("/v1/models")).json()["data"]
    assert models[0]["proving"] == {"what": "how it keeps its KV", "since": 1_700_000_000}
    assert models[1]["proving"] is None
    backend.replicas = [ReplicaStats("r0", "m", True, proving="how"), ReplicaStats("r1", "m", True)]
    found = samples((await api.client.get("/metrics")).text)
    assert [found["satchel_replica_proving", (("replica", name),)] for name in ("r0", "r1")] == [1, 0]


async def test_health_is_200_only_when_every_served_model_answers(api, backend):
    response = await api.client.get("/health")
    assert (response.status_code, response.json()["models"]) == (200, {"satchel/tiny": True, "other": True})
    for answering in ({"satchel/tiny": True, "other": False}, {}):
        backend.answering = answering
        response = await api.client.get("/health")
        assert response.status_code == 503
        assert response.json()["models"] == answering


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_metrics_are_read_live(api, backend):
    first = ReplicaStats("r0", "m", True, 3, 1, 100, 40, 20, 5, 2, 1024, hot_tokens_total=30, embedded_tokens_total=9)
    first = replace(first, preemptions_total=6, kv_tokens=64, kv_tokens_max=256)
    first = replace(first, drafts_total=2, drafted_tokens_total=14, accepted_tokens_total=11)
    backend.replicas = [first, ReplicaStats("r1", "m", False)]
    response = await api.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    found = samples(response.text)
    r0, r1 = (("replica", "r0"),), (("replica", "r1"),)
    e0, e1 = ((("engine", name), ("model_name", "m")) for name in ("r0", "r1"))
    assert found["vllm:num_requests_running", e0] == 3
    assert found["vllm:num_requests_waiting", e0] == 1
    assert found["vllm:kv_cache_usage_perc", e0] == 0.25
    assert found["vllm:num_preemptions_total", e0] == 6
    assert found["satchel_requests_total", r0] == 5
    assert found["vllm:prompt_tokens_total", e0] == 100
    assert found["vllm:prompt_tokens_cached_total", e0] == 40
    assert found["vllm:prefix_cache_queries_total", e0] == 100
    assert found["vllm:prefix_cache_hits_total", e0] == 30
    assert found["vllm:generation_tokens_total", e0] == 20
    assert found["vllm:spec_decode_num_drafts_total", e0] == 2
    assert found["vllm:spec_decode_num_draft_tokens_total", e0] == 14
    assert found["vllm:spec_decode_num_accepted_tokens_total", e0] == 11
    assert found["satchel_embedded_tokens_total", r0] == 9
    assert found["vllm:num_requests_running", e1] == found["vllm:kv_cache_usage_perc", e1] == 0
    assert ("satchel_requests_total", r1) not in found and ("vllm:prompt_tokens_total", e1) not in found
    backend.replicas = [ReplicaStats("r0", "m", True, 7)]
    assert samples((await api.client.get("/metrics")).text)["vllm:num_requests_running", e0] == 7


async def test_a_node_says_whether_it_is_up_and_what_is_on_its_disk(api, backend):
    backend.machines = [
        NodeState("a", "127.0.0.1", (), True, disk_bytes=5, disk_free_bytes=7),
        NodeState("b", "127.0.0.2", (), False),
    ]
    found = samples((await api.client.get("/metrics")).text)
    a, b = (("node", "a"),), (("node", "b"),)
    assert (found["satchel_node_up", a], found["satchel_node_up", b]) == (1, 0)
    assert (found["satchel_disk_bytes", a], found["satchel_disk_free_bytes", a]) == (5, 7)
    assert ("satchel_disk_bytes", b) not in found and ("satchel_disk_free_bytes", b) not in found


async def test_requests_are_counted_by_route_and_status(api, backend):
    await api.chat()
    await api.stream()
    await api.chat(temperature=-1)
    await api.client.get("/made/up")
    found = samples((await api.client.get("/metrics")).text)

    def count(route: str, status: str) -> float:
        return found["satchel_http_requests_total", (("route", route), ("status", status))]

    assert count("/v1/chat/completions", "200") == 2
    assert count("/v1/chat/completions", "400") == 1
    assert count("other", "404") == 1
    assert "/made/up" not in str(found)
    assert found["satchel_http_request_duration_seconds_count", (("route", "/v1/chat/completions"),)] == 3


async def test_two_applications_share_no_metrics(api, backend, config):
    from satchel.api.app import create_app

    await api.chat()
    create_app(backend, config)
    assert samples((await api.client.get("/metrics")).text)


async def test_the_description_names_the_fields(api):
    described = (await api.client.get("/openapi.json")).json()
    body = described["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"messages", "temperature", "stop", "logit_bias", "n", "timeout_s", "agent_id"} <= set(body["properties"])
    named = set(re.findall(r"'#/components/schemas/(\w+)'", str(described)))
    assert named and named <= set(described["components"]["schemas"])
    assert "$defs" not in str(described)
    assert body["properties"]["tool_choice"]["anyOf"][0]["enum"] == ["auto", "none", "required"]
    for path, name, most in (("/v1/agents", "limit", 100), ("/v1/cluster", "agents", 1000)):
        asked = {each["name"]: each["schema"] for each in described["paths"][path]["get"]["parameters"]}
        assert asked[name]["maximum"] == most
