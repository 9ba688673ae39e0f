"""A request for speech follows its replica, and another one goes on where it was if that is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from satchel.actors.protocol.speech_messages import (
    SPEAK,
    TRANSCRIBE,
    SpeechPiece,
    SpeechRequest,
    SpeechUpdate,
    Transcript,
)
from satchel.api.ray_backend.speech import RaySpeech
from satchel.cluster.errors import GenerationFailed, QueueFull, ReplicaLeaves, ReplicaLost
from tests.api.ray_backend import test_dispatch as worlds
from tests.api.ray_backend.test_pooling import Cluster as Pooling
from tests.worlds.api.scripted_replica import ScriptedReplica

HEARD = SpeechRequest("id/1", "m", TRANSCRIBE, bytes(4 * 16_000), seed=7, deadline_s=60.0)
SAID = SpeechRequest("id/1", "m", SPEAK, text="Hello", deadline_s=60.0)
DONE = SpeechUpdate(9, transcript=Transcript("Hello there"), done=True)


class Replica(ScriptedReplica):
    begin, news, done = "do_speech", "next_speech", DONE


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
