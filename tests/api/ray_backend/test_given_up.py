"""A row whose replicas' processes end before it says anything is tried once more, and never on all replicas."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from satchel.api.ray_backend import rows
from satchel.api.ray_backend.rows import PROGRESS_TOKENS, RayGeneration
from satchel.cluster.errors import GenerationFailed, ReplicaDied, ReplicaLost
from satchel.cluster.timing import Timing
from tests.api.ray_backend.test_dispatch import REQUEST, FakeBackend, FakeLink, said


@pytest.fixture(autouse=True)
def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is written down."""
    told: list[str] = []
    monkeypatch.setattr(rows, "note_incident_aside", lambda home, kind, text: told.append(f"{kind}: {text}"))
    return told


def row_of(backend: FakeBackend, name: str = "r") -> RayGeneration:
    request = replace(REQUEST, request_id=name, sampling=replace(REQUEST.sampling, max_tokens=500))
    return RayGeneration(backend, request)  # type: ignore[arg-type]


def end(backend: FakeBackend, name: str, *, died: bool = True) -> None:
    """The replica's process ends and is started again; or only the link breaks."""
    link = backend.links[name]
    new = backend.links[name] = FakeLink(backend, name, *link.script)
    new.taken = link.taken
    lost, link.rows, link.died = link.rows, {}, died
    link.broken.set()
    for take in lost.values():
        take(ReplicaDied("died") if died else ReplicaLost("silent"))


def tell(link: FakeLink, name: str, *tokens: int, finish: str | None = None) -> None:
    take = link.rows[name]
    if finish is not None:
        del link.rows[name]
    take(rows.RowUpdate(name, list(tokens), finish))


async def until(true: Any) -> None:
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.001)


async def test_a_row_that_ends_two_replicas_is_given_up(noted: list[str]):
    backend = FakeBackend(a=[], b=[], c=[])
    row = row_of(backend, "id/1")
    await row.start()
    reading = asyncio.create_task(said(row))
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
        await row_of(backend).start()
    assert not backend.links["c"].taken


async def test_a_row_that_gets_on_outlives_any_number_of_replicas(noted: list[str]):
    """As where replicas are killed again and again while a long answer is written."""
    backend = FakeBackend(a=[], b=[])
    row = row_of(backend)
    await row.start()
    reading = asyncio.create_task(said(row))
    for number in range(4 * rows.ATTEMPTS):
        name = "ab"[number % 2]
        await until(lambda name=name: backend.links[name].rows)
        tell(backend.links[name], "r", *[7] * PROGRESS_TOKENS)
        end(backend, name)
    link = backend.links["a"]
    await until(lambda: link.rows)
    tell(link, "r", 8, finish="stop")
    assert await reading == [*[7] * PROGRESS_TOKENS * 4 * rows.ATTEMPTS, 8]
    assert not noted


async def test_a_first_token_clears_a_row_and_a_broken_link_is_no_death():
    backend = FakeBackend(a=[], b=[])
    row = row_of(backend)
    await row.start()
    reading = asyncio.create_task(said(row))
    for number, (tokens, died) in enumerate([((), True), ((1,), True), ((), True), ((), False)]):
        name = "ab"[number % 2]
        await until(lambda name=name: backend.links[name].rows)
        if tokens:
            tell(backend.links[name], "r", *tokens)
        end(backend, name, died=died)
    link = backend.links["a"]
    await until(lambda: link.rows)
    tell(link, "r", 2, finish="stop")
    assert await reading == [1, 2]


async def test_a_whole_node_that_ends_is_no_death():
    backend = FakeBackend(a=[], b=[], c=[])
    backend.ended = {"node of b"}
    row = row_of(backend)
    await row.start()
    reading = asyncio.create_task(said(row))
    end(backend, "a")
    await until(lambda: backend.links["b"].rows)
    end(backend, "b")
    await until(lambda: backend.links["a"].rows)
    tell(backend.links["a"], "r", 2, finish="stop")
    assert await reading == [2]


async def test_suspects_are_tried_one_at_a_time_so_that_no_other_is_given_up_with_the_one():
    """Three rows wait at a replica that one of them ends."""
    backend = FakeBackend(a=[], b=[])
    names = ["guilty", "x", "y"]
    those = {name: row_of(backend, name) for name in names}
    for row in those.values():
        await row.start()
    reading = {name: asyncio.create_task(said(row)) for name, row in those.items()}
    end(backend, "a")
    done: list[str] = []
    while len(done) < 3:
        await until(lambda: any(link.rows for link in backend.links.values()))
        await asyncio.sleep(0.01)
        assert all(len(link.rows) <= 1 for link in backend.links.values()), "one suspect at a time"
        where = next(where for where, link in backend.links.items() if link.rows)
        (name,) = backend.links[where].rows
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
    first, second = row_of(backend, "first"), row_of(backend, "second")
    for row in (first, second):
        await row.start()
    reading = [asyncio.create_task(said(row)) for row in (first, second)]
    end(backend, "a")
    b = backend.links["b"]
    await until(lambda: b.rows)
    (name,) = b.rows
    leaving = first if name == "first" else second
    await leaving.abort()
    await until(lambda: b.rows)
    (other,) = b.rows
    assert other != name
    tell(b, other, 3, finish="stop")
    assert await reading[other == "second"] == [3]
    reading[other != "second"].cancel()


async def test_the_time_that_a_suspect_waits_for_others_is_not_its_wait_for_a_replica():
    backend = FakeBackend(Timing(recovery_s=0.2, retry_s=0.001), a=[], b=[])
    row = row_of(backend)
    await row.start()
    reading = asyncio.create_task(said(row))
    await backend.links["b"].probation.acquire()
    end(backend, "a")
    await asyncio.sleep(0.4)
    backend.away = 5
    end(backend, "b")
    await until(lambda: any(link.rows for link in backend.links.values()))
    link = next(link for link in backend.links.values() if link.rows)
    tell(link, "r", 2, finish="stop")
    assert await reading == [2]
