"""Paths as clients write them: each reaches its route, and its errors have its protocol's shape."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import httpx
import pytest

from satchel.api.app import create_app
from satchel.cluster.home import Home, prepare_home
from satchel.cluster.keys import KeyRing, create_key
from tests.worlds.api.served_models import served_model

HOST = "http://localhost"
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"prompt": "Hi"}
MESSAGE = {**CHAT, "max_tokens": 5}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/chat/completions", CHAT),
        ("/completions", TEXT),
        ("/messages", MESSAGE),
        ("/messages/count_tokens", CHAT),
        ("/models", None),
        ("/models/satchel/tiny", None),
    ],
)
async def test_a_route_is_found_with_and_without_v1_and_slashes(api, path, body):
    for begin, end in product(("/v1", "", "/", "//v1", "/v1/", "/v1/v1", "//v1//v1/"), ("", "/", "//")):
        url = f"{HOST}{begin}{path}{end}"
        response = await (api.client.get(url) if body is None else api.client.post(url, json=body))
        assert response.status_code == 200, f"{url}: {response.text}"


@pytest.mark.parametrize("begin", ["/v1", ""])
@pytest.mark.parametrize("end", ["", "/"])
async def test_an_error_has_the_shape_of_its_protocol_at_every_path(api, begin, end):
    anthropic = await api.client.post(f"{begin}/messages{end}", json={})
    assert anthropic.status_code == 400
    assert anthropic.json()["type"] == "error"
    assert anthropic.headers["request-id"] == anthropic.headers["x-request-id"]
    openai = await api.client.post(f"{begin}/chat/completions{end}", json={})
    assert openai.status_code == 400
    assert openai.json()["error"]["param"] == "messages"
    assert "request-id" not in openai.headers


async def test_ollamas_routes_are_found_behind_slashes_and_have_no_version(api):
    body = {"model": "satchel/tiny", "prompt": "Hi", "stream": False}
    assert (await api.client.post(f"{HOST}//api/generate/", json=body)).status_code == 200
    assert (await api.client.post(f"{HOST}//api/generate", json={})).json().keys() == {"error"}
    assert (await api.client.post("/v1/api/generate", json=body)).status_code == 404


async def test_a_key_is_asked_for_at_every_path(backend, config, tmp_path):
    home = Home(tmp_path / "home")
    prepare_home(home)
    create_key(home, "ann")
    transport = httpx.ASGITransport(create_app(backend, config, keys=KeyRing(home, required=True)))
    async with httpx.AsyncClient(transport=transport, base_url=HOST) as client:
        for begin in ("/v1", "//v1", "/v1/v1", "/v1/", "/"):
            path = f"{begin}/chat/completions"
            assert (await client.post(f"{HOST}{path}", json=CHAT)).status_code == 401, path


async def test_what_is_not_served_is_not_found_at_any_path(api):
    for path in (
        "/v1",
        "/nothing",
        "/v1/nothing/",
        "/chat",
        "/chatter/completions",
        "/v1/v1",
        "/v1/v1/nothing",
        "/v1x/models",
    ):
        response = await api.client.get(path)
        assert response.status_code == 404, path
        assert response.json()["error"]["code"] == "not_found"


@pytest.mark.parametrize("path", ["/v1/models", "/models/", "/v1/models/other", "/health", "/"])
async def test_head_is_answered_where_get_is(api, path):
    assert (await api.client.head(path)).status_code == 200


@pytest.mark.parametrize(
    ("path", "allowed"),
    [("/v1/chat/completions", "OPTIONS, POST"), ("/models/", "GET, HEAD, OPTIONS")],
)
async def test_options_says_what_a_path_takes_and_so_does_a_405(api, path, allowed):
    asked = await api.client.options(path)
    assert (asked.status_code, asked.headers["allow"], asked.content) == (204, allowed, b"")
    refused = await api.client.patch(path)
    assert (refused.status_code, refused.headers["allow"]) == (405, allowed)
    assert (await api.client.options("/v1/nothing")).status_code == 404


async def test_pages_that_may_use_it_ask_at_every_path(backend, config):
    page = "http://localhost:3000"
    app = create_app(backend, replace(config, endpoint=replace(config.endpoint, origins=(page,))))
    asked = {
        "Origin": page,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=HOST) as client:
        for path in ("/v1/chat/completions", "/chat/completions", "/v1/messages/"):
            first = await client.options(path, headers=asked)
            assert (first.status_code, first.headers["access-control-allow-origin"]) == (200, page)
            assert "authorization" in first.headers["access-control-allow-headers"]
        told = await client.post("/chat/completions/", json=CHAT, headers={"Origin": page})
        assert (told.status_code, told.headers["access-control-allow-origin"]) == (200, page)


async def test_the_document_has_every_route_once(api):
    paths = (await api.client.get("/openapi.json")).json()["paths"]
    assert "/v1/chat/completions" in paths and "/v1/messages" in paths
    assert not [path for path in paths if path.endswith("/") or "head" in paths[path]]
    others = {path for path in paths if not path.startswith(("/v1/", "/api/"))}
    assert others == {"/health", "/metrics", "/v2/rerank"} and not [
        path for path in paths if path.startswith("/v1/api")
    ]


@pytest.mark.parametrize("setting", [None, "refuse", "default"])
async def test_a_model_that_is_not_served(backend, config, setting):
    app = create_app(backend, replace(config, endpoint=replace(config.endpoint, unknown_model=setting)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=HOST) as client:
        answers = [
            await client.post("/v1/chat/completions", json={**CHAT, "model": "gpt-5"}),
            await client.post("/v1/completions", json={**TEXT, "model": "gpt-5"}),
            await client.get("/v1/models/gpt-5"),
        ]
        if setting == "default":
            assert [answer.status_code for answer in answers] == [200] * 3
            assert [answer.json().get("model") for answer in answers[:2]] == ["satchel/tiny"] * 2
            assert answers[2].json()["id"] == "satchel/tiny"
            return
        for answer in answers:
            assert answer.status_code == 404
            assert (answer.json()["error"]["code"], answer.json()["error"]["param"]) == ("model_not_found", "model")


async def test_a_model_says_its_context_and_what_it_takes(api, backend):
    backend.served[1] = served_model(backend.served[1], pictures=True)
    text, pictures = (await api.client.get("/v1/models")).json()["data"]
    assert text["max_model_len"] == text["context_length"] == backend.served[0].info.context_tokens
    assert text["architecture"] == {"input_modalities": ["text"], "output_modalities": ["text"]}
    assert pictures["architecture"]["input_modalities"] == ["text", "image", "video"]
