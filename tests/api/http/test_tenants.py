"""Two keys, two tenants: by no route can one see, change or slow down what the other has."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from satchel.actors.protocol.block_ids import scope_of
from satchel.api.http import guard
from satchel.api.views.agents import agent_transcripts
from satchel.cluster.audit import Audit
from satchel.cluster.home import Home, prepare_home
from satchel.cluster.keys import KeyRing, create_key, owner_key, revoke_key, write_owner_key
from tests.worlds.api.remembering import LocalStore, Remembering


class Tenants(Remembering):
    """An endpoint with keys; `as_` sets the key of the next requests."""

    def __init__(self, backend: Any, config: Any, home: Home) -> None:
        store = LocalStore(config, home.root / "kv")
        super().__init__(backend, config, store, keys=KeyRing(home, required=False), audit=Audit(home))
        self.home = home
        self.secrets: dict[str, str] = {}

    def key(self, name: str, **how: Any) -> None:
        self.secrets[name] = create_key(self.home, name, **how)[1]

    def as_(self, name: str | None) -> None:
        self.client.headers.pop("Authorization", None)
        if name is not None:
            self.client.headers["Authorization"] = f"Bearer {self.secrets[name]}"

    async def transcripts(self, agent: str) -> list[bytes]:
        return await agent_transcripts(self.store.asked, agent)

    async def call(self, name: str, method: str, path: str, body: Any = None) -> httpx.Response:
        self.as_(name)
        return await self.client.request(method, path, json=body)


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Home, dict[str, str]]:
    """A home with three keys, made once: deriving one is meant to be slow."""
    home = Home(tmp_path_factory.mktemp("keyed"))
    prepare_home(home)
    how: dict[str, dict[str, Any]] = {"ann": {}, "bob": {}, "root": {"admin": True}}
    return home, {name: create_key(home, name, **more)[1] for name, more in how.items()}


@pytest.fixture
async def endpoint(backend, config, keyed: tuple[Home, dict[str, str]], tmp_path: Path) -> AsyncIterator[Tenants]:
    template, secrets = keyed
    home = Home(tmp_path / "home")
    shutil.copytree(template.root, home.root)
    made = Tenants(backend, config, home)
    made.secrets |= secrets
    yield made
    await made.client.aclose()


async def test_requests_with_one_key_wait_for_one_check(endpoint: Tenants, monkeypatch: pytest.MonkeyPatch):
    """All clients come back at once if the endpoint starts again, each with many connections. None is refused."""
    monkeypatch.setattr(guard, "CHECKS_MAX", 2)
    asked = [endpoint.call(name, "GET", "/v1/models") for name in ("ann", "bob") for _ in range(8)]
    assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}


async def test_without_keys_everybody_is_the_owner(backend, config, tmp_path):
    home = Home(tmp_path)
    open_one = Tenants(backend, config, home)
    for headers in ({}, {"Authorization": "Bearer sk-whatever"}, {"x-api-key": "x"}):
        assert (await open_one.client.get("/v1/cluster", headers=headers)).status_code == 200
    await open_one.say("Hi", agent="me")
    assert backend.requests[-1]["tenant"] == "default" and backend.requests[-1]["flow"] == "default/me"
    closed = Remembering(backend, config, keys=KeyRing(home, required=True))
    assert (await closed.client.get("/v1/models")).status_code == 401


ROUTES = [
    ("GET", "/v1/models"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/v1/agents"),
    ("DELETE", "/v1/agents/a"),
    ("GET", "/v1/cluster"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("GET", "/nothing"),
    ("PUT", "/v1/models"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_every_route_needs_a_key(endpoint: Tenants, method: str, path: str):
    for headers in (
        {},
        {"Authorization": "Bearer nonsense"},
        {"Authorization": endpoint.secrets["ann"]},
        {"Authorization": f"Basic {endpoint.secrets['ann']}"},
        {"x-api-key": endpoint.secrets["ann"][:-1] + "!"},
        {"Authorization": "Bearer " + "é" * 50},
    ):
        sent = [(name.encode(), value.encode()) for name, value in headers.items()]
        answer = await endpoint.client.request(method, path, headers=sent)
        assert answer.status_code == 401, answer.text
        error = answer.json()["error"]
        assert error["code"] == "invalid_api_key" and answer.headers["www-authenticate"] == "Bearer"
    assert endpoint.backend.requests == []


@pytest.mark.parametrize("header", ["Authorization", "x-api-key"])
async def test_a_key_may_come_in_either_header(endpoint: Tenants, header: str):
    secret = endpoint.secrets["ann"]
    value = f"bearer {secret}" if header == "Authorization" else secret
    other = {"x-api-key": "dummy"} if header == "Authorization" else {"Authorization": "Bearer dummy"}
    answer = await endpoint.client.get("/v1/models", headers={header: value, **other})
    assert answer.status_code == 200


async def test_health_tells_strangers_the_status_only(endpoint: Tenants):
    assert (await endpoint.client.get("/health")).json() == {"status": "ok"}
    assert (await endpoint.call("ann", "GET", "/health")).json() == {"status": "ok"}
    assert "models" in (await endpoint.call("root", "GET", "/health")).json()


async def test_an_administrator_reaches_the_agents_of_every_tenant(endpoint: Tenants):
    for name in ("ann", "bob", "root"):
        endpoint.as_(name)
        await endpoint.say(f"I am {name}", agent="a")
    listed = (await endpoint.call("root", "GET", "/v1/agents?tenant=*&limit=2")).json()
    assert [(each["tenant"], each["id"]) for each in listed["data"]] == [("ann", "a"), ("bob", "a")]
    assert listed["has_more"] and listed["last_id"] == "bob/a"
    rest = (await endpoint.call("root", "GET", "/v1/agents?tenant=*&after=bob/a")).json()
    assert [(each["tenant"], each["id"]) for each in rest["data"]] == [("root", "a")]
    named = (await endpoint.call("root", "GET", "/v1/agents?tenant=ann")).json()["data"]
    assert len(named) == 1 and "tenant" not in named[0]
    view = (await endpoint.call("root", "GET", "/v1/cluster?tenant=*")).json()["agents"]
    assert [(each["tenant"], each["id"]) for each in view] == [("ann", "a"), ("bob", "a"), ("root", "a")]
    assert (await endpoint.call("root", "POST", "/v1/agents/a/fork?tenant=ann", {"as": "b"})).status_code == 200
    assert (await endpoint.call("ann", "GET", "/v1/agents/b")).status_code == 200
    said = {"messages": [{"role": "user", "content": "x"}]}
    assert (await endpoint.call("root", "POST", "/v1/agents/b/inject?tenant=ann", said)).status_code == 200
    assert (await endpoint.call("ann", "GET", "/v1/agents/b")).json()["messages"] == 3
    assert (await endpoint.call("root", "DELETE", "/v1/agents/a?tenant=bob")).status_code == 200
    assert (await endpoint.call("bob", "GET", "/v1/agents/a")).status_code == 404
    assert (await endpoint.call("root", "GET", "/v1/agents/a")).status_code == 200
    wrong = await endpoint.call("root", "GET", "/v1/agents/a?tenant=no/body")
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "tenant"
    assert (await endpoint.call("root", "GET", "/v1/agents/a?tenant=*")).status_code == 400


async def test_an_agent_is_given_to_another_tenant(endpoint: Tenants):
    """For example an agent from before the first key, which belongs to the owner."""
    write_owner_key(endpoint.home)
    endpoint.secrets["owner"] = owner_key(endpoint.home)
    endpoint.as_("owner")
    await endpoint.say("The code is 4711", agent="a")
    given = await endpoint.call("owner", "POST", "/v1/agents/a/give", {"to": "ann"})
    assert given.json() == {"id": "a", "object": "agent.gift", "from": "default", "to": "ann", "branches": 1}
    assert (await endpoint.call("owner", "GET", "/v1/agents/a")).status_code == 404
    assert (await endpoint.call("ann", "GET", "/v1/agents/a")).json()["messages"] == 2
    endpoint.as_("ann")
    await endpoint.say("What is it?", agent="a", agent_continue=True)
    assert "4711" in endpoint.backend.text.tokenizer.decode(endpoint.backend.requests[-1]["prompt"])
    endpoint.as_("bob")
    await endpoint.say("Hi", agent="a")
    for path, body, status in (
        ("/v1/agents/a/give?tenant=ann", {"to": "bob"}, 409),
        ("/v1/agents/a/give?tenant=ann", {"to": "ann"}, 400),
        ("/v1/agents/a/give?tenant=ann", {"to": "no/body"}, 400),
        ("/v1/agents/a/give?tenant=ann", {"to": 1}, 400),
        ("/v1/agents/a/give?tenant=ann", {"to": "nobody"}, 400),
        ("/v1/agents/a/give?tenant=ann", {"to": "Bob"}, 400),
        ("/v1/agents/none/give?tenant=ann", {"to": "bob"}, 404),
    ):
        assert (await endpoint.call("root", "POST", path, body)).status_code == status, (path, body)
    assert (await endpoint.call("ann", "GET", "/v1/agents/a")).status_code == 200
    revoke_key(endpoint.home, "bob")
    gone = await endpoint.call("root", "POST", "/v1/agents/a/give?tenant=ann", {"to": "bob"})
    assert gone.status_code == 400 and gone.json()["error"]["param"] == "to"
    assert "there is no key 'bob'" in gone.json()["error"]["message"]
    back = await endpoint.call("root", "POST", "/v1/agents/a/give?tenant=ann", {"to": "default"})
    assert back.status_code == 200, "whoever runs the server needs no key"


@pytest.mark.parametrize("continues", [False, True])
@pytest.mark.parametrize("ends", ["answered", "gone"])
async def test_an_agent_is_not_given_away_during_a_turn(endpoint: Tenants, continues: bool, ends: str):
    endpoint.as_("ann")
    await endpoint.say("The code is 4711", agent="a")
    go_on = asyncio.Event()
    endpoint.backend.play(go_on, *endpoint.backend.sequence("Noted"))
    turn = asyncio.create_task(endpoint.say("It is 4712 now", agent="a", agent_continue=continues))
    while len(endpoint.backend.requests) < 2:
        await asyncio.sleep(0.01)
    busy = await endpoint.call("root", "POST", "/v1/agents/a/give?tenant=ann", {"to": "bob"})
    assert busy.status_code == 409 and busy.json()["error"]["code"] == "agent_busy"
    if ends == "answered":
        go_on.set()
        assert await turn == "Noted"
    else:
        turn.cancel()
        await asyncio.wait([turn])
    given = await endpoint.call("root", "POST", "/v1/agents/a/give?tenant=ann", {"to": "bob"})
    assert given.status_code == 200
    assert ("4712" in json.dumps([json.loads(each) for each in await endpoint.transcripts("bob/a")])) is (
        ends == "answered"
    )


async def test_a_turn_of_another_process_ends_before_its_agent_is_given(endpoint: Tenants):
    """A turn that begins meanwhile is refused, because it would be lost."""
    endpoint.as_("ann")
    await endpoint.say("The code is 4711", agent="a")
    await endpoint.store.begin("ann/a", "elsewhere", b"", {})
    give = asyncio.create_task(
        endpoint.client.post(
            "/v1/agents/a/give?tenant=ann",
            json={"to": "bob"},
            headers={"Authorization": f"Bearer {endpoint.secrets['root']}"},
        )
    )
    while endpoint.store.calls.count("begin") < 2:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    assert not give.done()
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    assert (await endpoint.post(body, "a")).status_code == 409
    assert (await endpoint.post({**body, "agent_continue": True}, "a")).status_code == 409
    await endpoint.store.abandon("ann/a", "elsewhere")
    assert (await give).status_code == 200
    assert (await endpoint.post(body, "a")).status_code == 200, "an agent of that name may begin anew"


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/agents?tenant=bob", None),
        ("GET", "/v1/agents?tenant=*", None),
        ("GET", "/v1/agents/a?tenant=bob", None),
        ("DELETE", "/v1/agents/a?tenant=bob", None),
        ("POST", "/v1/agents/a/fork?tenant=bob", {"as": "b"}),
        ("POST", "/v1/agents/a/inject?tenant=bob", {"messages": "x"}),
        ("POST", "/v1/agents/a/release?tenant=bob", None),
        ("GET", "/v1/agents/a/satchel?tenant=bob", None),
        ("GET", "/v1/agents/a/transcript?tenant=bob", None),
        ("PUT", "/v1/agents/a/satchel?tenant=bob&replace=true", None),
        ("POST", "/v1/agents/a/give", {"to": "ann"}),
        ("POST", "/v1/agents/a/give?tenant=bob", {"to": "ann"}),
    ],
)
async def test_nobody_else_names_a_tenant(endpoint: Tenants, method: str, path: str, body: Any):
    for name in ("ann", "bob"):
        endpoint.as_(name)
        await endpoint.say("Hi", agent="a")
    assert (await endpoint.call("ann", method, path, body)).status_code == 403
    assert (await endpoint.call("bob", "GET", "/v1/agents/a")).json()["messages"] == 2
    assert (await endpoint.call("ann", "GET", "/v1/agents?tenant=ann")).status_code == 200, "the own one"


ADMINISTRATORS = [
    ("GET", "/v1/cluster", None),
    ("GET", "/v1/cluster/agents/a", None),
    ("GET", "/v1/cluster/decisions/x", None),
    ("GET", "/v1/cluster/decisions", None),
    ("GET", "/v1/cluster/history", None),
    ("DELETE", "/v1/cluster/nodes/local", None),
    ("GET", "/v1/cache/stats", None),
    ("DELETE", "/v1/cache", None),
    ("POST", "/v1/agents/a/move", {"to": "local"}),
    ("GET", "/metrics", None),
]


@pytest.mark.parametrize(("method", "path", "body"), ADMINISTRATORS)
async def test_what_is_everybodys_is_for_administrators(endpoint: Tenants, method: str, path: str, body: Any):
    refused = await endpoint.call("ann", method, path, body)
    assert refused.status_code == 403 and refused.json()["error"]["code"] == "not_allowed"
    assert (await endpoint.call("root", method, path, body)).status_code != 403


async def test_an_agent_is_carried_from_tenant_to_tenant_by_its_file_alone(endpoint: Tenants):
    endpoint.as_("ann")
    await endpoint.say("Hi", agent="coder")
    packed = await endpoint.client.get("/v1/agents/coder/satchel")
    assert packed.status_code == 200 and len(packed.content) == int(packed.headers["content-length"])
    assert "coder.satchel" in packed.headers["content-disposition"]

    async def slowly():
        for start in range(0, len(packed.content), 100):
            yield packed.content[start : start + 100]

    endpoint.as_("bob")
    path = "/v1/agents/coder/satchel"
    cut = await endpoint.client.put(path, content=packed.content[:-9])
    assert (cut.status_code, cut.json()["error"]["code"]) == (400, "invalid_satchel")
    assert (await endpoint.client.get("/v1/agents/coder")).status_code == 404
    came = (await endpoint.client.put(path, content=slowly())).json()
    assert (came["object"], came["branches"], came["replaced"], came["kv"]["of"]) == ("agent.satchel", 1, False, 0)
    again = await endpoint.client.put(path, content=packed.content)
    assert (again.status_code, again.json()["error"]["code"], again.json()["error"]["param"]) == (
        409,
        "agent_exists",
        "replace",
    )
    assert (await endpoint.client.put(f"{path}?replace=true", content=packed.content)).json()["replaced"]
    assert await endpoint.store.transcript("bob/coder") == await endpoint.store.transcript("ann/coder")
    endpoint.key("small", disk_bytes_max=1000)
    refused = await endpoint.call("small", "GET", "/v1/agents")
    refused = await endpoint.client.put(path, content=bytes(2000))
    assert refused.status_code == 429 and "2,000 bytes is more than the 1,000" in refused.text
    assert not [*(endpoint.home.root / "kv" / "satchels").iterdir()]


async def test_two_tenants_have_agents_of_one_name_and_see_only_their_own(endpoint: Tenants):
    endpoint.as_("ann")
    await endpoint.say("Hi", agent="coder")
    await endpoint.say("Hi", agent="mine")
    endpoint.as_("bob")
    assert (await endpoint.client.get("/v1/agents")).json()["data"] == []
    await endpoint.say("Bye", agent="coder")
    seen = (await endpoint.client.get("/v1/agents")).json()
    assert [each["id"] for each in seen["data"]] == ["coder"] and seen["let_go"] is None
    for method, path, body in (
        ("GET", "/v1/agents/mine", None),
        ("DELETE", "/v1/agents/mine", None),
        ("POST", "/v1/agents/mine/release", None),
        ("POST", "/v1/agents/mine/fork", {"as": "stolen"}),
        ("GET", "/v1/agents/mine/satchel", None),
        ("GET", "/v1/agents/mine/transcript", None),
    ):
        answer = await endpoint.call("bob", method, path, body)
        never = await endpoint.call("bob", method, path.replace("mine", "none"), body)
        assert answer.status_code == 404 and answer.text == never.text.replace("none", "mine")
    for after in ("", "a", "coder", "ann/mine"):
        answer = await endpoint.call("bob", "GET", f"/v1/agents?after={after}")
        assert "mine" not in answer.text or answer.status_code == 400
    # If both tenants have an agent of the same name, forget and fork affect only the caller's own.
    assert (await endpoint.call("bob", "POST", "/v1/agents/coder/fork", {"as": "mine"})).status_code == 200
    assert (await endpoint.call("bob", "DELETE", "/v1/agents/coder")).status_code == 200
    ids = [each["id"] for each in (await endpoint.call("ann", "GET", "/v1/agents")).json()["data"]]
    assert ids == ["coder", "mine"]
    whole = await endpoint.store.transcript("ann/coder")
    assert "Bye" not in whole.decode() and json.loads(whole)
    assert json.loads(await endpoint.store.transcript("ann/mine"))[0]["content"] == "Hi"


async def test_a_turn_continues_only_what_its_own_tenant_said(endpoint: Tenants):
    endpoint.as_("ann")
    await endpoint.go_on("my secret", agent="a")
    endpoint.as_("bob")
    await endpoint.go_on("what is it?", agent="a")
    assert "my secret" not in endpoint.backend.prompt
    assert {request["tenant"] for request in endpoint.backend.requests} == {"ann", "bob"}


async def test_scopes_of_tenants_and_salts_are_apart(endpoint: Tenants):
    scopes = [
        scope_of("tenant", tenant, "", "r", salt)
        for tenant, salt in (("ann", ""), ("ann", "x"), ("ann", "y"), ("bob", ""), ("bob", "x"))
    ]
    assert len(set(scopes)) == len(scopes) and scopes[0] == "tenant:ann"
    endpoint.as_("ann")
    await endpoint.say("Hi", agent="", cache_salt="pepper")
    assert endpoint.backend.requests[-1]["cache_salt"] == "pepper"
    for path, body in (
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("completions", {"prompt": "x"}),
    ):
        answer = await endpoint.client.post(f"/v1/{path}", json={**body, "cache_salt": "x", "agent_id": "a"})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "cache_salt"
    empty = await endpoint.client.post("/v1/completions", json={"prompt": "x", "cache_salt": ""})
    assert empty.status_code == 400 and empty.json()["error"]["param"] == "cache_salt"


async def test_a_revoked_key_is_refused_from_the_next_request_on(endpoint: Tenants):
    assert (await endpoint.call("ann", "GET", "/v1/models")).status_code == 200
    revoke_key(endpoint.home, "ann")
    assert (await endpoint.call("ann", "GET", "/v1/models")).status_code == 401
    endpoint.key("ann")
    assert (await endpoint.call("ann", "GET", "/v1/models")).status_code == 200


async def test_the_command_line_of_the_owner_is_let_in(endpoint: Tenants):
    write_owner_key(endpoint.home)
    endpoint.secrets["me"] = owner_key(endpoint.home)
    assert (await endpoint.call("me", "GET", "/v1/cluster")).status_code == 200
    await endpoint.say("Hi")
    assert endpoint.backend.requests[-1]["tenant"] == "default"


async def test_a_key_sees_the_models_that_it_may_use(endpoint: Tenants):
    endpoint.key("few", models=("other",))
    listed = (await endpoint.call("few", "GET", "/v1/models")).json()["data"]
    assert [model["id"] for model in listed] == ["other"]
    assert (await endpoint.call("few", "GET", "/v1/models/satchel/tiny")).status_code == 404
    ask = {"messages": [{"role": "user", "content": "x"}]}
    refused = await endpoint.call("few", "POST", "/v1/chat/completions", {**ask, "model": "satchel/tiny"})
    unknown = await endpoint.call("few", "POST", "/v1/chat/completions", {**ask, "model": "satchel/none"})
    assert refused.status_code == 404 and refused.text.replace("tiny", "none") == unknown.text
    assert (await endpoint.call("few", "POST", "/v1/chat/completions", ask)).json()["model"] == "other"


async def test_limits_are_429_with_the_usual_headers(endpoint: Tenants):
    endpoint.key("slow", requests_per_minute=2, tokens_per_minute=100_000)
    for left in ("1", "0"):
        answer = await endpoint.call("slow", "GET", "/v1/models")
        assert answer.status_code == 200 and answer.headers["x-ratelimit-remaining-requests"] == left
    answer = await endpoint.call("slow", "GET", "/v1/models")
    assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
    assert (
        answer.headers["x-ratelimit-limit-requests"] == "2" and answer.headers["x-ratelimit-limit-tokens"] == "100000"
    )
    assert answer.json()["error"]["code"] == "rate_limit_exceeded"
    assert (await endpoint.call("slow", "GET", "/health")).status_code == 200
    assert (await endpoint.call("ann", "GET", "/v1/models")).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_sequences_that_run_are_counted_and_given_back(endpoint: Tenants, backend, stream: bool):
    # So few that what is taken does not come back at once.
    endpoint.key("two", rows_max=2, tokens_per_minute=3000)
    end = asyncio.Event()
    backend.play(end, *backend.sequence("ok"))
    endpoint.as_("two")
    ask = {"messages": [{"role": "user", "content": "x"}], "stream": stream}

    async def post(**more: Any) -> httpx.Response:
        return await endpoint.client.post("/v1/chat/completions", json={**ask, **more})

    running = [asyncio.create_task(post()) for _ in range(2)]
    while len(backend.generations) < 2:
        await asyncio.sleep(0.01)
    refused = await post()
    assert refused.status_code == 429 and "2 concurrent answers" in refused.text
    assert (await post(n=3)).status_code == 400
    end.set()
    assert [(await each).status_code for each in running] == [200, 200]
    assert (await post(n=2)).status_code == 200
    backend.refusal = RuntimeError("a sequence that does not begin")
    assert (await post(n=2)).status_code == 500
    backend.refusal = None
    answer = await post(n=2)
    assert answer.status_code == 200
    taken = 3000 - int(answer.headers["x-ratelimit-remaining-tokens"])
    assert 0 < taken < 1000, "prompts and answers, and nothing for sequences that did not begin"


async def test_a_sequence_that_a_client_leaves_is_given_back(endpoint: Tenants, backend):
    endpoint.key("one", rows_max=1)
    backend.play(asyncio.Event())
    endpoint.as_("one")
    ask = {"messages": [{"role": "user", "content": "x"}]}
    leaving = asyncio.create_task(endpoint.client.post("/v1/chat/completions", json=ask))
    while not backend.generations:
        await asyncio.sleep(0.01)
    leaving.cancel()
    await asyncio.wait({leaving})
    backend.say("ok")
    for _ in range(100):
        if (answer := await endpoint.client.post("/v1/chat/completions", json=ask)).status_code == 200:
            break
        await asyncio.sleep(0.02)
    assert answer.status_code == 200


async def test_priority_of_a_key(endpoint: Tenants, backend):
    endpoint.key("vip", priority_max=3)
    ask = {"messages": [{"role": "user", "content": "x"}]}
    assert (await endpoint.call("ann", "POST", "/v1/chat/completions", {**ask, "priority": 1})).status_code == 400
    assert (await endpoint.call("vip", "POST", "/v1/chat/completions", {**ask, "priority": 3})).status_code == 200
    assert backend.requests[-1]["priority"] == 3


async def test_new_keys_do_not_wait_in_a_line_without_end(endpoint: Tenants, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(guard, "CHECKS_MAX", 0)
    answer = await endpoint.call("ann", "GET", "/v1/models")
    assert answer.status_code == 503 and "retry-after" in answer.headers


async def test_the_audit_names_administrators_and_refused_keys(endpoint: Tenants):
    await endpoint.call("root", "DELETE", "/v1/cache")
    wrong = endpoint.secrets["ann"][:-3] + "xyz"
    await endpoint.client.get("/v1/models", headers={"Authorization": f"Bearer {wrong}"})
    text = endpoint.home.audit_file.read_text()
    cleared, refused = (json.loads(line) for line in text.splitlines())
    assert cleared["what"] == "cache cleared" and cleared["tenant"] == "root" and cleared["request_id"]
    assert refused["what"] == "key refused" and refused["path"] == "/v1/models"
    assert refused["key"] == wrong[:19] and wrong[20:] not in text
