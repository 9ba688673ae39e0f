"""Routes that are added, and examined by FastAPI when they are first used."""

from __future__ import annotations

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.exceptions import FastAPIError
from fastapi.responses import JSONResponse, Response

from satchel.api.http.adding import DeferredRoute, add_route


class Unknown:
    """A class of which FastAPI can make no parameter."""


async def right(request: Request, number: int = 1) -> Response:
    return JSONResponse(number)


async def wrong(parameter: Unknown) -> Response:
    return JSONResponse(None)


@pytest.fixture
def app() -> FastAPI:
    app = FastAPI()
    add_route(app, "GET", "/right/{place}", right)
    add_route(app, "GET", "/wrong", wrong)
    return app


async def test_a_route_is_used_though_another_one_cannot_be(app: FastAPI) -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        for _ in range(2):
            assert (await client.get("/right/here?number=3")).json() == 3
        assert (await client.get("/right/here?number=x")).status_code == 422
        assert (await client.head("/right/here")).status_code == 200
        assert (await client.post("/right/here")).status_code == 405
        assert (await client.get("/left")).status_code == 404
        with pytest.raises(FastAPIError):
            await client.get("/wrong")


def test_what_a_route_has_not_is_an_error_before_and_after_it_was_used(app: FastAPI) -> None:
    route = next(route for route in app.routes if isinstance(route, DeferredRoute))
    for _ in range(2):
        assert not hasattr(route, "colour")
    assert route.dependant.query_params[0].name == "number"


def test_the_description_has_every_route(app: FastAPI) -> None:
    app.router.routes = [route for route in app.routes if getattr(route, "path", "") != "/wrong"]
    parameters = app.openapi()["paths"]["/right/{place}"]["get"]["parameters"]
    assert [parameter["name"] for parameter in parameters] == ["number"]
