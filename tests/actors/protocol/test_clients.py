"""What the clients ask, of which method, for how long, and what they make of the answers."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from satchel.actors.kv_store.actor import KVStoreActor
from satchel.actors.planner.actor import PlannerActor
from satchel.actors.protocol import clients
from satchel.actors.protocol.block_ids import BLOCK_TOKENS
from satchel.actors.protocol.clients import CONFIG_S, ReplicaClient, RouterClient
from satchel.actors.protocol.entries import EntryRecord, Failure, Location, SegmentRecord
from satchel.actors.protocol.group_clients import PlannerClient, StageClient
from satchel.actors.protocol.group_messages import FoundPart, PlannedModel, ReadPart, StageAddress, StageState
from satchel.actors.protocol.replica_messages import (
    GenerateRequest,
    ImageRequest,
    ImageUpdate,
    KVSelection,
    Pixels,
    PooledTexts,
    PoolingRequest,
    ReplicaProgress,
    ReplicaStats,
    Sampling,
    SequenceUpdate,
)
from satchel.actors.protocol.router_messages import (
    AgentPlace,
    Decision,
    Decisions,
    Explanation,
    MadeDecision,
    NodeReport,
    Places,
    RouteRequest,
    SequenceLeft,
)
from satchel.actors.protocol.speech_messages import (
    SpeechPiece,
    SpeechRequest,
    SpeechUpdate,
    Transcript,
    TranscriptSegment,
    TranscriptWord,
)
from satchel.actors.protocol.store_client import StoreClient
from satchel.actors.protocol.store_messages import (
    AgentBranches,
    AskUnpack,
    Begun,
    BranchKV,
    BranchMemory,
    Commit,
    CommitOutcome,
    Content,
    DiskSession,
    Fetched,
    FoundKV,
    FoundTail,
    Head,
    Moved,
    Packed,
    PullKV,
    Recalled,
    Standing,
    StoreStats,
    TakeIn,
    TakeSecondary,
    Tombstone,
    Unpacked,
)
from satchel.actors.replica.actor import ReplicaActor
from satchel.actors.replica.group.follower import StageActor
from satchel.actors.router.actor import RouterActor
from satchel.actors.rpc.client import ActorRef, Call
from satchel.actors.rpc.codec import encode, encode_call
from satchel.actors.rpc.local import LocalAddress
from satchel.actors.rpc.spec import Client, Method
from satchel.cluster.config.config import default_config
from satchel.cluster.config.timing import USUAL
from satchel.cluster.environment import ray_settings
from satchel.cluster.errors import OtherVersion
from satchel.cluster.home import Home
from tests.worlds.direct import model_info
from tests.worlds.routing import report, store

ROUTE = RouteRequest("r", "m", "t/a", [b"x" * 32], 300)
ROW = GenerateRequest("r", "c", "m", "", [1], [], b"r" * 32, Sampling(), deadline_s=60.0)
PIXELS = Pixels(2, 1, b"rgbrgb")
IMAGE = ImageRequest("r", "m", "a cube", 32, 16, 7, steps=4, images=[PIXELS], deadline_s=60.0)
HEARD = SpeechRequest("r", "m", "transcribe", b"1234" * 8, language="de", words=True, deadline_s=60.0)
WORDS = [TranscriptWord("Ada", 0.5, 1.0)]
TRANSCRIPT = Transcript("Ada", "en", [TranscriptSegment(0.5, 1.0, "Ada", [7, 8], 0.2, -0.3, 1.1, 0.01, WORDS)])
TEXTS = PoolingRequest("r", "m", [[1, 2], [3]], [1, 0], [5, 6], deadline_s=60.0)
KEPT = KVSelection(b"r" * 32, [b"x" * 32], b"", [b"f"])
DECISIONS = Decisions("router", 4, [MadeDecision(4, "r/1", "t/a", "m", 9, 1.5, Explanation("a", "why"))])
PLACES = Places([AgentPlace("t/a", "mac0", True, 2, ["mac1"])], ["mac2"])
NODES = [NodeReport("mac0", True, 0.5, blocks=3)]
FRAME = [SequenceUpdate("r", [1, 2])]
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
PLANNER, STAGE = "planner", "stage 0 of m-0"
planner, stage = PlannerClient(USUAL), StageClient(STAGE, USUAL, None)

# The call, the actor's method, the arguments that come to it, and the answer.
Case = tuple[Call[Any], str, list[Any], Any]

OF_ROUTER: list[Case] = [
    (router.local_address(), "local_address", [], LocalAddress("n", 7, b"s", ["route"])),
    (router.route(ROUTE), "route", [ROUTE], Decision("a", "why")),
    (router.report(report("a")), "report", [report("a")], True),
    (router.store_report(store("mac0")), "store_report", [store("mac0")], False),
    (router.lose("a"), "lose", ["a"], None),
    (router.lose_node("mac0"), "lose_node", ["mac0"], None),
    (router.release(SequenceLeft("a", "r")), "release", [SequenceLeft("a", "r")], None),
    (router.explain("r"), "explain", ["r"], Explanation("a", "why")),
    (router.explain("r"), "explain", ["r"], None),
    (router.decisions(3, 10), "decisions", [3, 10], DECISIONS),
    (router.alive("m"), "alive", ["m"], ["a"]),
    (router.places(("t/a", "t/b")), "places", [["t/a", "t/b"]], PLACES),
    (router.moved("t/a", "mac0", 3), "moved", ["t/a", "mac0", 3], None),
    (router.agents_on("mac0"), "agents_on", ["mac0"], ["t/a"]),
    (router.nodes(), "nodes", [], NODES),
]
OF_REPLICA: list[Case] = [
    (replica.progress(), "progress", [], ReplicaProgress("reads", 0.5, False)),
    (replica.info(), "info", [], model_info()),
    (replica.info(), "info", [], None),
    (replica.stats(), "stats", [], ReplicaStats("m-0", "m", True)),
    (replica.submit(ROW), "submit", [ROW], None),
    (replica.prepare(ROW), "prepare", [ROW], None),
    (replica.pool(TEXTS), "pool", [TEXTS], PooledTexts(1, b"1234")),
    (replica.make_image(IMAGE), "make_image", [IMAGE], None),
    (replica.next_image("r", 3), "next_image", ["r", 3], ImageUpdate(4, 2, 9, partial=[PIXELS])),
    (replica.next_image("r", 3), "next_image", ["r", 3], ImageUpdate(5, 9, 9, image=PIXELS, prompt_tokens=3)),
    (replica.next_image("r", 3), "next_image", ["r", 3], None),
    (replica.do_speech(HEARD), "do_speech", [HEARD], None),
    (replica.next_speech("r", 3), "next_speech", ["r", 3], SpeechUpdate(4, [SpeechPiece("Ada", b"12")])),
    (replica.next_speech("r", 3), "next_speech", ["r", 3], SpeechUpdate(5, [], TRANSCRIPT, 1.0, True)),
    (replica.next_speech("r", 3), "next_speech", ["r", 3], None),
    (replica.next_frame("c", 7), "next_frame", ["c", 7], FRAME),
    (replica.next_frame("c", 7), "next_frame", ["c", 7], None),
    (replica.local_address(), "local_address", [], LocalAddress("n", 7, b"s", ["submit"])),
    (replica.abort(("r", "s")), "abort", [["r", "s"]], None),
    (replica.go_on(("r", "s")), "go_on", [["r", "s"]], None),
    (replica.release(KEPT), "release", [KEPT], 9),
    (replica.held(KEPT), "held", [KEPT], 2),
    (replica.clear_cache(), "clear_cache", [], 0),
    (replica.drain(), "drain", [False, False], None),
    (replica.drain(end_sequences=True), "drain", [True, False], None),
    (replica.drain(end_sequences=True, leaves=True), "drain", [True, True], None),
]
RECALLED = Recalled(9, [BranchMemory(HEAD, CONTENT), BranchMemory(HEAD, None)], True)
OF_STORE: list[Case] = [
    (store_of.local_address(), "local_address", [], LocalAddress("n", 7, b"s", ["recall"])),
    (
        store_of.recall("t/a", b"w", MappingProxyType({3: 7}), {"t": None}),
        "recall",
        ["t/a", b"w", {3: 7}, {"t": None}],
        RECALLED,
    ),
    (
        store_of.begin("t/a", "turn", b"w", {}),
        "begin",
        ["t/a", "turn", b"w", {}, None],
        Begun(9, BranchMemory(HEAD, None), False, b"[]"),
    ),
    (store_of.renew("t/a", "turn"), "renew", ["t/a", "turn"], False),
    (
        store_of.commit("t/a", COMMIT, {"t": 5}),
        "commit",
        ["t/a", COMMIT, {"t": 5}],
        CommitOutcome("opened", 3, 7, False),
    ),
    (store_of.abandon("t/a", "turn"), "abandon", ["t/a", "turn"], None),
    (store_of.transcript("t/a"), "transcript", ["t/a"], b"[]"),
    (store_of.info("t/a"), "info", ["t/a"], AGENT),
    (store_of.agents("t", "t/a", 5), "agents", ["t", "t/a", 5], [AGENT]),
    (store_of.blocks("t/a"), "blocks", ["t/a", []], [BranchKV(b"m", KEPT)]),
    (store_of.disk_kept("t/a"), "disk_kept", ["t/a"], 2),
    (store_of.fork("t/a", "t/b"), "fork", ["t/a", "t/b", None], 1),
    (store_of.forget("t/a"), "forget", ["t/a"], True),
    (store_of.stats(), "stats", [], STATS),
    (store_of.disk_session(), "disk_session", [], DiskSession("/kv", "s", 3)),
    (store_of.disk_session(), "disk_session", [], None),
    (store_of.disk_commit(SEGMENT), "disk_commit", [SEGMENT, None], [b"x"]),
    (store_of.disk_touch(b"m", [b"x"], "t/a"), "disk_touch", [b"m", [b"x"], "t/a"], None),
    (
        store_of.disk_find(b"m", [b"x"], b"p", b"", 2),
        "disk_find",
        [b"m", [b"x"], b"p", b"", 2],
        FoundKV([PLACE], [FoundTail(PLACE, 2)], "lease"),
    ),
    (
        store_of.disk_read("lease", [b"x"], "t/a", (Failure(PLACE, "damaged", False),)),
        "disk_read",
        ["lease", [b"x"], "t/a", [Failure(PLACE, "damaged", False)]],
        None,
    ),
    (store_of.kv_models("t/a"), "kv_models", ["t/a"], [b"m" * 32]),
    (store_of.claimed("t/a", 3, [b"m" * 32], [b"facts"]), "claimed", ["t/a", 3, [b"m" * 32], [b"facts"]], [b"x" * 32]),
    (store_of.pull(PULL), "pull", [PULL], Fetched(1, 2, 3, 0.5)),
    (store_of.move("t/a", "mac1"), "move", ["t/a", "mac1", False], Moved("mac1", 2)),
    (store_of.promote("t/a", 2), "promote", ["t/a", 2], 3),
    (store_of.drain(), "drain", [], None),
    (store_of.promote_here("t/a", 2), "promote_here", ["t/a", 2], 3),
    (store_of.take_secondary(COPY), "take_secondary", [COPY], [3]),
    (store_of.send_secondary("t/a", "mac1"), "send_secondary", ["t/a", "mac1"], 2),
    (store_of.take_in(HANDED), "take_in", [HANDED], 1),
    (store_of.standing(("t/a",)), "standing", [["t/a"]], [STANDS]),
    (store_of.doubt("t/a"), "doubt", ["t/a"], None),
    (store_of.buried(), "buried", [], [BURIAL]),
    (store_of.bury("t/a", 2, 9), "bury", ["t/a", 2, 9], True),
    (store_of.fetch("t/a", "mac1", 5.0), "fetch", ["t/a", "mac1", 5.0], Fetched()),
    # Pairs come out of msgpack as lists.
    (store_of.block_addresses(), "block_addresses", [], [["h", 1]]),
    (store_of.room("t/a", 5), "room", ["t/a", 5, None], "/kv/x"),
    (store_of.pack("t/a"), "pack", ["t/a", []], PACKED),
    (store_of.borrow("t/a", "mac1"), "borrow", ["t/a", "mac1"], None),
    (store_of.give_back("t/a"), "give_back", ["t/a"], None),
    (store_of.unpack(UNPACK), "unpack", [UNPACK], UNPACKED),
]
PART = ReadPart("r/1", "t/a", "tenant:t", b"r" * 32, [b"x" * 32], b"1234", 256)
OF_PLANNER: list[Case] = [(planner.planned("m"), "planned", ["m"], PlannedModel("m", "waits", "m-0"))]
OF_STAGE: list[Case] = [
    (stage.state(), "state", [], StageState("serving", None, True, 9, 2, 3)),
    (stage.form("g"), "form", ["g"], StageAddress("10.0.0.1", 7)),
    (stage.read(PART), "read", [PART], FoundPart(2, [b"1234"])),
]
OF = {ROUTER: OF_ROUTER, REPLICA: OF_REPLICA, STORE: OF_STORE, PLANNER: OF_PLANNER, STAGE: OF_STAGE}
ACTORS: dict[str, tuple[type, type[Client]]] = {
    ROUTER: (RouterActor, RouterClient),
    REPLICA: (ReplicaActor, ReplicaClient),
    STORE: (KVStoreActor, StoreClient),
    PLANNER: (PlannerActor, PlannerClient),
    STAGE: (StageActor, StageClient),
}
CASES = [(actor, *case) for actor, cases in OF.items() for case in cases]


@pytest.mark.parametrize(("actor", "call", "method", "asked", "said"), CASES, ids=lambda value: str(value)[:20])
async def test_each_method_asks_its_own_question_and_reads_its_own_answer(
    actor: str, call: Call[Any], method: str, asked: list[Any], said: Any, monkeypatch: pytest.MonkeyPatch
):
    heard: list[tuple[str, list[Any]]] = []
    _, declared = ACTORS[actor]

    async def answer(data: bytes) -> bytes:
        heard.append((method, getattr(declared, method).asked(data)))
        return encode(said)

    async def find(ref: ActorRef) -> Any:
        assert ref.name == actor
        return SimpleNamespace(**{method: SimpleNamespace(remote=answer)})

    monkeypatch.setattr(ActorRef, "find_aside", find)
    assert await call == said and heard == [(method, asked)]


def methods_of(actor: type) -> set[str]:
    return {name for name, value in vars(actor).items() if callable(value) and not name.startswith("_")}


def test_every_method_of_an_actor_is_called_by_its_client():
    for name, cases in OF.items():
        actor, declared = ACTORS[name]
        called = {each for each, value in vars(declared).items() if isinstance(value, Method)}
        assert called == {case[1] for case in cases}
        assert methods_of(actor) == called | ({"config"} if name == ROUTER else set())


def test_the_processes_of_actors_import_their_methods():
    """What they cannot find by its name Ray sends them as code, without the module around it."""
    for actor, _ in ACTORS.values():
        for name in methods_of(actor):
            method = getattr(actor, name)
            assert pickle.loads(pickle.dumps(method)) is method


OF_THEIR_OWN = ("submit", "pool", "make_image", "next_image", "do_speech", "next_speech", "next_frame")
"""Methods of replicas with time limits of their own."""

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
        *((case[0], USUAL.answer_s) for case in OF_REPLICA if case[1] not in OF_THEIR_OWN),
        (replica.submit(ROW), 60.0 + USUAL.answer_s),
        (replica.pool(TEXTS), 60.0 + USUAL.answer_s),
        (replica.make_image(IMAGE), 60.0 + USUAL.answer_s),
        (replica.next_image("r", 0), USUAL.frame_silence_s),
        (replica.do_speech(HEARD), 60.0 + USUAL.answer_s),
        (replica.next_speech("r", 0), USUAL.frame_silence_s),
        (replica.next_frame("c", 0), USUAL.frame_silence_s),
        *((case[0], USUAL.store_answer_s) for case in OF_STORE if case[1] in PATIENT),
        *((case[0], USUAL.answer_s) for case in OF_STORE if case[1] not in (*PATIENT, "pull", "fetch")),
        *((case[0], USUAL.answer_s) for case in (*OF_PLANNER, *OF_STAGE) if case[1] != "read"),
        (stage.read(PART), USUAL.block_lease_s),
        (store_of.pull(PULL), 20.0 + USUAL.answer_s),
        (store_of.fetch("t/a", "mac1", 60.0), 60.0 + USUAL.answer_s),
    ],
)
def test_nothing_is_waited_for_for_ever(call: Call[Any], timeout_s: float):
    assert call._timeout_s == timeout_s and call.within(0.5)._timeout_s == 0.5


def test_what_may_be_a_megabyte_is_encoded_beside_the_event_loop():
    assert {case[2] for case in CASES if case[1]._large} == {"commit", "do_speech", "make_image", "pool", "prepare"}


async def test_the_config_is_the_clusters(monkeypatch: pytest.MonkeyPatch):
    config: Any = default_config()

    async def answer() -> Any:
        return config

    own = RouterClient(USUAL, SimpleNamespace(config=SimpleNamespace(remote=answer)))
    assert await own.config() is config
    monkeypatch.setattr(clients, "Config", str)
    with pytest.raises(OtherVersion, match="another config"):
        await own.config()


def test_a_long_prompt_does_not_pass_rays_object_store():
    """Which would take milliseconds more."""
    most = int(ray_settings(Home(Path("/home")))["RAY_max_direct_call_object_size"])
    prompt = [151_643] * 131_072
    assert len(encode_call([replace(ROW, prompt=prompt, block_ids=[bytes(32)] * 512)])) < most / 4
