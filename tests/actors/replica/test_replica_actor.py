"""The replica's actor without Ray: what it refuses before anything is computed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from satchel.actors.model_files.identity.model_identity import adapted_id
from satchel.actors.model_files.source import EMBEDDED
from satchel.actors.protocol.clients import ReplicaClient
from satchel.actors.protocol.replica_messages import (
    GenerateRequest,
    KVSelection,
    MediaSpan,
    PooledTexts,
    PoolingRequest,
    Sampling,
    SequenceUpdate,
)
from satchel.actors.replica import actor
from satchel.actors.replica import reports as engine_reports
from satchel.actors.replica.actor import ReplicaActor
from satchel.actors.replica.adapters.adapters import Adapter, Adapters
from satchel.actors.replica.energy_pace import EnergyPace
from satchel.actors.replica.execution.decode_way import DEQUANTIZED
from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.loop.delivery import Counters
from satchel.actors.replica.reports import EngineReports
from satchel.actors.rpc import local
from satchel.actors.rpc.local import NearActor
from satchel.cluster.config.config import Model, Scheduling
from satchel.cluster.config.nodes import Node
from satchel.cluster.config.timing import USUAL
from satchel.cluster.errors import InvalidRequest, NoReplica, SatchelError, Unavailable
from tests.worlds.direct import Direct

OWN, OTHER = b"o" * 32, b"x" * 32


ADAPTER = Adapter("mine", {"adapters.safetensors": "ab"}, 4)


class Loaded:
    """A model with an adapter, of which no more than its ids matters."""

    model_id = OWN
    adapters = Adapters([ADAPTER])
    computes = LoadedModel.computes


class Engine:
    """Takes every sequence."""

    def __init__(self) -> None:
        self.loaded: Any = Loaded()
        self.taken: list[str] = []
        self.aborted: list[str] = []
        self.compiling = threading.Event()
        self.compiled = threading.Event()

    def grammar_of(self, request: GenerateRequest) -> str:
        if request.sampling.grammar == "wrong":
            raise InvalidRequest("unknown name")
        self.compiling.set()
        assert self.compiled.wait(10)
        return "compiled"

    def pool(self, request: PoolingRequest, reply: Callable[[PooledTexts | SatchelError], None]) -> None:
        self.taken.append(request.request_id)
        answer = PooledTexts(1, b"1234") if request.texts else InvalidRequest("no texts")
        if request.request_id != "never":
            threading.Thread(target=reply, args=(answer,)).start()

    def abort(self, request_ids: tuple[str, ...]) -> None:
        self.aborted += request_ids

    def submit(self, message: GenerateRequest, reply: object, *restored: object) -> None:
        assert callable(reply) and ("compiled" in restored) == bool(message.sampling.grammar)
        self.taken.append(message.request_id)
        reply(None)


@pytest.fixture
def replica(monkeypatch: pytest.MonkeyPatch) -> ReplicaActor:
    monkeypatch.setattr(ReplicaActor, "_run_engine", lambda self: None)
    monkeypatch.setattr(ReplicaActor, "_end_when_unwanted", lambda self: None)
    actor = ReplicaActor("m-0", Model(name="m", source="s"), Scheduling(), Node(name="mac0"), USUAL)
    actor._engine = Engine()  # type: ignore[assignment]
    return actor


def client(replica: ReplicaActor) -> ReplicaClient:
    return ReplicaClient("m-0", USUAL, Direct(lambda: replica))


async def test_a_request_made_for_another_model_id_is_refused(replica: ReplicaActor):
    """As where a replica came back with an update behind the router's back: its KV would be kept under the names of
    what computes otherwise. It may be tried again."""

    async def submitted(name: str, model_id: bytes, adapter: bytes = b"") -> SatchelError | None:
        request = GenerateRequest(name, "c", "m", "", [1], [], bytes(32), Sampling())
        request = replace(request, model_id=model_id, adapter=adapter)
        try:
            return await client(replica).submit(request)
        except SatchelError as error:
            return error

    refusal = await submitted("r", OTHER)
    assert isinstance(refusal, Unavailable) and "computes differently" in refusal.message
    assert await submitted("r", OWN) is None, "and it left nothing behind"
    assert await submitted("s", b"") is None, "nobody has said"
    assert await submitted("t", adapted_id(OWN, ADAPTER.digest), ADAPTER.digest) is None
    for model_id, adapter in ((OWN, ADAPTER.digest), (adapted_id(OWN, b"z"), b"z"), (b"", b"z")):
        refusal = await submitted("u", model_id, adapter)
        assert isinstance(refusal, Unavailable) and "computes differently" in refusal.message
    assert replica._engine.taken == ["r", "s", "t"]  # type: ignore[union-attr]


async def test_requests_that_need_a_self_test_are_to_be_retried(replica: ReplicaActor):
    """Text is served in plain mode; pictures and vectors only after their self-test. An engine that takes over after
    the replica was told to leave takes nothing more."""
    engine: Engine = replica._engine  # type: ignore[assignment]
    engine.drain = lambda: engine.taken.append("drained")  # type: ignore[attr-defined]
    proven = SimpleNamespace(notes=[])
    picture = MediaSpan(0, [1], b"k", [], 1, 1, [b"rgb"])
    text = GenerateRequest("r", "c", "m", "", [1], [], bytes(32), Sampling())
    replica._take_up(proven, engine, None, plain=True)  # type: ignore[arg-type]
    assert replica._plain_since
    with pytest.raises(Unavailable, match="the self-test of m has not ended: pictures"):
        await client(replica).submit(replace(text, media=[picture]))
    with pytest.raises(Unavailable, match="the self-test of m has not ended: adapters"):
        await client(replica).submit(replace(text, adapter=ADAPTER.digest))
    with pytest.raises(Unavailable, match="has not ended: embeddings"):
        await client(replica).pool(PoolingRequest("v", "m", [[1]]))
    await client(replica).submit(text)
    replica._take_up(proven, engine, None, plain=False)  # type: ignore[arg-type]
    await client(replica).submit(replace(text, request_id="s", media=[picture]))
    assert await client(replica).pool(PoolingRequest("v", "m", [[1]])) == PooledTexts(1, b"1234")
    assert engine.taken == ["r", "s", "v"]
    replica._draining = True
    replica._take_up(proven, engine, None, plain=False)  # type: ignore[arg-type]
    assert engine.taken[-1] == "drained"


async def test_a_grammar_is_compiled_before_its_sequence_is_taken(replica: ReplicaActor):
    """Beside the event loop; a sequence that is aborted meanwhile is not taken, and one that is refused may come
    again."""
    engine: Engine = replica._engine  # type: ignore[assignment]

    async def submit(name: str, grammar: str) -> None:
        asked = Sampling(grammar=grammar)
        await client(replica).submit(GenerateRequest(name, "c", "m", "", [1], [], bytes(32), asked))

    for _ in range(2):
        with pytest.raises(InvalidRequest, match="unknown name"):
            await submit("r", "wrong")
    going = [asyncio.create_task(submit(name, "right")) for name in ("r", "s")]
    assert await asyncio.to_thread(engine.compiling.wait, 10)
    await submit("plain", "")
    assert engine.taken == ["plain"]
    engine.abort = lambda ids: None  # type: ignore[attr-defined]
    await client(replica).abort(["s"])
    engine.compiled.set()
    await going[0]
    with pytest.raises(Unavailable, match="taken out"):
        await going[1]
    assert engine.taken == ["plain", "r"]


async def test_vectors_are_answered_refused_and_given_up(replica: ReplicaActor):
    assert await client(replica).pool(PoolingRequest("r", "m", [[1]])) == PooledTexts(1, b"1234")
    with pytest.raises(InvalidRequest, match="no texts"):
        await client(replica).pool(PoolingRequest("s", "m", []))
    waiting = asyncio.create_task(client(replica).pool(PoolingRequest("never", "m", [[1]]))._ask())
    engine = replica._engine
    while "never" not in engine.taken:  # type: ignore[union-attr]
        await asyncio.sleep(0.001)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert engine.aborted == ["never"]  # type: ignore[union-attr]
    replica._engine = None
    with pytest.raises(NoReplica, match="still loading"):
        await client(replica).pool(PoolingRequest("r", "m", [[1]]))


async def test_prompts_are_prepared_only_by_a_proven_model_and_as_the_config_says(replica: ReplicaActor):
    engine: Engine = replica._engine  # type: ignore[assignment]
    engine.prepare_prompt = lambda request: engine.taken.append(request.request_id)  # type: ignore[attr-defined]
    for number, (plain, wanted) in enumerate([(0.0, True), (1.0, True), (0.0, False)]):
        replica._plain_since, replica._scheduling = plain, Scheduling(prepare_while_idle=wanted)
        asked = GenerateRequest(str(number), "", "m", "t/ann", [1], [], bytes(32), Sampling())
        await client(replica).prepare(asked)
    replica._engine = None
    await client(replica).prepare(asked)
    assert engine.taken == ["0"]


async def test_what_was_prepared_for_an_agent_is_released_with_its_kv(replica: ReplicaActor):
    engine: Engine = replica._engine  # type: ignore[assignment]
    nothing = SimpleNamespace(drop=lambda *_: 0)
    engine.prefixes, engine.pictures = nothing, SimpleNamespace(embeddings=nothing)  # type: ignore[attr-defined]
    engine.call = lambda action: action()  # type: ignore[attr-defined]
    engine.forget_prepared = lambda agent: engine.taken.append(agent) or 7  # type: ignore[attr-defined]
    assert await client(replica).release(KVSelection(b"r", [], b"", agent="t/ann")) == 7
    assert await client(replica).release(KVSelection(b"r", [], b"")) == 0
    assert engine.taken == ["t/ann"]


async def test_an_engine_that_is_stuck_makes_the_replica_not_ready(
    replica: ReplicaActor, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(replica._watchdog, "is_slow", lambda part: part == "engine")
    monkeypatch.setattr(replica._engine, "counters", Counters(), raising=False)
    prepared = {"prepared_tokens": 0, "used_tokens": 0, "wasted_tokens": 0}
    numbers = MagicMock(running=0, blocks=0, nbytes=0, embeddings=MagicMock(hits=0, encodes=0, nbytes=0), **prepared)
    for name in ("scheduler", "prefixes", "pictures"):
        monkeypatch.setattr(replica._engine, name, numbers, raising=False)
    for name in ("waiting", "failed_checks", "idle_s"):
        monkeypatch.setattr(replica._engine, name, 0, raising=False)
    executor = SimpleNamespace(
        drafts=SimpleNamespace(count=0, drafted=0, right=0, drafted_by_model=0, right_by_model=0)
    )
    monkeypatch.setattr(replica._engine, "executor", executor, raising=False)
    usage = dict.fromkeys(("slots_running", "slots_kept", "slots_free", "memory_bytes", "memory_bytes_max"), 0)
    monkeypatch.setattr(replica._engine, "room", SimpleNamespace(usage=usage), raising=False)
    monkeypatch.setattr(replica._engine, "energy", EnergyPace(), raising=False)
    replica._engine.loaded.identity = SimpleNamespace(computing={})  # type: ignore[union-attr]
    replica._engine.loaded.multiplying = ""  # type: ignore[union-attr]
    replica._engine.loaded.way = DEQUANTIZED  # type: ignore[union-attr]
    replica._engine.loaded.folder = EMBEDDED / "recall"  # type: ignore[union-attr]
    stats = await client(replica).stats()
    assert stats.answers is False
    assert (stats.folder, stats.weights_bytes) == (str(EMBEDDED / "recall"), 11_018_240)
    monkeypatch.setattr(replica._watchdog, "is_slow", lambda part: False)
    assert (await client(replica).stats()).answers is True


@pytest.mark.parametrize("slow", [False, True])
def test_a_replica_whose_engine_is_stuck_sends_no_reports(slow: bool, monkeypatch: pytest.MonkeyPatch):
    told: list[object] = []
    monkeypatch.setattr(engine_reports, "ToRouter", lambda timing: lambda report: told.append(report) or True)
    reports = EngineReports("m-0", "m", "mac0", MagicMock(), None, USUAL, lambda: slow)  # type: ignore[arg-type]
    reports._events_taken = True
    assert reports._tell(MagicMock()) is not slow and len(told) == (not slow)


@pytest.mark.parametrize("ended", [0, 3])
def test_a_replica_that_ended_at_once_waits_and_says_so(
    replica: ReplicaActor, ended: int, monkeypatch: pytest.MonkeyPatch
):
    waited: list[float] = []
    monkeypatch.setattr(actor.time, "sleep", waited.append)
    monkeypatch.setattr(actor.ray, "get_runtime_context", lambda: SimpleNamespace(was_current_actor_reconstructed=True))
    monkeypatch.setattr(actor.registry, "note_start", lambda name, again: ended if again and name == "m-0" else 99)
    replica._pause()
    assert waited == ([4.0] if ended else [])
    assert ("waiting for 4 s" in replica._loading.what) is bool(ended)


def test_a_replica_starts_though_the_control_store_does_not_answer(
    replica: ReplicaActor, monkeypatch: pytest.MonkeyPatch
):
    def fails(name: str, again: bool) -> int:
        raise RuntimeError("no answer")

    monkeypatch.setattr(actor.ray, "get_runtime_context", lambda: SimpleNamespace(was_current_actor_reconstructed=True))
    monkeypatch.setattr(actor.registry, "note_start", fails)
    replica._pause()


class Disk:
    """What another node makes comes when `came` is set, or not at all."""

    def __init__(self) -> None:
        self.came = asyncio.Event()
        self.waited_s = 0.0
        self.counters = SimpleNamespace(lost_prefills=0)

    async def follow(self, request: GenerateRequest, wait_s: float, waits: Callable[[], bool]) -> bool:
        self.waited_s = wait_s
        while waits() and not self.came.is_set():
            await asyncio.sleep(0.005)
        return self.came.is_set()


async def test_a_sequence_that_waits_for_another_nodes_prefill_is_accepted_at_once(replica: ReplicaActor):
    """It is submitted when its KV is here, or `go_on` says that it will not be; one that is aborted never is, and what
    refuses it then comes as its end."""
    engine: Engine = replica._engine  # type: ignore[assignment]
    disk = replica._disk = Disk()  # type: ignore[assignment]
    engine.look_up = lambda request: (0, {})  # type: ignore[attr-defined]

    async def submitted(name: str, deadline_s: float = 60.0) -> Disk:
        sampling, more = Sampling(), {"pull_wait_s": 30.0, "pull_from": "mac1", "deadline_s": deadline_s}
        request = GenerateRequest(name, "c", "m", "t/a", [1], [b"x" * 32], bytes(32), sampling, **more)  # type: ignore[arg-type]
        fresh = replica._disk = Disk()  # type: ignore[assignment]
        await client(replica).submit(request)
        await asyncio.sleep(0.02)
        assert name not in engine.taken and name in replica._looking
        return fresh

    async def until(true: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not true():
                await asyncio.sleep(0.005)

    disk = await submitted("r")
    disk.came.set()
    await until(lambda: engine.taken == ["r"])
    disk = await submitted("s", deadline_s=7.0)
    assert disk.waited_s == 7.0, "no longer than the request may take"
    await client(replica).go_on(["unknown", "s"])
    await until(lambda: engine.taken == ["r", "s"])
    assert disk.counters.lost_prefills == 1
    disk = await submitted("t")
    await client(replica).abort(["t"])
    await until(lambda: not replica._looking and not replica._waiting)
    assert engine.taken == ["r", "s"] and engine.aborted == ["t"]
    assert disk.counters.lost_prefills == 0, "its client has left"

    first = asyncio.ensure_future(client(replica).next_frame("c", 0))
    for name, error in (("u", Unavailable("full")), ("v", OSError("disk"))):

        def refuse(request: GenerateRequest, error: Exception = error) -> None:
            raise error

        engine.look_up = refuse  # type: ignore[attr-defined]
        disk = await submitted(name)
        disk.came.set()
        await until(lambda: not replica._waiting)
    frame = await first
    assert frame is not None
    ends = [(sequence.request_id, sequence.finish, bool(sequence.error)) for sequence in frame]
    assert ends == [("u", "error", True)]
    again = await client(replica).next_frame("c", 1)
    assert again is not None and [sequence.request_id for sequence in again] == ["v"]
    assert not replica._known().sequences("c") & {"u", "v"}


async def test_a_request_whose_caller_is_cut_off_is_taken_out(replica: ReplicaActor):
    engine: Engine = replica._engine  # type: ignore[assignment]
    submitted = asyncio.Event()
    engine.submit = lambda *_: submitted.set()  # type: ignore[method-assign]
    request = GenerateRequest("r", "c", "m", "", [1], [], bytes(32), Sampling())
    call = asyncio.ensure_future(client(replica).submit(request))
    await submitted.wait()
    call.cancel()
    await asyncio.wait([call])
    assert engine.aborted == ["r"] and not replica._known().sequences("c")


async def test_frames_come_over_a_socket_too(replica: ReplicaActor, monkeypatch: pytest.MonkeyPatch):
    """Who asks in one way may go on in the other. Over the socket one call asks for many frames."""
    monkeypatch.setattr(local, "this_machine", lambda: "node-1")
    at, again = await asyncio.gather(*(client(replica).local_address() for _ in range(2)))
    assert at == again and (at.machine, at.ahead) == ("node-1", ["next_frame"])
    assert at.methods == ["next_frame", "submit", "abort"]
    near, other, third = (ReplicaClient("m-0", USUAL, Direct(lambda: replica), kind=NearActor) for _ in range(3))
    for one in (near, other, third):
        await one.go_on([])
        await asyncio.wait({one.actor._opening}, timeout=20)  # type: ignore[attr-defined]
    for number, who in enumerate((near, near, client(replica), other, other)):
        asked = asyncio.ensure_future(who.next_frame("c", number))
        await asyncio.sleep(0.05)
        replica._deliver({"c": [SequenceUpdate("r", [number])]})
        assert await asked == [SequenceUpdate("r", [number])]
    replica._deliver({"c": [SequenceUpdate("r", [5])]})
    replica._deliver({"c": [SequenceUpdate("r", [6])]})
    assert await other.next_frame("c", 5) == [SequenceUpdate("r", [5])], "frames are sent ahead"
    assert await third.next_frame("c", 6) is None, "this frame has been given"
