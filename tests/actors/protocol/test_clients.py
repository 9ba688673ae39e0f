"""What the clients ask, of which method, for how long, and what they make of the answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from satchel.actors.kv_store.actor import KVStoreActor
from satchel.actors.protocol import clients
from satchel.actors.protocol.block_ids import BLOCK_TOKENS
from satchel.actors.protocol.calls import ActorRef, Call
from satchel.actors.protocol.clients import CONFIG_S, ReplicaClient, RouterClient
from satchel.actors.protocol.codec import decode, encode
from satchel.actors.protocol.entries import EntryRecord, Failure, Location, SegmentRecord
from satchel.actors.protocol.messages import (
    Count,
    Drain,
    Frame,
    GenerateRequest,
    KVSelection,
    NextFrame,
    Nothing,
    PooledTexts,
    PoolingRequest,
    ReplicaProgress,
    ReplicaStats,
    RowIds,
    RowUpdate,
    Sampling,
)
from satchel.actors.protocol.router_messages import (
    AgentKeys,
    AgentMoved,
    AgentPlace,
    Decision,
    Explanation,
    ModelName,
    Names,
    NodeName,
    NodeReport,
    NodeReports,
    Places,
    ReplicaName,
    ReportAck,
    RequestId,
    RouteRequest,
    RowLeft,
)
from satchel.actors.protocol.store_client import StoreClient
from satchel.actors.protocol.store_messages import (
    Addresses,
    AgentBranches,
    AgentKey,
    AgentKV,
    AgentPage,
    AgentTo,
    AskKV,
    AskRoom,
    AskUnpack,
    Begin,
    Begun,
    BranchIds,
    BranchKV,
    BranchMemory,
    Commit,
    CommitOutcome,
    CommitSegment,
    CommitTurn,
    Content,
    DiskSession,
    EntryIds,
    Fetched,
    FetchKV,
    FilePath,
    FindKV,
    Flag,
    Fork,
    FoundKV,
    FoundTail,
    Head,
    ListAgents,
    MoveAgent,
    Moved,
    Packed,
    PrimaryEpoch,
    Promote,
    PullKV,
    ReadDone,
    Recall,
    Recalled,
    Standing,
    Standings,
    StoreStats,
    TakeIn,
    TakeSecondary,
    Tombstone,
    TombstoneList,
    TouchChain,
    Transcript,
    TurnName,
    Unpacked,
)
from satchel.actors.replica.actor import ReplicaActor
from satchel.actors.router.actor import RouterActor
from satchel.cluster.config import default_config
from satchel.cluster.errors import OtherVersion
from satchel.cluster.timing import USUAL
from tests.worlds.direct import model_info
from tests.worlds.routing import report, store

ROUTE = RouteRequest("r", "m", "t/a", [b"x" * 32], 300)
ROW = GenerateRequest("r", "c", "m", "", [1], [], b"r" * 32, Sampling(), deadline_s=60.0)
TEXTS = PoolingRequest("r", "m", [[1, 2], [3]], [1, 0], [5, 6], deadline_s=60.0)
KEPT = KVSelection(b"r" * 32, [b"x" * 32], b"", [b"f"])
PLACES = Places([AgentPlace("t/a", "mac0", True, 2, ["mac1"])], ["mac2"])
NODES = [NodeReport("mac0", True, 0.5, blocks=3)]
FRAME = Frame([RowUpdate("r", [1, 2])])
ROUTER = "router"
REPLICA = "replica:m-0"

STORE = "kv_store:mac0"
HEAD = Head("t/a", 3, 7, b"m", b"r", 2, False, 4, 600, 9000, 1.0, 2.0)
CONTENT = Content(b"1234", "said", b"[]")
COMMIT = Commit(b"m", CONTENT, 1, 9, 3, 7, turn="turn")
AGENT = AgentBranches("t/a", 3, [HEAD], 2, True)
STATS = StoreStats(1, 2, 3, 4, {"blocks": 5}, "", 6, 7, 8, 9, 10)
ENTRY = EntryRecord(b"x" * 32, b"p" * 32, False, bytes(4 * BLOCK_TOKENS), b"d" * 16, 0, True, 100)
SEGMENT = SegmentRecord("s-1.safetensors", 200, b"m" * 32, 3, 1.0, {"a": "b"}, (ENTRY,))
PLACE = Location.of(ENTRY, b"m", "s-1", 0)
PULL = PullKV("mac1", b"m", b"r", [b"x"], [1, 2], "t/a", 20.0, {"t": None})
PACKED, UNPACK = Packed("/kv/x", 5, 1, 2), AskUnpack("t/a", "/kv/x", [b"m"])
UNPACKED = Unpacked(1, 2, 2, 5, "", False)
COPY = TakeSecondary("t/a", 2, 9, [HEAD], {3: CONTENT}, {"t": 5})
HANDED = TakeIn("t/a", 2, [BranchMemory(HEAD, CONTENT)])
STANDS = Standing("t/a", 2, 1, 7, -1, 4)
BURIAL = Tombstone("t/a", 2, 9)

router, replica, store_of = RouterClient(USUAL), ReplicaClient("m-0", USUAL), StoreClient("mac0", USUAL)

# The call, the actor's method, what comes to it, what it answers, and what is made of that.
Case = tuple[Call[Any], str, Any, Any, Any]

OF_ROUTER: list[Case] = [
    (router.route(ROUTE), "route", ROUTE, Decision("a", "why"), Decision("a", "why")),
    (router.report(report("a")), "report", report("a"), ReportAck(True), True),
    (router.report(store("mac0")), "store_report", store("mac0"), ReportAck(False), False),
    (router.lose("a"), "lose", ReplicaName("a"), None, None),
    (router.lose_node("mac0"), "lose_node", NodeName("mac0"), None, None),
    (router.release(RowLeft("a", "r")), "release", RowLeft("a", "r"), None, None),
    (router.explain("r"), "explain", RequestId("r"), Explanation("a", "why"), Explanation("a", "why")),
    (router.explain("r"), "explain", RequestId("r"), None, None),
    (router.alive("m"), "alive", ModelName("m"), Names(["a"]), ["a"]),
    (router.places(("t/a", "t/b")), "places", AgentKeys(["t/a", "t/b"]), PLACES, PLACES),
    (router.moved("t/a", "mac0", 3), "moved", AgentMoved("t/a", "mac0", 3), None, None),
    (router.agents_on("mac0"), "agents_on", NodeName("mac0"), Names(["t/a"]), ["t/a"]),
    (router.nodes(), "nodes", Nothing(), NodeReports(NODES), NODES),
]
OF_REPLICA: list[Case] = [
    (
        replica.progress(),
        "progress",
        Nothing(),
        ReplicaProgress("reads", 0.5, False),
        ReplicaProgress("reads", 0.5, False),
    ),
    (replica.info(), "info", Nothing(), model_info(), model_info()),
    (replica.info(), "info", Nothing(), None, None),
    (replica.stats(), "stats", Nothing(), ReplicaStats("m-0", "m", True), ReplicaStats("m-0", "m", True)),
    (replica.submit(ROW), "submit", ROW, None, None),
    (replica.pool(TEXTS), "pool", TEXTS, PooledTexts(1, b"1234"), PooledTexts(1, b"1234")),
    (replica.next_frame("c", 7), "next_frame", NextFrame("c", 7), FRAME, FRAME),
    (replica.next_frame("c", 7), "next_frame", NextFrame("c", 7), None, None),
    (replica.abort(("r", "s")), "abort", RowIds(["r", "s"]), None, None),
    (replica.go_on(("r", "s")), "go_on", RowIds(["r", "s"]), None, None),
    (replica.release(KEPT), "release", KEPT, Count(9), 9),
    (replica.held(KEPT), "held", KEPT, Count(2), 2),
    (replica.clear_cache(), "clear_cache", Nothing(), Count(0), 0),
    (replica.drain(), "drain", Drain(False), None, None),
    (replica.drain(end_rows=True), "drain", Drain(True), None, None),
    (replica.drain(end_rows=True, leaves=True), "drain", Drain(True, True), None, None),
]
OF_STORE: list[Case] = [
    (
        store_of.recall("t/a", b"w", {3: 7}, {"t": None}),
        "recall",
        Recall("t/a", b"w", {3: 7}, {"t": None}),
        Recalled(9, [BranchMemory(HEAD, CONTENT), BranchMemory(HEAD, None)], True),
        Recalled(9, [BranchMemory(HEAD, CONTENT), BranchMemory(HEAD, None)], True),
    ),
    (
        store_of.begin("t/a", "turn", b"w", {}),
        "begin",
        Begin("t/a", "turn", b"w", {}),
        Begun(9, BranchMemory(HEAD, None), False, b"[]"),
        Begun(9, BranchMemory(HEAD, None), False, b"[]"),
    ),
    (store_of.renew("t/a", "turn"), "renew", TurnName("t/a", "turn"), Flag(False), False),
    (
        store_of.commit("t/a", COMMIT, {"t": 5}),
        "commit",
        CommitTurn("t/a", COMMIT, {"t": 5}),
        CommitOutcome("opened", 3, 7, False),
        CommitOutcome("opened", 3, 7, False),
    ),
    (store_of.abandon("t/a", "turn"), "abandon", TurnName("t/a", "turn"), None, None),
    (store_of.transcript("t/a"), "transcript", AgentKey("t/a"), Transcript(b"[]"), b"[]"),
    (store_of.info("t/a"), "info", AgentKey("t/a"), AGENT, AGENT),
    (store_of.agents("t", "t/a", 5), "agents", ListAgents("t", "t/a", 5), AgentPage([AGENT]), [AGENT]),
    (store_of.blocks("t/a"), "blocks", AskKV("t/a"), AgentKV([BranchKV(b"m", KEPT)]), [BranchKV(b"m", KEPT)]),
    (store_of.disk_kept("t/a"), "disk_kept", AgentKey("t/a"), Count(2), 2),
    (store_of.fork("t/a", "t/b"), "fork", Fork("t/a", "t/b"), Count(1), 1),
    (store_of.forget("t/a"), "forget", AgentKey("t/a"), Flag(True), True),
    (store_of.stats(), "stats", Nothing(), STATS, STATS),
    (store_of.disk_session(), "disk_session", Nothing(), DiskSession("/kv", "s", 3), DiskSession("/kv", "s", 3)),
    (store_of.disk_session(), "disk_session", Nothing(), None, None),
    (store_of.disk_commit(SEGMENT), "disk_commit", CommitSegment(SEGMENT), EntryIds([b"x"]), [b"x"]),
    (store_of.disk_touch(b"m", [b"x"], "t/a"), "disk_touch", TouchChain(b"m", [b"x"], "t/a"), None, None),
    (
        store_of.disk_find(b"m", [b"x"], b"p", b"", 2),
        "disk_find",
        FindKV(b"m", [b"x"], b"p", b"", 2),
        FoundKV([PLACE], [FoundTail(PLACE, 2)], "lease"),
        FoundKV([PLACE], [FoundTail(PLACE, 2)], "lease"),
    ),
    (
        store_of.disk_read("lease", [b"x"], "t/a", [Failure(PLACE, "damaged", False)]),
        "disk_read",
        ReadDone("lease", [b"x"], "t/a", [Failure(PLACE, "damaged", False)]),
        None,
        None,
    ),
    (store_of.pull(PULL), "pull", PULL, Fetched(1, 2, 3, 0.5), Fetched(1, 2, 3, 0.5)),
    (store_of.move("t/a", "mac1"), "move", MoveAgent("t/a", "mac1"), Moved("mac1", 2), Moved("mac1", 2)),
    (store_of.promote("t/a", 2), "promote", Promote("t/a", 2), PrimaryEpoch(3), 3),
    (store_of.drain(), "drain", Nothing(), None, None),
    (store_of.promote_here("t/a", 2), "promote_here", Promote("t/a", 2), PrimaryEpoch(3), 3),
    (store_of.take_secondary(COPY), "take_secondary", COPY, BranchIds([3]), [3]),
    (store_of.send_secondary("t/a", "mac1"), "send_secondary", AgentTo("t/a", "mac1"), PrimaryEpoch(2), 2),
    (store_of.take_in(HANDED), "take_in", HANDED, Count(1), 1),
    (store_of.standing(("t/a",)), "standing", AgentKeys(["t/a"]), Standings([STANDS]), [STANDS]),
    (store_of.doubt("t/a"), "doubt", AgentKey("t/a"), None, None),
    (store_of.buried(), "buried", Nothing(), TombstoneList([BURIAL]), [BURIAL]),
    (store_of.bury(BURIAL), "bury", BURIAL, Flag(True), True),
    (store_of.fetch("t/a", "mac1", 5.0), "fetch", FetchKV("t/a", "mac1", 5.0), Fetched(), Fetched()),
    (store_of.block_addresses(), "block_addresses", Nothing(), Addresses([("h", 1)]), [("h", 1)]),
    (store_of.room("t/a", 5), "room", AskRoom("t/a", 5), FilePath("/kv/x"), "/kv/x"),
    (store_of.pack("t/a"), "pack", AskKV("t/a"), PACKED, PACKED),
    (store_of.borrow("t/a", "mac1"), "borrow", AgentTo("t/a", "mac1"), None, None),
    (store_of.give_back("t/a"), "give_back", AgentKey("t/a"), None, None),
    (store_of.unpack(UNPACK), "unpack", UNPACK, UNPACKED, UNPACKED),
]
OF = {ROUTER: OF_ROUTER, REPLICA: OF_REPLICA, STORE: OF_STORE}
ACTORS = {ROUTER: RouterActor, REPLICA: ReplicaActor, STORE: KVStoreActor}
CASES = [(actor, *case) for actor, cases in OF.items() for case in cases]


@pytest.mark.parametrize(("actor", "call", "method", "asked", "said", "made"), CASES, ids=lambda value: str(value)[:20])
async def test_each_method_asks_its_own_question_and_reads_its_own_answer(
    actor: str, call: Call[Any], method: str, asked: Any, said: Any, made: Any, monkeypatch: pytest.MonkeyPatch
):
    heard: list[tuple[str, Any]] = []

    async def answer(data: bytes) -> bytes:
        heard.append((method, decode(type(asked), data)))
        return encode(said)

    async def find(ref: ActorRef) -> Any:
        assert ref.name == actor
        return SimpleNamespace(**{method: SimpleNamespace(remote=answer)})

    monkeypatch.setattr(ActorRef, "find_aside", find)
    assert await call == made and heard == [(method, asked)]
    assert callable(getattr(ACTORS[actor], method))


def methods_of(actor: type) -> set[str]:
    return {name for name, value in vars(actor).items() if callable(value) and not name.startswith("_")}


def test_every_method_of_an_actor_is_called_by_its_client():
    for name, cases in OF.items():
        assert methods_of(ACTORS[name]) == {case[1] for case in cases} | ({"config"} if name == ROUTER else set())


PATIENT = (
    "recall",
    "begin",
    "renew",
    "commit",
    "abandon",
    "transcript",
    "info",
    "agents",
    "blocks",
    "disk_kept",
    "pack",
    "unpack",
)
PATIENT += ("fork", "forget", "move")


@pytest.mark.parametrize(
    ("call", "timeout_s"),
    [
        *((case[0], USUAL.answer_s) for case in OF_ROUTER),
        (router.config(), CONFIG_S),
        *((case[0], USUAL.answer_s) for case in OF_REPLICA if case[1] not in ("submit", "pool", "next_frame")),
        (replica.submit(ROW), 60.0 + USUAL.answer_s),
        (replica.pool(TEXTS), 60.0 + USUAL.answer_s),
        (replica.next_frame("c", 0), USUAL.frame_silence_s),
        *((case[0], USUAL.store_answer_s) for case in OF_STORE if case[1] in PATIENT),
        *((case[0], USUAL.answer_s) for case in OF_STORE if case[1] not in (*PATIENT, "pull", "fetch")),
        (store_of.pull(PULL), 20.0 + USUAL.answer_s),
        (store_of.fetch("t/a", "mac1", 60.0), 60.0 + USUAL.answer_s),
    ],
)
def test_nothing_is_waited_for_for_ever(call: Call[Any], timeout_s: float):
    assert call._timeout_s == timeout_s and call.within(0.5)._timeout_s == 0.5


async def test_the_config_is_the_clusters(monkeypatch: pytest.MonkeyPatch):
    config: Any = default_config()

    async def answer() -> Any:
        return config

    own = RouterClient(USUAL, SimpleNamespace(config=SimpleNamespace(remote=answer)))
    assert await own.config() is config
    monkeypatch.setattr(clients, "Config", str)
    with pytest.raises(OtherVersion, match="another config"):
        await own.config()
