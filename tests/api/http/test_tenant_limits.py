"""Two keys, one with little memory and disk. Over its limits its KV is computed again and its turns are refused; the
other key's memory and agents are not affected."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from satchel.actors.protocol.block_ids import BLOCK_TOKENS
from satchel.actors.protocol.store_messages import Commit, Content
from satchel.api.agents.memory import AgentMemory
from satchel.api.app import create_app
from satchel.api.pipeline.generation import Generator
from satchel.cluster.config.config import Config, parse_config
from satchel.cluster.home import Home, prepare_home
from satchel.cluster.keys import KeyRing, create_key, revoke_key
from tests.worlds.api.engine_backend import EngineBackend
from tests.worlds.api.remembering import LocalStore, Remembering, spoken
from tests.worlds.kv_store.kv_files import nbytes_of

from .test_tenants import Tenants

LONG = "Remember: the code of ada is 1815. " * 60


class World:
    """An endpoint over a real engine and a real disk, with keys."""

    def __init__(self, folder: Path) -> None:
        self.config: Config = parse_config({"models": [{"name": "satchel/recall", "source": "embedded:recall"}]})
        self.store = LocalStore(self.config, folder / "kv")
        self.backend = EngineBackend(self.config, self.store)
        self.home = Home(folder / "home")
        prepare_home(self.home)
        self.secrets: dict[str, str] = {}
        generator = Generator(self.backend, self.config, memory=AgentMemory(self.store.asked))
        keys = KeyRing(self.home, required=False)
        app = create_app(self.backend, self.config, generator=generator, keys=keys)
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost", timeout=120)

    def key(self, name: str, **limits: Any) -> None:
        if name in self.secrets:
            revoke_key(self.home, name)
        self.secrets[name] = create_key(self.home, name, **limits)[1]

    async def call(self, name: str, method: str, path: str, body: Any = None) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.secrets[name]}"}
        return await self.client.request(method, f"/v1{path}", json=body, headers=headers)

    async def ask(self, name: str, agent: str, text: str = LONG) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": text}], "agent_id": agent, "max_tokens": 4}
        answer = await self.call(name, "POST", "/chat/completions", body)
        await self.backend.at_rest()
        return answer

    async def cached(self, name: str, agent: str, text: str = LONG) -> tuple[int, int]:
        """Returns the prompt's tokens, and how many of them were cached."""
        answer = await self.ask(name, agent, text)
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

    def on_disk(self, tenant: str) -> int:
        disk = self.store.actor.services.memory.disk.store
        assert disk is not None
        return nbytes_of(disk, tenant)

    def words(self, tenant: str) -> int:
        return self.store.actor.services.memory.agents.nbytes_of(tenant)

    async def agents(self, name: str) -> list[str]:
        listed = await self.call(name, "GET", "/agents")
        assert listed.status_code == 200
        return [each["id"] for each in listed.json()["data"]]


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path)
    await made.backend.begin()
    yield made
    await made.backend.at_rest()
    await made.backend.on_thread(made.backend.engine.prefixes.check)
    await made.client.aclose()
    await made.backend.end()
    disk = made.store.actor.services.memory.disk.store
    assert disk is not None
    disk.check(payload=True)


async def test_one_key_over_its_limits_and_another_one_that_notices_nothing(world: World):
    block = world.backend.engine.loaded.spec.bytes_per_token * BLOCK_TOKENS
    world.key("bob")
    world.key("ann", memory_bytes_max=block, disk_bytes_max=2 * block)
    tokens, cached = await world.cached("bob", "b")
    assert tokens > 3 * BLOCK_TOKENS and cached == 0
    hers, his = world.on_disk("ann"), world.on_disk("bob")
    assert hers == 0 < his
    for turn in range(3):
        _, cached = await world.cached("ann", f"a{turn}")
        assert cached <= 2 * BLOCK_TOKENS
        assert 0 < world.on_disk("ann") + world.words("ann") <= 2 * block and world.on_disk("bob") == his
    assert (await world.cached("bob", "b"))[1] == tokens - 1
    # Even KV that is only on disk.
    his = world.on_disk("bob")
    await world.backend.on_thread(world.backend.engine.prefixes.clear)
    await world.ask("ann", "a0", LONG + "More.")
    assert (await world.cached("bob", "b"))[1] == tokens - 1 and world.on_disk("bob") == his
    # Transcripts over the limit. A key that was made again has its new limit from its next request on.
    world.key("ann", disk_bytes_max=world.words("ann") - 1)
    bobs = world.words("bob")
    for method, path, body in (
        ("POST", "/chat/completions", {"messages": spoken("Hi"), "agent_id": "a0"}),
        ("POST", "/chat/completions", {"messages": spoken("Hi"), "agent_id": "new"}),
        ("POST", "/chat/completions", {"messages": spoken("Hi"), "agent_id": "new", "stream": True}),
        ("POST", "/chat/completions", {"messages": spoken("Hi"), "agent_id": "a0", "agent_continue": True}),
        ("POST", "/agents/a0/inject", {"messages": spoken("Hi")}),
        ("POST", "/agents/a0/fork", {"as": "copy"}),
    ):
        refused = await world.call("ann", method, path, body)
        error = refused.json()["error"]
        assert refused.status_code == 429 and error["code"] == "insufficient_quota", refused.text
        assert f"{world.words('ann') - 1:,}" in error["message"] and "erasing agents" in error["message"]
    assert await world.agents("ann") == ["a0", "a1", "a2"] and await world.agents("bob") == ["b"]
    assert (await world.call("ann", "GET", "/agents/a1")).status_code == 200
    nobody = {"messages": spoken("Hi"), "max_tokens": 2}
    assert (await world.call("ann", "POST", "/chat/completions", nobody)).status_code == 200, "adds no words"
    assert (await world.ask("bob", "b2", "Hello")).status_code == 200 and world.words("bob") > bobs
    assert (await world.call("ann", "DELETE", "/agents/a2")).status_code == 200
    assert (await world.ask("ann", "a0", "Hi")).status_code == 200
    assert await world.agents("ann") == ["a0", "a1"] and (await world.cached("bob", "b"))[1] == tokens - 1


async def test_a_turn_that_others_overtook_is_answered_and_says_that_it_is_not_kept(backend, config, tmp_path: Path):
    """The store refuses the turn; an injection is an error then."""
    home = Home(tmp_path / "home")
    prepare_home(home)
    endpoint = Tenants(backend, config, home)
    endpoint.key("ann", disk_bytes_max=2000)
    endpoint.as_("ann")
    remembered: Remembering = endpoint
    client = remembered.store.actor.client
    commit = client.commit

    async def overtaken(*arguments: Any) -> Any:
        await commit("ann/other", Commit(b"m" * 32, Content(bytes(3000), "", b"[]"), 1, 2**60))
        return await commit(*arguments)

    client.commit = overtaken  # type: ignore[method-assign]
    answer = await endpoint.post({"messages": spoken("Hi")}, "a")
    assert answer.status_code == 200 and answer.headers["x-satchel-memory"] == "not-kept; reason=insufficient_quota"
    assert answer.json()["satchel"] == {"kept": False, "reason": "insufficient_quota"}
    await client.forget("ann/other")
    injected = await endpoint.client.post("/v1/agents/a/inject", json={"messages": spoken("Hi")})
    assert injected.status_code == 429 and injected.json()["error"]["code"] == "insufficient_quota"
    await endpoint.client.aclose()


async def test_one_key_leaves_places_in_the_background_for_others(backend, config, tmp_path: Path):
    """Each key may have as many as it leaves free: of seven Ann gets four, then Bob two; the last one is for others."""
    home = Home(tmp_path / "home")
    prepare_home(home)
    limited = replace(config, endpoint=replace(config.endpoint, background_responses_max=7))
    endpoint = Tenants(backend, limited, home)
    for name in ("ann", "bob", "eve"):
        endpoint.key(name)
    go, (first, *rest) = asyncio.Event(), backend.sequence("Hello there")
    backend.play(first, go, *rest)

    async def begin(name: str) -> httpx.Response:
        return await endpoint.call(name, "POST", "/v1/responses", {"input": "Hi", "background": True})

    async def most(name: str) -> tuple[int, httpx.Response]:
        for began in range(8):
            if (answer := await begin(name)).status_code != 200:
                return began, answer
        raise AssertionError("it is never refused")

    for name, places in (("ann", 4), ("bob", 2)):
        began, refused = await most(name)
        error = refused.json()["error"]
        assert (began, refused.status_code, error["code"]) == (places, 429, "rate_limit_exceeded"), refused.text
        assert refused.headers["retry-after"] == "1" and "for others" in error["message"]
    assert (await begin("eve")).status_code == 200
    full = await begin("eve")
    assert (full.status_code, full.json()["error"]["code"]) == (503, "queue_full")
    go.set()
    for _ in range(200):
        if (await begin("ann")).status_code == 200:
            break
        await asyncio.sleep(0.01)
    else:
        raise AssertionError("no place becomes free")
    await endpoint.client.aclose()
