"""Each process keeps its layers' KV on its own node, and new processes go on from as much as all of them have."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from satchel.actors.protocol.block_ids import BLOCK_TOKENS
from satchel.actors.protocol.entries import pack_tokens
from satchel.actors.protocol.group_messages import FoundPart, ReadPart
from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.group.forming import Member
from satchel.actors.replica.group.loading import load_stage
from satchel.actors.replica.group.parts import READINGS_MAX, FollowerParts, GroupDisk
from satchel.actors.replica.kv.caches import read_spec
from satchel.actors.replica.loading import models
from satchel.actors.replica.memory.disk_tier import DiskTier, Prompt
from satchel.actors.replica.memory.other_parts import OtherParts, Remote
from satchel.actors.replica.memory.sequence_memory import Restored
from tests.actors.replica.group.calls.test_overlap import Whims
from tests.worlds.models.families import write_model
from tests.worlds.replica.bench import Bench
from tests.worlds.replica.bench_disk import Node, process, write_down
from tests.worlds.replica.group import GROUP, KEY, TIMES, Led, listener, on_a_thread

AGENT = "default/alice"
LAYERS, CUT = 3, 2


def prompt_of(length: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, 3000) for _ in range(length)]


class _Asked:
    """Stands for a call to a follower in another process."""

    def __init__(self, read: Callable[[], FoundPart]) -> None:
        self.wait = read


class _Client:
    """Stands for `StageClient` where the follower is in this process."""

    def __init__(self, parts: FollowerParts) -> None:
        self._parts = parts

    def read(self, part: ReadPart) -> _Asked:
        return _Asked(lambda: self._parts.read(part))


class _Restores:
    """Stands for a disk side that restores something of any prompt."""

    def load(self, *_: object) -> Restored:
        return Restored(0, [], [])


def test_kv_that_comes_when_its_reading_is_over_is_not_kept():
    """The leader gave up while the follower was still reading."""
    parts: Any = FollowerParts(_Restores(), None, bytes(32))  # type: ignore[arg-type]
    for number in range(READINGS_MAX):
        parts.forget(f"r{number}")
        parts.read(ReadPart(f"r{number}", AGENT, "t/x", bytes(32), [], pack_tokens([1, 2, 3]), 0))
    assert not parts._staged


def others_of(loaded: LoadedModel, nodes: list[Node], own: int) -> OtherParts | None:
    """What makes KV of a process's layers, on one of two nodes that are named by their places."""
    if loaded.part is None:
        return None
    remotes = [Remote(str(place), node.client) for place, node in enumerate(nodes) if place != own]
    return OtherParts(loaded.identity, *loaded.part, loaded.spec, nodes[own].client, remotes)


class Group:
    """A leader and a follower on a thread, each with a node of its own; both forget all but what is on disk when they
    end."""

    bench: Bench
    leaders: GroupDisk
    disk: DiskTier

    def __init__(
        self,
        folder: Path,
        nodes: list[Node],
        kv: str = "q4",
        cut: int = CUT,
        layers: int = LAYERS,
        piece_tokens: int | None = None,
    ) -> None:
        self._folder, self._nodes, self._kv, self._cut, self._layers = folder, nodes, kv, cut, layers
        self._piece_tokens = piece_tokens

    def _load(self, start: int, stop: int) -> LoadedModel:
        loaded = load_stage(str(self._folder), start, stop, kv=self._kv)
        return loaded if self._piece_tokens is None else replace(loaded, piece_tokens=self._piece_tokens)

    @contextmanager
    def running(self) -> Iterator[Group]:
        listens, member = listener(), None
        found: dict[str, Any] = {}

        def follow() -> None:
            nonlocal member
            member = Member(GROUP, 0, KEY, listens, TIMES)
            try:
                loaded = self._load(0, self._cut)
                following = member.follow(loaded)
                self.disk = DiskTier(loaded.spec, loaded.model_id, self._nodes[0].client)
                self.disk.others = others_of(loaded, self._nodes, 0)
                found["parts"] = following.batch.parts = FollowerParts(self.disk, following.batch, loaded.model_id)
                following.run()
            finally:
                member.close()

        last = self._load(self._cut, self._layers)
        leaders = GroupDisk(last.spec, last.model_id, self._nodes[1].client)
        leaders.others = others_of(last, self._nodes, 1)
        with on_a_thread(follow) as done:
            led = Led(last, listens.getsockname()[:2], disk=leaders)
            ends = time.monotonic() + 10
            while "parts" not in found and time.monotonic() < ends:
                time.sleep(0.01)
            client: Any = _Client(found["parts"])
            leaders.serve(led.bench.engine, [client])
            self.bench, self.leaders = led.bench, leaders
            try:
                yield self
            finally:
                led.member.close()
        assert done.exception() is None

    def write_down(self) -> None:
        write_down(self.bench, self.leaders)
        ends = time.monotonic() + 20
        while self.disk.waiting_bytes or not self.disk._queue.empty():
            assert time.monotonic() < ends
            time.sleep(0.01)

    def restarted(self) -> None:
        for node in self._nodes:
            node.restart()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    found = [Node(tmp_path / "first"), Node(tmp_path / "last")]
    for node in found:
        node.sources.update({str(place): other for place, other in enumerate(found)})
    yield found
    for node in found:
        node.store.check()
        node.store.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "llama", "llama", num_hidden_layers=LAYERS)


def whole(folder: Path, kv: str = "q4", numerics: str = "reproducible") -> LoadedModel:
    return models.load(
        str(folder), context_tokens_max=None, progress=lambda *_: None, numerics=numerics, weights="stored", kv=kv
    )


@pytest.mark.variants(3)
@pytest.mark.parametrize("kv", ["q4", "fp16"])
@pytest.mark.parametrize("length", [40, 300, 700])
def test_new_processes_compute_only_what_is_new(folder: Path, nodes: list[Node], length: int, kv: str):
    prompt, more = prompt_of(length), prompt_of(30, seed=2)
    group = Group(folder, nodes, kv)
    with group.running():
        first = group.bench.run("first", prompt, agent=AGENT, max_tokens=20)
        group.write_down()
    group.restarted()
    second = [*prompt, *first.tokens, *more]
    with group.running():
        warm = group.bench.run("warm", second, agent=AGENT)
        assert warm.cached == length + 20
        # What was read back is shared and kept as anything else.
        hot = group.bench.run("hot", second, agent=AGENT)
        assert hot.cached and hot.cached >= length + 20
    cold = Bench(whole(folder, kv)).run("cold", second)
    assert warm.tokens == hot.tokens == cold.tokens


def test_agents_that_are_answered_at_once_all_go_on_from_the_disks(folder: Path, nodes: list[Node]):
    """Their sequences are in several micro-batches, and move between them when one ends."""
    lengths = {"default/ada": (300, 30), "default/ben": (40, 8), "default/eve": (520, 20), "default/kim": (255, 40)}
    group = Group(folder, nodes)
    with group.running():
        for seed, (agent, (length, answer)) in enumerate(lengths.items()):
            group.bench.submit(agent, prompt_of(length, seed), agent=agent, max_tokens=answer)
        group.bench.drain()
        group.write_down()
        first = group.bench.sequences
    group.restarted()
    with group.running():
        for seed, (agent, (length, _)) in enumerate(lengths.items()):
            prompt = [*prompt_of(length, seed), *first[agent].tokens, 7, 8, 9]
            warm = group.bench.run(agent, prompt, agent=agent, max_tokens=5)
            assert warm.cached == len(prompt) - 3
            assert warm.tokens == Bench(whole(folder)).run(agent, prompt, max_tokens=5).tokens


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_kv_is_written_and_read_back_while_stages_compute_at_the_same_time(folder: Path, nodes: list[Node], seed: int):
    """While a prompt is computed in pieces, and others decode in two micro-batches."""
    rng = random.Random(seed)
    prompts = {f"default/{length}": prompt_of(length, seed=length) for length in (300, 530, 700)}
    group, cold = Group(folder, nodes, piece_tokens=64), Bench(whole(folder))
    with group.running():
        group.bench.engine.executor.rule = Whims(rng)
        for agent, prompt in prompts.items():
            group.bench.submit(agent, prompt, agent=agent, max_tokens=20)
        group.bench.drain()
        seconds = {
            agent: [*prompt, *group.bench.sequences[agent].tokens, *prompt_of(30, seed=2)]
            for agent, prompt in prompts.items()
        }
        group.write_down()
    group.restarted()
    with group.running():
        group.bench.engine.executor.rule = Whims(rng)
        for number, (agent, second) in enumerate(seconds.items()):
            group.bench.submit(f"new {number}", prompt_of(900, seed=100 + number), max_tokens=40)
            for _ in range(rng.randrange(1, 8)):
                group.bench.turn()
            group.bench.submit(agent, second, agent=agent, max_tokens=40)
        group.bench.drain()
        for agent, second in seconds.items():
            warm = group.bench.sequences[agent]
            assert warm.cached == len(second) - 30
            assert warm.tokens == cold.run(agent, second, max_tokens=40).tokens
        for number in range(len(seconds)):
            expected = cold.run(f"new {number}", prompt_of(900, seed=100 + number), max_tokens=40)
            assert group.bench.sequences[f"new {number}"].tokens == expected.tokens


@pytest.mark.parametrize("kv", ["q4", "fp16"])
@pytest.mark.parametrize("length", [40, 700])
def test_a_model_that_is_divided_in_another_way_goes_on_from_the_same_kv(
    folder: Path, nodes: list[Node], length: int, kv: str
):
    """Layers that moved come from the other node's disk; what was made is there at the next start."""
    prompt = prompt_of(length)
    group = Group(folder, nodes, kv, cut=2)
    with group.running():
        first = group.bench.run("first", prompt, agent=AGENT, max_tokens=20)
        group.write_down()
    group.restarted()
    second = [*prompt, *first.tokens, *prompt_of(30, seed=2)]
    group = Group(folder, nodes, kv, cut=1)
    with group.running():
        warm = group.bench.run("warm", second, agent=AGENT)
        assert warm.cached == length + 20
        group.write_down()
    group.restarted()
    for node in nodes:
        node.sources.clear()
    with group.running():
        again = group.bench.run("again", second, agent=AGENT)
        assert again.cached and again.cached >= length + 20
    cold = Bench(whole(folder, kv)).run("cold", second)
    assert warm.tokens == again.tokens == cold.tokens


@pytest.mark.parametrize("length", [40, 700])
def test_a_model_that_is_divided_no_more_goes_on_from_its_parts_and_the_other_way_round(
    folder: Path, nodes: list[Node], length: int
):
    """As on a node that has unpacked a satchel: its disk has all parts."""
    node, prompt = nodes[0], prompt_of(length)
    group = Group(folder, [node, node], cut=2)
    with group.running():
        first = group.bench.run("first", prompt, agent=AGENT, max_tokens=20)
        group.write_down()
    node.restart()
    second = [*prompt, *first.tokens, *prompt_of(30, seed=2)]
    loaded = whole(folder, numerics="fast")
    bench, disk = process(loaded, node)
    disk.others = others_of(loaded, [node], 0)
    warm = bench.run("warm", second, agent=AGENT, max_tokens=300)
    assert warm.cached == length + 20
    write_down(bench, disk)
    node.restart()
    third = [*second, *warm.tokens, *prompt_of(9, seed=3)]
    group = Group(folder, [node, node], cut=1)
    with group.running():
        divided = group.bench.run("divided", third, agent=AGENT)
        assert divided.cached == length + 50 + 300
    assert divided.tokens == Bench(whole(folder)).run("cold", third).tokens


def test_what_cannot_be_made_of_other_parts_is_computed(folder: Path, nodes: list[Node]):
    """A layer's KV is lost, or the prompt is another one's."""
    prompt = prompt_of(700)
    group = Group(folder, nodes, cut=2)
    with group.running():
        first = group.bench.run("first", prompt, agent=AGENT, max_tokens=20)
        group.write_down()
    group.restarted()
    second = [*prompt, *first.tokens, *prompt_of(30, seed=2)]
    for node in nodes:
        node.sources.clear()
    group = Group(folder, nodes, cut=1)
    with group.running():
        # The leader's node never had the second layer.
        assert group.bench.run("other", second, agent=AGENT).cached == 0
        other = group.bench.run("tenant", second, agent="other/eve", tenant="other")
        assert other.cached == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, layers, more",
    [
        ("gpt_oss", 4, {"layer_types": ["sliding_attention", "full_attention"] * 2}),
        ("qwen3_next", 8, {}),
        ("deepseek_v2", 4, {}),
        ("falcon_h1", 2, {}),
    ],
)
def test_windows_states_and_latent_kv_are_kept_in_parts_too(
    tmp_path: Path, nodes: list[Node], family: str, layers: int, more: dict[str, Any]
):
    folder = write_model(tmp_path / family, family, num_hidden_layers=layers, **more)
    prompt = prompt_of(600)
    group = Group(folder, nodes, cut=layers // 2, layers=layers)
    with group.running():
        first = group.bench.run("first", prompt, agent=AGENT, max_tokens=20)
        second = [*prompt, *first.tokens, *prompt_of(30, seed=2)]
        hot = group.bench.run("hot", second, agent=AGENT, max_tokens=2)
        group.write_down()
    group.restarted()
    with group.running():
        warm = group.bench.run("warm", second, agent=AGENT, max_tokens=2)
        assert warm.cached and warm.cached >= (hot.cached or 0) >= 512
        assert warm.tokens == hot.tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, layers, more, kv",
    [
        ("gpt_oss", 6, {"layer_types": ["sliding_attention", "full_attention"] * 3}, "q4"),
        ("gpt_oss", 6, {"layer_types": ["sliding_attention", "full_attention"] * 3}, "fp16"),
        ("gemma3_text", 6, {"sliding_window_pattern": 2}, "q4"),
        ("qwen3_next", 12, {}, "q4"),
    ],
)
@pytest.mark.parametrize("divided", [False, True])
def test_windows_and_states_are_used_by_other_divisions_too(
    tmp_path: Path, nodes: list[Node], family: str, layers: int, more: dict[str, Any], kv: str, divided: bool
):
    """By one process too, which has a part of its own and pulls the other."""
    folder = write_model(tmp_path / family, family, num_hidden_layers=layers, **more)
    prompt, cuts = prompt_of(600), [layers // 3, 2 * layers // 3]
    group = Group(folder, nodes, kv, cut=cuts[1], layers=layers)
    with group.running():
        first = group.bench.run("first", prompt, agent=AGENT, max_tokens=20)
        group.write_down()
    group.restarted()
    second = [*prompt, *first.tokens, *prompt_of(30, seed=2)]
    loaded = whole(folder, kv, numerics="fast")
    if divided:
        group = Group(folder, nodes, kv, cut=cuts[0], layers=layers)
        with group.running():
            warm = group.bench.run("warm", second, agent=AGENT, max_tokens=2)
    else:
        bench, disk = process(loaded, nodes[1])
        disk.others = others_of(loaded, nodes, 1)
        warm = bench.run("warm", second, agent=AGENT, max_tokens=2)
    # At least up to the token before the answer's last one.
    assert warm.cached and warm.cached >= 619
    assert warm.tokens == Bench(loaded).run("cold", second, max_tokens=2).tokens


def test_what_one_process_has_lost_is_computed_and_kept_again(
    folder: Path, nodes: list[Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A prefix is whole up to the least of its processes."""
    prompt = prompt_of(600)
    group = Group(folder, nodes)
    with group.running():
        first = group.bench.run("first", prompt, agent=AGENT, max_tokens=20)
        group.write_down()
    group.restarted()
    second = [*prompt, *first.tokens, *prompt_of(300, seed=2)]
    with group.running():
        # The follower's disk is too slow, so its node misses the second turn.
        monkeypatch.setattr(group.disk, "has_room", lambda nbytes: False)
        assert group.bench.run("second", second, agent=AGENT, max_tokens=2).cached == 620
        group.write_down()
    group.restarted()
    third = [*second, *prompt_of(9, seed=3)]
    with group.running():
        part = group.bench.run("part", third, agent=AGENT)
        assert part.cached == 620
        group.write_down()
    nodes[0].store.close()
    nodes[0] = group._nodes[0] = Node(tmp_path / "new")
    group._nodes[1].restart()
    with group.running():
        nothing = group.bench.run("nothing", third, agent=AGENT)
        assert nothing.cached == 0
        group.write_down()
    group.restarted()
    with group.running():
        again = group.bench.run("again", third, agent=AGENT)
        assert again.cached and again.cached >= 768
    cold = Bench(whole(folder)).run("cold", third)
    assert part.tokens == nothing.tokens == again.tokens == cold.tokens


def test_a_prompt_is_read_back_as_far_as_the_follower_with_the_least_has_it():
    """With tails that all have after the same block. Blocks that not all have are written again."""
    store: Any = None
    disk = GroupDisk(read_spec([], 0), b"m" * 32, store)
    tokens = prompt_of(4 * BLOCK_TOKENS + 9)
    prompt = Prompt("r", AGENT, b"r" * 32, [bytes([number]) * 32 for number in range(4)], tokens)
    for block in prompt.ids:
        disk._note_saved(block)

    def whole(*found: FoundPart) -> Any:
        clients: Any = [SimpleNamespace(read=lambda part, one=one: _Asked(lambda: one)) for one in found]
        disk.clients = clients
        return disk._whole("reading", prompt, BLOCK_TOKENS)

    both = whole(FoundPart(3, [b"a", b"b"]), FoundPart(3, [b"b", b"c"]))
    assert both.ids == prompt.ids and both.tails == {b"b"} and list(disk.saved) == prompt.ids
    less = whole(FoundPart(3, [b"a"]), FoundPart(1, [b"a"]))
    assert less.ids == prompt.ids[:2] and not less.tails and list(disk.saved) == prompt.ids[:2]
    assert whole(FoundPart(0, []), FoundPart(3, [b"a"])) is None
    tail = whole(FoundPart(0, [b"a"]), FoundPart(0, [b"a"]))
    assert tail.ids == prompt.ids[:1] and tail.tails == {b"a"}
