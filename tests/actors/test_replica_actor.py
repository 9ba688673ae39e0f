"""The replica's shell without Ray: what it refuses before anything is computed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from satchel.actors.messages import GenerateRequest, Sampling, encode
from satchel.actors.replica.actor import ReplicaActor
from satchel.cluster.config import Model, Scheduling
from satchel.cluster.errors import SatchelError, Unavailable, from_wire
from satchel.cluster.nodes import Node

OWN, OTHER = b"o" * 32, b"x" * 32


class Engine:
    """Takes every row."""

    def __init__(self) -> None:
        self.loaded = SimpleNamespace(model_id=OWN)
        self.taken: list[str] = []

    def submit(self, message: GenerateRequest, reply: object, *restored: object) -> None:
        assert callable(reply)
        self.taken.append(message.request_id)
        reply(None)


@pytest.fixture
def replica(monkeypatch: pytest.MonkeyPatch) -> ReplicaActor:
    monkeypatch.setattr(ReplicaActor, "_run_engine", lambda self: None)
    monkeypatch.setattr(ReplicaActor, "_end_when_unwanted", lambda self: None)
    actor = ReplicaActor("m-0", Model(name="m", source="s"), Scheduling(), Node(name="mac0"), 1)
    actor._engine = Engine()  # type: ignore[assignment]
    return actor


async def test_a_request_made_for_another_model_id_is_refused(replica: ReplicaActor):
    """As where a replica came back with an update behind the router's back: its KV would be kept under the names of
    what computes otherwise. It may be tried again."""

    async def submitted(name: str, model_id: bytes) -> SatchelError | None:
        request = GenerateRequest(name, "c", "m", "", [1], [], bytes(32), Sampling(), model_id=model_id)
        answer = await replica.submit(encode(request))
        return None if answer is None else from_wire(answer)

    refusal = await submitted("r", OTHER)
    assert isinstance(refusal, Unavailable) and "computes otherwise" in refusal.message
    assert await submitted("r", OWN) is None, "and it left nothing behind"
    assert await submitted("s", b"") is None, "nobody has said"
    assert replica._engine.taken == ["r", "s"]  # type: ignore[union-attr]
