"""What the clients ask, of which method, for how long, and what they make of the answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from satchel.actors.protocol import clients
from satchel.actors.protocol.calls import ActorRef, Call
from satchel.actors.protocol.clients import CONFIG_S, ReplicaClient, RouterClient
from satchel.actors.protocol.messages import (
    AgentKeys,
    AgentMoved,
    AgentPlace,
    Count,
    Decision,
    Drain,
    Explanation,
    Frame,
    GenerateRequest,
    Heard,
    KeptKV,
    ModelName,
    Names,
    NextFrame,
    NodeName,
    NodeReport,
    NodeReports,
    Nothing,
    Places,
    Progress,
    ReplicaName,
    ReplicaStats,
    RequestId,
    RouteRequest,
    RowIds,
    RowLeft,
    RowUpdate,
    Sampling,
    decode,
    encode,
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
KEPT = KeptKV(b"r" * 32, [b"x" * 32], b"", [b"f"])
PLACES = Places([AgentPlace("t/a", "mac0", True, 2, ["mac1"])], ["mac2"])
NODES = [NodeReport("mac0", True, 0.5, blocks=3)]
FRAME = Frame([RowUpdate("r", [1, 2])])
ROUTER = "router"
REPLICA = "replica:m-0"

router, replica = RouterClient(USUAL), ReplicaClient("m-0", USUAL)

# The call, the actor's method, what comes to it, what it answers, and what is made of that.
Case = tuple[Call[Any], str, Any, Any, Any]

OF_ROUTER: list[Case] = [
    (router.route(ROUTE), "route", ROUTE, Decision("a", "why"), Decision("a", "why")),
    (router.report(report("a")), "report", report("a"), Heard(True), True),
    (router.report(store("mac0")), "store_report", store("mac0"), Heard(False), False),
    (router.lose("a"), "lose", ReplicaName("a"), None, None),
    (router.lose_node("mac0"), "lose_node", NodeName("mac0"), None, None),
    (router.release("a", "r"), "release", RowLeft("a", "r"), None, None),
    (router.explain("r"), "explain", RequestId("r"), Explanation("a", "why"), Explanation("a", "why")),
    (router.explain("r"), "explain", RequestId("r"), None, None),
    (router.alive("m"), "alive", ModelName("m"), Names(["a"]), ["a"]),
    (router.places(("t/a", "t/b")), "places", AgentKeys(["t/a", "t/b"]), PLACES, PLACES),
    (router.moved("t/a", "mac0", 3), "moved", AgentMoved("t/a", "mac0", 3), None, None),
    (router.agents_on("mac0"), "agents_on", NodeName("mac0"), Names(["t/a"]), ["t/a"]),
    (router.nodes(), "nodes", Nothing(), NodeReports(NODES), NODES),
]
OF_REPLICA: list[Case] = [
    (replica.progress(), "progress", Nothing(), Progress("reads", 0.5, False), Progress("reads", 0.5, False)),
    (replica.info(), "info", Nothing(), model_info(), model_info()),
    (replica.info(), "info", Nothing(), None, None),
    (replica.stats(), "stats", Nothing(), ReplicaStats("m-0", "m", True), ReplicaStats("m-0", "m", True)),
    (replica.submit(ROW), "submit", ROW, None, None),
    (replica.next_frame("c", 7), "next_frame", NextFrame("c", 7), FRAME, FRAME),
    (replica.next_frame("c", 7), "next_frame", NextFrame("c", 7), None, None),
    (replica.abort(("r", "s")), "abort", RowIds(["r", "s"]), None, None),
    (replica.release(KEPT), "release", KEPT, Count(9), 9),
    (replica.held(KEPT), "held", KEPT, Count(2), 2),
    (replica.clear_cache(), "clear_cache", Nothing(), Count(0), 0),
    (replica.drain(), "drain", Drain(False), None, None),
    (replica.drain(end_rows=True), "drain", Drain(True), None, None),
]
CASES = [(ROUTER, *case) for case in OF_ROUTER] + [(REPLICA, *case) for case in OF_REPLICA]


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
    assert callable(getattr(RouterActor if actor == ROUTER else ReplicaActor, method))


def methods_of(actor: type) -> set[str]:
    return {name for name, value in vars(actor).items() if callable(value) and not name.startswith("_")}


def test_every_method_of_an_actor_is_called_by_its_client():
    assert methods_of(RouterActor) == {method for _, _, method, *_ in CASES[: len(OF_ROUTER)]} | {"config"}
    assert methods_of(ReplicaActor) == {method for _, _, method, *_ in CASES[len(OF_ROUTER) :]}


@pytest.mark.parametrize(
    ("call", "timeout_s"),
    [
        *((case[0], USUAL.answer_s) for case in OF_ROUTER),
        (router.config(), CONFIG_S),
        *((case[0], USUAL.answer_s) for case in OF_REPLICA if case[1] not in ("submit", "next_frame")),
        (replica.submit(ROW), 60.0 + USUAL.answer_s),
        (replica.next_frame("c", 0), USUAL.frame_silence_s),
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
