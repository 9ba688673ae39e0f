"""The engine of speech: requests come, go and end between two steps, and an error ends one of them alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from satchel.actors.model_files.identity.model_identity import ModelIdentity
from satchel.actors.protocol.speech_messages import (
    SPEAK,
    TRANSCRIBE,
    SpeechInfo,
    SpeechRequest,
    SpeechUpdate,
    Transcript,
)
from satchel.actors.replica.audio.engine import SpeechEngine
from satchel.actors.replica.audio.listening import ListeningModel
from satchel.actors.replica.audio.speaking import SpeakingModel
from satchel.cluster.errors import SatchelError
from tests.worlds.models.speech_families import noise

HEARD = SpeechRequest("", "m", TRANSCRIBE, noise(31).tobytes(), seed=1)
SAID = SpeechRequest("", "m", SPEAK, text="\n".join(["Hello there."] * 100))


class World:
    """An engine with a real model. `at_piece` is called on its thread with the name of a request that has news."""

    def __init__(self, model: Any, waiting_max: int = 4) -> None:
        self.updates: dict[str, list[SpeechUpdate]] = {}
        self.ended: dict[str, Future[SpeechUpdate]] = {}
        self.at_piece: Callable[[str], None] = lambda name: None
        self.engine = SpeechEngine(model, ModelIdentity({}, {}), waiting_max, 2**33, self._take)
        self.thread = threading.Thread(target=self.engine.run, daemon=True)
        self.thread.start()

    def _take(self, request_id: str, update: SpeechUpdate) -> None:
        self.updates.setdefault(request_id, []).append(update)
        if update.is_last:
            self.ended[request_id].set_result(update)
        else:
            self.at_piece(request_id)

    def submit(self, request: SpeechRequest, name: str, **fields: Any) -> Future[SatchelError | None]:
        answer: Future[SatchelError | None] = Future()
        self.ended[name] = Future()
        self.engine.submit(replace(request, request_id=name, **fields), answer.set_result)
        return answer

    def end_of(self, name: str) -> SpeechUpdate:
        return self.ended[name].result(60)

    def close(self) -> None:
        self.engine.end_all()
        self.engine.stop()
        self.thread.join(60)
        assert not self.thread.is_alive()


@pytest.fixture
def ear(whisper: ListeningModel) -> Iterator[World]:
    world = World(whisper)
    yield world
    world.close()


@pytest.fixture
def mouth(soprano: SpeakingModel) -> Iterator[World]:
    world = World(soprano)
    yield world
    world.close()


def kind(update: SpeechUpdate) -> str | None:
    return None if update.error is None else update.error["kind"]


def test_a_transcript_comes_in_pieces_and_then_whole(ear: World):
    assert ear.submit(HEARD, "a").result(20) is None
    last = ear.end_of("a")
    assert last.done and last.transcript is not None
    pieces = [piece.text for update in ear.updates["a"] for piece in update.partial]
    assert "".join(pieces) == last.transcript.text
    engine = ear.engine
    assert (engine.counters.transcripts, engine.counters.transcribed_s) == (1, 31.0)
    assert engine.pace.tokens_per_s > 0 and engine.queue.request_ids == []
    assert engine.described["layers"] == "writes down speech (whisper)"


def test_a_hang_up_ends_a_transcript_between_two_windows_and_the_next_begins(ear: World):
    # The first piece comes when the first window is done.
    ear.at_piece = lambda name: ear.engine.abort(("a", "unknown")) if name == "a" else None
    ear.submit(HEARD, "a")
    assert kind(ear.end_of("a")) == "RequestAborted"
    assert len([update for update in ear.updates["a"] if update.partial]) == 1
    ear.submit(HEARD, "b", samples=noise(1).tobytes())
    assert ear.end_of("b").done and ear.engine.counters.transcripts == 1


def test_a_hang_up_ends_speech_between_two_segments(mouth: World):
    mouth.at_piece = lambda name: mouth.engine.abort(("a",))
    mouth.submit(SAID, "a")
    assert kind(mouth.end_of("a")) == "RequestAborted"
    assert len([update for update in mouth.updates["a"] if update.partial]) == 1
    assert mouth.engine.counters.speeches == 0


def test_speech_comes_segment_by_segment(mouth: World):
    mouth.submit(SAID, "a", text="Hello.\nAnd you.")
    last = mouth.end_of("a")
    audio = [piece.audio for update in mouth.updates["a"] for piece in update.partial]
    assert len(audio) == 2 and last.seconds == sum(map(len, audio)) / 2 / 32_000
    assert mouth.engine.totals["spoken_s_total"] == last.seconds


def test_a_deadline_ends_a_transcript_within_its_windows(ear: World):
    ear.submit(HEARD, "a", samples=noise(590).tobytes(), deadline_s=0.3)
    assert kind(ear.end_of("a")) == "DeadlineExceeded"
    assert ear.engine.counters.transcripts == 0


def test_an_error_ends_that_request_alone(ear: World, monkeypatch: pytest.MonkeyPatch):
    whole = ear.engine.model

    def fails(request: SpeechRequest) -> Any:
        if request.request_id == "a":
            raise KeyError("what it lacks")
        return type(whole)._generate(whole, request)  # type: ignore[arg-type]

    monkeypatch.setattr(whole, "_generate", fails)
    ear.submit(HEARD, "a")
    ear.submit(HEARD, "b", samples=noise(1).tobytes())
    assert kind(ear.end_of("a")) == "GenerationFailed"
    assert ear.end_of("b").done


def waits(event: threading.Event) -> None:
    assert event.wait(20)


class OneStep(ListeningModel):
    """Writes a whole file down in one step, as families other than Whisper do."""

    def __init__(self) -> None:
        self.in_windows, self.info = False, SpeechInfo("fake", listens=True)
        self.at_step: Callable[[], None] = lambda: None

    def transcribe(self, request: SpeechRequest, paused: Callable[[int], None], told: Any) -> Transcript:
        self.at_step()
        paused(0)
        return Transcript("Hello")


class Lines(SpeakingModel):
    """Speaks a text in some number of segments."""

    def __init__(self, segments: int) -> None:
        self.info, self.segments = SpeechInfo("fake", speaks=True), segments

    def speak(self, request: SpeechRequest, paused: Callable[[int], None], told: Any) -> float:
        for done in range(self.segments):
            paused(done + 1)
        return 1.0


@pytest.fixture
def worlds() -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(model: Any, waiting_max: int = 8) -> World:
        made.append(World(model, waiting_max))
        return made[-1]

    yield make
    for world in made:
        world.close()


def charges(world: World) -> dict[str, int]:
    """Returns what each request is charged, filled while the engine works."""
    charged: dict[str, int] = {}
    shares = world.engine.queue._shares
    charge = shares.charge

    def noted(job: Any, tokens: int) -> None:
        charged[job.request_id] = charged.get(job.request_id, 0) + tokens
        charge(job, tokens)

    shares.charge = noted  # type: ignore[method-assign]
    return charged


def test_tenants_take_turns_though_a_file_is_one_step(worlds: Callable[..., World]):
    world = worlds(OneStep())
    holds = threading.Event()
    world.engine.call(lambda: waits(holds))
    short = noise(3).tobytes()
    for name in [*(f"A{number}" for number in range(6)), "B0"]:
        world.submit(HEARD, name, samples=short, tenant=name[0], flow=f"{name[0]}/")
    holds.set()
    for name in world.ended:
        assert world.end_of(name).done
    assert list(world.updates) == ["A0", "B0", "A1", "A2", "A3", "A4", "A5"]
    assert world.engine.pace.tokens_per_s > 0 and world.engine.pace.step_s is not None


def test_a_file_whose_client_hangs_up_is_charged(worlds: Callable[..., World]):
    model = OneStep()
    world = worlds(model)
    charged = charges(world)
    model.at_step = lambda: world.engine.abort(("a",))
    world.submit(HEARD, "a")
    assert kind(world.end_of("a")) == "RequestAborted"
    assert charged == {"a": HEARD.tokens}


@pytest.mark.parametrize("segments", [1, 8, 20])
def test_a_text_costs_its_length_whatever_its_segments(worlds: Callable[..., World], segments: int):
    world = worlds(Lines(segments))
    charged = charges(world)
    text = "\n \n".join(["Hello there."] * 8)
    request = replace(SAID, text=text)
    assert world.engine.cost(request) == (request.tokens // 8, 8)
    world.submit(request, "a")
    assert world.end_of("a").done
    assert request.tokens - 8 < charged["a"] <= request.tokens
    assert world.engine.pace.tokens_per_s > 0


def test_a_full_queue_refuses(ear: World):
    holds = threading.Event()

    ear.engine.call(lambda: waits(holds))
    answers = [ear.submit(HEARD, f"w{number}", tenant=str(number), flow=str(number)) for number in range(6)]
    holds.set()
    kinds = [type(answer.result(20)).__name__ for answer in answers]
    assert kinds == ["NoneType"] * 4 + ["QueueFull"] * 2


def test_what_the_model_does_not_do_is_refused_by_name(ear: World, mouth: World):
    for world, request in ((ear, SAID), (mouth, HEARD)):
        refusal: Any = world.submit(request, "a").result(20)
        assert (refusal.status, refusal.param) == (400, "model")


def test_audio_that_would_not_fit_into_memory_is_refused(ear: World):
    ear.engine.pace.note_job(50, 2**33)
    refusal: Any = ear.submit(HEARD, "a").result(20)
    assert refusal.param == "file" and "MiB of memory" in refusal.message


def test_longer_audio_is_taken_once_half_as_much_was_written_down(worlds: Callable[..., World]):
    world = worlds(OneStep())

    def accepted(seconds: int) -> str:
        name = f"of {seconds} s"
        refusal = world.submit(HEARD, name, samples=bytes(64_000 * seconds)).result(20)
        if refusal is None:
            assert world.end_of(name).done
            return ""
        assert (refusal.status, refusal.param) == (400, "file")
        return refusal.message

    assert "at most 60 s are taken" in accepted(61)
    assert not accepted(60)
    assert "at most 120 s are taken" in accepted(121)
    assert not accepted(120)
    assert not accepted(200)


def test_memory_is_predicted_by_what_it_grows_with(worlds: Callable[..., World], ear: World):
    def predicted(engine: SpeechEngine, known_s: int, seconds: int) -> int:
        size = {each: engine.size(replace(HEARD, samples=bytes(64_000 * each))) for each in (known_s, seconds)}
        engine.pace.note_job(size[known_s], 2**20)
        return engine.pace.job_bytes(size[seconds]) // 2**10

    # Attention grows with the square of the length. Of windows there is one at a time.
    assert predicted(worlds(OneStep()).engine, 30, 60) == 4 * 1024
    assert 1.0 <= predicted(ear.engine, 30, 60) / 1024 < 1.2
    assert 2.0 < predicted(ear.engine, 30, 600) / 1024 < 4.0


def test_no_caller_fills_the_room_of_files_that_wait(worlds: Callable[..., World]):
    world = worlds(OneStep(), 100)
    file = bytes(64_000 * 5)
    world.engine.given_bytes_max = 10 * len(file)
    holds = threading.Event()
    world.engine.call(lambda: waits(holds))

    def submitted(flow: str) -> list[Future[SatchelError | None]]:
        return [
            world.submit(HEARD, f"{flow}{number}", samples=file, tenant=flow[0], flow=flow, deadline_s=60.0)
            for number in range(10)
        ]

    answers = {flow: submitted(flow) for flow in ("A/x", "A/y", "B/x")}
    holds.set()
    refusals = {flow: [answer.result(20) for answer in each] for flow, each in answers.items()}
    assert {flow: sum(each is None for each in of) for flow, of in refusals.items()} == {"A/x": 7, "A/y": 2, "B/x": 1}
    reasons = [each.message for each in refusals["A/x"] if each is not None]
    assert len(reasons) == 3 and all("reserved for other callers" in each for each in reasons)
