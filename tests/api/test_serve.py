"""A Ray cluster must not run other Serve applications, and calls to the endpoint."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.exceptions import RayServeException

from satchel.actors.rpc.codec import encode, encode_error
from satchel.api import serve
from satchel.cluster.config.config import Config
from satchel.cluster.config.timing import USUAL
from satchel.cluster.errors import ActorSilent, ClusterError, ModelLoadError, NoAnswer


def test_nothing_is_started_beside_another_application_of_ray_serve(monkeypatch: pytest.MonkeyPatch, config: Config):
    began: list[Config] = []
    running = {serve.APPLICATION: None, "shop": None}
    monkeypatch.setattr(serve.serve, "status", lambda: SimpleNamespace(applications=running))
    monkeypatch.setattr(serve, "start_actors", began.append)
    with pytest.raises(ClusterError, match=r"Ray Serve runs shop in this Ray cluster.*Nothing was changed"):
        serve.deploy(config, report=lambda what, fraction: None)
    assert began == []


class Said:
    """What a handle of Ray Serve returns."""

    def __init__(self, answer: bytes | Exception) -> None:
        self._answer = answer

    def result(self, timeout_s: float) -> bytes:
        assert timeout_s == 5.0 + USUAL.brief_answer_s
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


def test_the_endpoint_is_asked_to_close_and_says_whether_it_did(monkeypatch: pytest.MonkeyPatch):
    asked: list[list[Any]] = []

    def close(answer: bytes | Exception) -> None:
        def remote(data: bytes) -> Said:
            asked.append(serve.EndpointClient.close.asked(data))
            return Said(answer)

        handle = SimpleNamespace(close=SimpleNamespace(remote=remote))
        monkeypatch.setattr(serve.serve, "get_app_handle", lambda name: handle)
        serve.EndpointClient(USUAL).close(5.0).wait()

    close(encode(None))
    assert asked == [[5.0]]
    with pytest.raises(ModelLoadError, match="it cannot"):
        close(encode_error(ModelLoadError("it cannot")))
    with pytest.raises(ActorSilent, match="the endpoint does not answer now"):
        close(TimeoutError())
    with pytest.raises(NoAnswer, match="the endpoint does not answer now"):
        close(RayServeException("it is gone"))


def test_an_endpoint_that_is_not_there_gives_no_answer(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> Any:
        raise RayServeException(f"there is no application {name}")

    monkeypatch.setattr(serve.serve, "get_app_handle", missing)
    with pytest.raises(NoAnswer, match="the endpoint does not answer now"):
        serve.EndpointClient(USUAL).warm().wait()
