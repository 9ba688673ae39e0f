"""Transcripts and speech by models of speech: what clients see, what the model gets, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import wave
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import pytest_asyncio

from satchel.actors.protocol.speech_messages import (
    SPEAK,
    TRANSCRIBE,
    TRANSLATE,
    SpeechPiece,
    SpeechRequest,
    Transcript,
    TranscriptSegment,
    TranscriptWord,
)
from satchel.actors.replica.audio.listening import ListeningModel
from satchel.actors.replica.audio.speaking import SpeakingModel
from satchel.api.app import create_app
from satchel.api.pipeline.speech import MadeSpeech
from satchel.api.protocols.openai.speech_answers import subtitles, transcript_verbose
from satchel.cluster.config.config import Config
from tests.worlds.api.fake_backend import tiny_backend
from tests.worlds.api.served_models import served_model
from tests.worlds.api.speech_backend import SpeechBackend
from tests.worlds.models.speech_families import noise, write_speech_model
from tests.worlds.sounds import wav

QUEUE_MAX = 2
EAR, MOUTH = "ear", "mouth"
HEARD, LONG = ((16_000 * noise(seconds)).astype("<i2") for seconds in (3, 31))
FILE = wav(HEARD)
SAID = "Hello there.\nAnd you."
# One temperature: an improbable text would be decoded again at five more.
HOW = {"temperature": 0.5, "seed": 1}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ListeningModel | SpeakingModel]:
    root = tmp_path_factory.mktemp("speech")
    return {
        EAR: ListeningModel.load(write_speech_model(root / "a", "whisper"), EAR),
        MOUTH: SpeakingModel.load(write_speech_model(root / "b", "soprano"), MOUTH),
    }


@pytest_asyncio.fixture
async def backend(
    folders: dict[str, Path], text: Any, models: dict[str, ListeningModel | SpeakingModel]
) -> AsyncIterator[SpeechBackend]:
    backend = SpeechBackend(text, tiny_backend(folders, text).served, models, QUEUE_MAX)
    yield backend
    await asyncio.to_thread(backend.close)


@pytest_asyncio.fixture
async def http(backend: SpeechBackend, config: Config) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(backend, config))
    async with httpx.AsyncClient(transport=transport, base_url="http://satchel", timeout=60) as client:
        yield client


@pytest.fixture
def client(http: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url="http://satchel/v1", api_key="none", http_client=http, max_retries=0)


def own(models: dict[str, Any], heard: np.ndarray = HEARD, **fields: Any) -> Transcript:
    """The transcript by the model itself."""
    samples = (heard.astype(np.float32) / 32_768).astype("<f4").tobytes()
    request = SpeechRequest("", EAR, TRANSCRIBE, samples, **{**HOW, **fields})
    return models[EAR].transcribe(request, lambda windows: None, lambda piece: None)


@pytest.fixture(scope="module")
def spoken(models: dict[str, Any]) -> bytes:
    """The audio by the model itself."""
    pieces: list[SpeechPiece] = []
    models[MOUTH].speak(SpeechRequest("", MOUTH, SPEAK, text=SAID, seed=7), lambda done: None, pieces.append)
    return b"".join(piece.audio for piece in pieces)


async def sent(http: httpx.AsyncClient, path: str = "transcriptions", /, file: bytes = FILE, **fields: Any) -> Any:
    return await http.post(f"/v1/audio/{path}", data=fields, files={"file": ("speech.wav", file, "audio/wav")})


async def test_a_transcript(client: openai.AsyncOpenAI, backend: SpeechBackend, models: dict[str, Any]):
    how: dict[str, Any] = {"language": "de", "prompt": "Ada", "temperature": 0.5, "extra_body": {"seed": 1}}
    made = await client.audio.transcriptions.create(model=EAR, file=("speech.wav", FILE), **how)
    assert made.text == own(models, language="de", text="Ada").text.strip() != ""
    usage: Any = made.usage
    assert (usage.type, usage.seconds) == ("duration", 3.0)
    (request,) = backend.asked
    assert (request.task, request.rate, request.tokens) == (TRANSCRIBE, 16_000, 3 * 50 + 3)


async def test_a_transcript_with_times(client: openai.AsyncOpenAI, models: dict[str, Any]):
    made = await client.audio.transcriptions.create(
        model=EAR, file=("speech.wav", FILE), response_format="verbose_json", extra_body=HOW
    )
    reference = own(models)
    assert (made.text, made.language, made.duration) == (reference.text.strip(), reference.language, 3.0)
    assert made.segments and made.words is None
    assert [(each.start, each.end, each.text, each.tokens) for each in made.segments] == [
        (each.start, each.end, each.text, each.tokens) for each in reference.segments
    ]


def test_words_and_segments_come_as_they_are_asked_for():
    words = [TranscriptWord(" Ada", 0.5, 1.0), TranscriptWord(" writes", 1.0, 1.5)]
    transcript = Transcript(" Ada writes", "en", [TranscriptSegment(0.5, 1.5, " Ada writes", words=words)])
    made = MadeSpeech(served_model(), transcript, 2.0, (100, 2), "a", "b", "c")
    both = transcript_verbose(made, "transcribe", ["word", "segment"])
    assert both["words"] == [
        {"word": "Ada", "start": 0.5, "end": 1.0},
        {"word": "writes", "start": 1.0, "end": 1.5},
    ]
    assert [(each["id"], each["text"]) for each in both["segments"]] == [(0, " Ada writes")]
    assert "segments" not in transcript_verbose(made, "transcribe", ["word"])
    assert "words" not in transcript_verbose(made, "transcribe", [])


@pytest.mark.slow
async def test_words_are_asked_of_the_model(http: httpx.AsyncClient, backend: SpeechBackend):
    fields = {"response_format": "verbose_json", "timestamp_granularities[]": ["word", "segment"]}
    answer = await sent(http, file=wav(HEARD[:8000]), model=EAR, **fields, **HOW)
    assert {"words", "segments"} < {*answer.json()} and backend.asked[0].words


async def test_subtitles(http: httpx.AsyncClient, models: dict[str, Any]):
    shown = [" ".join(each.text.split()) for each in own(models).segments if each.text.strip()]
    srt = await sent(http, model=EAR, response_format="srt", **HOW)
    assert srt.headers["content-type"].startswith("text/plain")
    assert [block.split("\n")[2] for block in srt.text.strip().split("\n\n")] == shown != []


def test_subtitles_have_clocks_and_no_blank_lines():
    spoken = [(0.0, 1.5, " Hello\n\nthere"), (2.0, 2.0, " "), (3599.9996, 3661.25, "a --> b")]
    made = MadeSpeech(
        served_model(), Transcript("", "", [TranscriptSegment(*each) for each in spoken]), 1.0, (1, 1), "", "", ""
    )
    assert subtitles(made, "srt") == (
        "1\n00:00:00,000 --> 00:00:01,500\nHello there\n\n2\n01:00:00,000 --> 01:01:01,250\na -> b\n"
    )
    assert subtitles(made, "vtt") == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nHello there\n\n01:00:00.000 --> 01:01:01.250\na -> b\n"
    )


@pytest.mark.slow
async def test_plain_text_and_other_subtitles(http: httpx.AsyncClient, models: dict[str, Any]):
    plain = await sent(http, model=EAR, response_format="text", **HOW)
    assert plain.text == f"{own(models).text.strip()}\n"
    vtt = await sent(http, model=EAR, response_format="vtt", **HOW)
    assert vtt.text.startswith("WEBVTT\n\n00:00:0")


async def test_a_streamed_transcript_without_a_model_is_the_first_that_listens(
    client: openai.AsyncOpenAI, backend: SpeechBackend, models: dict[str, Any]
):
    how: dict[str, Any] = {"model": "", "file": ("speech.wav", wav(LONG)), "stream": True, "extra_body": HOW}
    events: list[Any] = [event async for event in await client.audio.transcriptions.create(**how)]
    assert [event.type for event in events] == ["transcript.text.delta"] * 2 + ["transcript.text.done"]
    text = own(models, LONG).text.strip()
    assert "".join(event.delta for event in events[:-1]) == events[-1].text == text
    assert events[-1].usage.input_tokens == backend.asked[0].tokens and events[-1].usage.output_tokens > 0


async def test_a_translation(client: openai.AsyncOpenAI, backend: SpeechBackend):
    made: Any = await client.audio.translations.create(model=EAR, file=("a.wav", FILE), temperature=0.5)
    assert backend.asked[0].task == TRANSLATE and made.text


async def test_speech(client: openai.AsyncOpenAI, backend: SpeechBackend, spoken: bytes):
    how: dict[str, Any] = {"model": MOUTH, "voice": "alloy", "input": SAID, "extra_body": {"seed": 7}}
    made = await client.audio.speech.create(**how, response_format="wav")
    assert made.response.headers["content-type"] == "audio/wav"
    with wave.open(io.BytesIO(made.content)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (32_000, 1, 2)
        assert file.readframes(file.getnframes()) == spoken
    pcm = await client.audio.speech.create(**how, response_format="pcm")
    assert pcm.content == spoken
    assert pcm.response.headers["content-type"] == "audio/pcm;rate=32000;channels=1"
    assert backend.asked[0].tokens == len(SAID)


async def test_speech_comes_piece_by_piece(client: openai.AsyncOpenAI, http: httpx.AsyncClient, spoken: bytes):
    how: dict[str, Any] = {"model": MOUTH, "voice": "alloy", "input": SAID}
    streamed = client.audio.speech.with_streaming_response.create(
        **how, response_format="pcm", extra_body={"seed": 7, "stream_format": "audio"}
    )
    async with streamed as answer:
        assert b"".join([piece async for piece in answer.iter_bytes()]) == spoken
    events = await http.post("/v1/audio/speech", json={**how, "stream_format": "sse", "seed": 7})
    assert events.headers["content-type"].startswith("text/event-stream")
    read = [json.loads(line.removeprefix("data: ")) for line in events.text.split("\n\n") if line]
    assert [each["type"] for each in read] == ["speech.audio.delta"] * 2 + ["speech.audio.done"]
    audio = b"".join(base64.b64decode(each["audio"]) for each in read[:-1])
    assert audio[44:] == spoken and audio[40:44] == b"\xff" * 4
    usage = read[-1]["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] > len(SAID)


@pytest.mark.parametrize(
    ("path", "fields", "param", "why"),
    [
        ("transcriptions", {"response_format": "diarized_json"}, "response_format", "tells speakers apart"),
        ("transcriptions", {"response_format": "srt", "stream": "true"}, "response_format", "is not streamed"),
        ("transcriptions", {"timestamp_granularities[]": "word"}, "timestamp_granularities", "verbose_json"),
        ("transcriptions", {"timestamp_granularities[]": "hour"}, "timestamp_granularities[0]", "Input should be"),
        ("transcriptions", {"language": "xx"}, "language", "knows no 'xx'"),
        ("transcriptions", {"include[]": "logprobs"}, "include", "not supported"),
        ("transcriptions", {"model": MOUTH}, "model", "speaks, and makes no transcripts"),
        ("translations", {"stream": "true"}, "stream", "translations do not have it"),
    ],
)
async def test_what_is_wrong_in_a_form_is_named(
    http: httpx.AsyncClient, backend: SpeechBackend, path: str, fields: dict[str, Any], param: str, why: str
):
    answer = await sent(http, path, **{"model": EAR, **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error"), error
    assert why in error["message"] and not backend.asked


async def test_files_without_audio_are_refused(http: httpx.AsyncClient, backend: SpeechBackend):
    for file in (b"hello", b"", b"RIFF\xff\xff\xff\xffWAVEfmt "):
        answer = await sent(http, file=file, model=EAR)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "file"), answer.text
    assert not backend.asked


@pytest.mark.parametrize(
    ("fields", "param", "why"),
    [
        ({"input": " "}, "input", "must not be empty"),
        ({"input": "a" * 4097}, "input", "at most 4096"),
        ({"response_format": "mp3"}, "response_format", "nothing installed here writes mp3"),
        ({"response_format": "midi"}, "response_format", "Input should be"),
        ({"voice": "../../secret.safetensors"}, "voice", "match pattern"),
        ({"speed": 1.5}, "speed", "takes none"),
        ({"speed": 5}, "speed", "less than or equal to 4"),
        ({"instructions": "softly"}, "instructions", "takes none"),
        ({"model": EAR}, "model", "writes down speech, and makes no audio"),
    ],
)
async def test_what_is_wrong_in_a_text_is_named(
    http: httpx.AsyncClient, backend: SpeechBackend, fields: dict[str, Any], param: str, why: str
):
    answer = await http.post("/v1/audio/speech", json={"model": MOUTH, "input": "Hello", **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert why in error["message"] and not backend.asked


async def test_routes_of_text_name_the_right_ones(client: openai.AsyncOpenAI):
    for name, route in ((EAR, "/v1/audio/transcriptions"), (MOUTH, "/v1/audio/speech")):
        with pytest.raises(openai.BadRequestError, match=route):
            await client.chat.completions.create(model=name, messages=[{"role": "user", "content": "Hello"}])
    # The default is a model of text.
    listed = [each.id for each in (await client.models.list()).data]
    assert {EAR, MOUTH} < {*listed}


async def test_the_list_of_models_says_what_they_do(http: httpx.AsyncClient):
    listed = {each["id"]: each for each in (await http.get("/v1/models")).json()["data"]}
    ear, mouth = listed[EAR]["speech"], listed[MOUTH]["speech"]
    assert (ear["family"], ear["transcribes"], ear["times"]) == ("whisper", True, ["segments", "words"])
    assert (mouth["family"], mouth["speaks"], mouth["sample_rate"]) == ("soprano", True, 32_000)
    assert listed[EAR]["architecture"] == {"input_modalities": ["audio"], "output_modalities": ["text"]}
    assert listed[MOUTH]["architecture"] == {"input_modalities": ["text"], "output_modalities": ["audio"]}


async def test_a_full_queue_is_a_503(http: httpx.AsyncClient, backend: SpeechBackend):
    body = {"model": MOUTH, "input": "\n".join(["Hello there."] * 300)}
    sending = [asyncio.create_task(http.post("/v1/audio/speech", json=body)) for _ in range(QUEUE_MAX + 3)]
    done, _ = await asyncio.wait(sending, return_when=asyncio.FIRST_COMPLETED)
    refused = done.pop().result()
    assert refused.status_code == 503 and "retry-after" in refused.headers, refused.text
    for each in sending:
        each.cancel()
    await asyncio.wait(sending)
    # Those that hung up end between two segments.
    await backend.idle()
    assert backend.engines[MOUTH].counters.speeches == 0
