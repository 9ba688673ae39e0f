"""A sequence's way from replica to replica, with fake connections: no token comes twice, and none is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from satchel.actors.model_files.identity.model_identity import adapted_id
from satchel.actors.protocol.block_ids import block_ids, root_id
from satchel.actors.protocol.clients import ReplicaClient
from satchel.actors.protocol.replica_messages import GenerateRequest, MediaSpan, Sampling, SequenceUpdate
from satchel.actors.protocol.router_messages import Decision, SequenceLeft
from satchel.actors.rpc.codec import encode, encode_error
from satchel.api.ray_backend.connection import SENT_MAX, ReplicaConnection, SentPictures
from satchel.api.ray_backend.sequences import ATTEMPTS, RayGeneration
from satchel.api.requests.loading import Loading
from satchel.cluster.config.config import parse_config
from satchel.cluster.config.timing import USUAL, Timing
from satchel.cluster.errors import (
    ComputesOtherwise,
    NoReplica,
    PictureLost,
    QueueFull,
    ReplicaLeaves,
    ReplicaLost,
    SatchelError,
    SlowReader,
)
from satchel.cluster.telemetry.context import TRACING, span, working_for
from tests.worlds.collector import traced
from tests.worlds.direct import Direct, model_info

SAMPLING = Sampling(max_tokens=6, min_tokens=3, logprobs=1)
REQUEST = GenerateRequest("r", "c", "m", "", [1, 2, 3], [], b"r" * 32, SAMPLING, choices=4)
UNREAD_MAX = 100


class Lost(ValueError):
    """Stands for Ray's error from a dead actor."""


class FakeLink:
    """One replica. `script` has its reaction to each submission, in order: "take", a refusal, or an exception."""

    def __init__(self, backend: FakeBackend, name: str, *script: Any) -> None:
        self.backend, self.replica, self.script = backend, name, list(script)
        self.consumer = f"consumer of {name}"
        self.broken, self.heard, self.died = asyncio.Event(), True, False
        self.probation = asyncio.Lock()
        self.sequences: dict[str, Any] = {}
        self.sent = SentPictures()
        self.taken: list[GenerateRequest] = []
        self.aborted: list[str] = []
        self.client = ReplicaClient(name, USUAL, Direct(lambda: SimpleNamespace(submit=self._submit)))

    async def _submit(self, data: bytes) -> bytes:
        step = self.script.pop(0) if self.script else "take"
        if isinstance(step, SatchelError):
            return encode_error(step)
        if step == "die":
            # The stream of frames often notices the loss first.
            self.lose()
            raise Lost
        if step == "end":
            raise RayActorError
        self.taken += ReplicaClient.submit.asked(data)
        return encode(None)

    def lose(self) -> None:
        sequences, self.sequences = self.sequences, {}
        for take in sequences.values():
            take(ReplicaLost("lost"))

    def say(self, *tokens: int, finish: str | None = None, error: SatchelError | None = None) -> None:
        for take in list(self.sequences.values()):
            logprobs = [(-float(token), [(token, -float(token))]) for token in tokens]
            if finish is not None:
                del self.sequences["r"]
            wire = error.to_wire() if error is not None else None
            take(SequenceUpdate("r", list(tokens), finish, len(self.taken), wire, logprobs))

    async def abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids


SOON = Timing(retry_s=0.01)


class FakeBackend:
    """Routes to the first replica that is not excluded, else to the first."""

    def __init__(self, timing: Timing = SOON, **scripts: list[Any]) -> None:
        self.links = {name: FakeLink(self, name, *script) for name, script in scripts.items()}
        self.loads: dict[str, int] = dict.fromkeys(scripts, 0)
        self.away = 0
        self.left: list[SequenceLeft] = []
        self.ended: set[str] = set()
        """Nodes on which no process is left."""
        self.failovers = 0
        self.unloaded: list[bool] | None = None
        """Whether the model was unloaded, at each time that it is waited for; None for a model that stays loaded."""
        self.gone: set[str] = set()
        """Replicas that were unloaded."""
        self.beside: list[str] = []
        self.ids: list[bytes] = []
        """The model ids that the router knows, and those that replicas have."""
        self.computing: dict[str, bytes] = {}
        self.proven: dict[str, bytes] = {}
        """The ids that replicas got after the router learned theirs."""
        self.asked: list[list[GenerateRequest]] = []
        self.tasks: set[asyncio.Task[Any]] = set()
        endpoint = {"unread_tokens_max": UNREAD_MAX}
        config = parse_config({"models": [{"name": "m", "source": "s"}], "endpoint": endpoint})
        self.config = replace(config, timing=timing)

    def background(self, work: Any) -> None:
        self.tasks.add(asyncio.ensure_future(work))

    def model_ids(self, request: GenerateRequest) -> list[bytes]:
        return self.ids

    async def info(self, replica: str) -> Any:
        return model_info(model_id=self.proven[replica]) if replica in self.proven else None

    async def route(self, request: GenerateRequest, exclude: Any, beside: str, others: Any = ()) -> Decision:
        self.beside.append(beside)
        self.asked.append([request, *others])
        if self.away:
            self.away -= 1
            raise NoReplica("none")
        name = next((name for name in self.links if name not in exclude), next(iter(self.links)))
        self.loads[name] += 1
        return Decision(name, "why", node=f"node of {name}", model_id=self.computing.get(name, b""))

    async def load_again(self, model: str, loading: Loading) -> bool | None:
        if self.unloaded is None:
            return None
        return self.unloaded.pop(0) if self.unloaded else False

    async def recovery_s(self, model: str) -> float:
        return self.config.timing.recovery_s

    async def was_unloaded(self, model: str, replica: str) -> bool:
        return replica in self.gone

    def link(self, decision: Decision) -> FakeLink:
        return self.links[decision.replica]

    async def node_lives(self, node: str) -> bool:
        return node not in self.ended

    def release(self, left: SequenceLeft) -> None:
        self.loads[left.replica] -= 1
        self.left.append(left)

    def lose(self, name: str) -> None:
        self.loads[name] = 0


def generation(backend: FakeBackend, beside: str = "", media: Sequence[MediaSpan] = ()) -> RayGeneration:
    return RayGeneration(backend, replace(REQUEST, media=list(media)), beside)  # type: ignore[arg-type]


def shown(key: bytes, pixels: bytes = b"rgb") -> MediaSpan:
    return MediaSpan(0, [1], key, [], 1, 1, [pixels] if pixels else [])


def pixels_of(link: FakeLink) -> list[list[bytes]]:
    return [[b"".join(one.pixels) for one in request.media] for request in link.taken]


async def said(sequence: RayGeneration) -> list[int]:
    async with asyncio.timeout(10):
        return [token for update in [update async for update in sequence] for token in update.tokens]


async def test_a_replica_lost_while_it_was_asked_is_counted_once():
    """The stream and the call both report the loss; the sequence runs at one replica and sends every token once."""
    backend = FakeBackend(a=["die"], b=[], c=[])
    sequence = generation(backend)
    await sequence.start()
    assert sequence.replica == "b"
    assert backend.failovers == 0, "nothing had been said that could go on"
    backend.links["b"].say(7, 8, finish="stop")
    backend.links["c"].say(9, finish="stop")
    assert await said(sequence) == [7, 8]
    assert not backend.links["c"].taken


async def test_the_router_hears_what_a_sequence_took():
    """At its end, or if its client disconnects before."""
    backend = FakeBackend(a=[])
    for ends in (True, False):
        sequence = generation(backend)
        await sequence.start()
        link = ReplicaConnection.__new__(ReplicaConnection)
        link.sequences = backend.links["a"].sequences
        link._deal(SequenceUpdate(REQUEST.request_id, [7], "stop" if ends else None, cached_tokens=2, disk_tokens=1))
        if not ends:
            await sequence.abort()
        left = backend.left.pop()
        assert (left.replica, left.request_id, left.cached_tokens) == ("a", REQUEST.request_id, 2)
        assert left.disk_tokens == 1
        assert left.first_token_s is not None and left.first_token_s > 0.0


async def lose_first_and_finish_on_second(backend: FakeBackend) -> None:
    """Replica a is lost, and b generates the rest of the sequence."""
    await asyncio.sleep(0.05)
    backend.links["a"].lose()
    while not backend.links["b"].taken:
        await asyncio.sleep(0.01)
    backend.links["b"].say(9, finish="length")


async def test_a_sequence_goes_on_with_what_it_has_said_so_far():
    backend = FakeBackend(a=[], b=[])
    sequence = generation(backend, beside="a")
    await sequence.start()
    backend.links["a"].say(7, 8)

    helper = asyncio.create_task(lose_first_and_finish_on_second(backend))
    updates = [update async for update in sequence]
    await helper
    assert [token for update in updates for token in update.tokens] == [7, 8, 9]
    assert [update.cached_tokens for update in updates] == [1, None], "the client hears of the first reuse only"
    said = [entry for update in updates for entry in update.logprobs or []]
    assert said == [(-7.0, [(7, -7.0)]), (-8.0, [(8, -8.0)]), (-9.0, [(9, -9.0)])]
    (second,) = backend.links["b"].taken
    assert (second.prompt, second.generated) == ([1, 2, 3, 7, 8], 2)
    assert (second.sampling.max_tokens, second.sampling.min_tokens, second.choices) == (4, 3, 1)
    assert backend.beside == ["a", ""], "the companions' replica is the one that was lost"
    assert (sequence.replica, sequence.node, backend.failovers) == ("b", "node of b", 1)


async def test_a_trace_says_that_a_sequence_went_on_elsewhere():
    with traced() as collector:
        backend = FakeBackend(a=[], b=[])
        with working_for("r", TRACING.begin("a request", {})):
            sequence = generation(backend)
            await sequence.start()
            losing = asyncio.create_task(lose_first_and_finish_on_second(backend))
            assert await said(sequence) == [9]
            await losing
            span().end()
        TRACING.close()
    assert collector.named("a request").events == ["failover"]


async def test_a_sequence_waits_for_a_lone_replica_to_come_back():
    backend = FakeBackend(a=[])
    sequence = generation(backend)
    await sequence.start()
    backend.links["a"].lose()
    backend.away = 5

    async def answer() -> None:
        while len(backend.links["a"].taken) < 2:
            await asyncio.sleep(0.01)
        backend.links["a"].say(4, finish="stop")

    helper = asyncio.create_task(answer())
    assert await said(sequence) == [4]
    await helper


async def test_a_full_queue_is_tried_elsewhere_and_leaves_no_load_behind():
    backend = FakeBackend(a=[QueueFull("full")], b=[])
    sequence = generation(backend)
    await sequence.start()
    assert (sequence.replica, backend.loads) == ("b", {"a": 0, "b": 1})
    full = FakeBackend(a=[QueueFull("full")] * 9, b=[QueueFull("full")] * 9)
    with pytest.raises(QueueFull):
        await generation(full).start()
    assert full.loads == {"a": 0, "b": 0}


async def test_an_abort_reaches_the_replica_once_and_a_finished_sequence_needs_none():
    backend = FakeBackend(a=[])
    sequence = generation(backend)
    await sequence.start()
    await sequence.abort()
    await sequence.abort()
    assert backend.links["a"].aborted == ["r"]
    assert backend.loads == {"a": 0}


async def test_a_reader_that_does_not_read_loses_its_sequence():
    """The sequence is aborted at once, unread tokens are dropped, and the reader gets the error when it reads again."""
    backend = FakeBackend(a=[])
    sequence = generation(backend)
    await sequence.start()
    for token in range(UNREAD_MAX + 1):
        backend.links["a"].say(token)
    assert not backend.links["a"].aborted
    for token in range(50):
        backend.links["a"].say(token)
    await asyncio.gather(*backend.tasks)
    assert backend.links["a"].aborted == ["r"]
    assert (backend.links["a"].sequences, backend.loads, sequence._updates.qsize()) == ({}, {"a": 0}, 1)
    with pytest.raises(SlowReader, match="more than 100 tokens"):
        await said(sequence)
    assert backend.links["a"].aborted == ["r"]


async def test_much_at_once_makes_no_slow_reader():
    """A stalled event loop delivers all tokens since then at once. An answer that is complete occupies no place in the
    batch."""
    backend = FakeBackend(a=[])
    sequence = generation(backend)
    await sequence.start()
    backend.links["a"].say(*range(5 * UNREAD_MAX))
    backend.links["a"].say(1, finish="length")
    assert len(await said(sequence)) == 5 * UNREAD_MAX + 1
    assert not backend.links["a"].aborted


async def test_what_came_since_the_last_update_was_read_is_one_update():
    """A replica sends frames ahead. An endpoint that is slower than it sends fewer events, not ever more of them."""
    backend = FakeBackend(a=[])
    sequence = generation(backend)
    await sequence.start()
    link, updates = backend.links["a"], aiter(sequence)
    for token in range(3):
        link.say(token)
    assert (await anext(updates)).tokens == [0, 1, 2]
    link.say(3)
    assert (await anext(updates)).tokens == [3]
    link.say(4)
    link.say(5, finish="length")
    last = await anext(updates)
    assert (last.tokens, last.finish) == ([4, 5], "length")
    assert [update async for update in updates] == []


async def test_tokens_before_a_loss_are_read_before_the_sequence_goes_on():
    backend = FakeBackend(a=[], b=[])
    sequence = generation(backend)
    await sequence.start()
    for token in (1, 2):
        backend.links["a"].say(token)
    backend.links["a"].lose()
    updates = aiter(sequence)
    assert (await anext(updates)).tokens == [1, 2]
    going_on = asyncio.ensure_future(anext(updates))
    async with asyncio.timeout(20):
        while not backend.links["b"].taken:
            await asyncio.sleep(0)
    assert backend.links["b"].taken[-1].prompt == [*REQUEST.prompt, 1, 2]
    backend.links["b"].say(3, finish="stop")
    assert (await going_on).tokens == [3]


async def test_a_reader_that_reads_may_read_any_amount():
    backend = FakeBackend(a=[])
    sequence = generation(backend)
    await sequence.start()
    updates = aiter(sequence)
    for token in range(10 * UNREAD_MAX):
        backend.links["a"].say(token)
        assert (await anext(updates)).tokens == [token]
    await sequence.abort()


async def test_a_sequence_that_cannot_go_on_is_no_failover():
    backend = FakeBackend(Timing(recovery_s=0.05, retry_s=0.01), a=[])
    sequence = generation(backend)
    await sequence.start()
    backend.away = 1000
    backend.links["a"].lose()
    with pytest.raises(NoReplica):
        await said(sequence)
    assert backend.failovers == 0


async def test_pixels_are_sent_to_a_replica_once():
    """They are sent again to a replica that has dropped them, or to another one; that does not count as a lost
    replica."""
    backend = FakeBackend(a=["take", "take", PictureLost("lost"), "take", "die"], b=[])
    link = backend.links["a"]
    for media in ([shown(b"x")], [shown(b"x"), shown(b"y", b"RGB")], [shown(b"x"), shown(b"y", b"RGB")]):
        sequence = generation(backend, media=media)
        await sequence.start()
        link.say(7, finish="stop")
        assert await said(sequence) == [7]
    assert pixels_of(link) == [[b"rgb"], [b"", b"RGB"], [b"rgb", b"RGB"]], "the third was refused without them"
    sequence = generation(backend, media=[shown(b"x")])
    await sequence.start()
    assert sequence.replica == "b" and pixels_of(backend.links["b"]) == [[b"rgb"]]
    assert backend.failovers == 0


async def test_a_sequence_that_ends_for_want_of_a_picture_goes_on_with_it():
    """A replica may drop a picture after it has accepted the sequence, which may have generated tokens by then."""
    backend = FakeBackend(a=[], b=[])
    link = backend.links["a"]
    await generation(backend, media=[shown(b"x")]).start()
    link.say(finish="stop")
    sequence = generation(backend, media=[shown(b"x")])
    await sequence.start()
    link.say(7)
    link.say(finish="error", error=PictureLost("lost"))

    async def answer() -> None:
        while len(link.taken) < 3:
            await asyncio.sleep(0.01)
        link.say(8, finish="stop")

    helper = asyncio.create_task(answer())
    assert await said(sequence) == [7, 8]
    await helper
    assert pixels_of(link) == [[b"rgb"], [b""], [b"rgb"]] and link.taken[2].prompt == [1, 2, 3, 7]
    assert (sequence.replica, backend.failovers) == ("a", 0)


async def test_a_picture_that_nobody_has_is_said_to_be_lost():
    """Without pixels to send, neither a refusal nor a failed sequence is retried."""
    backend = FakeBackend(a=[PictureLost("lost")], b=[])
    with pytest.raises(PictureLost):
        await generation(backend, media=[shown(b"x", b"")]).start()
    sequence = generation(backend, media=[shown(b"x")])
    await sequence.start()
    backend.links["a"].say(finish="error", error=PictureLost("lost"))
    (update,) = [update async for update in sequence]
    assert update.finish == "error" and len(backend.links["a"].taken) == 1


def test_of_very_many_pictures_the_latest_are_remembered():
    sent = SentPictures()
    for index in range(SENT_MAX + 1):
        sent.note(replace(REQUEST, media=[shown(b"%d" % index)]))
    first, last = (replace(REQUEST, media=[shown(b"%d" % index)]) for index in (0, SENT_MAX))
    assert sent.without(first) is first and sent.without(last).media[0].pixels == []
    other = replace(last, root_id=b"s" * 32)
    assert sent.without(other) is other, "another tenant's picture is another one"


CPU, GPU = b"c" * 32, b"g" * 32
PROMPT = list(range(600))


def unequal(**scripts: list[Any]) -> tuple[FakeBackend, RayGeneration]:
    """Returns replicas `a` and `b` of one model that compute differently, and a sequence made for the model id of
    `a`."""
    backend = FakeBackend(**{"a": [], "b": [], **scripts})
    backend.computing, backend.ids = {"a": CPU, "b": GPU}, [CPU, GPU]
    root = root_id(CPU, "tenant:t")
    request = replace(REQUEST, prompt=PROMPT, root_id=root, block_ids=block_ids(root, PROMPT), model_id=CPU)
    return backend, RayGeneration(backend, request, "", "tenant:t")  # type: ignore[arg-type]


def is_called_as(request: GenerateRequest, model_id: bytes) -> bool:
    root = root_id(model_id, "tenant:t")
    return (request.model_id, request.root_id, request.block_ids) == (model_id, root, block_ids(root, request.prompt))


async def test_the_router_is_told_what_blocks_are_called_under_every_id():
    backend, sequence = unequal()
    await sequence.start()
    (asked,) = backend.asked
    assert is_called_as(asked[0], CPU) and is_called_as(asked[1], GPU) and len(asked) == 2


async def test_a_replica_gets_the_names_of_its_own_id():
    """Otherwise it would store its KV under the block ids of a model that computes differently."""
    backend, sequence = unequal(a=[QueueFull("full")])
    await sequence.start()
    (taken,) = backend.links["b"].taken
    assert is_called_as(taken, GPU)
    assert sequence.model_id == GPU, "under which the turn's KV is to be remembered"
    assert is_called_as(backend.asked[1][0], CPU), "what was refused there may still go anywhere"


async def test_a_sequence_that_goes_on_elsewhere_takes_the_names_of_that_place():
    backend, sequence = unequal()
    await sequence.start()
    assert sequence.model_id == CPU
    backend.links["a"].say(7, 8)

    helper = asyncio.create_task(lose_first_and_finish_on_second(backend))
    assert await said(sequence) == [7, 8, 9]
    await helper
    (taken,) = backend.links["b"].taken
    assert taken.prompt == [*PROMPT, 7, 8] and is_called_as(taken, GPU)
    assert sequence.model_id == GPU


async def test_a_replica_that_has_got_another_id_gets_the_sequence_with_its_names_at_once():
    """For example because its self-test has ended since the router learned its id. If it has no other id, the refusal
    stays."""
    backend, sequence = unequal(a=[ComputesOtherwise("otherwise")])
    backend.proven["a"] = GPU
    await sequence.start()
    (taken,) = backend.links["a"].taken
    assert is_called_as(taken, GPU) and sequence.model_id == GPU and sequence.replica == "a" and len(backend.asked) == 1
    backend, sequence = unequal(a=[ComputesOtherwise("otherwise")])
    backend.proven["a"] = CPU
    await sequence.start()
    assert sequence.replica == "b"


async def test_a_sequence_with_an_adapter_gets_its_names_under_another_id_too():
    """The replica's own id is that of the model without an adapter."""
    backend, sequence = unequal(a=[ComputesOtherwise("otherwise")])
    sequence._request = replace(sequence._request, adapter=b"d" * 32)
    backend.proven["a"] = GPU
    await sequence.start()
    (taken,) = backend.links["a"].taken
    assert taken.adapter == b"d" * 32 and is_called_as(taken, adapted_id(GPU, b"d" * 32))


async def test_a_sequence_that_waited_while_its_replica_was_proven_is_asked_for_again():
    """It is submitted again with its tokens so far; any other error ends it."""
    backend, sequence = unequal()
    await sequence.start()
    backend.computing["a"] = GPU
    backend.links["a"].say(7, 8)
    backend.links["a"].say(finish="error", error=ComputesOtherwise("otherwise"))

    async def finish() -> None:
        async with asyncio.timeout(10):
            while len(backend.links["a"].taken) < 2:
                await asyncio.sleep(0.005)
        backend.links["a"].say(9, finish="stop")

    helper = asyncio.create_task(finish())
    assert await said(sequence) == [7, 8, 9]
    await helper
    taken = backend.links["a"].taken[1]
    assert taken.prompt == [*PROMPT, 7, 8] and is_called_as(taken, GPU)
    assert backend.failovers == 0


async def leave_first_and_finish_on_second(backend: FakeBackend, *last: int) -> None:
    """Replica a's node leaves, and b generates the rest of the sequence."""
    await asyncio.sleep(0.05)
    backend.links["a"].say(*last, finish="error", error=ReplicaLeaves("the node is leaving"))
    while not backend.links["b"].taken:
        await asyncio.sleep(0.01)
    backend.links["b"].say(9, finish="length")


@pytest.mark.parametrize("last", [(), (8,)])
async def test_a_sequence_whose_replica_leaves_goes_on_elsewhere_with_all_that_it_said(last: tuple[int, ...]):
    """Its latest tokens may come in one frame with the error."""
    backend = FakeBackend(a=[], b=[])
    sequence = generation(backend)
    await sequence.start()
    backend.links["a"].say(7)
    helper = asyncio.create_task(leave_first_and_finish_on_second(backend, *last))
    updates = [update async for update in sequence]
    await helper
    assert [token for update in updates for token in update.tokens] == [7, *last, 9]
    assert [update.finish for update in updates if update.finish] == ["length"]
    assert not [update for update in updates if update.error]
    (second,) = backend.links["b"].taken
    assert (second.prompt, second.generated) == ([1, 2, 3, 7, *last], 1 + len(last))
    assert backend.failovers == 1


async def test_nodes_that_leave_one_after_the_other_do_not_exhaust_a_sequence():
    """The sequence itself may cause a loss without progress, but not the leaving of a node."""
    names = [f"r{number}" for number in range(ATTEMPTS + 3)]
    scripts: dict[str, list[Any]] = {name: [] for name in names}
    backend = FakeBackend(SOON, **scripts)
    sequence = generation(backend)
    await sequence.start()

    async def restart_all() -> None:
        for name in names[:-1]:
            link = backend.links[name]
            while not link.taken:
                await asyncio.sleep(0.01)
            # No request is sent there any more.
            del backend.links[name]
            link.say(finish="error", error=ReplicaLeaves("the node is leaving"))
        last = backend.links[names[-1]]
        while not last.taken:
            await asyncio.sleep(0.01)
        last.say(9, finish="length")

    helper = asyncio.create_task(restart_all())
    tokens = await said(sequence)
    await helper
    assert tokens == [9]
