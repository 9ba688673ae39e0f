"""What the leader decides before it serves: where processes listen, how much KV there may be, what a self-test says."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import mlx.core as mx
import pytest

from satchel.actors.protocol.group_messages import StageAddress, StageState
from satchel.actors.protocol.replica_messages import Sampling
from satchel.actors.replica.execution.micro_batches import MicroBatchRule
from satchel.actors.replica.group import serving
from satchel.actors.replica.group.follower import StageActor
from satchel.actors.replica.group.followers import Followers, addresses_of
from satchel.actors.replica.group.forming import Member
from satchel.actors.replica.group.gathering import ROOM_S, Gathering
from satchel.actors.replica.group.link.broken import GroupBroken
from satchel.actors.replica.group.loading import load_stage
from satchel.actors.replica.group.self_test import prove_group
from satchel.actors.replica.group.serving import leaders_bytes
from satchel.actors.replica.kv.caches import LayerKind, LayerSpec, ModelCacheSpec
from satchel.actors.replica.proving.findings import Findings
from satchel.actors.replica.selftest.forced_sequences import ForcedSequence, _Forced
from satchel.cluster.config.config import Logs, Scheduling, Traces, parse_model
from satchel.cluster.config.nodes import Link, Node
from satchel.cluster.config.stages import GroupPlan, Stage
from satchel.cluster.config.timing import USUAL
from satchel.cluster.errors import ActorLost, ActorSilent, ModelLoadError, NoRoom
from tests.worlds.models.families import write_model
from tests.worlds.replica.group import GROUP, KEY, TIMES, Led, listener, on_a_thread

THUNDERBOLT = Link(address="10.0.0.1", kind="thunderbolt")
ETHERNET = Link(address="192.168.1.1", kind="ethernet")


def test_processes_listen_at_the_fastest_link_that_all_nodes_have():
    other = Node(name="b", address="1.1.1.2", links=(replace(THUNDERBOLT, address="10.0.0.2"),))
    assert addresses_of([Node(name="a", address="1.1.1.1", links=(ETHERNET, THUNDERBOLT)), other]) == [
        "10.0.0.1",
        "10.0.0.2",
    ]
    # One of them has no cable to the others.
    assert addresses_of([Node(name="a", address="1.1.1.1", links=(ETHERNET,)), other]) == ["1.1.1.1", "1.1.1.2"]
    assert addresses_of([Node(name="a", address="1.1.1.1"), other]) == ["1.1.1.1", "1.1.1.2"]


def test_the_leader_uses_as_much_as_the_process_with_the_least_room_has():
    """In its own bytes: a process with more layers needs more for a token, and for a sequence's open block."""
    layer = LayerSpec(LayerKind.FULL, token_bytes=10, open_bytes=1000, sealed=True)
    leader = ModelCacheSpec((layer,) * 2, 20, 2000)
    assert leaders_bytes(leader, StageState("", token_bytes=40, sequence_bytes=4000), 1000) == 500
    assert leaders_bytes(leader, StageState("", token_bytes=10, sequence_bytes=1000), 1000) == 2000
    assert leaders_bytes(leader, StageState("", token_bytes=10, sequence_bytes=4000), 1000) == 500


class Scripted(Followers):
    """Followers whose processes say what a script says, one line a process."""

    script: ClassVar[list[list[StageState | Exception]]]

    def _started(self, rank: int) -> Any:
        said = iter(self.script.pop(0))

        def state() -> Any:
            now = next(said)
            if isinstance(now, Exception):
                raise now
            return now

        return SimpleNamespace(state=lambda: SimpleNamespace(within=lambda _: SimpleNamespace(wait=state)))


def started(script: list[list[StageState | Exception]], told: list[str]) -> Followers:
    Scripted.script = script
    stages = (Stage("mac0", 0, 2, 9), Stage("mac1", 2, 3, 9))
    plan = GroupPlan(stages, (Node(name="mac0"), Node(name="mac1")))
    model = parse_model(name="m", source="s")
    told_by = lambda what, done: told.append(what)  # noqa: E731
    return Scripted("m-0", plan, model, Scheduling(), USUAL, Logs(), Traces(), told_by)


READY = StageState("waiting", None, True, 1000)


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Makes this process of the leader the first one, or one that follows on another; nothing waits."""
    monkeypatch.setattr("satchel.actors.replica.group.followers.AGAIN_S", 0.001)
    monkeypatch.setattr("satchel.actors.replica.group.followers.POLL_S", 0.001)
    return lambda restarted: monkeypatch.setattr(
        "satchel.actors.replica.group.followers.is_restarted", lambda: restarted
    )


def test_the_leader_waits_for_nodes_that_are_away_and_starts_followers_again(again: Callable[[bool], None]):
    again(False)
    told: list[str] = []
    away, lost, full = ActorSilent("silent"), ActorLost("lost"), NoRoom("another one is still ending")
    followers = started([[away, StageState("loading m", 0.5), lost], [full], [READY]], told)
    assert followers.ready() == [READY]
    waited = "waiting for node mac0"
    assert told == [waited, "mac0: loading m", waited, "waiting for memory on node mac0"]


def test_a_follower_that_cannot_load_is_an_error(again: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch):
    again(False)
    with pytest.raises(ModelLoadError, match="damaged"):
        started([[ModelLoadError("a file is damaged")]], []).ready()
    monkeypatch.setattr("satchel.actors.replica.group.gathering.ROOM_S", -1.0)
    full: list[list[StageState | Exception]] = [[NoRoom("no room")]]
    with pytest.raises(NoRoom, match="no room"):
        started([*full], []).ready()
    # What was served before has room again, once other processes have ended.
    again(True)
    assert started([*full, *full, [READY]], []).ready() == [READY]


def test_followers_are_ready_if_all_are_at_the_same_time():
    gathering, now = Gathering(2, patient=False), 0.0
    gathering.told(0, READY)
    gathering.told(1, StageState("loading"))
    assert gathering.states is None
    assert gathering.failed(0, ActorLost("lost"), now)
    gathering.told(1, READY)
    assert gathering.states is None
    gathering.told(0, READY)
    assert gathering.states == [READY, READY]
    assert not gathering.failed(1, ActorSilent("slow"), now) and gathering.states is None


def test_a_follower_has_room_within_a_time_of_its_own():
    gathering, full = Gathering(2, patient=False), NoRoom("no room")
    assert gathering.failed(0, full, 0.0) and gathering.failed(1, full, ROOM_S) and gathering.failed(0, full, ROOM_S)
    gathering.told(0, READY)
    assert gathering.failed(0, full, 1.5 * ROOM_S) and gathering.failed(1, full, 2 * ROOM_S)
    with pytest.raises(NoRoom):
        gathering.failed(1, full, 2.5 * ROOM_S)


@pytest.mark.parametrize("where", ["follower", "link"])
def test_a_leader_whose_group_cannot_be_formed_is_started_again(where: str, monkeypatch: pytest.MonkeyPatch):
    """It does not stay as one whose model cannot be loaded."""

    def form(group: str) -> list[StageAddress]:
        raise ActorLost("stage 0 does not answer now")

    leader: Any = serving.GroupServing.__new__(serving.GroupServing)
    stages = (Stage("a", 0, 2, 9), Stage("b", 2, 3, 9))
    leader._plan, leader._name = GroupPlan(stages, (Node(name="a"), Node(name="b"))), "m-0"
    leader._shell = SimpleNamespace(note_progress=lambda what, done: None)
    # An address of a cable that was pulled is no address of this machine.
    followers: Any = SimpleNamespace(address="127.0.0.1" if where == "follower" else "203.0.113.1", form=form)
    with pytest.raises(
        GroupBroken, match="does not answer now" if where == "follower" else "cannot be formed: OSError"
    ):
        leader._form(None, followers)


@pytest.mark.parametrize("fault", [False, True])
def test_a_leader_that_cannot_serve_ends_its_group_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: bool
) -> None:
    """So its process stays, and can say why; and the follower with the least room limits its budget."""
    folder = write_model(tmp_path / "llama", "llama", num_hidden_layers=3)
    listens = listener()
    ended: list[str] = []
    broken: list[str] = []
    monkeypatch.setattr(serving, "end_soon", lambda name, why: broken.append(why))
    monkeypatch.setattr(serving, "cluster_key", lambda: KEY)
    monkeypatch.setattr(serving, "default_home", lambda: SimpleNamespace(digests_file=None, trials_file=None))

    class Started:
        """Stands for the followers' actors; the only one is on a thread."""

        address, clients = "127.0.0.1", ()

        def __init__(self, *_: Any) -> None: ...

        def ready(self) -> list[StageState]:
            return [StageState("", None, True, 1000, 2, 0)]

        def form(self, group: str) -> list[StageAddress]:
            names.append(group)
            formed.set()
            return [StageAddress(*listens.getsockname()[:2])]

        def end(self) -> None:
            ended.append("killed")

    names: list[str] = []
    formed = threading.Event()
    monkeypatch.setattr(serving, "Followers", Started)
    if fault:

        def wrong(*_: Any) -> Any:
            raise ModelLoadError("it computes something else")

        monkeypatch.setattr(serving, "prove_group", wrong)
    else:

        def proven_meanwhile(loaded: Any, *given: Any) -> Any:
            given[-1].offer(loaded)
            given[-1].serve()
            return prove_group(loaded, *given)

        monkeypatch.setattr(serving, "prove_group", proven_meanwhile)

    def follow() -> None:
        assert formed.wait(60)
        member = Member(names[0], 0, KEY, listens, TIMES, memory_bytes=lambda: 1000)
        try:
            member.follow(load_stage(str(folder), 0, 2)).run()
        finally:
            member.close()

    plan = GroupPlan((Stage("a", 0, 2, 9), Stage("b", 2, 3, 9)), (Node(name="a"), Node(name="b")))
    model = parse_model(name="m", source=str(folder), self_test=False, split={"pipeline": "auto"})
    watched: dict[str, Any] = {}
    watchdog = SimpleNamespace(watch=lambda part, post, limit_s: watched.update({part: post}))
    shell: Any = SimpleNamespace(note_progress=lambda what, done: None, watchdog=watchdog)
    memory: Any = SimpleNamespace(settle=lambda loaded: 2**30, make_way=lambda nbytes: None)
    leader = serving.GroupServing(
        "m-0", model, Scheduling(), Node(name="b"), USUAL, shell, plan=plan, logs=Logs(), traces=Traces()
    )
    served: list[Any] = []
    engine = SimpleNamespace(
        executor=SimpleNamespace(clear_batch=lambda: None),
        delivery=SimpleNamespace(sequences={}),
        serve=lambda: served.append("served"),
    )
    monkeypatch.setattr(leader, "begin", lambda *given: served.append(given) or engine)
    with on_a_thread(follow) as done:
        if fault:
            with pytest.raises(ModelLoadError, match="something else"):
                leader._ready(memory)
        else:
            proven, memory_bytes = leader._ready(memory)
            assert leader._member is not None
            leader._member.close()
            assert memory_bytes == leaders_bytes(proven.loaded.spec, StageState("", token_bytes=2), 1000)
            assert "its layers are divided: layers 0 to 2 on a, 2 to 3 on b" in proven.notes
            # Before that one sequence at a time, whose KV is not used again, within the same budget.
            (alone, _, alone_bytes), end = served
            assert end == "served" and not alone.together and not alone.loaded.spec.reusable
            assert proven.loaded.spec.reusable and alone_bytes == memory_bytes
    assert done.exception() is None and not broken and ended == (["killed"] if fault else [])
    assert [*watched] == ["group"]


def test_followers_that_were_started_already_end_with_a_refused_model(monkeypatch: pytest.MonkeyPatch):
    """They start before the leader's libraries are imported, which may be long before it fails."""
    ended, refused = [], []

    class Begun:
        def end(self) -> None:
            ended.append(1)

    def missing(*_: Any, **__: Any) -> Any:
        raise ModelLoadError("its folder is gone")

    monkeypatch.setattr(serving, "Followers", lambda *_: pytest.fail("they are started a second time"))
    monkeypatch.setattr("satchel.actors.replica.serving.ReplicaMemory", missing)
    plan = GroupPlan((Stage("a", 0, 2, 9), Stage("b", 2, 3, 9)), (Node(name="a"), Node(name="b")))
    model = parse_model(name="m", source="/nowhere", split={"pipeline": "auto"})
    shell: Any = SimpleNamespace(note_progress=lambda what, done: None, refuse=refused.append, engine=None)
    given = "m-0", model, Scheduling(), Node(name="b"), USUAL, shell
    begun: Any = Begun()
    serving.GroupServing(*given, plan=plan, logs=Logs(), traces=Traces(), followers=begun).run()
    assert ended == [1] and [error.message for error in refused] == ["its folder is gone"]


def test_a_leader_starts_followers_without_the_libraries_of_models():
    code = "import sys; import satchel.actors.replica.group.followers; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert "ray" in loaded
    assert not {"mlx.core", "mlx_lm", "mlx_vlm", "transformers"}.intersection(loaded)


@pytest.mark.parametrize("asked, called", [(math.inf, True), (0.0, False)])
def test_a_follower_ends_if_no_leader_asks_for_it_any_more(asked: float, called: bool):
    """The first question may come late: the leader loads its own stage first."""
    follower: Any = StageActor.__new__(StageActor)
    follower._calls, follower._timing = threading.Semaphore(0), SimpleNamespace(unwanted_s=0.02)
    follower._asked_at = time.monotonic() + asked - 1.0
    if called:
        threading.Timer(0.1, follower._calls.release).start()
    assert follower._is_called() is called


class Doubled:
    """A model that computes something else if several sequences are computed at once."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, tokens: Any, **named: Any) -> Any:
        logits = self._model(tokens, **named)
        return logits * 2 if tokens.shape[0] > 1 else logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


@pytest.mark.parametrize("fault", [False, True])
def test_a_group_is_compared_with_itself_and_its_batches_are_left_out_if_they_are_wrong(
    tmp_path: Path, fault: bool, monkeypatch: pytest.MonkeyPatch
):
    """Also if sequences move between micro-batches at every step."""
    turns = cycle((1, 2))
    monkeypatch.setattr(MicroBatchRule, "choose", lambda rule, sequences: next(turns))
    folder = write_model(tmp_path / "llama", "llama", num_hidden_layers=2)
    listens, known = listener(), tmp_path / "trials.json"
    member = Member(GROUP, 0, KEY, listens, TIMES)

    def follow() -> None:
        try:
            member.follow(load_stage(str(folder), 0, 1)).run()
        finally:
            member.close()

    with on_a_thread(follow) as done:
        last = load_stage(str(folder), 1, 2)
        led = Led(last, listens.getsockname()[:2])
        try:
            loaded = replace(last, model=Doubled(last.model)) if fault else last
            followers, model = led.bench.engine.executor.followers, parse_model(name="m", source=str(folder))
            assert followers is not None
            proven = prove_group(loaded, followers, "0 to 1; 1 to 2", model, lambda what, done: None, known)
            assert proven.together is not fault
            assert any("run one after the other: when batched" in note for note in proven.notes) is fault
            # What was found is known at the next start, for this division only.
            asked: list[str] = []
            again = prove_group(
                loaded, followers, "0 to 1; 1 to 2", model, lambda what, done: asked.append(what), known
            )
            assert again.together is proven.together and not asked
            Findings(known, last.model_id).note(
                "divided, other", 1, {"alone": "it is off", "together": "", "again": ""}
            )
            with pytest.raises(ModelLoadError, match="computed in chunks, it is off"):
                prove_group(loaded, followers, "other", model, lambda what, done: None, known)
        finally:
            led.member.close()
    assert done.exception() is None


def test_a_sequence_of_a_self_test_goes_on_in_another_micro_batch():
    """With the next token of its own script."""
    noted: dict[tuple[int, int], Any] = {}
    scripts = [ForcedSequence([1, 2, 3, 4], 1), ForcedSequence([5, 6, 7, 8], 1)]
    one, other = (_Forced(scripts, noted) for _ in range(2))
    for seed in (0, 1):
        one.add(Sampling(seed=seed), [0], [])
    logits = mx.zeros((2, 9))
    assert one(logits, None).tokens.tolist() == [2, 6]
    other.add_state(one.state_of(1))
    one.keep([0])
    assert other(logits, None).tokens.tolist() == [7] and one(logits, None).tokens.tolist() == [3]
    assert sorted(noted) == [(0, 0), (0, 1), (1, 0), (1, 1)]
