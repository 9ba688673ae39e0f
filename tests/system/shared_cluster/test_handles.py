"""Python handles: from a driver, from Ray tasks and actors, synchronous and not."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
import ray

from satchel.api.client.cluster import Cluster
from satchel.cluster.errors import AgentExists, AgentNotFound, ContextLengthExceeded, InvalidRequest, InvalidSatchel


async def test_an_answer_comes_piece_by_piece(handles: Cluster):
    """What a slow reader has not taken is joined, so the answer is a long one."""
    agent = handles.agent("writer")
    pieces = [piece async for piece in agent.chat("Go on.", temperature=0, max_tokens=300, ignore_eos=True)]
    assert len(pieces) > 1


async def test_an_agent_continues_its_own_transcript(handles: Cluster):
    agent = handles.agent("alice")
    assert await agent.ask("Remember: the code of dora is 7777.", temperature=0) == "Noted."
    pieces = [piece async for piece in agent.chat("What is the code of dora?", temperature=0)]
    assert "".join(pieces) == "The code of dora is 7777."
    # Another handle, and another cluster object, mean the same agent.
    assert await Cluster().agent("alice").ask("What is the code of dora?", temperature=0) == "The code of dora is 7777."
    roles = [message["role"] for message in await agent.transcript()]
    assert roles == ["user", "assistant"] * 3
    assert await handles.agent("somebody-else").ask("What is the code of dora?", temperature=0) == (
        "I do not know the code of dora."
    )


async def test_an_agent_goes_into_a_file_and_comes_back_under_another_name(handles: Cluster, tmp_path: Path):
    await handles.agent("vera").ask("Remember: the code of wren is 4321.", temperature=0)
    file, plain = tmp_path / "vera.satchel", tmp_path / "plain.satchel"
    assert await handles.pack("vera", file, passphrase="open sesame") == file.stat().st_size
    await handles.pack("vera", plain)
    assert b"wren" in plain.read_bytes() and b"wren" not in file.read_bytes()
    with pytest.raises(InvalidRequest, match="exists already"):
        await handles.pack("vera", file)
    with pytest.raises(AgentNotFound):
        await handles.pack("nobody", tmp_path / "nobody.satchel")
    with pytest.raises(InvalidRequest, match="needs a passphrase"):
        await handles.unpack(file, agent="vera2")
    with pytest.raises(InvalidSatchel):
        await handles.unpack(file, agent="vera2", passphrase="close sesame")
    with pytest.raises(AgentExists):
        await handles.unpack(file, passphrase="open sesame")
    came = await handles.unpack(file, agent="vera2", passphrase="open sesame")
    assert (came["id"], came["branches"], came["replaced"]) == ("vera2", 1, False)
    kv = came["kv"]
    assert isinstance(kv, dict) and kv["entries"] == kv["of"] != 0
    assert await handles.agent("vera2").ask("What is the code of wren?", temperature=0) == "The code of wren is 4321."
    assert (await handles.unpack(plain, replace=True))["replaced"]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["plain.satchel", "vera.satchel"]


def test_the_synchronous_forms_say_the_same(handles: Cluster):
    agent = handles.agent("bob", system="You are a helpful assistant.")
    assert agent.ask_sync("Remember: the code of emil is 1234.", temperature=0) == "Noted."
    assert "".join(agent.chat_sync("What is the code of emil?", temperature=0)) == "The code of emil is 1234."
    assert [message["role"] for message in agent.transcript_sync()] == ["system"] + ["user", "assistant"] * 2
    reply = handles.generate_sync([{"role": "user", "content": "Hello."}], temperature=0)
    assert (reply.finish_reason, str(reply)) == ("stop", reply.text)
    assert handles.generate_sync("one, two, three,", max_tokens=3, temperature=0).completion_tokens == 3


def test_tasks_of_users_have_environments_of_their_own(handles: Cluster):
    """Ray asks an agent for them; a node without it ends."""

    @ray.remote(num_cpus=0, runtime_env={"env_vars": {"CODE_OF_DORA": "7777"}})
    def read() -> str | None:
        return os.environ.get("CODE_OF_DORA")

    assert ray.get(read.remote(), timeout=60) == "7777"


async def test_concurrent_turns_of_one_agent_are_all_remembered(handles: Cluster):
    agent = handles.agent("busy")
    told = {"fay": "1212", "gil": "3434", "hal": "5656"}
    await asyncio.gather(
        *(agent.ask(f"Remember: the code of {name} is {code}.", temperature=0) for name, code in told.items())
    )
    for name, code in told.items():
        assert await agent.ask(f"What is the code of {name}?", temperature=0) == f"The code of {name} is {code}."


async def test_a_turn_that_is_left_early_is_not_remembered(handles: Cluster):
    agent = handles.agent("impatient")
    async for _ in agent.chat("Tell me a story.", temperature=0, max_tokens=3000, ignore_eos=True):
        break
    await agent.ask("Hello.", temperature=0)
    transcript = await agent.transcript()
    assert transcript[0]["content"] == "Hello."


async def test_whoever_gives_up_leaves_the_agent_free(handles: Cluster):
    """A long turn runs, a second one gives up waiting for it, then the first is cancelled in mid-answer."""
    agent = handles.agent("torn")

    async def read() -> None:
        async for _ in agent.chat("Tell me a story.", max_tokens=4000, ignore_eos=True):
            started.set()

    started = asyncio.Event()
    reading = asyncio.create_task(read())
    await started.wait()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(agent.ask("Hello."), 1.0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    answer = await asyncio.wait_for(agent.ask("Hello."), 30)
    assert answer == "Hello! What shall I remember for you?"
    assert len(await agent.transcript()) == 2


async def test_texts_are_embedded_and_ranked(handles: Cluster):
    """By either of two replicas, which say the same; the engine's own tests say what is right."""
    made = [await handles.embed(["The code of dora is 7777.", "one, two"]) for _ in range(4)]
    assert all(each.shape == (2, 256) and (abs(each - made[0]) < 1e-6).all() for each in made)
    one = handles.embed_sync("one, two", dimensions=16)
    assert one.shape == (16,) and (one @ one) == pytest.approx(1, abs=1e-5)
    documents = ["one, two", "What is the code of dora?", "Hello."]
    ranked = await handles.rerank("What is the code of dora?", documents, top_n=2)
    assert ranked[0].index == 1 and ranked[0].score == pytest.approx(1, abs=1e-4) and len(ranked) == 2
    assert [each.index for each in handles.rerank_sync("What is the code of dora?", documents)][:1] == [1]
    with pytest.raises(InvalidRequest, match="dimensions"):
        await handles.embed("x", dimensions=1000)
    with pytest.raises(InvalidRequest, match="top_n"):
        await handles.rerank("x", ["y"], top_n=0)
    figures = [replica.stats().wait() for replica in handles.replicas().values()]
    assert sum(each.embedded_tokens_total for each in figures) > 0


async def test_errors_are_the_trees_own(handles: Cluster):
    with pytest.raises(InvalidRequest):
        handles.agent("no spaces")
    with pytest.raises(InvalidRequest) as error:
        await handles.agent("carl").ask("Hello.", temperature=99)
    assert error.value.param == "temperature"
    with pytest.raises(ContextLengthExceeded):
        await handles.agent("carl").ask("word " * 9000)
    assert await handles.agent("carl").ask("Hello.", temperature=0), "a failed turn leaves the agent free"


@pytest.mark.slow
def test_handles_work_inside_ray_tasks_and_actors(handles: Cluster):
    """A pipeline: a task tells agents facts, an actor asks for them."""

    @ray.remote(num_cpus=0)
    def teach(facts: dict[str, str]) -> list[str]:
        from satchel.api import connect

        with connect() as cluster:
            agents = {name: cluster.agent(f"pipeline-{name}") for name in facts}
            told = (f"Remember: the code of {name} is {code}." for name, code in facts.items())
            return [agent.ask_sync(text, temperature=0) for agent, text in zip(agents.values(), told, strict=True)]

    @ray.remote(num_cpus=0)
    class Examiner:
        async def ask(self, name: str) -> str:
            from satchel.api import connect

            return await connect().agent(f"pipeline-{name}").ask(f"What is the code of {name}?", temperature=0)

    facts = {"ivan": "1111", "jody": "2222"}
    assert ray.get(teach.remote(facts), timeout=120) == ["Noted."] * 2
    examiner = Examiner.remote()
    answers = ray.get([examiner.ask.remote(name) for name in facts], timeout=120)
    assert answers == [f"The code of {name} is {code}." for name, code in facts.items()]


def test_the_actors_themselves_are_handles(handles: Cluster):
    replicas = handles.replicas()
    assert sorted(replicas) == ["satchel-recall-0", "satchel-recall-1"]
    assert sorted(handles.router.alive("satchel/recall").wait()) == sorted(replicas)
    info = [replica.info().wait() for replica in replicas.values()]
    assert len({entry.model_id for entry in info if entry is not None}) == 1
    assert len({entry.pid for entry in info if entry is not None}) == 2
    stats = replicas["satchel-recall-0"].stats().wait()
    assert stats.answers and stats.requests_total > 0
