"""A sequence whose replicas' processes end before its first token is tried once more, but never on all replicas."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from satchel.api.ray_backend import sequences
from satchel.api.ray_backend.sequences import PROGRESS_TOKENS, RayGeneration
from satchel.cluster.config.timing import Timing
from satchel.cluster.errors import GenerationFailed, ReplicaDied, ReplicaLost
from tests.api.ray_backend.test_dispatch import REQUEST, FakeBackend, FakeLink, said


@pytest.fixture(autouse=True)
def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The recorded incidents."""
    told: list[str] = []
    monkeypatch.setattr(sequences, "note_incident_aside", lambda home, kind, text: told.append(f"{kind}: {text}"))
    return told


def sequence_of(backend: FakeBackend, name: str = "r") -> RayGeneration:
    request = replace(REQUEST, request_id=name, sampling=replace(REQUEST.sampling, max_tokens=500))
    return RayGeneration(backend, request)  # type: ignore[arg-type]


def end(backend: FakeBackend, name: str, *, died: bool = True) -> None:
    """The replica's process ends and restarts; or only the connection breaks."""
    link = backend.links[name]
    new = backend.links[name] = FakeLink(backend, name, *link.script)
    new.taken = link.taken
    lost, link.sequences, link.died = link.sequences, {}, died
    link.broken.set()
    for take in lost.values():
        take(ReplicaDied("died") if died else ReplicaLost("silent"))


def tell(link: FakeLink, name: str, *tokens: int, finish: str | None = None) -> None:
    take = link.sequences[name]
    if finish is not None:
        del link.sequences[name]
    take(sequences.SequenceUpdate(name, list(tokens), finish))


async def until(true: Any) -> None:
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.001)


async def test_a_sequence_that_ends_two_replicas_is_given_up(noted: list[str]):
    backend = FakeBackend(a=[], b=[], c=[])
    sequence = sequence_of(backend, "id/1")
    await sequence.start()
    reading = asyncio.create_task(said(sequence))
    end(backend, "a")
    await until(lambda: backend.links["b"].taken)
    end(backend, "b")
    with pytest.raises(GenerationFailed, match="not retried"):
        await reading
    assert not backend.links["c"].taken and not any(len(link.taken) > 1 for link in backend.links.values())
    (told,) = noted
    assert told.startswith("given_up:") and "request id " in told


async def test_one_that_ends_whoever_is_asked_is_given_up_too():
    backend = FakeBackend(a=["end", "end"], b=["end"], c=[])
    with pytest.raises(GenerationFailed):
        await sequence_of(backend).start()
    assert not backend.links["c"].taken


async def test_a_sequence_that_gets_on_outlives_any_number_of_replicas(noted: list[str]):
    """For example if replicas are killed again and again during a long answer."""
    backend = FakeBackend(a=[], b=[])
    sequence = sequence_of(backend)
    await sequence.start()
    reading = asyncio.create_task(said(sequence))
    for number in range(4 * sequences.ATTEMPTS):
        name = "ab"[number % 2]
        await until(lambda name=name: backend.links[name].sequences)
        tell(backend.links[name], "r", *[7] * PROGRESS_TOKENS)
        end(backend, name)
    link = backend.links["a"]
    await until(lambda: link.sequences)
    tell(link, "r", 8, finish="stop")
    assert await reading == [*[7] * PROGRESS_TOKENS * 4 * sequences.ATTEMPTS, 8]
    assert not noted


async def test_a_first_token_clears_a_sequence_and_a_broken_link_is_no_death():
    backend = FakeBackend(a=[], b=[])
    sequence = sequence_of(backend)
    await sequence.start()
    reading = asyncio.create_task(said(sequence))
    for number, (tokens, died) in enumerate([((), True), ((1,), True), ((), True), ((), False)]):
        name = "ab"[number % 2]
        await until(lambda name=name: backend.links[name].sequences)
        if tokens:
            tell(backend.links[name], "r", *tokens)
        end(backend, name, died=died)
    link = backend.links["a"]
    await until(lambda: link.sequences)
    tell(link, "r", 2, finish="stop")
    assert await reading == [1, 2]


async def test_a_whole_node_that_ends_is_no_death():
    backend = FakeBackend(a=[], b=[], c=[])
    backend.ended = {"node of b"}
    sequence = sequence_of(backend)
    await sequence.start()
    reading = asyncio.create_task(said(sequence))
    end(backend, "a")
    await until(lambda: backend.links["b"].sequences)
    end(backend, "b")
    await until(lambda: backend.links["a"].sequences)
    tell(backend.links["a"], "r", 2, finish="stop")
    assert await reading == [2]


async def test_suspects_are_tried_one_at_a_time_so_that_no_other_is_given_up_with_the_one():
    """Three sequences wait at a replica that one of them crashes."""
    backend = FakeBackend(a=[], b=[])
    names = ["guilty", "x", "y"]
    those = {name: sequence_of(backend, name) for name in names}
    for sequence in those.values():
        await sequence.start()
    reading = {name: asyncio.create_task(said(sequence)) for name, sequence in those.items()}
    end(backend, "a")
    done: list[str] = []
    while len(done) < 3:
        await until(lambda: any(link.sequences for link in backend.links.values()))
        await asyncio.sleep(0.01)
        assert all(len(link.sequences) <= 1 for link in backend.links.values()), "one suspect at a time"
        where = next(where for where, link in backend.links.items() if link.sequences)
        (name,) = backend.links[where].sequences
        done.append(name)
        if name == "guilty":
            end(backend, where)
        else:
            tell(backend.links[where], name, 5, finish="stop")
    with pytest.raises(GenerationFailed):
        await reading["guilty"]
    assert await reading["x"] == await reading["y"] == [5]


async def test_a_suspect_that_leaves_lets_the_next_one_be_tried():
    backend = FakeBackend(a=[], b=[])
    first, second = sequence_of(backend, "first"), sequence_of(backend, "second")
    for sequence in (first, second):
        await sequence.start()
    reading = [asyncio.create_task(said(sequence)) for sequence in (first, second)]
    end(backend, "a")
    b = backend.links["b"]
    await until(lambda: b.sequences)
    (name,) = b.sequences
    leaving = first if name == "first" else second
    await leaving.abort()
    await until(lambda: b.sequences)
    (other,) = b.sequences
    assert other != name
    tell(b, other, 3, finish="stop")
    assert await reading[other == "second"] == [3]
    reading[other != "second"].cancel()


async def test_the_time_that_a_suspect_waits_for_others_is_not_its_wait_for_a_replica():
    backend = FakeBackend(Timing(recovery_s=0.2, retry_s=0.001), a=[], b=[])
    sequence = sequence_of(backend)
    await sequence.start()
    reading = asyncio.create_task(said(sequence))
    await backend.links["b"].probation.acquire()
    end(backend, "a")
    await asyncio.sleep(0.4)
    backend.away = 5
    end(backend, "b")
    await until(lambda: any(link.sequences for link in backend.links.values()))
    link = next(link for link in backend.links.values() if link.sequences)
    tell(link, "r", 2, finish="stop")
    assert await reading == [2]
