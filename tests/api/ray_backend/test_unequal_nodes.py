"""Replicas of one model on nodes that compute differently: an agent's transcripts and token ids are used everywhere, KV
only under its own model id."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from satchel.actors import start
from satchel.actors.protocol.block_ids import BLOCK_TOKENS, block_ids, root_id
from satchel.actors.protocol.clients import ReplicaClient
from satchel.actors.protocol.registry import ServedEntry
from satchel.actors.protocol.replica_messages import ModelInfo
from satchel.actors.protocol.store_client import StoreClient
from satchel.actors.protocol.store_messages import Commit, Content
from satchel.actors.rpc.codec import encode
from satchel.actors.start import differing
from satchel.api.ray_backend import store as ray_store
from satchel.api.ray_backend.store import RayStore
from satchel.api.requests.backend import ReplicaStats
from satchel.cluster.config.config import Model
from satchel.cluster.config.timing import USUAL
from satchel.cluster.errors import ModelLoadError
from tests.worlds.api.remembering import LocalStore, Remembering, spoken
from tests.worlds.api.served_models import served_model
from tests.worlds.direct import Direct, answer_of, carried, model_info

FILES, CPU, GPU = b"f" * 32, b"c" * 32, b"g" * 32
LONG = "word " * 60


@pytest.fixture
async def endpoint(backend, config) -> AsyncIterator[Remembering]:
    backend.served = [served_model(model, model_id=CPU, files_id=FILES) for model in backend.served[:1]]
    backend.configured = [backend.served[0].info.name]
    remembering = Remembering(backend, config)
    yield remembering
    await remembering.client.aclose()


async def stands(endpoint: Remembering, *replicas: list[bytes]) -> list[Any]:
    found = [(branch.model, branch.kept) for branch in await endpoint.store.blocks("default/ann", list(replicas))]
    return [(model, kept.root, kept.block_ids, kept.first, kept.embeddings) for model, kept in found]


async def test_a_conversation_goes_on_where_another_id_computes_it(endpoint, backend):
    """It is one branch with exactly the sampled token ids; its KV is stored under the model id of its last turn."""
    backend.computes_as = CPU
    drawn = endpoint.draw("the quick")
    await endpoint.say(LONG)
    first = endpoint.prompt
    assert [each[0] for each in await stands(endpoint)] == [CPU]
    backend.computes_as = GPU
    await endpoint.say(LONG, "the quick", "And?")
    assert endpoint.prompt[: len(first) + len(drawn)] == [*first, *drawn]
    assert endpoint.memory.commits == {"opened": 1, "replaced": 1}
    (branch,) = await endpoint.branches()
    assert branch["model"] == backend.served[0].info.name
    ((model, root, ids, *_),) = await stands(endpoint)
    said = endpoint.prompt + backend.text.tokenizer.encode("the quick")
    assert (model, root) == (GPU, root_id(GPU, "tenant:default"))
    assert ids[: len(endpoint.prompt) // BLOCK_TOKENS] == block_ids(root, said)[: len(endpoint.prompt) // BLOCK_TOKENS]


@pytest.mark.parametrize("answers_first", [CPU, GPU])
async def test_whose_agents_are_whose_is_not_decided_by_who_answers_first(backend, config, answers_first):
    """A restarted endpoint that learns of the model from another replica first knows the same agents."""
    store = LocalStore(config)
    for model_id, said in ((CPU, ["Hi"]), (answers_first, ["Hi", "Hello there", "And?"])):
        backend.served = [served_model(backend.served[0], model_id=model_id, files_id=FILES)]
        backend.computes_as = CPU
        endpoint = Remembering(backend, config, store)
        await endpoint.say(*said)
        await endpoint.client.aclose()
    assert endpoint.memory.commits == {"replaced": 1} and endpoint.memory.matches == {"extend": 1}


async def test_a_continuing_turn_and_an_injection_are_kept_under_the_id_that_computed_them(endpoint, backend):
    backend.computes_as = GPU
    await endpoint.go_on(LONG)
    assert [each[0] for each in await stands(endpoint)] == [GPU]
    backend.computes_as = CPU
    response = await endpoint.client.post("/v1/agents/ann/inject", json={"messages": spoken("Know this.")})
    assert response.status_code == 200, response.text
    assert [each[0] for each in await stands(endpoint)] == [CPU]
    backend.computes_as = GPU
    await endpoint.go_on("And?")
    assert len(await endpoint.transcript()) == 5 and len(await endpoint.branches()) == 1
    assert [each[0] for each in await stands(endpoint)] == [GPU]


async def test_other_files_are_another_model_and_other_words(endpoint, backend, config):
    """No token ids are taken over, because they may mean something else."""
    await endpoint.say("Hi")
    backend.served = [served_model(backend.served[0], files_id=b"o" * 32)]
    await endpoint.say("Hi", "Hello there", "And?")
    assert endpoint.memory.matches == {"new": 2}


async def test_a_branch_stands_on_what_every_replica_of_its_words_may_have(endpoint, backend):
    """So forget and release reach all of its KV, but none of other models."""
    backend.computes_as = CPU
    await endpoint.say(LONG)
    found = await stands(endpoint, [FILES, CPU], [FILES, GPU], [FILES, GPU], [b"o" * 32, b"x" * 32])
    assert [each[0] for each in found] == [CPU, GPU]
    for model, root, ids, *_ in found:
        assert root == root_id(model, "tenant:default")
        tokens = endpoint.prompt[: len(endpoint.prompt) // BLOCK_TOKENS * BLOCK_TOKENS]
        assert ids[: len(block_ids(root, tokens))] == block_ids(root, tokens)


class Replica(ReplicaClient):
    """A replica with this description."""

    def __init__(self, said: ModelInfo | None) -> None:
        super().__init__("m", USUAL, Direct(lambda: SimpleNamespace(info=lambda _: answer_of(said))))


async def test_the_store_over_ray_asks_for_the_ids_of_all_replicas(monkeypatch):
    class Homes:
        async def locate(self, agent: str) -> str:
            return "mac0"

        async def ask(self, node: str, question: Any) -> Any:
            return await question(carried(node, tell))

        async def alive(self) -> list[str]:
            return ["mac0"]

    async def tell(method: str, asked: bytes, timeout_s: float) -> bytes:
        told.append((method, StoreClient.blocks.asked(asked)))
        return encode([])

    told: list[Any] = []

    said = (model_info(files_id=FILES, model_id=CPU), model_info(files_id=FILES, model_id=GPU), None)
    infos = dict(zip(("m-0", "m-1", "m-2"), said, strict=True))
    entry = ServedEntry(0, Model("m", "m"), dict.fromkeys(infos, "mac0"))
    monkeypatch.setattr(ray_store.registry, "entries", lambda: (entry,))
    monkeypatch.setattr(
        ray_store, "find_replicas", lambda _, timing: {name: Replica(info) for name, info in infos.items()}
    )
    assert await RayStore(Homes(), USUAL).blocks("t/ann") == []  # type: ignore[arg-type]
    ids: Any = [[FILES, CPU], [FILES, GPU]]
    assert told == [("blocks", ["t/ann", ids])]


async def test_token_ids_survive_the_disk_and_branches_of_earlier_versions_are_read(tmp_path, config):
    """A branch from before files had ids still belongs to its model id."""
    for files, words in ((b"", CPU), (FILES, FILES)):
        folder, agent = tmp_path / words.hex()[:4], "default/ann"
        store = LocalStore(config, folder)
        since = (await store.recall(agent, words, {})).since
        content = Content(array("I", [1, 2]).tobytes(), "x", b"[]")
        await store.commit(agent, Commit(CPU, content, 1, since, files=files))
        store.actor.close()
        again = LocalStore(config, folder)
        (branch,) = (await again.recall(agent, words, {})).branches
        assert (branch.head.model, branch.head.files, branch.head.root) == (CPU, files, root_id(CPU, "tenant:default"))
        assert (await again.recall(agent, GPU, {})).branches == []
        assert again.actor.services.memory.database.damaged_total == 0


# What the status says.

COMPUTING = {"device": "cpu", "dtype": "float32", "mlx": "1"}


def info(replica: str, files: dict[str, str] | None = None, **computing: str) -> ModelInfo:
    kept = {"config.json": "1", "model.safetensors": "2", **(files or {})}
    how = {**COMPUTING, **computing}
    return model_info(name="qwen", replica=replica, node=f"node of {replica}", files=kept, computing=how)


def test_replicas_that_compute_differently_are_named_with_what_differs():
    assert differing({}) == []
    assert differing({"a": info("a"), "b": info("b")}) == []
    proving = replace(info("b", device="metal"), proving="trying it")
    assert differing({"a": info("a"), "b": proving}) == [], "it computes otherwise until it is proven"
    (said,) = differing({"a": info("a"), "b": info("b", device="metal", dtype="bfloat16, own"), "c": info("c")})
    assert said == (
        "b on node of b computes differently from a on node of a (device: metal, cpu; dtype: bfloat16, own, float32): "
        "they share agents' transcripts, but not KV"
    )


def test_replicas_with_other_files_are_refused_with_their_names():
    """Their answers would be another model's, and token ids might mean something else."""
    with pytest.raises(ModelLoadError, match=r"'qwen' is another model on node of b than on node of a: ") as error:
        differing({"a": info("a"), "b": info("b", {"model.safetensors": "3", "extra.json": "4"}, device="metal")})
    assert "extra.json, model.safetensors differ" in error.value.message


async def test_a_node_that_joins_is_compared_with_those_that_were_there(monkeypatch):
    """Whatever the order of the replicas' names; a replica that has not loaded yet is not compared."""
    found = {"a": Replica(info("a", device="metal")), "b": Replica(info("b")), "c": Replica(None)}
    monkeypatch.setattr(start.registry, "entries", lambda: ("qwen",))
    monkeypatch.setattr(start, "find_replicas", lambda entries, timing: found)
    (said,) = await start.compare_models({"a": found["a"]}, USUAL)
    assert said.startswith("a on node of a computes differently from b on node of b (device: metal, cpu)")
    found["a"] = Replica(info("a", {"tokenizer.json": "5"}))
    with pytest.raises(ModelLoadError, match=r"another model on node of a than on node of b: tokenizer\.json differs"):
        await start.compare_models({"a": found["a"]}, USUAL)


async def test_the_cluster_shows_what_differs_among_replicas_of_a_model(endpoint, backend):
    def stats(replica: str, model: str, model_id: bytes, **computing: str) -> ReplicaStats:
        how = {**COMPUTING, **computing}
        return ReplicaStats(replica, model, True, model_id=model_id.hex(), computing=how)

    silent = ReplicaStats("m-2", "m", False)
    backend.replicas = [
        stats("m-0", "m", CPU), stats("m-1", "m", GPU, device="metal"), silent, stats("n-0", "n", GPU, device="metal")
    ]  # fmt: skip
    found = (await endpoint.client.get("/v1/cluster")).json()["replicas"]
    assert [each["differs"] for each in found] == [{"device": "cpu"}, {"device": "metal"}, {}, {}]
    assert [each["model_id"] for each in found] == [CPU.hex(), GPU.hex(), None, GPU.hex()]
