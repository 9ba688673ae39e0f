"""A request for speech follows its replica, and another one goes on where it was if that is lost."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from satchel.actors.protocol.clients import ReplicaClient
from satchel.actors.protocol.speech_messages import (
    SPEAK,
    TRANSCRIBE,
    SpeechPiece,
    SpeechRequest,
    SpeechUpdate,
    Transcript,
)
from satchel.actors.rpc.codec import encode, encode_error
from satchel.api.ray_backend.speech import RaySpeech
from satchel.cluster.config.timing import USUAL
from satchel.cluster.errors import GenerationFailed, QueueFull, ReplicaLeaves, ReplicaLost, SatchelError
from tests.api.ray_backend import test_dispatch as worlds
from tests.api.ray_backend.test_pooling import Cluster as Pooling
from tests.worlds.direct import Direct

HEARD = SpeechRequest("id/1", "m", TRANSCRIBE, bytes(4 * 16_000), seed=7, deadline_s=60.0)
SAID = SpeechRequest("id/1", "m", SPEAK, text="Hello", deadline_s=60.0)
DONE = SpeechUpdate(9, transcript=Transcript("Hello there"), done=True)


class Replica(worlds.FakeLink):
    """Refuses by its first word, or "take"s the request; then its further words are updates, None for nothing new, and
    an error or "end" in place of one."""

    def __init__(self, backend: Any, name: str, *script: Any) -> None:
        super().__init__(backend, name, *script)
        self.asked: list[SpeechRequest] = []
        self.open()

    def open(self) -> None:
        self.broken = asyncio.Event()
        methods = SimpleNamespace(do_speech=self._do, next_speech=self._next)
        self.client = ReplicaClient(self.replica, USUAL, Direct(lambda: methods))

    async def _do(self, data: bytes) -> bytes:
        self.asked += ReplicaClient.do_speech.asked(data)
        return self._answer(self.script.pop(0) if self.script else "take")

    async def _next(self, data: bytes) -> bytes:
        return self._answer(self.script.pop(0) if self.script else DONE)

    @staticmethod
    def _answer(step: Any) -> bytes:
        if isinstance(step, SatchelError):
            return encode_error(step)
        if step == "end":
            raise RayActorError
        return encode(None if step == "take" else step)


class Cluster(Pooling):
    def __init__(self, **scripts: list[Any]) -> None:
        super().__init__(worlds.SOON, **scripts)
        self.replicas = {name: Replica(self, name, *script) for name, script in scripts.items()}  # type: ignore[assignment]
        self.told: list[SpeechPiece] = []

    async def done(self, request: SpeechRequest = HEARD) -> Any:
        async with asyncio.timeout(10):
            return await RaySpeech(self, request, self.told.append).run()  # type: ignore[arg-type]


def text(number: int, *pieces: str) -> SpeechUpdate:
    return SpeechUpdate(number, partial=[SpeechPiece(text=piece) for piece in pieces])


async def test_pieces_come_until_the_request_is_done_and_the_load_is_taken_back():
    cluster = Cluster(a=["take", text(1, "Hello"), None, text(4, " the", "re"), DONE], b=[])
    answer = await cluster.done()
    assert (answer.update, answer.replica, answer.node, answer.why) == (DONE, "a", "node of a", "why")
    assert [piece.text for piece in cluster.told] == ["Hello", " the", "re"]
    (routed,) = cluster.routed
    assert (routed.model, routed.prompt_tokens) == ("m", 50)
    assert cluster.loads == {"a": 0, "b": 0}


@pytest.mark.parametrize(
    "lost",
    [
        "end",
        ReplicaLost("it does not know the request"),
        SpeechUpdate(3, error=ReplicaLeaves("leaving").to_wire()),
    ],
)
async def test_another_replica_tells_only_what_is_new(lost: Any):
    first = ["take", text(1, "Hello"), text(2, " th"), lost]
    cluster = Cluster(a=first, b=["take", text(1, "Hello there"), text(2, ", you"), DONE])
    answer = await cluster.done()
    assert answer.replica == "b" and cluster.replicas["b"].asked[0].seed == 7
    assert [piece.text for piece in cluster.told] == ["Hello", " th", "ere", ", you"]
    assert cluster.loads == {"a": 0, "b": 0}


async def test_audio_goes_on_at_its_byte():
    pieces = [
        SpeechUpdate(number, partial=[SpeechPiece(audio=audio)]) for number, audio in ((1, b"abcd"), (2, b"efgh"))
    ]
    cluster = Cluster(a=["take", pieces[0], "end"], b=["take", *pieces, SpeechUpdate(3, seconds=1.0, done=True)])
    assert (await cluster.done(SAID)).update.seconds == 1.0
    assert [piece.audio for piece in cluster.told] == [b"abcd", b"efgh"]


async def test_a_refusal_and_a_failure():
    cluster = Cluster(a=[QueueFull("full")], b=[])
    assert (await cluster.done()).replica == "b"
    failed = SpeechUpdate(1, error=GenerationFailed("it failed").to_wire())
    with pytest.raises(GenerationFailed, match="it failed"):
        await Cluster(a=["take", failed], b=[]).done()
