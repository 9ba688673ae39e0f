"""Two stages in two processes answer as the whole model does in one, to the bit; and a group that broke stays so."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from satchel.actors.protocol.block_ids import BLOCK_TOKENS
from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.group.forming import Member, Rank, why_not
from satchel.actors.replica.group.link.broken import GroupBroken
from satchel.actors.replica.group.loading import load_stage
from satchel.actors.replica.loading import models
from tests.worlds.models.families import write_model
from tests.worlds.replica.bench import Bench, Received
from tests.worlds.replica.drafting import oracle
from tests.worlds.replica.group import GROUP, KEY, TIMES, Fault, Led, Process, listener, on_a_thread

LAYERS, CUT = 3, 2
FAMILIES: list[tuple[str, int, dict[str, Any]]] = [
    ("gpt_oss", 4, {"layer_types": ["sliding_attention", "full_attention"] * 2}),
    ("gemma3_text", 6, {}),
    ("qwen3_next", 8, {}),
    ("deepseek_v2", 3, {}),
    ("falcon_h1", 2, {}),
]
LENGTHS = (40, 255, 300, 520)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "llama", "llama", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def whole(folder: Path) -> LoadedModel:
    return models.load(
        str(folder), context_tokens_max=None, progress=lambda *_: None, numerics="reproducible", weights="stored"
    )


@pytest.fixture
def last(folder: Path) -> LoadedModel:
    return load_stage(str(folder), CUT, LAYERS)


def converse(bench: Bench, *, together: bool = True) -> dict[str, Received]:
    """Sequences of all lengths, `together` or one by one, turns that go on from memory, a branch, one that is left in
    the middle of its answer, and one that comes alone."""
    rng = random.Random(3)
    prompts = [[rng.randrange(10, 3000) for _ in range(length)] for length in LENGTHS]

    def submit(name: str, prompt: list[int], **how: Any) -> None:
        bench.submit(name, prompt, temperature=0.8, logprobs=2, **how)
        if not together:
            bench.drain()

    for number, prompt in enumerate(prompts):
        submit(f"cold {number}", prompt, seed=number, max_tokens=12)
    if together:
        bench.submit("left", prompts[1][:99], max_tokens=200)
        while len(bench.sequences["left"].tokens if "left" in bench.sequences else ()) < 5:
            bench.turn()
        bench.engine.abort(("left",))
    bench.drain()
    for number, prompt in enumerate(prompts):
        submit(f"next {number}", [*prompt, *bench.sequences[f"cold {number}"].tokens, 7, 8, 9], seed=9, max_tokens=9)
    submit("branch", [*prompts[3][:400], 5, 6], max_tokens=8)
    bench.drain()
    bench.run("alone", prompts[0], temperature=0.0, max_tokens=5)
    return {name: received for name, received in bench.sequences.items() if name != "left"}


def same(one: dict[str, Received], other: dict[str, Received]) -> None:
    assert one.keys() == other.keys()
    for name, received in one.items():
        for what in ("tokens", "finish", "cached", "logprobs"):
            assert getattr(received, what) == getattr(other[name], what), f"{what} of {name}"


def test_two_processes_answer_as_one_to_the_bit(folder: Path, whole: LoadedModel, last: LoadedModel):
    """And a follower that stops is noticed, though its connections stay open."""
    expected = converse(Bench(whole))
    follower = Process(folder, 0, CUT)
    led = Led(last, follower.address)
    same(expected, converse(led.bench))
    assert expected["next 3"].cached and expected["branch"].cached == 256
    os.kill(follower.process.pid or 0, signal.SIGSTOP)
    try:
        with pytest.raises(GroupBroken, match=r"stage 0 says nothing for 3 s"):
            led.bench.run("more", [1, 2, 3], max_tokens=100)
        with pytest.raises(GroupBroken, match="stage 0 says nothing"):
            led.bench.engine.executor.leave(["more"])
    finally:
        follower.process.kill()
        led.member.close()


def follower(
    folder: Path,
    member: Member,
    change: Callable[[Any], object] = lambda following: None,
    start: int = 0,
    stop: int = CUT,
) -> None:
    """A follower's life, on a thread. `change` is done to it once the group is formed."""
    try:
        following = member.follow(load_stage(str(folder), start, stop))
        change(following)
        following.run()
    finally:
        member.close()


@pytest.mark.parametrize("fails_at", [1, 4])
@pytest.mark.parametrize("where", ["follower", "leader"])
def test_what_fails_in_one_process_ends_the_group_and_is_not_tried_again(
    folder: Path, last: LoadedModel, where: str, fails_at: int
):
    """In a prompt, and in a decode step: the engine would try both again if the model were whole."""
    listens, faults = listener(), []

    def put(batch: Any) -> None:
        batch._model = fault = Fault(batch._model, fails_at)
        faults.append(fault)

    change = (lambda following: put(following._batch)) if where == "follower" else (lambda following: None)
    member = Member(GROUP, 0, KEY, listens, TIMES)
    with on_a_thread(lambda: follower(folder, member, change)) as done:
        led = Led(last, listens.getsockname()[:2])
        try:
            if where == "leader":
                put(led.bench.engine.executor)
            with pytest.raises(GroupBroken, match="ValueError: injected"):
                led.bench.run("one", [5] * 40, max_tokens=20)
            with pytest.raises(GroupBroken, match="ValueError: injected"):
                led.bench.engine.executor.prefill([("one", [5])])
        finally:
            led.member.close()
    assert isinstance(done.exception(), GroupBroken)
    assert faults[0].calls == fails_at


def test_a_group_ends_and_what_a_follower_kept_is_gone_with_what_the_leader_dropped(folder: Path, last: LoadedModel):
    listens, followers = listener(), []
    member = Member(GROUP, 0, KEY, listens, TIMES)
    with on_a_thread(lambda: follower(folder, member, followers.append)) as done:
        led = Led(last, listens.getsockname()[:2])
        led.bench.run("one", [*range(10, 610)], max_tokens=5)
        assert followers[0].kept > 0
        led.bench.engine.memory.reset()
        # What was dropped is told with the next call.
        led.bench.engine.executor.leave(["nobody"])
        led.member.close()
    assert done.exception() is None and followers[0].kept == 0


@pytest.mark.slow
@pytest.mark.parametrize("family, layers, more", FAMILIES)
def test_layers_of_every_kind_answer_as_in_one_process(tmp_path: Path, family: str, layers: int, more: dict[str, Any]):
    """Windows and recurrent states too: what one process can reuse, all can."""
    folder = write_model(tmp_path / family, family, num_hidden_layers=layers, **more)
    how: dict[str, Any] = {"context_tokens_max": None, "progress": lambda *_: None, "weights": "stored"}
    loaded = models.load(str(folder), numerics="reproducible", **how)
    # Scans in chunks of other lengths round otherwise.
    together = not loaded.spec.recurrent
    # Snapshots are taken where chunks end, so these must not depend on the machine's speed.
    chunks: dict[str, Any] = {"prefill_chunk_tokens": BLOCK_TOKENS}
    expected = converse(Bench(loaded, **chunks), together=together)
    listens = listener()
    member = Member(GROUP, 0, KEY, listens, TIMES)
    with on_a_thread(lambda: follower(folder, member, stop=layers // 2)) as done:
        led = Led(load_stage(str(folder), layers // 2, layers), listens.getsockname()[:2], **chunks)
        try:
            same(expected, converse(led.bench, together=together))
        finally:
            led.member.close()
    assert done.exception() is None


def test_three_stages_with_drafts_answer_as_one(folder: Path, whole: LoadedModel):
    """What is drafted and wrong is taken back in all of them."""
    script = [5] * 270
    script += Bench(whole).run("one", script, max_tokens=40).tokens
    listens = [listener(), listener()]
    members = [Member(GROUP, rank, KEY, each, TIMES) for rank, each in enumerate(listens)]
    first, second = (lambda rank=rank: follower(folder, members[rank], start=rank, stop=rank + 1) for rank in (0, 1))
    with oracle([script]), on_a_thread(first) as one, on_a_thread(second) as other:
        led = Led(load_stage(str(folder), 2, 3), *(each.getsockname()[:2] for each in listens), drafts=True)
        assert led.bench.run("one", script[:270], max_tokens=40).tokens == script[270:]
        drafts = led.bench.engine.executor.drafts
        assert drafts.right > 5 and drafts.drafted > drafts.right
        led.member.close()
    assert one.exception() is None and other.exception() is None


def test_nobody_without_the_key_takes_part(folder: Path, last: LoadedModel):
    listens = listener()
    member = Member(GROUP, 0, b"the key of another cluster", listens, replace(TIMES, form_s=1.0))
    refused = pytest.raises(GroupBroken, match="does not have this cluster's key")
    with on_a_thread(lambda: follower(folder, member)) as done, refused:
        Led(last, listens.getsockname()[:2])
    assert "nobody connects for calls, heartbeats" in str(done.exception())


def test_stages_that_do_not_fit_together_are_refused(folder: Path):
    """On both sides, with the same reason."""
    listens = listener()
    member = Member(GROUP, 0, KEY, listens, TIMES)
    refused = pytest.raises(GroupBroken, match="their layers, 0 to 2, 1 to 3, are not the 3 of the model")
    with on_a_thread(lambda: follower(folder, member)) as done, refused:
        Led(load_stage(str(folder), 1, LAYERS), listens.getsockname()[:2])
    assert "are not the 3 of the model" in str(done.exception())


RANK = Rank(0, 2, 4, {"dtype": "float32"})


@pytest.mark.parametrize(
    "ranks, why",
    [
        ([RANK, Rank(2, 4, 4, {"dtype": "float32"})], ""),
        ([RANK, Rank(2, 3, 4, {"dtype": "float32"}), Rank(3, 4, 4, {"dtype": "float32"})], ""),
        ([RANK, Rank(3, 4, 4, {"dtype": "float32"})], "their layers, 0 to 2, 3 to 4, are not the 4"),
        ([RANK, Rank(2, 3, 4, {"dtype": "float32"})], "are not the 4"),
        ([Rank(1, 2, 4, {"dtype": "float32"}), Rank(2, 4, 4, {"dtype": "float32"})], "are not the 4"),
        ([RANK, Rank(2, 4, 4, {"dtype": "bfloat16"})], "stage 0 has dtype 'float32', the last stage 'bfloat16'"),
        ([RANK, Rank(2, 4, 4, {"dtype": "float32", "mlx": "1"})], "stage 0 has mlx None, the last stage '1'"),
    ],
)
def test_stages_make_a_model_if_they_follow_on_each_other_and_compute_alike(ranks: list[Rank], why: str):
    assert why_not(ranks) == "" if not why else why in why_not(ranks)
