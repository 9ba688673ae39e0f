"""Background responses: polled, followed from any event, cancelled, and limited."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response

from satchel.actors.protocol.replica_messages import SequenceUpdate
from satchel.api.app import create_app
from satchel.api.protocols.responses.event_log import EventLog
from satchel.cluster.errors import GenerationFailed, InvalidRequest
from tests.worlds.api.responses_client import Responses, check_event


@pytest.fixture
def asking(client: httpx.AsyncClient) -> Responses:
    return Responses(client)


@pytest.fixture
def go(backend) -> asyncio.Event:
    """An event that lets the answer continue behind its first word."""
    go, sequence = asyncio.Event(), backend.sequence("Hello there, Ada")
    backend.play(sequence[0], go, *sequence[1:])
    return go


async def shown(asking: Responses, id: str, *, until: str = "") -> dict[str, Any]:
    for _ in range(200):
        answer = await asking.client.get(f"/v1/responses/{id}")
        assert answer.status_code == 200, answer.text
        Response.model_validate(answer.json())
        if until in ("", answer.json()["status"]):
            return answer.json()
        await asyncio.sleep(0.01)
    raise AssertionError(f"it is {answer.json()['status']} still")


async def events(asking: Responses, id: str, **query: Any) -> list[dict[str, Any]]:
    answer = await asking.client.get(f"/v1/responses/{id}", params={"stream": "true", **query})
    assert answer.status_code == 200, answer.text
    read = [json.loads(each.split("\ndata: ")[1]) for each in answer.text.removesuffix("\n\n").split("\n\n")]
    for event in read:
        check_event(event)
    return read


async def first_word(asking: Responses, id: str) -> None:
    """Waits until the events have the first piece of text."""
    for _ in range(500):
        after = {"stream": "true", "starting_after": 5}
        following = asyncio.create_task(asking.client.get(f"/v1/responses/{id}", params=after))
        done, _ = await asyncio.wait({following}, timeout=0.1)
        if not done:
            # There is an event with this number, so it waits for the next one.
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            return
        assert following.result().status_code == 400
        await asyncio.sleep(0.02)
    raise AssertionError("nothing is said")


async def test_it_is_polled_until_it_is_complete(asking, go):
    first = await asking.say("Hi", background=True, metadata={"a": "b"})
    assert (first["status"], first["background"], first["output"]) == ("queued", True, [])
    running = await shown(asking, first["id"], until="in_progress")
    assert running["completed_at"] is None and running["metadata"] == {"a": "b"}
    go.set()
    last = await shown(asking, first["id"], until="completed")
    assert last["output"][0]["content"][0]["text"] == "Hello there, Ada" and last["usage"]["output_tokens"]
    assert (last["id"], last["background"]) == (first["id"], True)
    assert (await asking.client.get(f"/v1/responses/{first['id']}/input_items")).json()["data"][0]["role"] == "user"
    assert (await asking.say("Go on.", previous_response_id=first["id"]))["status"] == "completed"


async def test_its_events_are_followed_from_anywhere(asking, go):
    streaming = asyncio.create_task(asking.stream("Hi", background=True))
    await asyncio.sleep(0.05)
    go.set()
    whole = await streaming
    kinds = [event["type"].removeprefix("response.") for event in whole]
    assert kinds[:3] == ["created", "queued", "in_progress"] and kinds[-1] == "completed"
    assert [event["response"]["status"] for event in whole[:3]] == ["queued", "queued", "in_progress"]
    id = whole[0]["response"]["id"]
    assert await events(asking, id) == whole
    for after in (0, 4, len(whole) - 2):
        assert await events(asking, id, starting_after=after) == whole[after + 1 :]
    refused = await asking.client.get(f"/v1/responses/{id}?stream=true&starting_after={len(whole)}")
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "starting_after"
    assert (await asking.client.get(f"/v1/responses/{id}?starting_after=1")).status_code == 400


async def test_a_reader_that_goes_away_ends_nothing(asking, backend, go):
    first = await asking.say("Hi", background=True)
    reading = asyncio.create_task(events(asking, first["id"]))
    await shown(asking, first["id"], until="in_progress")
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    go.set()
    last = await shown(asking, first["id"], until="completed")
    assert last["output"][0]["content"][0]["text"] == "Hello there, Ada" and backend.generations[0].aborts == 0


async def test_cancelled_it_keeps_what_it_has(asking, backend, go):
    first = await asking.say("Hi", background=True)
    following = asyncio.create_task(events(asking, first["id"]))
    await first_word(asking, first["id"])
    cancelled = (await asking.client.post(f"/v1/responses/{first['id']}/cancel")).json()
    Response.model_validate(cancelled)
    assert cancelled["status"] == "cancelled" and cancelled["output"][0]["status"] == "incomplete"
    assert backend.generations[-1].aborted.is_set()
    assert (await following)[-1]["response"] == cancelled
    assert await shown(asking, first["id"]) == cancelled
    again = await asking.client.post(f"/v1/responses/{first['id']}/cancel")
    assert again.json() == cancelled
    error = await asking.refused("Go on.", previous_response_id=first["id"])
    assert error["param"] == "previous_response_id" and "cancelled" in error["message"]


async def test_one_that_has_ended_is_not_cancelled(asking):
    first = await asking.say("Hi", background=True)
    last = await shown(asking, first["id"], until="completed")
    assert (await asking.client.post(f"/v1/responses/{first['id']}/cancel")).json() == last


async def test_a_failure_is_its_status(asking, backend):
    tokenizer = backend.text.tokenizer
    backend.play(SequenceUpdate("row", tokenizer.encode("Hello"), cached_tokens=0), GenerationFailed("it broke"))
    failed = await shown(asking, (await asking.say("Hi", background=True))["id"], until="failed")
    assert failed["error"] == {"code": "server_error", "message": "it broke"}
    long = await asking.say("word " * 20_000, background=True)
    last = (await events(asking, long["id"]))[-1]
    assert (last["type"], last["response"]["error"]["code"]) == ("response.failed", "context_length_exceeded")


async def test_what_cannot_be_is_refused(asking, go):
    assert (await asking.refused(background=True, store=False))["param"] == "background"
    assert (await asking.refused(background=True, model="none", status=404))["param"] == "model"
    first = await asking.say("Hi", background=True)
    error = await asking.refused("Go on.", previous_response_id=first["id"])
    assert "no answer to continue" in error["message"]
    assert (await asking.client.delete(f"/v1/responses/{first['id']}")).json()["deleted"]
    assert (await asking.client.get(f"/v1/responses/{first['id']}")).status_code == 404


async def test_there_are_only_so_many(backend, config, go):
    limits = replace(config.endpoint, background_responses_max=2)
    transport = httpx.ASGITransport(create_app(backend, replace(config, endpoint=limits)))
    asking = Responses(httpx.AsyncClient(transport=transport, base_url="http://localhost"))
    ids = [(await asking.say("Hi", background=True))["id"] for _ in range(2)]
    error = await asking.refused("Hi", background=True, status=503)
    assert "background_responses_max" in error["message"]
    go.set()
    for id in ids:
        await shown(asking, id, until="completed")
    assert (await asking.say("Hi", background=True))["status"] == "queued"


async def test_one_that_was_lost_has_failed(asking, backend, config, go):
    first = await asking.say("Hi", background=True)
    transport = httpx.ASGITransport(create_app(backend, config))
    later = Responses(httpx.AsyncClient(transport=transport, base_url="http://localhost"))
    lost = await shown(later, first["id"])
    assert lost["status"] == "failed" and "restarted before" in lost["error"]["message"]
    assert lost["model"] == first["model"] == "satchel/tiny"
    (event,) = await events(later, first["id"], starting_after=7)
    assert (event["type"], event["sequence_number"], event["response"]) == ("response.failed", 8, lost)
    assert (await later.client.post(f"/v1/responses/{first['id']}/cancel")).json() == lost
    assert (await later.client.delete(f"/v1/responses/{first['id']}")).json()["deleted"]
    assert (await later.client.get(f"/v1/responses/{first['id']}")).status_code == 404
    begin, name = first["id"].rsplit("_", 1)
    for other in (begin, f"{begin}_AAAA", f"{begin}_A", f"{begin[:-6]}{(int(begin[-6:], 16) ^ 1):06x}_{name}"):
        assert (await later.client.get(f"/v1/responses/{other}")).status_code == 404


async def test_the_official_client(client, backend):
    backend.say("Hello wörld")
    sdk = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", max_retries=0, http_client=client)
    stream = await sdk.responses.create(model="satchel/tiny", input="Hi", background=True, stream=True)
    seen: list[Any] = [event async for event in stream]
    id = seen[0].response.id
    resumed: Any = await sdk.responses.retrieve(id, stream=True, starting_after=3)
    assert [event.sequence_number async for event in resumed] == [event.sequence_number for event in seen[4:]]
    assert (await sdk.responses.cancel(id)).status == "completed"
    assert (await sdk.responses.retrieve(id)).output_text == "Hello wörld"


async def test_a_log_drops_its_oldest_events():
    log, event = EventLog(100), b"event: x\ndata: {}\n\n"
    for _ in range(9):
        log.add(event)
    assert log.nbytes <= 100
    with pytest.raises(InvalidRequest, match="no longer kept"):
        log.check(2)
    following = log.follow(7)
    assert await anext(following) == event
    slow = log.follow(-1)
    assert [piece async for piece in slow] == [], "what it wants next is gone"
    log.add(event * 2)
    assert await anext(following) == event * 2
    log.end()
    assert [piece async for piece in following] == []
