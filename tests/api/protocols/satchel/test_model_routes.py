"""Loading and unloading models over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from satchel.actors.protocol.pool_messages import LOADED, LOADING, UNLOADING, PooledModel
from satchel.api.app import create_app
from satchel.api.requests.backend import ListedModel
from satchel.api.requests.loading import Loading
from satchel.cluster.audit import Audit
from satchel.cluster.config.config import Config
from satchel.cluster.errors import InvalidRequest, ModelBusy, ModelLoadError
from satchel.cluster.home import Home, prepare_home
from satchel.cluster.keys import KeyRing, create_key
from tests.worlds.api.fake_backend import FakeBackend

NAME = "satchel/tiny"


@pytest.fixture
def pooled(backend: FakeBackend) -> FakeBackend:
    """The default model comes and goes, and is not loaded."""

    async def load(name: str, loading: Loading) -> None:
        backend.states[name] = PooledModel(name, LOADED)

    async def unload(name: str) -> None:
        if name != NAME:
            raise InvalidRequest("it stays loaded", param="model")
        if backend.states[name].state == LOADING:
            raise ModelBusy("requests wait for it", param="model")
        backend.states[name] = PooledModel(name, UNLOADING, "finishing what runs")

    backend.entries[NAME] = ListedModel(NAME, ("gpt-4o",), True, False)
    backend.loader, backend.unload = load, unload
    return backend


def problem(answer: httpx.Response) -> tuple[int, str, str | None]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


async def test_a_model_is_loaded_and_unloaded_by_its_name_or_alias(client: httpx.AsyncClient, pooled: FakeBackend):
    loaded = await client.post("/v1/models/gpt-4o/load")
    assert loaded.status_code == 200 and loaded.json() == (await client.get(f"/v1/models/{NAME}")).json()
    assert (loaded.json()["id"], loaded.json()["state"], pooled.loads) == (NAME, "loaded", [NAME])
    unloaded = (await client.post(f"/v1/models/{NAME}/unload")).json()
    assert (unloaded["id"], unloaded["state"]) == (NAME, "unloading")
    assert unloaded["progress"] == {"what": "finishing what runs", "fraction": None}
    listed = (await client.get("/v1/models")).json()["data"]
    assert NAME in [model["id"] for model in listed], "it can be loaded again"


async def test_what_cannot_be_loaded_or_unloaded_is_an_error(client: httpx.AsyncClient, pooled: FakeBackend):
    assert problem(await client.post("/v1/models/nothing/unload")) == (404, "model_not_found", "model")
    assert problem(await client.post("/v1/models/nothing/load")) == (404, "model_not_found", "model")
    assert problem(await client.post("/v1/models/other/unload"))[::2] == (400, "model")
    pooled.states[NAME] = PooledModel(NAME, LOADING, "reading weights", 0.4)
    assert problem(await client.post(f"/v1/models/{NAME}/unload")) == (409, "model_busy", "model")

    async def fails(name: str, loading: Loading) -> None:
        raise ModelLoadError("its weights are gone")

    pooled.loader = fails
    failed = await client.post(f"/v1/models/{NAME}/load")
    assert failed.status_code == 500 and failed.json()["error"]["message"] == "its weights are gone"


async def test_an_unknown_name_is_not_taken_for_the_default_model(pooled: FakeBackend, config: Config):
    lenient = create_app(pooled, replace(config, endpoint=replace(config.endpoint, unknown_model="default")))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(lenient), base_url="http://localhost") as client:
        assert (await client.get("/v1/models/nothing")).status_code == 200
        assert (await client.post("/v1/models/nothing/unload")).status_code == 404


async def test_the_clusters_view_has_every_model_with_its_state(client: httpx.AsyncClient, pooled: FakeBackend):
    pooled.states[NAME] = PooledModel(NAME, LOADING, "reading weights", 0.4, error="no room")
    pooled.entries["other"] = ListedModel("other", source="owner/other")
    view = (await client.get("/v1/cluster")).json()
    progress = {"what": "reading weights", "fraction": 0.4}
    first = {"id": NAME, "source": None, "aliases": ["gpt-4o"], "load": "request", "state": "loading"}
    second = {"id": "other", "source": "owner/other", "aliases": [], "load": "start", "state": "loaded"}
    assert view["models"] == [
        {**first, "progress": progress, "error": "no room"},
        {**second, "progress": None, "error": None},
    ]


@pytest.fixture
async def guarded(pooled: FakeBackend, config: Config, tmp_path: Path) -> AsyncIterator[tuple[httpx.AsyncClient, Home]]:
    home = Home(tmp_path)
    prepare_home(home)
    app = create_app(pooled, config, keys=KeyRing(home, required=True), audit=Audit(home))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        yield client, home


async def test_only_administrators_may_and_the_audit_log_says_who(guarded: tuple[httpx.AsyncClient, Home]):
    client, home = guarded
    keys = {name: create_key(home, name, admin=name == "root")[1] for name in ("root", "bob")}
    for what in ("load", "unload"):
        for name, status in (("bob", 403), ("root", 200)):
            headers = {"Authorization": f"Bearer {keys[name]}"}
            answer = await client.post(f"/v1/models/{NAME}/{what}", headers=headers)
            assert answer.status_code == status, answer.text
    lines = [json.loads(line) for line in (await asyncio.to_thread(home.audit_file.read_text)).splitlines()]
    notes = [(line["what"], line["tenant"], line["model"]) for line in lines if "model" in line]
    assert notes == [("model loaded", "root", NAME), ("model unloaded", "root", NAME)]
