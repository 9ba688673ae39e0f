"""Plain mode serves a model during its self-test: with right answers, between the pieces of the test, and without
caching."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from satchel.actors.protocol.block_ids import block_ids, root_id
from satchel.actors.protocol.replica_messages import GenerateRequest, Sampling, SequenceUpdate
from satchel.actors.replica import plain_mode, serving
from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.loading import models
from satchel.actors.replica.loop.engine import Engine
from satchel.actors.replica.memory.replica_memory import ReplicaMemory
from satchel.actors.replica.plain_mode import PlainMode, fault
from satchel.actors.replica.proving.findings import Findings
from satchel.actors.replica.proving.pieces import IN_ONE_PIECE, Pieces
from satchel.actors.replica.selftest import self_test
from satchel.actors.replica.selftest.forced_sequences import ForcedSequence, Scene
from satchel.actors.replica.selftest.self_test import Proven, Verdict, prove
from satchel.actors.replica.serving import Serving
from satchel.cluster.config.config import Drafting, Model, Scheduling
from satchel.cluster.config.nodes import Node
from satchel.cluster.config.timing import USUAL
from satchel.cluster.errors import ComputesOtherwise, ModelLoadError, SatchelError
from satchel.cluster.home import Home
from satchel.cluster.incidents import incidents
from tests.worlds.models import vision_families
from tests.worlds.models.families import write_model

PROMPT = [7, 3, 19, 4, 23, 5, 40, 2] * 40
ANSWER_TOKENS = 6
WAIT_S = 120.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("plain") / "llama", "llama")


def request_of(name: str, model_id: bytes, prompt: list[int] = PROMPT) -> GenerateRequest:
    root, sampling = root_id(model_id, "tenant:t"), Sampling(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    ids = block_ids(root, prompt)
    return GenerateRequest(name, "c", "m", "", prompt, ids, root, sampling, model_id=model_id)


class Told:
    """The updates of sequences, and why they were refused, by name."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, SequenceUpdate] = {}
        self.refused: dict[str, SatchelError] = {}

    def take(self, updates: dict[str, list[SequenceUpdate]]) -> None:
        for update in updates.get("c", []):
            self.tokens.setdefault(update.request_id, []).extend(update.tokens)
            if update.finish is not None:
                self.ends[update.request_id] = update

    def submit(self, engine: Engine, name: str, model_id: bytes | None = None) -> None:
        def reply(refusal: SatchelError | None) -> None:
            if refusal is not None:
                self.refused[name] = refusal

        engine.submit(request_of(name, engine.loaded.model_id if model_id is None else model_id), reply)


def plain_of(folder: Path) -> LoadedModel:
    kept: list[LoadedModel] = []
    models.load(
        str(folder), context_tokens_max=None, progress=lambda *_: None, served=lambda plain, known: kept.append(plain)
    )
    return kept[0]


def engine_of(loaded: LoadedModel, told: Told, follows: Engine | None = None, sequences_max: int = 1) -> Engine:
    return Engine(loaded, Scheduling(sequences_max=sequences_max), 2**32, told.take, follows=follows)


@pytest.mark.parametrize("family", ["llama", "qwen2_5_vl"])
def test_sequences_between_all_pieces_of_a_self_test_are_right_and_do_not_disturb_it(
    family: str, folder: Path, tmp_path: Path
) -> None:
    """A sequence comes at every tenth pause. Each answer is the tested model's, and the findings are those of an
    undisturbed test. The sequences of a model that sees are of text, while its pictures are tried."""
    if family != "llama":
        folder = vision_families.write_model(tmp_path / family, family)
    model = Model(name="m", source=str(folder), kv="fp16")
    alone = prove(load(folder, IN_ONE_PIECE), model, lambda *_: None)
    told, count, engines = Told(), 0, list[Engine]()

    def begin(plain: LoadedModel) -> Engine:
        engines.append(engine_of(plain, told))
        return engines[0]

    between = PlainMode(0.0, begin, lambda: pytest.fail("the engine failed"))
    serve = between.pieces._serve

    def come() -> None:
        nonlocal count
        count += 1
        if engines and count % 10 == 0:
            told.submit(engines[0], f"sequence {count}")
        serve()

    between.pieces._serve = come
    proven = prove(load(folder, between.pieces, served=between.offer), model, lambda *_: None, pieces=between.pieces)
    assert len(told.ends) > 10 and not told.refused
    assert (proven.notes, proven.together) == (alone.notes, alone.together)
    assert (proven.loaded.vision is not None) == (alone.loaded.vision is not None) == (family != "llama")
    assert (proven.loaded.way, proven.loaded.model_id) == (alone.loaded.way, alone.loaded.model_id)
    final = Told()
    engine = engine_of(proven.loaded, final, sequences_max=8)
    final.submit(engine, "after")
    engine.serve()
    assert len(final.tokens["after"]) == ANSWER_TOKENS
    assert all(tokens == final.tokens["after"] for tokens in told.tokens.values())
    assert engines[0].prefixes.blocks == 0 and engine.prefixes.blocks == 1


def load(folder: Path, pieces: Pieces, **how: Any) -> LoadedModel:
    return models.load(str(folder), context_tokens_max=None, progress=lambda *_: None, kv="fp16", pieces=pieces, **how)


def test_a_prompt_of_a_self_test_is_a_piece_for_each_layer(folder: Path) -> None:
    """So that nobody waits for a whole one."""
    pauses: list[int] = []
    one = load(folder, Pieces(lambda: pauses.append(len(pauses))))
    assert len(pauses) > 2 * len(one.spec.layers)
    before = len(pauses)
    with Scene(
        one, [ForcedSequence(PROMPT + [1] * 8, len(PROMPT))], Pieces(lambda: pauses.append(len(pauses)))
    ) as scene:
        scene.run([0])
    assert not scene.failure and len(pauses) - before >= 2 * len(one.spec.layers)


def test_the_clock_of_a_self_test_stops_while_requests_are_served() -> None:
    pieces = Pieces(lambda: time.sleep(0.05))
    clock_began, began = time.monotonic(), pieces.now_s()
    pieces.pause()
    pieces.pause()
    passed_s = pieces.now_s() - began
    assert passed_s <= time.monotonic() - clock_began - 2 * 0.05


def test_what_served_requests_log_is_no_fault_of_the_model(folder: Path) -> None:
    """A scene notes only failures of its own engine."""
    loaded, logger = load(folder, IN_ONE_PIECE), logging.getLogger("satchel.actors.replica.loop.delivery")

    def fail() -> None:
        try:
            raise RuntimeError("a sequence of somebody else")
        except RuntimeError:
            logger.exception("it failed")

    with Scene(loaded, [ForcedSequence(PROMPT + [1] * 8, len(PROMPT))], Pieces(fail)) as scene:
        scene.run([0])
    assert scene.failure == "" and scene.noted


def test_commands_of_others_do_not_keep_a_self_test_waiting(folder: Path) -> None:
    """Reports, the memory thread and the watchdog call an engine all the time: an idle engine answers, and the test
    continues."""
    told = Told()
    engine = engine_of(plain_of(folder), told)
    ran: list[int] = []
    waited: list[float] = []
    engine.wait = lambda: waited.append(1)  # type: ignore[method-assign]
    engine.call(lambda: ran.append(1))
    engine.serve()
    assert ran and not waited


def test_long_work_beside_lets_others_be_served() -> None:
    done, pauses = threading.Event(), list[int]()

    def serve() -> None:
        pauses.append(1)
        done.set()

    def work() -> str:
        assert done.wait(WAIT_S)
        return "seen"

    assert Pieces(serve).beside(work) == "seen" and pauses
    assert IN_ONE_PIECE.beside(lambda: threading.current_thread()) is threading.current_thread()
    with pytest.raises(ValueError, match="unseen"):
        Pieces().beside(lambda: (_ for _ in ()).throw(ValueError("unseen")))


def test_an_engine_takes_the_place_of_another_with_its_callers(folder: Path) -> None:
    """Waiting requests are told to retry with other ids, requests to the old engine are refused in the same way, and
    new ids are served."""
    told, plain = Told(), plain_of(folder)
    old = engine_of(plain, told)
    for name in ("first", "second"):
        told.submit(old, name)
    old.serve()
    assert [*told.ends] == ["first"], "others wait until the caller has done a piece of its own"
    proven = load(folder, IN_ONE_PIECE)
    new = engine_of(proven, told, old)
    old.hand_over()
    assert told.ends["second"].finish == "error" and (told.ends["second"].error or {})["kind"] == "ComputesOtherwise"
    told.submit(old, "late")
    told.submit(new, "third")
    ran: list[str] = []
    old.call(lambda: ran.append("by the new one"))
    new.serve()
    assert isinstance(told.refused["late"], ComputesOtherwise) and ran
    assert new.counters.requests == 3, "of both engines"
    assert told.tokens["third"] == told.tokens["first"] and told.ends["third"].finish == "length"


def in_parts(tokens: mx.array, cache: list[Any], logits: mx.array) -> mx.array:
    return mx.roll(logits, 1, -1) if tokens.shape[1] > 1 and cache[0].offset > tokens.shape[1] else logits


def no_numbers(tokens: mx.array, cache: list[Any], logits: mx.array) -> mx.array:
    return logits * mx.nan


def refusing(tokens: mx.array, cache: list[Any], logits: mx.array) -> mx.array:
    raise ValueError("wants something else")


class Faulty:
    def __init__(self, inner: Any, spoil: Callable[..., mx.array]) -> None:
        self._inner, self._spoil, self.layers = inner, spoil, inner.layers

    def __call__(self, tokens: mx.array, cache: list[Any], **given: Any) -> mx.array:
        return self._spoil(tokens, cache, self._inner(tokens, cache=cache, **given))


@pytest.mark.parametrize("spoil", [in_parts, no_numbers, refusing])
def test_a_model_that_is_wrong_by_itself_is_not_served_before_its_self_test(
    folder: Path, spoil: Callable[..., mx.array]
) -> None:
    plain = plain_of(folder)
    assert fault(plain) == ""
    wrong = replace(plain, model=Faulty(plain.model, spoil))
    assert fault(wrong)
    between = PlainMode(0.0, lambda _: pytest.fail("it is served"), lambda: None)
    between.offer(wrong)
    between.pieces.pause()
    between.pieces.pause()
    assert between.engine is None


def test_a_model_with_a_short_self_test_is_not_served_before_it_ends(folder: Path) -> None:
    between = PlainMode(60.0, lambda _: pytest.fail("it is served"), lambda: None)
    load(folder, between.pieces, served=between.offer)


def test_a_model_with_findings_does_not_enter_plain_mode_at_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a time in the config; once it has taken too long it is."""
    trials, told = tmp_path / "trials.json", list[bool]()

    def served(between: PlainMode) -> Callable[[LoadedModel, bool], None]:
        def offer(plain: LoadedModel, known: bool) -> None:
            told.append(known)
            between.offer(plain, known)

        return offer

    for known, after_s, serves in ((False, 2.0, True), (True, 60.0, False), (True, 0.0, True)):
        monkeypatch.setattr(plain_mode, "KNOWN_S", after_s)
        between = PlainMode(None, lambda plain: engine_of(plain, Told()), lambda: None)
        load(folder, between.pieces, served=served(between), trials=trials)
        assert (between.engine is not None) == serves
        assert told.pop() == known


def test_no_memory_for_plain_mode_is_no_fault_of_the_model(folder: Path) -> None:
    """The test must not see the error: it would take it for the model's."""

    def begin(plain: LoadedModel) -> Engine:
        raise ModelLoadError("not enough for one sequence")

    between = PlainMode(0.0, begin, lambda: None)
    loaded = load(folder, between.pieces, served=between.offer)
    assert between.engine is None and loaded.way.reason == ""


def test_an_engine_that_fails_ends_the_process_and_not_the_self_test(folder: Path) -> None:
    ended: list[int] = []

    def begin(plain: LoadedModel) -> Engine:
        def serve() -> None:
            raise RuntimeError("the device is gone")

        return SimpleNamespace(serve=serve)  # type: ignore[return-value]

    between = PlainMode(0.0, begin, lambda: ended.append(1))
    between.offer(plain_of(folder))
    between.pieces.pause()
    assert ended


def test_a_self_test_that_was_ended_continues_with_the_next_way(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first way was refused, and the process ended while the second was tried."""
    loaded, findings, tried = load(folder, IN_ONE_PIECE), Findings(tmp_path / "trials.json", bytes(32)), list[str]()
    faults = self_test._SelfTest._faults

    def first_is_wrong(self: Any, loaded: LoadedModel) -> Any:
        tried.append(loaded.way.describe())
        found = faults(self, loaded)
        if len(tried) == 1:
            found.together = "a neighbour changes it"
        if len(tried) == 2:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(self_test._SelfTest, "_faults", first_is_wrong)
    with pytest.raises(KeyboardInterrupt):
        self_test._try(loaded, findings, IN_ONE_PIECE)
    verdict = self_test._try(loaded, findings, IN_ONE_PIECE)
    assert tried[1:] == [tried[1]] * 2 and tried[0] != tried[1], "what was found of the first is kept"
    assert not verdict.usual_way and "a neighbour changes it" in verdict.notes[0]


class Shell:
    """Stands for a replica's actor."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.told = Told()
        self.is_plain = False
        self.taken: list[tuple[Proven, bool]] = []
        self.refusal: SatchelError | None = None
        self.watchdog = SimpleNamespace(watch=lambda *_: None, is_slow=lambda _: False)
        self.changed = threading.Condition()
        self.doing = ""

    def note_memory(self, memory: ReplicaMemory) -> None:
        self.memory = memory

    def note_progress(self, what: str, fraction: float | None) -> None:
        with self.changed:
            self.doing = what
            self.changed.notify_all()

    def send(self, updates: dict[str, list[SequenceUpdate]]) -> None:
        with self.changed:
            self.told.take(updates)
            self.changed.notify_all()

    def take_up(self, proven: Proven, engine: Engine, disk: Any, *, plain: bool) -> None:
        with self.changed:
            self.engine, self.is_plain = engine, plain
            self.taken.append((proven, plain))
            self.changed.notify_all()

    def refuse(self, error: SatchelError) -> None:
        with self.changed:
            self.refusal, self.is_plain = error, False
            self.changed.notify_all()

    def coming(self) -> list[str]:
        return []

    def until(self, holds: Callable[[], object]) -> None:
        with self.changed:
            assert self.changed.wait_for(holds, WAIT_S)

    def answer(self, name: str) -> list[int]:
        assert self.engine is not None
        self.told.submit(self.engine, name)
        self.until(lambda: name in self.told.ends)
        return self.told.tokens[name]


class Reports:
    """Stands for the reports to a router."""

    def __init__(self, *_: Any) -> None:
        self.reporter = SimpleNamespace(run=lambda: None)

    def follow(self, *_: Any) -> None:
        pass


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    home = Home(tmp_path / "home")
    home.run.mkdir(parents=True)
    monkeypatch.setattr(serving, "default_home", lambda: home)
    monkeypatch.setattr(serving, "EngineReports", Reports)
    return home


@pytest.fixture
def start(folder: Path, home: Home) -> Iterator[Callable[..., Shell]]:
    """Starts a replica of the model in this process."""
    begun: list[tuple[Shell, threading.Thread]] = []

    def begin(plain_after_s: float = 0.0, **how: Any) -> Shell:
        shell, model = Shell(), Model(name="m", source=str(folder), kv="fp16", plain_after_s=plain_after_s, **how)
        replica = Serving("m-0", model, Scheduling(), Node(name="local"), USUAL, shell)  # type: ignore[arg-type]
        begun.append((shell, threading.Thread(target=replica.run, daemon=True)))
        begun[-1][1].start()
        return shell

    yield begin
    for shell, thread in begun:
        ends = time.monotonic() + WAIT_S
        while thread.is_alive() and time.monotonic() < ends:
            if shell.engine is not None:
                shell.engine.stop()
            thread.join(0.05)
        assert not thread.is_alive()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Self-tests continue once it is set."""
    goes_on, honest = threading.Event(), self_test._try

    def tries(loaded: LoadedModel, findings: Findings, pieces: Pieces) -> Verdict:
        ends = time.monotonic() + WAIT_S
        while not goes_on.is_set() and time.monotonic() < ends:
            pieces.pause()
            time.sleep(0.001)
        return honest(loaded, findings, pieces)

    monkeypatch.setattr(self_test, "_try", tries)
    yield goes_on
    goes_on.set()


def test_a_first_start_serves_before_its_self_test_ends_and_a_later_one_needs_none(
    start: Callable[..., Shell], held: threading.Event, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = start()
    shell.until(lambda: shell.engine is not None)
    plain = shell.engine
    assert shell.is_plain and plain is not None and not plain.loaded.spec.reusable
    shell.until(lambda: shell.doing == f"testing {folder}")
    early = shell.answer("early")
    assert len(early) == ANSWER_TOKENS and shell.is_plain
    held.set()
    shell.until(lambda: not shell.is_plain)
    assert shell.engine is not plain and shell.answer("late") == early
    proven = shell.engine
    assert proven is not None and proven.loaded.spec.reusable and proven.prefixes.blocks
    assert [plain for _, plain in shell.taken] == [True, False]
    monkeypatch.setattr(self_test, "_try", lambda *_: pytest.fail("it was tried before"))
    monkeypatch.setattr(plain_mode, "fault", lambda _: pytest.fail("plain mode is not needed"))
    again = start(60.0)
    again.until(lambda: again.engine is not None)
    assert not again.is_plain and again.answer("again") == early


def test_a_model_that_turns_out_wrong_is_refused_from_then_on(
    start: Callable[..., Shell], home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_test, "_try", lambda *_: Verdict(refusal="with a prompt in parts it is another model"))
    shell = start()
    shell.until(lambda: shell.refusal is not None)
    assert "another model" in str(shell.refusal)
    assert shell.engine is not None, "it was served in plain mode"
    shell.told.submit(shell.engine, "late")
    ends = time.monotonic() + WAIT_S
    while "late" not in shell.told.refused and time.monotonic() < ends:
        time.sleep(0.01)
    assert isinstance(shell.told.refused["late"], ModelLoadError)
    (noted,) = incidents(home, 0.0)
    assert noted.kind == "unfit" and "another model" in noted.text


def test_a_model_that_promises_bits_says_the_same_at_every_start(start: Callable[..., Shell]) -> None:
    """So plain mode is not used for it."""
    shell = start(numerics="reproducible")
    shell.until(lambda: shell.engine is not None)
    assert [plain for _, plain in shell.taken] == [False]


@pytest.mark.parametrize("drafts", ["auto", "off"])
def test_sequences_are_drafted_as_the_config_says(start: Callable[..., Shell], drafts: str) -> None:
    shell = start(numerics="reproducible", drafts=drafts)
    shell.until(lambda: shell.engine is not None)
    assert shell.engine is not None and shell.engine.executor.drafts.wanted == (drafts == "auto")


def test_a_drafting_model_is_loaded_beside_and_its_kv_is_claimed(
    start: Callable[..., Shell], folder: Path, tmp_path: Path
) -> None:
    """One that cannot draft is left out, and the replica says why."""
    claimed = {}
    for name, source in (("itself", folder), ("other", write_model(tmp_path / "other", "qwen3_next"))):
        shell = start(numerics="reproducible", drafts=Drafting(str(source)))
        shell.until(lambda shell=shell: shell.engine is not None)
        assert shell.engine is not None and shell.memory is not None
        claimed[name] = shell.memory.claimed_bytes
        assert shell.engine.executor.drafts.wanted
        assert (shell.engine.executor.drafts.model is None) == (name == "other")
        notes = list(shell.taken[-1][0].notes)
        assert not notes if name == "itself" else "some of its layers are not plain attention" in notes[0]
    assert claimed["itself"] > claimed["other"]
