"""`satchel bench`: what it sends and what it shows; its figures are not tested."""

from __future__ import annotations

import json

import httpx

from satchel.api.cli.views import named_model

from ..conftest import Served


async def test_prompts_have_the_lengths_that_were_asked_for(served: Served) -> None:
    asked = ("--prompt", "40", "--tokens", "8", "--streams", "1,3", "--model", "other")
    output = await served.run("bench", *asked, "--json")
    assert output.exit_code == 0, output.output
    found = json.loads(output.stdout)
    assert (found["model"], found["prompt_tokens"], found["completion_tokens"]) == ("other", 40, 8)
    assert [each["streams"] for each in found["results"]] == [1, 3]
    assert all(value > 0 for each in found["results"] for value in each.values())
    lengths = [len(request["prompt"]) for request in served.endpoint.backend.requests if request["model"] == "other"]
    assert lengths == [40, 240, 40, 240, 40, 40, 40, 240, 240, 240], "a warm-up, one stream, three streams"
    prompts = [request["prompt"] for request in served.endpoint.backend.requests if len(request["prompt"]) == 40]
    assert len({tuple(prompt) for prompt in prompts}) == len(prompts), "no first turn is in memory"


async def test_a_table_for_people(served: Served) -> None:
    text = await served.says("bench", "--prompt", "10", "--tokens", "2", "--streams", "2")
    assert "satchel/tiny: prompts of 10 tokens, answers of 2" in text and "first token" in text


async def test_a_model_that_is_not_served_is_not_measured(served: Served) -> None:
    """The endpoint may answer an unknown name with its first model."""
    assert await served.refuses("bench", "--model", "nope") == "no model nope is served; there are: satchel/tiny, other"


def test_a_model_is_found_by_its_alias_too() -> None:
    listed = [{"id": "a", "aliases": []}, {"id": "b", "aliases": ["gpt-4o"]}]
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json={"data": listed}))
    with httpx.Client(transport=transport, base_url="http://localhost") as session:
        assert [named_model(session, name)["id"] for name in (None, "a", "gpt-4o")] == ["a", "a", "b"]


async def test_wrong_numbers_of_streams_are_refused(served: Served) -> None:
    for streams in ("0", "1,x", "65", ""):
        assert "must be numbers from 1 to 64" in await served.refuses("bench", "--streams", streams)
