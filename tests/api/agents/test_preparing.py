"""The prompt that a program will probably send next is prefilled before it comes: exactly as it comes, and only where
it does not continue what memory has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.memory.rewriting import Rewriter
from satchel.actors.protocol.block_ids import BLOCK_TOKENS
from satchel.actors.protocol.replica_messages import GenerateRequest
from satchel.api.text.model import load_text_model
from satchel.cluster.config.config import Config, parse_config
from tests.worlds.api.engine_backend import EngineBackend, remembering_app
from tests.worlds.api.remembering import Remembering
from tests.worlds.api.served_models import served_model
from tests.worlds.models.forgetful_templates import TEMPLATES, write_template


def observations(newest: int = 3) -> Rewriter:
    """A program that shows only the newest observations in full."""
    return Rewriter("user", newest=newest, oldest=1, placeholder="({lines} lines omitted)", every_turn=True)


@pytest.fixture
async def endpoint(backend, config: Config, request: pytest.FixtureRequest) -> AsyncIterator[Remembering]:
    backend.served[0] = served_model(folder=backend.served[0].info.folder, context_tokens=20_000)
    scheduling = replace(config.scheduling, prepare_while_idle=getattr(request, "param", True))
    remembering = Remembering(backend, replace(config, scheduling=scheduling))
    yield remembering
    await at_rest(remembering)
    await remembering.client.aclose()


async def at_rest(endpoint: Any) -> None:
    """Waits until all turns were looked at."""
    preparations = endpoint.generator.preparations
    assert preparations is not None
    if preparations._working is not None:
        await preparations._working


async def converse(endpoint: Remembering, program: Rewriter, agent: str, turns: int) -> AsyncIterator[list[int] | None]:
    """Runs turns, and yields before each but the first what was prepared for it."""
    for turn in range(turns):
        if turn:
            prepared = endpoint.backend.prepared
            yield prepared[-1][1].prompt if prepared else None
        prepared: Any = endpoint.backend.prepared
        prepared.clear()
        asked = program.request([{"role": "user", "content": f"Observation {turn} of {agent}.\n" * 12}])
        endpoint.draw(f"Step {turn}.")
        program.answered({"role": "assistant", "content": await endpoint.say(*asked, agent=agent)})
        await at_rest(endpoint)


async def test_what_is_prepared_is_what_the_program_sends(endpoint: Remembering, backend):
    """After the first rewrite of its first agent, for all its agents. It goes to the replica that has the agent's KV,
    and ends where the user's message begins."""
    program, ready = observations(), list[int]()
    async for prompt in converse(endpoint, program, "ann", 8):
        ready.append(len(prompt or []))
    assert ready[:4] == [0] * 4 and all(ready[4:])
    program.history.clear()
    steps = converse(endpoint, program, "bob", 7)
    sent: list[list[int]] = []
    async for prompt in steps:
        if prompt is not None:
            assert backend.prepared[-1][0] == backend.generations[-1].replica
            sent.append(prompt)
        former = endpoint.prompt
        if prompt is not None:
            ends = backend.text.tokenizer.decode(prompt)
            assert ends.endswith(("<|im_end|>", "<|im_start|>")), ends[-40:]
            assert prompt[: len(former)] != former
    assert len(sent) >= 2
    counted = (await endpoint.client.get("/metrics")).text
    assert 'satchel_history_rewrites_total{outcome="predicted"}' in counted


async def test_the_next_prompt_begins_with_what_was_prepared(endpoint: Remembering):
    program, right = observations(), 0
    last: list[int] | None = None
    async for prompt in converse(endpoint, program, "ann", 9):
        # What was prepared for the turn before, and that turn's prompt.
        if last is not None:
            assert endpoint.prompt[: len(last)] == last
            right += 1
        last = prompt
    assert right >= 3, right


@pytest.mark.parametrize("endpoint", [False], indirect=True)
async def test_it_can_be_switched_off(endpoint: Remembering, backend):
    async for prompt in converse(endpoint, observations(), "ann", 7):
        assert prompt is None


async def test_a_conversation_that_only_grows_is_not_prepared(endpoint: Remembering):
    async for prompt in converse(endpoint, Rewriter("user", characters=10**9), "ann", 5):
        assert prompt is None


async def test_a_forgotten_agent_is_not_remembered_here(endpoint: Remembering):
    async for _ in converse(endpoint, observations(), "ann", 3):
        pass
    assert "default/ann" in endpoint.memory.programs._agents
    await endpoint.client.delete("/v1/agents/ann")
    assert "default/ann" not in endpoint.memory.programs._agents
    assert endpoint.store.released_of == {"default/ann"}, "with what was prepared for it"


async def test_an_agent_that_is_forgotten_before_its_turn_is_noted_is_not_kept(endpoint: Remembering, monkeypatch):
    loop, turn = asyncio.get_running_loop(), endpoint.memory.programs.turn

    def late(*noted: Any) -> Any:
        asyncio.run_coroutine_threadsafe(endpoint.client.delete("/v1/agents/ann"), loop).result(10)
        return turn(*noted)

    monkeypatch.setattr(endpoint.memory.programs, "turn", late)
    async for _ in converse(endpoint, observations(), "ann", 1):
        pass
    assert "default/ann" not in endpoint.memory.programs._agents


async def test_what_is_prepared_for_an_agent_that_is_just_forgotten_is_dropped(endpoint: Remembering, monkeypatch):
    asked: list[str] = []

    async def forgotten_meanwhile(replica: str, model_id: bytes, request: GenerateRequest) -> None:
        asked.append(request.agent)
        await endpoint.client.delete("/v1/agents/ann")
        endpoint.store.released_of.clear()

    async for _ in converse(endpoint, observations(), "ann", 5):
        if not asked:
            monkeypatch.setattr(endpoint.backend, "prepare", forgotten_meanwhile)
    assert asked and endpoint.store.released_of == {"default/ann"}


async def test_reasoning_that_the_template_drops_is_prepared_without(backend, config: Config, tmp_path: Path):
    """At the first turn already: the template says so. After a call it stays, so nothing is prepared."""
    folder = write_template(tmp_path / "model", TEMPLATES["drops thinking"][0])
    backend.text = load_text_model(folder)
    backend.served[0] = served_model(folder=folder, context_tokens=20_000)
    endpoint = Remembering(backend, config)
    said = "What it said. " * 60
    endpoint.draw(f"Hm.\n</think>\n{said}")
    assert await endpoint.say("Hi") == said
    await at_rest(endpoint)
    ((_, request),) = backend.prepared
    endpoint.draw("Hm.\n</think>\nBye")
    await endpoint.say("Hi", said, "And?")
    assert len(request.prompt) >= BLOCK_TOKENS and endpoint.prompt[: len(request.prompt)] == request.prompt
    await at_rest(endpoint)
    await endpoint.client.aclose()


async def answers_of(folder: Path, *, prepares: bool) -> tuple[list[tuple[str, int]], int, int]:
    """Plays an agent on a real engine. Returns its answers with the lengths of their prompts, how many tokens of these
    were reused, and how many of those were prepared."""
    source = {"models": [{"name": "recall", "source": "embedded:recall"}]}
    config = parse_config({**source, "scheduling": {"prepare_while_idle": prepares}})
    program, answers, reused = observations(2), list[tuple[str, int]](), 0
    async with remembering_app(config, folder) as app:
        backend: EngineBackend = app.state.backend
        engine = backend.engine
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=120) as client:
            for turn in range(6):
                text = "".join(f"The code of {number + turn} is {number * 7}. " for number in range(30))
                asked = program.request([{"role": "user", "content": text}])
                body = {"messages": asked, "max_tokens": 8, "temperature": 0}
                answer = await client.post("/v1/chat/completions", json=body, headers={"X-Agent-ID": "ann"})
                said, usage = answer.json()["choices"][0]["message"]["content"], answer.json()["usage"]
                program.answered({"role": "assistant", "content": said})
                answers.append((said, usage["prompt_tokens"]))
                reused += usage["prompt_tokens_details"]["cached_tokens"]
                await at_rest(app.state)
                while await backend.on_thread(lambda: len(engine.prepare)):
                    await asyncio.sleep(0.01)
            return answers, reused, await backend.on_thread(lambda: engine.prefixes.used_tokens)


@pytest.mark.slow
async def test_a_prepared_prompt_is_not_computed_again(tmp_path: Path):
    """Through the whole server: answers are the same as of one that prepares nothing."""
    answers, reused, used = await answers_of(tmp_path / "with", prepares=True)
    others, fewer, none = await answers_of(tmp_path / "without", prepares=False)
    assert answers == others
    assert used >= BLOCK_TOKENS and none == 0 and reused >= fewer + BLOCK_TOKENS
