"""What becomes of a call to an actor, with handles made up here: an answer, the error that is said, or none."""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
from ray.actor import _ActorClassMethodMetadata
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError
from ray.util.annotations import RayDeprecationWarning

from satchel.actors.protocol.clients import ReplicaClient, RouterClient
from satchel.actors.protocol.replica_messages import KVSelection
from satchel.actors.protocol.router_messages import Places
from satchel.actors.protocol.store_client import StoreClient
from satchel.actors.protocol.store_messages import Commit, Content
from satchel.actors.rpc import client as calls
from satchel.actors.rpc.client import Call, actor_class, is_restarted
from satchel.actors.rpc.codec import VERSION, decode, encode, encode_error
from satchel.actors.rpc.shell import answers
from satchel.actors.rpc.spec import Client, method
from satchel.cluster.config.timing import USUAL
from satchel.cluster.errors import (
    ActorAway,
    ActorLost,
    ActorSilent,
    AgentNotFound,
    InvalidRecord,
    NoAnswer,
    OtherVersion,
    QueueFull,
    SatchelError,
    Unavailable,
)
from satchel.cluster.telemetry.context import NO_SPAN, TRACING, request_id, span, working_for
from tests.worlds.collector import traced

OTHER_VERSION = bytes(msgpack.packb([VERSION + 1, []]) or b"")
"""As an actor of another version says whatever it says."""


class Sent:
    """What a call has sent, as Ray's reference to the answer: it can be awaited, or waited for in a thread."""

    def __init__(self, answer: Coroutine[Any, Any, bytes]) -> None:
        self._answer = answer

    def __await__(self) -> Generator[Any, None, bytes]:
        return self._answer.__await__()

    def future(self) -> Future[bytes]:
        future: Future[bytes] = Future()

        def run() -> None:
            try:
                future.set_result(asyncio.run(asyncio.wait_for(self._answer, 1.0)))
            except Exception as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return future


class World:
    """Actors by name, whose methods all answer with what `said` gives."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: Callable[[], bytes] = lambda: encode(None)
        self.looked_up: list[str] = []
        self.names = {"router", "replica:m-0", "kv_store:mac0"}
        monkeypatch.setattr(calls, "actor_handle", self.find)

    def find(self, name: str) -> Any:
        self.looked_up.append(name)
        if name not in self.names:
            raise ValueError(name)
        return Handle(self)


class Handle:
    def __init__(self, world: World) -> None:
        self._world = world

    def __getattr__(self, name: str) -> Any:
        async def answer() -> bytes:
            if self._world.said is never:
                await asyncio.Event().wait()
            return self._world.said()

        return SimpleNamespace(remote=lambda asked: Sent(answer()))


def never() -> bytes:
    raise AssertionError


def raising(error: Exception) -> Callable[[], bytes]:
    def said() -> bytes:
        raise error

    return said


def failed(error: Exception) -> Exception:
    """As Ray raises what a method has raised: an instance of both."""
    return RayTaskError("method", "trace", error).as_instanceof_cause()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def outcome(call: Call[Any], how: str) -> Any:
    """The answer or the error, for an event loop or for a thread."""

    async def ask() -> Any:
        return await call

    try:
        return asyncio.run(ask()) if how == "awaited" else call.wait()
    except SatchelError as error:
        return error


TURN = Commit(b"m", Content(b"", "", b"[]"), 0, 0)
CALLS: dict[str, tuple[Callable[[], Call[Any]], str]] = {
    "router": (lambda: RouterClient(USUAL).nodes(), "the router does not answer now"),
    "replica": (lambda: ReplicaClient("m-0", USUAL).info(), "replica m-0 does not answer now"),
    "store": (lambda: StoreClient("mac0", USUAL).commit("t/a", TURN), "the store of node mac0 does not answer now"),
}

UNANSWERED: list[tuple[Callable[[], bytes], type[NoAnswer]]] = [
    (raising(ActorDiedError()), ActorLost),
    (raising(ActorUnavailableError("restarting", None)), ActorAway),
    (never, ActorSilent),
    (raising(failed(RuntimeError("a fault"))), NoAnswer),
    (raising(failed(TimeoutError("of somebody else"))), NoAnswer),
    (raising(failed(ValueError("a fault"))), NoAnswer),
    (raising(AttributeError("no such method")), NoAnswer),
]


@pytest.mark.parametrize("how", ["awaited", "waited for"])
@pytest.mark.parametrize("whom", CALLS)
@pytest.mark.parametrize(("said", "kind"), UNANSWERED)
def test_whoever_is_called_why_no_answer_comes_is_told_alike(
    world: World, said: Callable[[], bytes], kind: type[NoAnswer], whom: str, how: str
):
    make, text = CALLS[whom]
    world.said = said
    error = outcome(make().within(0.05 if said is never else 30.0), how)
    assert type(error) is kind and error.message == text and error.status == 503 and error.retry_after_s
    assert error.__cause__ is not None, "a log may say more"


@pytest.mark.parametrize("how", ["awaited", "waited for"])
@pytest.mark.parametrize("whom", CALLS)
def test_a_call_that_cannot_be_sent_has_no_answer_and_a_fault_is_raised(world: World, whom: str, how: str):
    """For an actor of a cluster that has ended Ray raises an exception of no kind."""

    class Away:
        error = Exception("Failed to submit task to actor")

        def __getattr__(self, name: str) -> Any:
            def remote(asked: bytes) -> Any:
                raise self.error

            return SimpleNamespace(remote=remote)

    make, text = CALLS[whom]
    call, away = make(), Away()
    call._actor._handle = away
    error = outcome(call, how)
    assert type(error) is NoAnswer and error.message == text
    call._actor._handle = away
    away.error = KeyError("a fault")
    with pytest.raises(KeyError):
        outcome(call, how)


@pytest.mark.parametrize("how", ["awaited", "waited for"])
@pytest.mark.parametrize("whom", CALLS)
def test_an_actor_that_is_not_there_gives_no_answer(world: World, whom: str, how: str):
    world.names.clear()
    make, text = CALLS[whom]
    error = outcome(make(), how)
    assert type(error) is NoAnswer and error.message == text


@pytest.mark.parametrize("how", ["awaited", "waited for"])
@pytest.mark.parametrize("whom", CALLS)
def test_an_error_that_the_actor_says_is_raised_as_it_is(world: World, whom: str, how: str):
    world.said = lambda: encode_error(QueueFull("full", param="model", retry_after_s=3.0))
    error = outcome(CALLS[whom][0](), how)
    assert type(error) is QueueFull
    assert (error.message, error.param, error.retry_after_s) == ("full", "model", 3.0)


@pytest.mark.parametrize("how", ["awaited", "waited for"])
@pytest.mark.parametrize("whom", CALLS)
def test_another_version_is_no_answer_and_no_fault(world: World, whom: str, how: str):
    world.said = lambda: OTHER_VERSION
    error = outcome(CALLS[whom][0](), how)
    assert type(error) is OtherVersion and f"version {VERSION + 1}" in error.message
    world.said = lambda: encode(["c", 0])
    assert type(outcome(ReplicaClient("m-0", USUAL).stats(), how)) is OtherVersion, "nor one that says something else"


def test_an_answer_that_is_missing_is_none():
    with pytest.raises(ValueError, match="no Places"):
        decode(Places, encode(None))


async def test_a_handle_is_looked_up_once_and_again_after_a_loss(world: World):
    """Not after silence: who is slow is still there."""
    client = RouterClient(USUAL)
    for said in (world.said, never, world.said, raising(ActorDiedError()), world.said):
        world.said = said
        try:
            await client.lose("m-0").within(0.05 if said is never else 30.0)
        except NoAnswer:
            continue
    assert world.looked_up == ["router", "router"]


async def test_a_call_is_made_when_it_is_awaited_and_no_sooner(world: World):
    call = RouterClient(USUAL).lose("m-0").within(30.0)
    assert not world.looked_up
    await call
    assert world.looked_up == ["router"]


async def test_who_gives_up_is_not_told_that_the_actor_is_silent(world: World):
    """A cancellation, or the time of whoever is around it, passes through."""
    world.said = never
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await RouterClient(USUAL).nodes()
    asking = asyncio.ensure_future(RouterClient(USUAL).nodes())
    await asyncio.sleep(0.01)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


# The actor's side.


class CounterClient(Client):
    @method(lambda timing, which, times, kept: times * timing.answer_s)
    def count(self, which: str, times: int = 1, *, kept: KVSelection | None = None) -> int: ...


KEPT = KVSelection(b"r", [b"x"], b"")


class Counter:
    def __init__(self, said: int | SatchelError) -> None:
        self._said, self.asked = said, []

    @answers(CounterClient.count)
    async def count(self, which: str, times: int = 1, *, kept: KVSelection | None = None) -> int:
        self.asked.append((which, times, kept))
        if isinstance(self._said, SatchelError):
            raise self._said
        return self._said


def asking(counter: Counter) -> CounterClient:
    handle = SimpleNamespace(count=SimpleNamespace(remote=lambda asked: Sent(counter.count(asked))))
    return CounterClient(calls.ActorRef("counter", "it does not count", handle=handle), USUAL)


async def test_what_is_asked_comes_to_the_actor_as_it_was_asked():
    counter = Counter(3)
    client = asking(counter)
    assert [await client.count("m-0"), await client.count(times=2, which="m-0", kept=KEPT)] == [3, 3]
    assert counter.asked == [("m-0", 1, None), ("m-0", 2, KEPT)]
    assert client.count("m-0", 3)._timeout_s == 3 * USUAL.answer_s
    with pytest.raises(AgentNotFound, match="nobody"):
        await asking(Counter(AgentNotFound("nobody"))).count("m-0")


@pytest.mark.parametrize("how", ["awaited", "waited for"])
def test_a_call_is_made_for_the_request_of_its_caller(how: str):
    """So a log and a trace say for which request an actor works."""
    seen: list[tuple[str, bool]] = []

    class Witness(Counter):
        @answers(CounterClient.count)
        async def count(self, which: str, times: int = 1, *, kept: KVSelection | None = None) -> int:
            seen.append((request_id(), span() is not NO_SPAN))
            return 1

    client = asking(Witness(1))
    outcome(client.count("for nobody"), how)
    with traced("counter") as collector:
        with working_for("untraced"):
            outcome(client.count("a"), how)
        with working_for("traced", TRACING.begin("a request", {})):
            outcome(client.count("b"), how)
            span().end()
        TRACING.close()
    assert seen == [("", False), ("untraced", False), ("traced", True)]
    assert collector.named("Witness.count").parent == collector.named("a request").id


@pytest.mark.parametrize(
    ("args", "named"), [((), {}), (("a", 1, None, 2), {}), (("a",), {"which": "b"}), (("a",), {"x": 1})]
)
def test_what_is_not_declared_cannot_be_asked(args: tuple[Any, ...], named: dict[str, Any]):
    with pytest.raises(TypeError, match="count takes which, times, kept"):
        asking(Counter(3)).count(*args, **named)


async def test_whom_somebody_else_gave_no_answer_is_not_taken_for_lost():
    with pytest.raises(Unavailable) as error:
        await asking(Counter(ActorLost("the store does not answer", retry_after_s=2.0))).count("m-0")
    assert type(error.value) is Unavailable
    assert (error.value.message, error.value.retry_after_s) == ("the store does not answer", 2.0)


@dataclass
class Fragile:
    text: str

    def to_wire(self) -> str:
        return self.text

    @classmethod
    def from_wire(cls, values: Any) -> Fragile:
        raise InvalidRecord(f"{values} is damaged")


class Keeper:
    @method()
    def keep(self, what: Fragile) -> None: ...

    @answers(keep)
    async def kept(self, what: Fragile) -> None:
        raise AssertionError


async def test_who_sends_what_is_damaged_is_told_that():
    with pytest.raises(InvalidRecord, match="it is damaged"):
        Keeper.keep.answered(await Keeper().kept(encode([Fragile("it")])))


OTHER_REQUESTS = [
    encode(["m-0"]),
    encode(["m-0", 1, None, 2]),
    encode([1, 1, None]),
    encode(["m-0", 1, [b"r"]]),
    encode({"m-0": 0, 1: 0, None: 0}),
    encode(None),
]


@pytest.mark.parametrize("asked", OTHER_REQUESTS)
async def test_a_request_that_was_not_declared_is_of_another_version(asked: bytes):
    counter = Counter(3)
    with pytest.raises(OtherVersion):
        CounterClient.count.answered(await counter.count(asked))
    assert not counter.asked


@pytest.mark.parametrize("said", [None, "three", [3]])
async def test_an_answer_that_was_not_declared_is_of_another_version(said: Any):
    with pytest.raises(OtherVersion, match="counter is another version"):
        await asking(Counter(said)).count("m-0")


async def test_a_request_of_another_version_is_answered_with_that():
    with pytest.raises(OtherVersion, match=f"version {VERSION + 1}"):
        CounterClient.count.answered(await Counter(3).count(OTHER_VERSION))


def test_a_class_is_made_an_actor_class_once():
    """Ray never forgets one, so models that come and go would fill the memory of all processes."""

    class Kind:
        def ping(self) -> bytes:
            return b""

    before = len(_ActorClassMethodMetadata._cache)
    for _ in range(3):
        actor_class(Kind).options(name="kind")
    assert len(_ActorClassMethodMetadata._cache) == before + 1


def test_whether_an_actor_is_restarted_is_asked_without_a_warning(monkeypatch):
    """Ray's own code warns of one of its properties there, in the log of every replica and follower."""

    class Context:
        @property
        def was_current_actor_reconstructed(self) -> bool:
            warnings.warn("deprecated", RayDeprecationWarning, stacklevel=2)
            return True

    monkeypatch.setattr(calls.ray, "get_runtime_context", Context)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert is_restarted()
