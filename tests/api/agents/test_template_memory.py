"""Agents whose model's template shows a date or drops reasoning: the endpoint knows which part of a prompt stays the
same."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from satchel.api.requests import requests
from satchel.api.text.model import load_text_model
from satchel.cluster.config.config import parse_config
from tests.worlds.api.engine_backend import remembering_app
from tests.worlds.api.remembering import Remembering
from tests.worlds.api.served_models import served_model
from tests.worlds.models.families import write_model
from tests.worlds.models.forgetful_templates import TEMPLATES, write_template


@pytest.fixture
async def endpoint(backend, config, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Remembering]:
    """Of a model with the template of that name."""
    folder = write_template(tmp_path / "model", TEMPLATES[request.param][0])
    backend.text = load_text_model(folder)
    backend.served[0] = served_model(folder=folder)
    remembering = Remembering(backend, config)
    yield remembering
    await remembering.client.aclose()


def day(after: int) -> str:
    return (datetime.now() + timedelta(days=after)).strftime("Today: %d %b %Y")


@pytest.mark.parametrize("endpoint", ["shows the date"], indirect=True)
@pytest.mark.parametrize(("kept", "shown"), [(7, [0, 0, 7, 14]), (1, [0, 1, 8, 15]), (0, [0, 1, 8, 15])])
async def test_a_conversation_keeps_the_date_of_its_first_turn_for_days(
    endpoint: Remembering, backend, monkeypatch: pytest.MonkeyPatch, kept: int, shown: list[int]
):
    """So a new day does not change the tokens after the date. Other conversations of the agent show the present
    date."""
    endpoint.generator.config = replace(endpoint.generator.config, date_days=kept)
    said: list[str] = ["Hi"]
    for turn, after in enumerate((0, 1, 8, 15)):
        monkeypatch.setattr(
            requests, "time", SimpleNamespace(time=lambda after=after: time.time() + after * 86_400 + 60)
        )
        endpoint.draw("ok")
        await (endpoint.go_on("And now?") if turn == 3 else endpoint.say(*said))
        assert day(shown[turn]) in backend.text.tokenizer.decode(endpoint.prompt)
        said += ["ok", "And now?"]
    await endpoint.say("Hello")
    assert day(15) in backend.text.tokenizer.decode(endpoint.prompt)


@pytest.mark.parametrize("endpoint", ["drops thinking"], indirect=True)
async def test_the_replica_is_told_where_later_prompts_go_on(endpoint: Remembering, backend):
    """Only for agents. It says too whether the state is worth writing to disk: after a user message, not after a
    tool's."""
    tokenizer = backend.text.tokenizer
    call = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    steps = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    result = {"role": "tool", "content": "It rains.", "tool_call_id": "call00001"}
    for agent, said, saved in (("", steps[:1], False), ("ann", steps[:1], True), ("ann", [*steps, result], False)):
        await endpoint.post({"messages": said}, agent)
        sent = backend.requests[-1]
        lasting = sent["prompt"][: sent["lasting_tokens"]]
        assert tokenizer.decode(sent["prompt"]).endswith("<|im_start|>assistant\n<think>\n")
        assert not agent or tokenizer.decode([*lasting, *tokenizer.encode("assistant\n<think>\n")]) == (
            tokenizer.decode(sent["prompt"])
        )
        assert bool(lasting) == bool(agent)
        assert sent["lasting_saved"] is saved


@pytest.mark.parametrize("endpoint", ["drops thinking"], indirect=True)
async def test_models_are_listed_with_what_their_templates_forget(endpoint: Remembering):
    first, other = (await endpoint.client.get("/v1/models")).json()["data"]
    assert [note.partition(":")[0] for note in first["notes"]] == ["the template drops thinking of earlier turns"]
    assert other["notes"] == []
    assert (await endpoint.client.get("/v1/models/satchel/tiny")).json() == first


@pytest.mark.parametrize("endpoint", ["keeps thinking if asked"], indirect=True)
async def test_a_model_may_have_variables_of_its_own_for_its_template(endpoint: Remembering, backend):
    """They are defaults for programs that send none; a request may override them. The model's note names the one that
    helps."""
    told = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "ok", "reasoning_content": "Hm."}]
    body = {"messages": [*told, {"role": "user", "content": "And now?"}]}

    async def prompt(**more: bool) -> str:
        await endpoint.post(body | ({"chat_template_kwargs": more} if more else {}))
        return backend.text.tokenizer.decode(endpoint.prompt)

    assert "Hm." not in await prompt()
    (note,) = (await endpoint.client.get("/v1/models/satchel/tiny")).json()["notes"]
    assert note.endswith('(not with `template_kwargs: {"clear_thinking": false}`)')
    backend.served[0] = replace(backend.served[0], template_kwargs={"clear_thinking": False})
    assert "Hm." in await prompt()
    kept = len(endpoint.prompt)
    assert "Hm." not in await prompt(clear_thinking=True)
    assert (await endpoint.client.get("/v1/models/satchel/tiny")).json()["notes"] == []
    counted = await endpoint.client.post("/v1/tokenize", json={"model": "satchel/tiny", **body})
    assert counted.json()["count"] == kept


async def test_after_thinking_is_dropped_recurrent_layers_go_on_where_the_answer_began(tmp_path: Path):
    """Through the whole server, with a real engine: only the tokens after the user's message are prefilled again."""
    folder = write_model(tmp_path / "hybrid", "qwen3_next")
    (folder / "chat_template.jinja").write_text(TEMPLATES["drops thinking"][0])
    config = parse_config({"models": [{"name": "hybrid", "source": str(folder)}]})
    told = [{"role": "user", "content": " ".join(f"The code of {number} is {number * 7}." for number in range(60))}]
    found: list[tuple[int, int]] = []
    async with remembering_app(config, tmp_path / "kv") as app:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=120) as client:
            for _ in range(3):
                body = {"messages": told, "max_tokens": 8, "temperature": 0}
                answer = (await client.post("/v1/chat/completions", json=body, headers={"X-Agent-ID": "ann"})).json()
                usage = answer["usage"]
                found.append((usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]))
                told += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "And now?"}]
    opening = len(load_text_model(folder).tokenizer.encode("assistant\n<think>\n"))
    assert found[0][1] == 0
    assert [cached for _, cached in found[1:]] == [prompt - opening for prompt, _ in found[:2]]
