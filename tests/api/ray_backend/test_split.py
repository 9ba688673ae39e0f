"""A sequence that one replica prefills and another decodes, with fake replicas: whatever happens to the prefill, the
sequence is answered, and nothing of it is left at a replica."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from satchel.actors.protocol.block_ids import block_ids
from satchel.actors.protocol.clients import ReplicaClient
from satchel.actors.protocol.replica_messages import GenerateRequest, MediaSpan, Sampling, SequenceUpdate
from satchel.actors.protocol.router_messages import Decision, SequenceLeft
from satchel.actors.rpc.codec import encode, encode_error
from satchel.api.ray_backend.connection import SentPictures
from satchel.api.ray_backend.routing import may_split
from satchel.api.ray_backend.sequences import RayGeneration
from satchel.cluster.config.config import parse_config
from satchel.cluster.config.timing import USUAL, Timing
from satchel.cluster.errors import QueueFull, ReplicaLost, SatchelError
from tests.worlds.direct import Direct

ROOT = b"r" * 32
PROMPT = [*range(1, 601)]
REQUEST = GenerateRequest("r", "c", "m", "t/alice", PROMPT, block_ids(ROOT, PROMPT), ROOT, Sampling(max_tokens=6))
SOON = Timing(retry_s=0.01, pull_s=0.05)


class Replica:
    """One replica. `answer` is its reaction to a submission: "take", "end", or a refusal."""

    def __init__(self, backend: Backend, name: str, answer: Any) -> None:
        self.backend, self.replica, self.answer = backend, name, answer
        self.consumer = f"consumer of {name}"
        self.broken, self.heard, self.died = asyncio.Event(), True, False
        self.probation = asyncio.Lock()
        self.sequences: dict[str, Any] = {}
        self.sent = SentPictures()
        self.taken: list[GenerateRequest] = []
        self.aborted: list[str] = []
        self.let_go: list[str] = []
        actor = SimpleNamespace(submit=self._submit, go_on=self._go_on)
        self.client = ReplicaClient(name, USUAL, Direct(lambda: actor))

    async def _submit(self, data: bytes) -> bytes:
        if isinstance(self.answer, SatchelError):
            return encode_error(self.answer)
        if self.answer == "end":
            raise RayActorError
        self.taken += ReplicaClient.submit.asked(data)
        return encode(None)

    async def _go_on(self, data: bytes) -> bytes:
        self.let_go += ReplicaClient.go_on.asked(data)[0]
        return encode(None)

    def say(
        self,
        sequence: str,
        *tokens: int,
        cached: int | None = None,
        finish: str | None = None,
        error: SatchelError | None = None,
    ) -> None:
        take = self.sequences[sequence]
        if finish is not None:
            del self.sequences[sequence]
        take(SequenceUpdate(sequence, list(tokens), finish, cached, error.to_wire() if error else None))

    def lose(self) -> None:
        sequences, self.sequences = self.sequences, {}
        self.broken.set()
        for take in sequences.values():
            take(ReplicaLost("lost"))

    async def abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids


class Backend:
    """Routes first to `studio` for prefill and `air` for decode, then only to `air`."""

    def __init__(self, studio: Any = "take", air: Any = "take") -> None:
        self.links = {"studio": Replica(self, "studio", studio), "air": Replica(self, "air", air)}
        self.loads: set[tuple[str, str]] = set()
        self.lost: list[str] = []
        self.excluded: list[list[str]] = []
        self.failovers = 0
        self.tasks: set[asyncio.Task[Any]] = set()
        self.decisions = [
            Decision(
                "air", "why", node="n1", pull_from="n0", pull_tokens=599, prefill_on="studio", wait_s=9.0,
                cached_tokens=256,
            )
        ]  # fmt: skip
        self.config = replace(parse_config({"models": [{"name": "m", "source": "s"}]}), timing=SOON)

    def background(self, work: Any) -> None:
        self.tasks.add(asyncio.ensure_future(work))

    def model_ids(self, request: GenerateRequest) -> list[bytes]:
        return []

    async def route(self, request: GenerateRequest, exclude: Any, beside: str, others: Any = ()) -> Decision:
        self.excluded.append(list(exclude))
        decision = self.decisions.pop(0) if self.decisions else Decision("air", "alone", node="n1")
        self.loads |= {(decision.replica, "r"), *([("studio", "r/prefill")] if decision.prefill_on else [])}
        return decision

    def link(self, decision: Decision) -> Replica:
        assert decision.node == {"studio": "n0", "air": "n1"}[decision.replica]
        return self.links[decision.replica]

    async def node_lives(self, node: str) -> bool:
        return True

    def release(self, left: SequenceLeft) -> None:
        self.loads.remove((left.replica, left.request_id))

    def lose(self, name: str) -> None:
        self.lost.append(name)


@asynccontextmanager
async def split_sequence(backend: Backend) -> AsyncIterator[tuple[RayGeneration, asyncio.Task[None], Replica, Replica]]:
    """Yields a sequence while it is being placed; at the end no replica has it any more."""
    sequence = RayGeneration(backend, REQUEST)  # type: ignore[arg-type]
    starting = asyncio.create_task(sequence.start())
    studio, air = backend.links.values()
    async with asyncio.timeout(20):
        while not (air.taken and (studio.taken or studio.answer != "take")) and not starting.done():
            await asyncio.sleep(0)
        yield sequence, starting, studio, air
        await sequence.abort()
        await asyncio.gather(*backend.tasks)
    assert not studio.sequences and not air.sequences
    assert backend.loads <= {(name, "r/prefill") for name in backend.lost}, "what is lost is uncounted by reports"


async def answer(sequence: RayGeneration) -> tuple[list[int], list[int | None]]:
    updates = [update async for update in sequence]
    return [token for update in updates for token in update.tokens], [update.cached_tokens for update in updates]


async def test_one_prefills_all_but_the_last_token_and_the_other_waits_for_it():
    async with split_sequence(Backend()) as (sequence, starting, studio, air):
        await starting
        (made,), (waits,) = studio.taken, air.taken
        assert made.prompt == PROMPT[:-1] and made.block_ids == REQUEST.block_ids[:2] and made.root_id == ROOT
        assert (made.request_id, made.consumer, made.agent) == ("r/prefill", "consumer of studio", "t/alice")
        assert (made.sampling, made.hands_on, made.pull_wait_s) == (Sampling(max_tokens=0), True, 0.0)
        assert (made.pull_from, made.pull_tokens) == ("", 0)
        assert waits.prompt == PROMPT and (waits.request_id, waits.hands_on) == ("r", False)
        assert (waits.pull_from, waits.pull_tokens, waits.pull_wait_s) == ("n0", 599, 9.0)
        studio.say("r/prefill", cached=256)
        studio.say("r/prefill", finish="length")
        air.say("r", 7, cached=599)
        air.say("r", 8, finish="stop")
        said = await answer(sequence)
        assert said == ([7, 8], [256]), "what the other node computed does not count as cached"
        assert not air.let_go and not studio.aborted and sequence.why == "why"


async def let_go(air: Replica) -> None:
    """Checks that the call is repeated until the sequence is there, because the replica may not have it yet."""
    while len(air.let_go) < 2:
        await asyncio.sleep(0.005)
    assert set(air.let_go) == {"r"}


async def test_what_was_sealed_last_has_some_time_to_come():
    async with split_sequence(Backend()) as (sequence, _, studio, air):
        studio.say("r/prefill", finish="length")
        await asyncio.sleep(SOON.pull_s / 2)
        assert not air.let_go
        await let_go(air)
        air.say("r", 7, cached=256)
        told = len(air.let_go)
        await asyncio.sleep(5 * SOON.retry_s)
        assert len(air.let_go) == told, "it has begun"
        air.say("r", finish="stop")
        assert (await answer(sequence))[0] == [7]


@pytest.mark.parametrize("loss", ["error", "abort", "lost"])
async def test_a_prefill_that_ends_badly_lets_the_other_go_on_alone(loss):
    async with split_sequence(Backend()) as (sequence, _, studio, air):
        if loss == "lost":
            studio.lose()
            studio.backend.lose("studio")
        else:
            studio.say("r/prefill", finish=loss)
        await let_go(air)
        air.say("r", 7, cached=256, finish="stop")
        assert (await answer(sequence)) == ([7], [256]) and len(air.taken) == 1


@pytest.mark.parametrize("refusal", [QueueFull("full"), "end"])
async def test_without_a_prefill_the_sequence_is_computed_where_it_was_to_be_decoded(refusal):
    async with split_sequence(Backend(studio=refusal)) as (sequence, _, studio, air):
        await let_go(air)
        assert sequence.replica == "air" and studio.backend.lost == (["studio"] if refusal == "end" else [])
        air.say("r", 7, cached=300, finish="stop")
        assert (await answer(sequence)) == ([7], [300]) and not studio.taken


async def test_a_prefill_ends_once_the_sequence_goes_on_without_it():
    """For example because its deadline was over."""
    async with split_sequence(Backend()) as (sequence, _, studio, air):
        air.say("r", 7, cached=0)
        await asyncio.sleep(0)
        assert studio.aborted == ["r/prefill"]
        air.say("r", 8, finish="stop")
        assert (await answer(sequence)) == ([7, 8], [0])


async def test_who_leaves_meanwhile_leaves_both():
    async with split_sequence(Backend()) as (sequence, starting, studio, air):
        await starting
        await sequence.abort()
        await asyncio.sleep(0)
        assert (studio.aborted, air.aborted) == (["r/prefill"], ["r"])


@pytest.mark.parametrize("late", [False, True])
async def test_a_refusal_where_it_was_to_be_decoded_ends_the_prefill(late):
    """At once, or after it has waited. Then another replica is asked, without a split."""
    async with split_sequence(Backend(air="take" if late else QueueFull("full"))) as (sequence, starting, studio, air):
        if not late:
            with pytest.raises(QueueFull):
                await starting
        else:
            await starting
            reading = asyncio.create_task(answer(sequence))
            air.say("r", finish="error", error=QueueFull("full"))
            while len(air.taken) < 2:
                await asyncio.sleep(0.005)
            assert (air.taken[1].pull_from, air.taken[1].pull_wait_s) == ("", 0.0)
            assert studio.backend.excluded == [[], ["air"]]
            air.say("r", 7, cached=10, finish="stop")
            assert await reading == ([7], [10]) and studio.backend.failovers == 0
        await asyncio.sleep(0)
        assert studio.aborted == ["r/prefill"]


@pytest.mark.parametrize(
    ("change", "may"),
    [
        ({}, True),
        ({"agent": ""}, False),
        ({"reusable": False}, False),
        ({"choices": 2}, False),
        ({"generated": 1}, False),
        ({"sampling": Sampling(max_tokens=0)}, False),
        ({"sampling": Sampling(choice=1)}, False),
        ({"media": [MediaSpan(0, [1], b"k", [], 1, 1, [])]}, False),
    ],
)
def test_what_may_be_split(change, may):
    assert may_split(replace(REQUEST, **change)) is may
