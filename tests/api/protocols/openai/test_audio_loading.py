"""Audio and models that are loaded for a request: streams begin before, deadlines hold, and the event loop is free."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from satchel.actors.protocol.speech_messages import (
    TRANSLATE,
    SpeechInfo,
    SpeechPiece,
    SpeechRequest,
    SpeechUpdate,
    Transcript,
)
from satchel.api.app import create_app
from satchel.api.pipeline.speech import MadeSpeech
from satchel.api.protocols.openai import speech_answers
from satchel.api.protocols.openai.audio_bodies import SpeechForm
from satchel.api.protocols.openai.audio_routes import AudioRoutes
from satchel.api.requests.backend import ListedModel, ServedModel, SpeechAnswer
from satchel.api.requests.loading import Loading
from satchel.api.text.model import TextModel
from satchel.cluster.config.config import Config
from satchel.cluster.errors import ModelLoadError
from tests.worlds.api.fake_backend import FakeBackend
from tests.worlds.api.served_models import served_model
from tests.worlds.sounds import tone, wav

FILE = wav(tone(440, 0.1))
CHAT, ENGLISH, EAR, MOUTH = "satchel/tiny", "english", "ear", "mouth"
SPEECH = {
    ENGLISH: SpeechInfo("whisper", listens=True),
    EAR: SpeechInfo("whisper", listens=True, translates=True),
    MOUTH: SpeechInfo("soprano", speaks=True),
}


class Backend(FakeBackend):
    """Models of speech that answer at once. `cold` makes all models come and go; they are loaded when `ready` is
    set."""

    def __init__(self, text: TextModel, folder: Path) -> None:
        speech = [served_model(name=name, folder=f"/{name}", speech=info) for name, info in SPEECH.items()]
        super().__init__(text, [served_model(folder=folder), *speech])
        self.spoke: list[SpeechRequest] = []
        self.ready, self.all = asyncio.Event(), list(self.served)
        self.error: ModelLoadError | None = None

    def cold(self, sources: dict[str, str]) -> None:
        self.served.clear()
        for model in self.all:
            name = model.info.name
            self.entries[name] = ListedModel(name, (), True, False, sources.get(name, "nobody/knows"))
        self.loader = self._load

    async def _load(self, name: str, loading: Loading) -> None:
        loading.progress = f"loading {name}"
        try:
            await self.ready.wait()
        finally:
            loading.progress = ""
        if self.error is not None:
            raise self.error
        self.served[:] = self.all

    async def do_speech(
        self, model: ServedModel, request: SpeechRequest, told: Callable[[SpeechPiece], None]
    ) -> SpeechAnswer:
        self.spoke.append(request)
        told(SpeechPiece(audio=b"ab") if request.text else SpeechPiece("Hello"))
        return SpeechAnswer(SpeechUpdate(1, transcript=Transcript("Hello"), done=True), "a", "b", "c")


@pytest.fixture
def backend(text: TextModel, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Backend:
    for name in ("HEADERS_WAIT_S", "PROGRESS_S", "PING_S"):
        monkeypatch.setattr(f"satchel.api.http.event_stream.{name}", 0.02)
    return Backend(text, folders["none"])


@pytest.fixture
async def http(backend: Backend, config: Config) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(backend, config))
    async with httpx.AsyncClient(transport=transport, base_url="http://satchel", timeout=20) as client:
        yield client


def asked(name: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    """Returns the path of a request, and how it is sent."""
    if name == MOUTH:
        return "/v1/audio/speech", {"json": {"model": name, "input": "Hello", **fields}}
    return "/v1/audio/transcriptions", {"data": {"model": name, **fields}, "files": {"file": ("a.wav", FILE)}}


@pytest.mark.parametrize("name", [CHAT, EAR, MOUTH])
async def test_a_stream_begins_before_its_model_is_loaded(
    server: str, backend: Backend, folders: dict[str, Path], tmp_path: Path, name: str
):
    (tmp_path / "config.json").write_text('{"model_type": "whisper"}')
    backend.cold({CHAT: str(folders["none"]), EAR: str(tmp_path)})
    backend.error = ModelLoadError("its weights are gone") if name == CHAT else None
    path, how = asked(name, **({"stream_format": "sse"} if name == MOUTH else {"stream": "true"}))
    async with (
        asyncio.timeout(10),
        httpx.AsyncClient(base_url=server, timeout=20) as client,
        client.stream("POST", path, **how) as answer,
    ):
        pieces = answer.aiter_bytes()
        before = await anext(pieces)
        backend.ready.set()
        after = b"".join([piece async for piece in pieces])
    assert answer.status_code == 200 and before.startswith(b":") and b"data:" not in before
    last = json.loads(after.split(b"data: ")[-1])
    assert last["error"]["message"] == "its weights are gone" if name == CHAT else last["type"].endswith(".done")


@pytest.mark.parametrize("name", [CHAT, MOUTH])
async def test_a_request_waits_for_its_model_no_longer_than_it_says(
    http: httpx.AsyncClient, backend: Backend, name: str
):
    backend.cold({})
    path, how = asked(name, timeout_s=0.2)
    answer = await http.post(path, **how)
    assert answer.status_code == 504 and "within 0.2 s" in answer.json()["error"]["message"], answer.text


async def test_a_translation_without_a_model_is_of_one_that_translates(http: httpx.AsyncClient, backend: Backend):
    _, how = asked("")
    assert (await http.post("/v1/audio/translations", **how)).json()["text"] == "Hello"
    assert (await http.post("/v1/audio/transcriptions", **how)).json()["text"] == "Hello"
    assert [(each.model, each.task == TRANSLATE) for each in backend.spoke] == [(EAR, True), (ENGLISH, False)]


async def test_files_and_events_are_encoded_in_other_threads(http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch):
    threads: list[int] = []

    def noted(whole: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            threads.append(threading.get_ident())
            return whole(*given, **named)

        return call

    monkeypatch.setattr(SpeechForm, "chat", noted(SpeechForm.chat))
    monkeypatch.setattr(speech_answers.base64, "b64encode", noted(speech_answers.base64.b64encode))
    for name, fields in ((CHAT, {}), (MOUTH, {"stream_format": "sse"})):
        threads.clear()
        path, how = asked(name, **fields)
        await http.post(path, **how)
        assert threads and threading.get_ident() not in threads


async def test_an_upload_is_gone_once_it_is_decoded():
    gone: list[bool] = []

    class File(bytes):
        def __del__(self) -> None:
            gone.append(True)

    class Maker:
        async def first(self, caller: Any, task: str) -> str:
            return EAR

        async def make(self, work: Any) -> MadeSpeech:
            assert not gone
            work.file.clear()
            assert gone == [True]
            return MadeSpeech(served_model(), Transcript("Hello"), 1.0, (1, 1), "", "", "")

    async def read_with(request: Any, parse: Any) -> Any:
        return SpeechForm(), [File(b"hello")]

    answering: Any = SimpleNamespace(
        bodies=SimpleNamespace(read_with=read_with),
        complete=lambda request, work, any_model: work,
        placed=lambda work, made: {},
    )
    request: Any = SimpleNamespace(headers={}, receive=asyncio.Event().wait, state=SimpleNamespace(caller=None))
    maker: Any = Maker()
    assert (await AudioRoutes(answering, maker).transcriptions(request)).status_code == 200
