"""A web page cannot use the endpoint of the machine that shows it, unless the config allows it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from satchel.api.app import create_app
from satchel.api.http.browser import Hosts
from satchel.cluster.config.config import Config, Endpoint, parse_config
from satchel.cluster.errors import ConfigError

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
OWN = "http://localhost:3000"


@pytest.fixture
async def local(backend, config: Config, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """The endpoint on loopback, with one page of another origin that may use it."""
    at = replace(config, endpoint=replace(config.endpoint, origins=(OWN,)))
    transport = httpx.ASGITransport(create_app(backend, at, batches=tmp_path / "batches"))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
        yield client


def check_refused(answer: httpx.Response, status: int, code: str, word: str) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["code"] == code and word in error["message"] and error["type"] == "invalid_request_error"
    assert "x-request-id" in answer.headers and "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8000", "localhost", "LocalHost:9", "[::1]:8000", "127.0.0.2", "satchel.:1"]
)
async def test_it_answers_to_what_it_listens_on_and_to_names_of_the_config(local: httpx.AsyncClient, host: str):
    assert (await local.get("/v1/models", headers={"Host": host})).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "rebind.evil.com:8000",
        "10.0.0.7:8000",
        "localhost.evil.com",
        "127.0.0.1.evil.com",
        "evil.com@127.0.0.1",
        "",
        "a b",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "OPTIONS"])
async def test_a_page_whose_name_was_made_to_point_here_is_refused(
    local: httpx.AsyncClient, backend: Any, host: str, method: str
):
    answer = await local.request(method, "/v1/agents/victim", headers={"Host": host, "Origin": f"http://{host}"})
    check_refused(answer, 403, "not_allowed", "endpoint.hosts")
    assert not backend.requests


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.com",
        "null",
        "http://127.0.0.1:8001",
        "https://127.0.0.1:8001",
        "file://",
        "http://localhost:8000",
        "x",
    ],
)
async def test_a_page_of_another_origin_is_refused(local: httpx.AsyncClient, backend: Any, origin: str):
    for request in (
        local.build_request("POST", "/v1/chat/completions", json=CHAT, headers={"Origin": origin}),
        local.build_request("DELETE", "/v1/cache", headers={"Origin": origin}),
        local.build_request("GET", "/v1/agents", headers={"Origin": origin}),
        local.build_request(
            "OPTIONS", "/v1/cache", headers={"Origin": origin, "Access-Control-Request-Method": "DELETE"}
        ),
    ):
        check_refused(await local.send(request), 403, "not_allowed", "endpoint.origins")
    assert not backend.requests


async def test_a_method_that_no_route_takes_is_said_to_be_wrong_whatever_comes_with_it(local: httpx.AsyncClient):
    for method in ("TRACE", "PATCH", "QUERY", "POST"):
        bytes_of = {"Content-Type": "application/octet-stream"}
        answer = await local.request(method, "/v1/agents/a/satchel", content=b"x", headers=bytes_of)
        check_refused(answer, 405, "method_not_allowed", method)


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_what_a_page_loads_without_an_origin_is_refused(local: httpx.AsyncClient, site: str):
    """Pictures and scripts are refused; a link that the user follows is not."""
    loads = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "no-cors"}
    check_refused(await local.get("/v1/models", headers=loads), 403, "not_allowed", "other sites")
    follows = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "navigate"}
    assert (await local.get("/v1/models", headers=follows)).status_code == 200
    check_refused(await local.post("/v1/agents/a/release", headers=follows), 403, "not_allowed", "other sites")


KINDS = ["", "text/plain;charset=UTF-8", "application/x-www-form-urlencoded", "application/octet-stream"]


@pytest.mark.parametrize("sign", [{"Origin": OWN}, {"Sec-Fetch-Site": "same-origin"}, {"Referer": "x"}])
@pytest.mark.parametrize("kind", [*KINDS, "application/jsonx"])
async def test_the_body_of_a_browser_says_that_it_is_json(
    local: httpx.AsyncClient, backend: Any, kind: str, sign: dict[str, str]
):
    """A page can send other bodies without a preflight."""
    headers = sign | ({"Content-Type": kind} if kind else {})
    answer = await local.post("/v1/chat/completions", content=b'{"messages": []}', headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")
    assert "application/json" in answer.json()["error"]["message"] and not backend.requests


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat"])
async def test_the_body_of_a_program_is_json_whatever_it_says(local: httpx.AsyncClient, path: str, kind: str):
    """`curl -d` declares a form, and aiohttp declares bytes (so LiteLLM to Ollama); Ollama reads both as JSON."""
    headers = {"Content-Type": kind} if kind else {}
    body = b'{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "model": "satchel/tiny"}'
    assert (await local.post(path, content=body, headers=headers)).status_code == 200
    assert (await local.post(path, content=b"a=b", headers=headers)).status_code == 400
    # A browser of before 2020 may send a form with no other sign.
    browser = {**headers, "User-Agent": "Mozilla/5.0 (X11; Linux x86_64; rv:60.0) Gecko/20100101 Firefox/60.0"}
    assert (await local.post(path, content=body, headers=browser)).status_code == 415


@pytest.mark.parametrize("kind", KINDS[1:])
async def test_a_form_says_that_it_is_one(local: httpx.AsyncClient, kind: str):
    answer = await local.post("/v1/files", content=b"purpose=batch", headers={"Content-Type": kind})
    check_refused(answer, 415, "unsupported_media_type", "multipart/form-data")


@pytest.mark.parametrize("kind", ["application/json", "application/json; charset=utf-8", "Application/JSON"])
async def test_a_body_that_says_so_is_taken(local: httpx.AsyncClient, kind: str):
    body = b'{"messages": [{"role": "user", "content": "Hi"}]}'
    answer = await local.post("/v1/chat/completions", content=body, headers={"Content-Type": kind})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Origin": OWN}, 200),
        ({"Origin": "http://127.0.0.1:8000"}, 200),
        ({"Origin": "https://evil.com"}, 403),
        ({"Cookie": "a=b"}, 415),
        ({"Referer": "https://evil.com/"}, 415),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"}, 415),
        pytest.param({"Sec-Fetch-Mode": "cors"}, 200, id="Node's fetch"),
    ],
)
async def test_a_form_with_a_file_is_taken_from_programs_and_pages_that_may(
    local: httpx.AsyncClient, headers: dict[str, str], status: int
):
    """A page can send forms without a preflight."""
    form: dict[str, Any] = {"files": {"file": ("f", b"x")}, "data": {"purpose": "batch"}, "headers": headers}
    answer = await local.post("/v1/files", **form)
    assert answer.status_code == status
    assert (await local.post("/v1/chat/completions", **form)).status_code in (403, 415)


async def test_its_own_pages_and_those_of_the_config_may_use_it(local: httpx.AsyncClient):
    same = await local.post("/v1/chat/completions", json=CHAT, headers={"Origin": "http://127.0.0.1:8000"})
    assert same.status_code == 200
    asked = {"Origin": OWN, "Access-Control-Request-Method": "DELETE", "Access-Control-Request-Headers": "content-type"}
    asked_first = await local.options("/v1/cache", headers=asked)
    assert asked_first.status_code == 200 and "DELETE" in asked_first.headers["access-control-allow-methods"]
    told = await local.post("/v1/chat/completions", json=CHAT, headers={"Origin": OWN})
    assert told.status_code == 200
    assert told.headers["access-control-allow-origin"] == asked_first.headers["access-control-allow-origin"] == OWN


@pytest.mark.parametrize(
    ("listen", "answers", "refuses"),
    [
        ("127.0.0.1", ["localhost", "::1", "127.0.0.9"], ["10.1.2.3", "mac0", "evil.com"]),
        ("0.0.0.0", ["localhost", "127.0.0.1", "10.1.2.3", "mac0", "mac0.local"], ["evil.com", "mac1.local"]),
        ("::", ["localhost", "::1", "fe80::1", "mac0"], ["evil.com"]),
        ("10.1.2.3", ["10.1.2.3", "mac0", "mac0.local"], ["10.1.2.4", "127.0.0.1", "localhost"]),
        ("studio.lan", ["studio.lan", "mac0.local"], ["lan", "10.1.2.3"]),
        ("localhost", ["localhost", "127.0.0.1", "::1"], ["10.1.2.3"]),
    ],
)
def test_the_hosts_of_an_address(
    monkeypatch: pytest.MonkeyPatch, listen: str, answers: list[str], refuses: list[str]
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "Mac0.local")
    hosts = Hosts(Endpoint(listen=listen, hosts=("Box.example.com",)))
    assert [host for host in [*answers, "box.example.com"] if host not in hosts] == []
    assert [host for host in refuses if host in hosts] == []


def test_names_of_the_certificate_are_answered_to_as_long_as_it_has_them() -> None:
    names = ["chat.example.org"]
    hosts = Hosts(Endpoint(), lambda: names)
    assert "chat.example.org" in hosts and "localhost" in hosts and "evil.com" not in hosts
    names[0] = "other.example.org"
    assert "chat.example.org" not in hosts and "other.example.org" in hosts


@pytest.mark.parametrize(
    "field", [{"hosts": ["a b"]}, {"hosts": ["http://x"]}, {"origins": ["x.com"]}, {"origins": ["http://x/y"]}]
)
def test_a_name_that_cannot_be_one_is_no_config(field: dict[str, list[str]]) -> None:
    with pytest.raises(ConfigError, match=r"endpoint\.(hosts|origins)"):
        parse_config({"models": [{"name": "m", "source": "s"}], "endpoint": field})
