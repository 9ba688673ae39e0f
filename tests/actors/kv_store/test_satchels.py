"""An agent as a file: what is packed in one cluster comes back in another, and what is not whole leaves nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from satchel.actors.kv_store.satchels import packing
from satchel.actors.kv_store.satchels.layout import MAGIC, VERSION
from satchel.actors.protocol.block_ids import root_id, scope_of
from satchel.actors.protocol.entries import Entry
from satchel.actors.protocol.media_ids import embeddings_parent, media_tokens, names_in
from satchel.actors.protocol.replica_messages import ReplicaStats
from satchel.actors.protocol.router_messages import AgentPlace
from satchel.actors.protocol.store_messages import AskUnpack, Unpacked
from satchel.api.ray_backend.store import RayStore
from satchel.cluster.errors import AgentExists, AgentNotFound, DiskFull, InvalidSatchel, QuotaExceeded, RequestTooLarge
from tests.worlds.direct import model_info
from tests.worlds.kv_store.kv_files import MODEL, OTHER_MODEL, chain, tail
from tests.worlds.kv_store.kv_node import spoken
from tests.worlds.kv_store.store_nodes import Cluster, cluster

ALICE, BOB = "default/alice", "default/bob"
PICTURE = media_tokens(b"p" * 32, 4)


def kv(agent: str = ALICE, share: str = "tenant") -> list[Entry]:
    """Two blocks and a tail with a picture, and the picture's embeddings."""
    tenant, _, name = agent.partition("/")
    root = root_id(MODEL, scope_of(share, tenant, name, ""))
    blocks = chain(2, parent=root)
    (pictured,) = names_in(PICTURE)
    last = tail([7, 8, *PICTURE, 9], 5, blocks[-1].id)
    return [*blocks, last, tail(pictured, 6, embeddings_parent(root, pictured))]


def said() -> list[int]:
    return spoken(*kv()[:3])


@pytest.fixture
async def home(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path / "home", ["a"]) as made:
        await made.speak("a", ALICE, "title", [1, 2])
        await made.speak("a", ALICE, "hello", said())
        for entry in kv():
            await made.put("a", [entry])
        yield made


async def carried(home: Cluster, agent: str = ALICE) -> bytes:
    packed = await home.at("a").pack(agent)
    path = Path(packed.path)
    data = path.read_bytes()
    path.unlink()
    assert len(data) == packed.nbytes
    return data


async def brought(to: Cluster, data: bytes, agent: str = ALICE, **how: Any) -> Unpacked:
    path = Path(await to.at("a").room(agent, len(data)))
    path.write_bytes(data)
    try:
        asked = {"models": [MODEL], "trusted": True, **how}
        return await to.at("a").unpack(AskUnpack(agent, str(path), **asked))
    finally:
        path.unlink()


@pytest.mark.parametrize(("agent", "share"), [(ALICE, "tenant"), (BOB, "tenant"), ("eve/bob", "agent")])
async def test_words_and_kv_come_back_elsewhere_and_under_other_names(home, tmp_path, agent, share):
    data = await carried(home)
    async with cluster(tmp_path / "other", ["a"], share=share) as other:
        came = await brought(other, data, agent)
        assert (came.branches, came.entries, came.entries_of, came.why_not, came.replaced) == (2, 4, 4, "", False)
        assert other.said("a", agent) == {"title", "hello"} and other.homes(agent) == ["a"]
        assert await other.at("a").transcript(agent) == await home.at("a").transcript(ALICE)
        assert other.has("a", *kv(agent, share)), "so its next turn finds all of it by its own ids"
        told = await other.at("a").disk_kept(agent)
        assert told == await home.at("a").disk_kept(ALICE) == 4
        await other.at("a").forget(agent)
        await other.owned("a").idle()
        assert not other.disk("a").locate(MODEL, [kv(agent, share)[0].id])[0], "it owns what came, and takes it along"


async def test_kv_of_a_model_that_is_not_served_or_of_a_strangers_satchel_stays_out(home, tmp_path):
    data = await carried(home)
    async with cluster(tmp_path / "other", ["a"]) as other:
        other.stores["a"].services.satchels._cluster_key = b"another cluster's"
        for agent, how, reason in (
            (ALICE, {"models": [OTHER_MODEL]}, "served"),
            (BOB, {"trusted": False}, "--admin"),
        ):
            came = await brought(other, data, agent, **how)
            assert came.entries == 0 and reason in came.why_not and other.said("a", agent) == {"title", "hello"}
    assert (await brought(home, data, BOB, trusted=False)).why_not == "", "a cluster knows its own"


async def test_an_agent_is_replaced_only_if_asked_for(home):
    data = await carried(home)
    since = (await home.at("a").recall(ALICE, MODEL, {})).since
    await home.speak("a", ALICE, "later")
    with pytest.raises(AgentExists):
        await brought(home, data)
    assert "later" in home.said("a", ALICE)
    assert (await brought(home, data, replace=True)).replaced
    assert home.said("a", ALICE) == {"title", "hello"} and home.homes(ALICE) == ["a"]
    await home.owned("a").idle()
    assert home.has("a", *kv()), "what both stand on stays"
    assert home.agents("a").buried(ALICE) > since, "a turn that began before it cannot commit"


def flipped(at: int) -> Callable[[bytes], bytes]:
    def flip(data: bytes) -> bytes:
        place = at if at >= 0 else len(data) + at
        return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]

    return flip


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: b"PK\3\4" + data, "does not begin as one"),
        (lambda data: b"", "does not begin as one"),
        (lambda data: MAGIC + (VERSION + 1).to_bytes(4, "little") + data[12:], "newer"),
        (lambda data: data[:-1], "cut off"),
        (lambda data: data[:200], "cut off"),
        (lambda data: data + b"\0", "does not end"),
        (flipped(60), "damaged"),
        (flipped(-2000), "damaged"),
        (flipped(-40), "damaged"),
        (lambda data: data[:13] + b"\xff" * 7 + data[20:], "cut off"),
    ],
)
async def test_what_is_not_whole_is_refused_and_leaves_nothing(home, tmp_path, damage, reason):
    data = damage(await carried(home))
    async with cluster(tmp_path / "other", ["a"]) as other:
        with pytest.raises(InvalidSatchel, match=reason):
            await brought(other, data)
        assert not other.said("a", ALICE) and not other.disk("a").stats()["entries"]
        files = [path for path in (tmp_path / "other").rglob("*") if path.is_file()]
        assert not [path for path in files if path.suffix in (".kv", ".tmp") or path.parent.name == "satchels"]


async def test_every_flipped_bit_is_found(home, tmp_path):
    data = await carried(home)
    async with cluster(tmp_path / "other", ["a"]) as other:
        for place in range(0, len(data) - 32, 97):
            with pytest.raises(InvalidSatchel):
                await brought(other, flipped(place)(data))
        assert not other.said("a", ALICE)


async def test_kv_of_what_was_not_said_is_refused(home, tmp_path):
    """A forger who recomputes the digest still brings nothing that other agents would find."""
    await home.put("a", chain(1, first=40, parent=kv()[1].id))
    foreign = chain(1, first=40, parent=kv()[1].id)[0]
    found = packing.kv_of
    with pytest.MonkeyPatch.context() as patch:
        where = home.disk("a").locate(MODEL, [foreign.id])
        patch.setattr("satchel.actors.kv_store.services.satchels.kv_of", lambda *of: [*found(*of), *where])
        data = await carried(home)
    with pytest.raises(InvalidSatchel, match="nothing that the agent said"):
        await brought(home, data, BOB)


async def test_no_room_is_said(home, tmp_path):
    data = await carried(home)
    with pytest.raises(AgentNotFound):
        await home.at("a").pack("default/nobody")
    async with cluster(tmp_path / "small", ["a"], satchel_bytes_max=100) as small:
        with pytest.raises(RequestTooLarge, match="satchel_bytes_max"):
            await brought(small, data)
    async with cluster(tmp_path / "full", ["a"]) as full:
        service = full.stores["a"].services.satchels
        service._io.space = lambda folder: (_ for _ in ()).throw(OSError(28, "no space"))  # type: ignore[method-assign]
        with pytest.raises(DiskFull):
            await brought(full, data)
        with pytest.raises(QuotaExceeded, match="may keep"):
            await full.at("a").room("t/x", 10**9, {"t": 10**6})


async def test_a_satchel_of_words_alone(tmp_path):
    async with cluster(tmp_path, ["a"]) as home:
        await home.speak("a", ALICE, "hello")
        data = await carried(home)
        assert (await brought(home, data, BOB)).entries_of == 0
        assert json.loads(await home.at("a").transcript(BOB)) == [{"content": "hello"}]


class Places:
    """As `AgentLocator`, of a cluster whose endpoint is on node a."""

    head = "a"

    def __init__(self, home: Cluster) -> None:
        self._cluster = home
        self.note = self.forget = lambda *of: None

    async def alive(self) -> list[str]:
        return [*self._cluster.stores]

    async def nodes(self) -> dict[str, bool]:
        return dict.fromkeys(self._cluster.stores, True)

    async def locate(self, agent: str) -> str:
        return (self._cluster.homes(agent) or ["a"])[0]

    async def where(self, agent: str) -> AgentPlace | None:
        return AgentPlace(agent, home[0], True, 1) if (home := self._cluster.homes(agent)) else None

    async def moved(self, *of: Any) -> None: ...

    async def ask(self, node: str, question: Any, timeout_s: float = 0.0) -> Any:
        return await question(self._cluster.at(node))


class Writing:
    """A replica that still writes KV when it is first asked."""

    def __init__(self, write: Callable[[], Awaitable[object]]) -> None:
        self._write = write
        self._unwritten = 2

    async def stats(self) -> ReplicaStats:
        self._unwritten = max(0, self._unwritten - 1)
        if not self._unwritten:
            await self._write()
        return ReplicaStats("r", "m", True, unwritten_bytes=self._unwritten)


class Store(RayStore):
    replica: Writing

    async def _infos(self) -> list[Any]:
        return [(self.replica, model_info(model_id=MODEL, files_id=MODEL))]


async def given_back(home: Cluster) -> None:
    """The node of the endpoint has dropped what came for satchels alone."""
    async with asyncio.timeout(10):
        while home.stores["a"].services.satchels._loans:
            await asyncio.sleep(0.01)
    await home.owned("a").idle()


@pytest.mark.parametrize("kept", ["a copy that belongs there", "KV that was there", "an agent that has moved there"])
async def test_packing_takes_nothing_away_that_was_not_brought_for_it(tmp_path, kept):
    async with cluster(tmp_path, ["a", "b"], replication=kept == "a copy that belongs there") as home:
        await home.speak("b", ALICE, "hello", said())
        for entry in kv():
            await home.put("b", [entry])
        if kept == "KV that was there":
            await home.put("a", [replace(kv()[0], owners=(ALICE,))])
        places: Any = Places(home)
        store = Store(places, home.config.timing)
        store.replica = Writing(lambda: asyncio.sleep(0))
        if kept == "an agent that has moved there":
            await home.at("a").borrow(ALICE, "b")
            await home.at("b").move(ALICE, "a")
            await home.at("a").give_back(ALICE)
        else:
            path = Path((await store.pack(ALICE)).path)
            # Whoever packs it again waits for nobody.
            path.unlink()
            await given_back(home)
        left = len(home.disk("a").owned(ALICE))
        assert (home.said("a", ALICE) == set()) == (kept == "KV that was there")
        assert left == (1 if kept == "KV that was there" else 4)


async def test_what_was_brought_for_a_satchel_that_was_given_up_goes_too(tmp_path):
    async with cluster(tmp_path, ["a", "b"], replication=0) as home:
        await home.speak("b", ALICE, "hello", said())
        for entry in kv():
            await home.put("b", [entry])
        places: Any = Places(home)
        store = Store(places, home.config.timing)
        store.replica = Writing(lambda: asyncio.sleep(60))
        packing_it = asyncio.ensure_future(store.pack(ALICE))
        async with asyncio.timeout(10):
            while not home.said("a", ALICE):
                await asyncio.sleep(0.01)
        packing_it.cancel()
        await asyncio.wait([packing_it])
        await given_back(home)
        assert not home.said("a", ALICE) and not home.disk("a").owned(ALICE)


async def test_an_agent_of_another_node_is_packed_and_replaced_at_the_endpoints(tmp_path):
    async with cluster(tmp_path, ["a", "b"], replication=0) as home:
        await home.speak("b", ALICE, "hello", said())
        *first, last = kv()
        for entry in first:
            await home.put("b", [entry])
        places: Any = Places(home)
        store = Store(places, home.config.timing)
        store.replica = Writing(lambda: home.put("b", [last]))
        packed = await store.pack(ALICE)
        assert packed.entries == 4 and Path(packed.path).is_relative_to(tmp_path / "a")
        await given_back(home)
        assert not home.said("a", ALICE) and not home.disk("a").owned(ALICE), "it lives on the other node, as before"
        assert home.has("b", *kv())
        with pytest.raises(AgentExists):
            await store.unpack(ALICE, packed.path, replace=False, trusted=False)
        await home.speak("b", ALICE, "later")
        came = await store.unpack(ALICE, packed.path, replace=True, trusted=False)
        assert (came.entries, came.why_not, came.replaced) == (4, "", True)
        assert home.homes(ALICE) == ["a"] and home.said("a", ALICE) == {"hello"} and home.has("a", *kv())
        await home.tend()
        assert "later" not in home.said("b", ALICE), "the other node hears that what it has was replaced"
