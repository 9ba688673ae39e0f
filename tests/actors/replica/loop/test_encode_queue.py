"""Pictures are encoded in parallel with the steps: no sequence waits for another's picture, and a failure or an abort
affects one sequence."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from satchel.actors.kv_store.agents.claims import Branch, Claims
from satchel.actors.model_files.media.processors import PictureProcessor
from satchel.actors.protocol.block_ids import BLOCK_TOKENS, root_id
from satchel.actors.protocol.media_ids import media_key, media_tokens, picture_hash
from satchel.actors.protocol.replica_messages import MediaSpan
from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.execution.media.vision import Vision
from satchel.actors.replica.loading import models
from satchel.actors.replica.loading.warming import warm_up
from satchel.actors.replica.memory.disk_tier import DiskTier
from satchel.cluster.errors import PictureLost, QueueFull
from tests.worlds.models.vision_families import write_model
from tests.worlds.replica.bench import Bench

from ..memory.test_disk_tier import AGENT, Node, write_down

TEXT = list(range(100, 140))


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, Path]:
    folder = write_model(tmp_path_factory.mktemp("model"), "qwen3_vl")
    return models.load(str(folder), context_tokens_max=None, progress=lambda *_: None, kv="q4"), folder


class Gate:
    """A gate before the encoder: `calls` pictures have come to it, and they pass when it is opened."""

    def __init__(self, encode: Callable[..., Any]) -> None:
        self.encode, self.calls, self.opened = encode, 0, threading.Event()
        self.threads: list[str] = []
        self.shown: list[int] = []
        self.failures = self.inside = self.most = 0

    def __call__(self, span: Any, shown: Sequence[Any], **named: Any) -> Any:
        self.calls += 1
        self.shown.append(len(shown))
        self.inside += 1
        self.most = max(self.most, self.inside)
        self.threads.append(threading.current_thread().name)
        try:
            assert self.opened.wait(20)
            if self.failures:
                self.failures -= 1
                raise RuntimeError("no stream in this thread")
            return self.encode(span, shown, **named)
        finally:
            self.inside -= 1


@pytest.fixture
def gate(seeing: tuple[LoadedModel, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    vision = seeing[0].vision
    assert vision is not None
    found = Gate(vision.encode)
    monkeypatch.setattr(Vision, "encode", lambda _, *arguments, **named: found(*arguments, **named))
    yield found
    found.opened.set()


def asked(folder: Path, colour: str) -> tuple[list[int], list[MediaSpan]]:
    """A prompt with a picture."""
    image = Image.new("RGB", (64, 64), colour)
    span = PictureProcessor.load(folder).layout(*image.size).span
    key = media_key([picture_hash(*image.size, image.tobytes())])
    words = iter(media_tokens(key, len(span.places)))
    shown = [next(words) if at in span.places else token for at, token in enumerate(span.tokens)]
    media = MediaSpan(len(TEXT), list(span.tokens), key, list(span.grid), *image.size, [image.tobytes()])
    return [*TEXT, *shown, 7, 8], [media]


def turn_until(bench: Bench, what: Callable[[], object]) -> None:
    for _ in range(2000):
        if not bench.turn():
            time.sleep(0.005)
        if what():
            return
    raise AssertionError("it does not come true")


def test_sequences_go_on_while_a_picture_is_encoded(seeing: tuple[LoadedModel, Path], gate: Gate):
    """And a picture that two sequences ask for is encoded once, the next one after it."""
    bench = Bench(seeing[0])
    bench.submit("text", TEXT, max_tokens=30)
    bench.turn()
    for name, colour in (("red", "red"), ("blue", "blue"), ("red again", "red")):
        prompt, media = asked(seeing[1], colour)
        bench.submit(name, prompt, media=media)
    turn_until(bench, lambda: bench.sequences["text"].finish)
    assert gate.calls == 1 and set(bench.sequences) == {"text"}, "one at a time, and nobody waited for it"
    gate.opened.set()
    bench.drain()
    assert gate.calls == 2 and set(gate.threads) == {"encoder"}
    assert bench.sequences["red"].tokens == bench.sequences["red again"].tokens != bench.sequences["blue"].tokens
    assert (bench.engine.pictures.embeddings.encodes, bench.engine.pictures.embeddings.hits) == (2, 1)


@pytest.fixture
def together(seeing: tuple[LoadedModel, Path], monkeypatch: pytest.MonkeyPatch) -> Vision:
    """As on a GPU."""
    vision = seeing[0].vision
    assert vision is not None
    monkeypatch.setattr(vision, "together_tokens", 1024)
    monkeypatch.setattr(vision, "unbatched", set())
    return vision


def test_pictures_of_one_layout_are_encoded_together(seeing: tuple[LoadedModel, Path], gate: Gate, together: Vision):
    """2, 4, ... of them, each once; the most urgent ones among themselves."""
    gate.opened.set()
    plans = [("a", "red", 0), ("b", "blue", 0), ("c", "red", 0), ("d", "lime", 0), ("e", "navy", 1), ("f", "gold", 1)]
    prompts = {name: asked(seeing[1], colour) for name, colour, _ in plans}
    together.together_tokens = 0
    bench = Bench(seeing[0])
    alone = {name: bench.run(name, prompt, media=media).tokens for name, (prompt, media) in prompts.items()}
    together.together_tokens = 1024
    bench, gate.shown = Bench(seeing[0]), []
    for name, _, priority in plans:
        prompt, media = prompts[name]
        bench.submit(name, prompt, media=media, priority=priority)
    bench.drain()
    assert gate.shown == [2, 2, 1] and bench.engine.pictures.embeddings.encodes == 5
    assert {name: sequence.tokens for name, sequence in bench.sequences.items()} == alone


def test_as_many_are_encoded_together_as_have_so_many_tokens(
    seeing: tuple[LoadedModel, Path], gate: Gate, together: Vision
):
    gate.opened.set()
    prompts = [asked(seeing[1], f"rgb(9,9,{blue})") for blue in range(9)]
    together.together_tokens = 5 * len(prompts[0][1][0].tokens)
    bench = Bench(seeing[0])
    for name, (prompt, media) in enumerate(prompts):
        bench.submit(str(name), prompt, media=media)
    bench.drain()
    assert gate.shown == [4, 4, 1] and {sequence.finish for sequence in bench.sequences.values()} == {"length"}


def test_pictures_that_cannot_be_encoded_together_are_encoded_one_by_one(
    seeing: tuple[LoadedModel, Path], gate: Gate, together: Vision
):
    gate.opened.set()
    gate.failures = 1
    bench = Bench(seeing[0])
    for blue in range(3):
        prompt, media = asked(seeing[1], f"rgb(8,8,{blue})")
        bench.submit(str(blue), prompt, media=media)
    bench.drain()
    assert gate.shown == [2, 1, 1, 1] and together.unbatched == {False}
    assert {sequence.finish for sequence in bench.sequences.values()} == {"length"} and set(gate.threads) == {"encoder"}


def test_what_is_encoded_for_a_sequence_that_has_left_is_kept(seeing: tuple[LoadedModel, Path], gate: Gate):
    bench = Bench(seeing[0])
    prompt, media = asked(seeing[1], "green")
    bench.submit("one", prompt, media=media)
    bench.turn()
    bench.engine.abort(("one",))
    bench.turn()
    assert bench.sequences["one"].finish == "abort"
    gate.opened.set()
    turn_until(bench, lambda: bench.engine.pictures.embeddings.encodes)
    bench.submit("two", prompt, media=media)
    bench.drain()
    assert bench.sequences["two"].finish == "length" and gate.calls == 1


def test_an_encoder_that_fails_on_its_thread_is_tried_on_the_engine_s_and_costs_one_sequence(
    seeing: tuple[LoadedModel, Path], gate: Gate
):
    bench = Bench(seeing[0])
    gate.opened.set()
    for failures, finish in ((1, "length"), (2, "error")):
        prompt, media = asked(seeing[1], f"rgb(1,2,{failures})")
        gate.failures, gate.threads = failures, []
        bench.submit("text", TEXT)
        bench.submit("picture", prompt, media=media)
        bench.drain()
        assert (bench.sequences.pop("text").finish, bench.sequences.pop("picture").finish) == ("length", finish)
        assert gate.threads == ["encoder", threading.current_thread().name]
    assert not bench.engine.pictures


def test_what_is_missing_after_all_waits_for_the_picture_in_hand(seeing: tuple[LoadedModel, Path], gate: Gate):
    """KV that was cached when a sequence came may be evicted before its turn, and its embeddings too."""
    bench = Bench(seeing[0], sequences_max=1, vision_bytes_max=1)
    (known, one), (new, other) = (asked(seeing[1], colour) for colour in ("navy", "gold"))
    gate.opened.set()
    bench.run("first", known, media=one, max_tokens=1)
    gate.opened.clear()
    bench.submit("running", TEXT, max_tokens=40)
    bench.turn()
    bench.submit("again", known, media=one, max_tokens=1)
    bench.submit("new", new, media=other, max_tokens=1)
    turn_until(bench, lambda: gate.inside)
    bench.engine.prefixes.reset()
    threading.Timer(0.3, gate.opened.set).start()
    bench.drain()
    assert gate.most == 1 and gate.calls == 3
    assert {sequence.finish for sequence in bench.sequences.values()} == {"length"}


def test_sequences_that_wait_for_their_pictures_fill_the_queue(seeing: tuple[LoadedModel, Path], gate: Gate):
    bench = Bench(seeing[0], sequences_max=1, queue_requests_max=2)
    prompt, media = asked(seeing[1], "white")
    for number in range(4):
        bench.submit(str(number), prompt, media=media)
        bench.turn()
    assert list(bench.refused) == ["3"] and isinstance(bench.refused["3"], QueueFull)
    assert (bench.engine.waiting, bench.engine.pending_tokens) == (3, 3 * (len(prompt) - 1)), "whoever drains sees them"
    gate.opened.set()
    bench.drain()
    assert [sequence.finish for sequence in bench.sequences.values()] == ["length"] * 3


def test_a_sequence_whose_pixels_were_not_sent_is_taken_only_where_they_are_not_needed(
    seeing: tuple[LoadedModel, Path], gate: Gate
):
    bench = Bench(seeing[0])
    gate.opened.set()
    prompt, media = asked(seeing[1], "teal")
    spared = [replace(one, pixels=[]) for one in media]
    bench.submit("too early", prompt, media=spared)
    bench.drain()
    assert isinstance(bench.refused["too early"], PictureLost) and bench.engine.pictures.embeddings.hits == 0
    assert not bench.engine.prefixes.holders and not bench.engine.active
    whole = bench.run("whole", prompt, media=media)
    assert bench.run("spared", prompt, media=spared).tokens == whole.tokens
    bench.engine.prefixes.reset()
    assert bench.run("by its features", prompt, media=spared).tokens == whole.tokens
    assert gate.calls == 1


def test_a_sequence_without_pixels_waits_for_another_that_has_them(seeing: tuple[LoadedModel, Path], gate: Gate):
    """Also if it is the more urgent one. If the other leaves before its turn, it ends with an error."""
    bench = Bench(seeing[0])
    first, of_first = asked(seeing[1], "navy")
    prompt, media = asked(seeing[1], "olive")
    spared = [replace(one, pixels=[]) for one in media]
    bench.submit("first", first, media=of_first)
    bench.submit("whole", prompt, media=media)
    turn_until(bench, lambda: gate.calls)
    bench.submit("spared", prompt, media=spared, priority=1)
    bench.turn()
    assert not bench.refused
    gate.opened.set()
    bench.drain()
    assert bench.sequences["spared"].tokens == bench.sequences["whole"].tokens and gate.calls == 2
    gate.opened.clear()
    late, of_late = asked(seeing[1], "maroon")
    other, of_other = asked(seeing[1], "silver")
    bench.submit("other", other, media=of_other)
    bench.submit("leaves", late, media=of_late)
    bench.turn()
    bench.submit("left behind", late, media=[replace(one, pixels=[]) for one in of_late])
    bench.turn()
    bench.engine.abort(("leaves",))
    bench.turn()
    gate.opened.set()
    bench.drain()
    error = bench.sequences["left behind"].error
    assert error is not None and error["kind"] == "PictureLost"
    assert bench.sequences["other"].finish == "length"


def test_the_warm_up_of_a_model_for_pictures_sees_one(seeing: tuple[LoadedModel, Path], gate: Gate):
    gate.opened.set()
    warm_up.meet_usual(seeing[0])
    assert gate.calls == 1


def test_what_is_encoded_for_one_is_given_to_all_that_wait_for_it(seeing: tuple[LoadedModel, Path], gate: Gate):
    """Also where there is no room to keep it."""
    bench = Bench(seeing[0], vision_bytes_max=1)
    first, of_first = asked(seeing[1], "indigo")
    prompt, media = asked(seeing[1], "khaki")
    bench.submit("first", first, media=of_first)
    bench.submit("whole", prompt, media=media)
    turn_until(bench, lambda: gate.calls)
    bench.submit("spared", prompt, media=[replace(one, pixels=[]) for one in media], priority=1)
    gate.opened.set()
    bench.drain()
    assert bench.sequences["spared"].tokens == bench.sequences["whole"].tokens and gate.calls == 2
    assert not bench.refused and not bench.engine.pictures._holding


def test_a_turn_with_a_picture_that_nobody_can_send_again_has_its_kv_read_back(
    seeing: tuple[LoadedModel, Path], gate: Gate, tmp_path: Path
):
    """Even if it continues from memory with few new tokens: another replica had the turn in between."""
    gate.opened.set()
    loaded, node = seeing[0], Node(tmp_path / "kv")
    disks = [DiskTier(loaded.spec, loaded.model_id, node.client) for _ in range(2)]
    here, there = (Bench(loaded, disk=disk) for disk in disks)
    prompt, media = asked(seeing[1], "orchid")
    first = here.run("first", TEXT, agent=AGENT, max_tokens=4)
    write_down(here, disks[0])
    second = [*TEXT, *first.tokens, *prompt[len(TEXT) :]]
    shown = [replace(one, start=one.start + len(first.tokens)) for one in media]
    there.engine.pictures._disk = None
    answer = there.run("second", second, agent=AGENT, media=shown, max_tokens=4)
    write_down(there, disks[1])
    third = [*second, *answer.tokens, *TEXT[:20]]
    known = len(second) + len(answer.tokens)
    spared = [replace(one, pixels=[]) for one in shown]
    sequence = here.run("third", third, agent=AGENT, media=spared, remembered=known)
    assert not here.refused and sequence.cached == known


def test_the_router_hears_what_is_known(seeing: tuple[LoadedModel, Path], gate: Gate):
    bench, gate.calls = Bench(seeing[0]), 0
    gate.opened.set()
    prompt, media = asked(seeing[1], "black")
    bench.run("one", prompt, media=media)
    (known,) = bench.engine.pictures.embeddings.ids()
    come, gone = bench.engine.changes(whole=False)
    assert known in come and not gone and known in bench.engine.changes(whole=True)[0]
    assert bench.engine.pictures.encode_token_s > 0
    assert bench.engine.pictures.embeddings.clear() > 0
    assert bench.engine.changes(whole=False) == ([], [known])


def test_an_agent_s_pictures_are_dropped_by_its_remembered_tokens(seeing: tuple[LoadedModel, Path], gate: Gate):
    bench = Bench(seeing[0])
    gate.opened.set()
    prompts = [asked(seeing[1], colour) for colour in ("navy", "teal")]
    for name, (prompt, media) in zip(("one", "other"), prompts, strict=True):
        bench.run(name, prompt, media=media)
    embeddings = bench.engine.pictures.embeddings
    theirs, others = embeddings.ids()
    root = root_id(seeing[0].model_id, "tenant:test")
    claims = Claims([Branch(seeing[0].model_id, root, array("I", prompts[0][0]).tobytes())])
    assert claims.embeddings == [theirs]
    held = embeddings.nbytes
    assert 0 < embeddings.drop([theirs, bytes(32)]) == held - embeddings.nbytes
    assert embeddings.ids() == [others] and bench.engine.changes(whole=False)[1] == [theirs]


def test_features_come_back_from_the_disk_in_any_precision(seeing: tuple[LoadedModel, Path], tmp_path: Path):
    """They are read on another thread, and what that leaves to compute the engine's thread cannot. Elsewhere in the
    prompt a picture has its features only."""
    folder = seeing[1]
    loaded = models.load(
        str(folder), dtype="bfloat16", context_tokens_max=None, progress=lambda *_: None, kv="q4", warm=False
    )
    node, (prompt, media) = Node(tmp_path), asked(folder, "purple")
    try:
        bench = Bench(loaded, disk=(disk := DiskTier(loaded.spec, loaded.model_id, node.client)))
        bench.run("cold", prompt, media=media, agent=AGENT)
        write_down(bench, disk)
        node.restart()
        bench = Bench(loaded, disk=DiskTier(loaded.spec, loaded.model_id, node.client))
        moved = [replace(one, start=one.start + 1, pixels=[]) for one in media]
        for name in ("once", "twice"):
            assert bench.run(name, [5, *prompt], media=moved, agent=AGENT).finish == "length"
        assert bench.engine.pictures.embeddings.encodes == 0
    finally:
        node.store.close()


def test_a_sequence_has_what_was_read_back_for_it_however_little_is_kept(
    seeing: tuple[LoadedModel, Path], gate: Gate, tmp_path: Path
):
    gate.opened.set()
    loaded, folder = seeing
    prompt, media = list(TEXT), list[MediaSpan]()
    for colour in ("red", "green", "blue"):
        shown, (one,) = asked(folder, colour)
        media.append(replace(one, start=len(prompt)))
        prompt += shown[len(TEXT) :]
    node = Node(tmp_path)
    try:
        bench = Bench(loaded, disk=(disk := DiskTier(loaded.spec, loaded.model_id, node.client)))
        bench.run("cold", prompt, media=media, agent=AGENT)
        write_down(bench, disk)
        room = bench.engine.pictures.embeddings.nbytes * 2 // 3
        node.restart()
        bench = Bench(loaded, disk=DiskTier(loaded.spec, loaded.model_id, node.client), vision_bytes_max=room)
        moved = [replace(one, start=one.start + 1, pixels=[]) for one in media]
        bench.submit("moved", [5, *prompt], media=moved, agent=AGENT)
        bench.drain()
        assert bench.sequences["moved"].finish == "length" and not bench.refused and gate.calls == 3
    finally:
        node.store.close()


def test_a_picture_whose_kv_is_on_a_slow_disk_is_not_encoded_again(
    seeing: tuple[LoadedModel, Path], gate: Gate, tmp_path: Path
):
    """It came without pixels."""
    gate.opened.set()
    loaded, folder = seeing
    shown, media = asked(folder, "coral")
    prompt, node = [*shown, *range(100, 400)], Node(tmp_path)
    try:
        bench = Bench(loaded, disk=(disk := DiskTier(loaded.spec, loaded.model_id, node.client)))
        bench.run("cold", prompt, media=media, agent=AGENT)
        write_down(bench, disk)
        node.restart()
        bench = Bench(loaded, disk=(disk := DiskTier(loaded.spec, loaded.model_id, node.client)))
        bench.run("other", list(range(100, 700)))
        disk._rate_alone.note(10**9, 1e9)
        again = bench.run("again", prompt, media=[replace(one, pixels=[]) for one in media], agent=AGENT)
        assert again.finish == "length" and (again.cached or 0) >= BLOCK_TOKENS and gate.calls == 1
    finally:
        node.store.close()


def test_pictures_before_what_a_window_can_reuse_are_read_back_too(tmp_path: Path):
    """The blocks are there and the picture in them, but layers lack the window before the place where prompts part."""
    folder = write_model(tmp_path / "model", "gemma3")
    loaded = models.load(str(folder), context_tokens_max=None, progress=lambda *_: None, kv="q4", warm=False)
    shown, (one,) = asked(folder, "olive")
    before = list(range(200, 480))
    prompt = [*before, *shown[len(TEXT) :], *(token % 900 + 50 for token in range(1500))]
    media = [replace(one, start=len(before))]
    node = Node(tmp_path / "node")
    try:
        # In one chunk, of which window layers have the end only.
        bench = Bench(
            loaded, disk=(disk := DiskTier(loaded.spec, loaded.model_id, node.client)), prefill_chunk_tokens=2048
        )
        bench.run("cold", prompt, media=media, agent=AGENT)
        write_down(bench, disk)
        other = [*prompt[:600], *range(700, 800)]
        for name, pixels in (("with", media[0].pixels), ("without", [])):
            node.restart()
            bench = Bench(loaded, disk=DiskTier(loaded.spec, loaded.model_id, node.client))
            bench.submit(name, other, media=[replace(media[0], pixels=pixels)], agent=AGENT)
            bench.drain()
            assert not bench.refused and bench.sequences[name].finish == "length"
            assert bench.engine.pictures.embeddings.encodes == 0
    finally:
        node.store.close()


@pytest.mark.parametrize("room", [True, False])
def test_many_pictures_of_one_sequence_do_not_hold_up_another_s_only_one(
    seeing: tuple[LoadedModel, Path], gate: Gate, room: bool
):
    """Nor do others that come one after the other hold up the rest of the many. Where features have no room, whoever
    came first has all of its own first, as sequences that wait hold what they have."""
    bench = Bench(seeing[0], vision_bytes_max=1 << 29 if room else 1)
    prompt, media = list[int](), list[MediaSpan]()
    for colour in ("red", "blue", "green"):
        more, (one,) = asked(seeing[1], colour)
        media.append(replace(one, start=len(prompt) + one.start))
        prompt += more
    bench.submit("many", prompt, media=media, max_tokens=1)
    turn_until(bench, lambda: gate.calls)
    for name in ("orange", "purple"):
        prompt, media = asked(seeing[1], name)
        bench.submit(name, prompt, media=media, max_tokens=1)
    gate.opened.set()
    ended = list[str]()
    while len(ended) < 3:
        if not bench.turn():
            time.sleep(0.005)
        ended += [name for name, sequence in bench.sequences.items() if sequence.finish and name not in ended]
    assert ended == (["orange", "purple", "many"] if room else ["many", "orange", "purple"])
    assert not bench.engine.pictures._holding


def test_many_sequences_of_one_caller_do_not_hold_up_another_s_picture(seeing: tuple[LoadedModel, Path], gate: Gate):
    bench = Bench(seeing[0])
    for name in ("red", "blue", "green", "navy", "gold"):
        prompt, media = asked(seeing[1], name)
        bench.submit(name, prompt, media=media, max_tokens=1, flow="greedy")
    turn_until(bench, lambda: gate.calls)
    prompt, media = asked(seeing[1], "orange")
    bench.submit("orange", prompt, media=media, max_tokens=1, flow="another")
    gate.opened.set()
    turn_until(bench, lambda: "orange" in bench.sequences and bench.sequences["orange"].finish)
    assert not {"green", "navy", "gold"} & bench.sequences.keys()
    bench.drain()


def test_features_that_sequences_wait_with_are_bounded(seeing: tuple[LoadedModel, Path], gate: Gate):
    """Sequences that have all theirs go first, then the encoder continues; also if a single picture is too large."""
    loaded, folder = seeing
    gate.opened.set()
    bench = Bench(loaded, sequences_max=1, vision_bytes_max=1)
    bench.submit("running", TEXT, max_tokens=60)
    bench.turn()
    for number in range(5):
        prompt, media = asked(folder, f"rgb(9,9,{number})")
        bench.submit(str(number), prompt, media=media, max_tokens=1)
    turn_until(bench, lambda: bench.sequences["running"].finish)
    assert gate.calls <= 2, "one waits for its turn with its features, and the next at the most"
    bench.drain()
    assert gate.calls == 5 and {sequence.finish for sequence in bench.sequences.values()} == {"length"}
