"""Audio in requests: what the replica gets, which audio counts as the same, and what is refused."""

from __future__ import annotations

import struct
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from satchel.actors.model_files.media.audio_processor import AudioProcessor
from satchel.actors.model_files.media.media_layouts import MediaLayout
from satchel.actors.protocol.media_ids import audio_hash, is_of_audio, is_of_video, media_tokens_in
from satchel.actors.protocol.replica_messages import MediaSpan
from satchel.api.app import create_app
from satchel.api.media.audio import AudioLimits, _converted, decode_audio, decoded_rate, format_of, longest
from satchel.api.media.fetch import PictureLoader
from satchel.api.media.pixels import Undecodable
from satchel.api.media.prompt import Medium, referred, with_references
from satchel.api.media.sources import Audio, AudioSource
from satchel.api.media.video import Deadline
from satchel.api.requests.requests import ChatRequest, Past, prepare_chat
from satchel.api.requests.unsupported_media import UNREAD, WORDS
from satchel.api.text.model import TextModel, load_text_model
from satchel.cluster.config.config import Config, Media, parse_config
from satchel.cluster.errors import ConfigError, InvalidRequest
from tests.worlds.api.fake_backend import FakeBackend
from tests.worlds.api.remembering import Remembering
from tests.worlds.api.served_models import served_model
from tests.worlds.models.vision_families import write_model
from tests.worlds.pictures import red_circle
from tests.worlds.sounds import audio_url, input_audio, silent_flac, tone, wav
from tests.zoo.vision_types import write

LIMITS = AudioLimits(seconds_max=20.0, timeout_s=30.0)
A = tone(440, 1.0)
QUESTION = {"type": "text", "text": "What is it?"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("omni") / "qwen3_omni_moe", "qwen3_omni_moe")


@pytest.fixture(scope="module")
def seeing_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("vision") / "qwen3_vl", "qwen3_vl")


@pytest.fixture(scope="module")
def text_model(folder: Path) -> TextModel:
    return load_text_model(folder)


@pytest.fixture
def backend(folder: Path, seeing_folder: Path, text_model: TextModel, folders: dict[str, Path]) -> FakeBackend:
    size = {"context_tokens": 4000, "vocabulary_size": 4000}
    served = [
        served_model(folder=folder, audio=True, **size),
        served_model(name="seeing", folder=seeing_folder, **size),
        served_model(name="failed", folder=folder, no_audio="audio fails", **size),
        served_model(name="text", folder=folders["none"], vocabulary_size=1000),
    ]
    return FakeBackend(text_model, served)


@pytest.fixture
async def client(backend: FakeBackend, config: Config) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(backend, config))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


async def ask(client: httpx.AsyncClient, *content: Any, **fields: Any) -> httpx.Response:
    return await talk(client, {"role": "user", "content": [*content]}, **fields)


async def talk(client: httpx.AsyncClient, *messages: Any, **fields: Any) -> httpx.Response:
    return await client.post("/v1/chat/completions", json={"messages": [*messages], **fields})


def sent(backend: FakeBackend) -> tuple[list[int], list[MediaSpan]]:
    """Returns the last prompt and its media."""
    return backend.requests[-1]["prompt"], list(backend.requests[-1]["media"])


def refused(answer: httpx.Response) -> str:
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["message"]


async def test_audio_has_tokens_in_the_prompt_and_its_samples_beside_it(
    client: httpx.AsyncClient, backend: FakeBackend, text_model: TextModel
) -> None:
    answer = await ask(client, {"type": "text", "text": "Listen: "}, input_audio(wav(A)), QUESTION)
    assert answer.status_code == 200, answer.text
    prompt, (media,) = sent(backend)
    samples = A.astype(np.float32) / 32768
    assert (media.audio_rate, media.video, media.grid, media.pixels) == (16_000, False, [], [samples.tobytes()])
    ids = media_tokens_in(prompt)
    assert len(ids) == len(set(ids)) == 13 and all(is_of_audio(token) and not is_of_video(token) for token in ids)
    assert media_tokens_in(prompt[media.start : media.start + len(media.tokens)]) == ids
    text = text_model.tokenizer.decode(text_model.plain(prompt))
    assert f"Listen: <|audio_start|>{'<|audio_pad|>' * 13}<|audio_end|>What is it?" in text


async def test_the_same_audio_is_the_same_however_it_is_sent(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    stereo = wav(np.stack([A, A], axis=1), channels=2)
    whole = {"type": "input_audio", "input_audio": {"data": audio_url(wav(A))["audio_url"]["url"], "format": "wav"}}
    parts = [
        input_audio(wav(A)),
        audio_url(wav(A)),
        whole,
        input_audio(stereo),
        {"type": "audio", "audio": audio_url(wav(A))["audio_url"]["url"]},
        input_audio(wav(A), form="mp3"),
    ]
    prompts = []
    for part in parts:
        assert (await ask(client, part, QUESTION)).status_code == 200
        prompts.append(sent(backend)[0])
    assert all(prompt == prompts[0] for prompt in prompts)
    assert (await ask(client, input_audio(wav(tone(550, 1.0))), QUESTION)).status_code == 200
    other = sent(backend)[0]
    assert len(other) == len(prompts[0]) and other != prompts[0]


async def test_responses_take_audio_too(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    assert (await ask(client, input_audio(wav(A)), QUESTION)).status_code == 200
    wanted = sent(backend)
    content = [input_audio(wav(A)), {"type": "input_text", "text": "What is it?"}]
    answer = await client.post("/v1/responses", json={"input": [{"role": "user", "content": content}]})
    assert answer.status_code == 200, answer.text
    assert sent(backend) == wanted


async def test_audio_and_pictures_go_together(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{_base64(red_circle())}"}}
    assert (await ask(client, picture, input_audio(wav(A)), QUESTION, picture)).status_code == 200
    assert [bool(one.audio_rate) for one in sent(backend)[1]] == [False, True, False]


async def test_other_rates_are_converted(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    for rate, near in ((8_000, 0.01), (44_100, 0.01), (96_000, 0.01), (192_000, 0.05)):
        assert (await ask(client, input_audio(wav(tone(440, 1.0, rate), rate)))).status_code == 200
        (media,) = sent(backend)[1]
        samples = np.frombuffer(media.pixels[0], "<f4")
        assert samples.size == 16_000
        middle = slice(2_000, 14_000)
        assert np.abs(samples[middle] - (A.astype(np.float32) / 32768)[middle]).max() < near


async def test_what_cannot_be_read_is_named(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    cases = [
        (input_audio(b"hello"), "is no audio that can be read; known are WAV, MP3, FLAC and Ogg Vorbis"),
        (input_audio(wav(A)[:-4000]), "is damaged or cut off"),
        (input_audio(wav(A)[:40]), "is damaged or cut off"),
        (input_audio(b"ID3" + bytes(500), "mp3"), "is damaged or cut off"),
        (input_audio(b"fLaC" + bytes(500), "flac"), "is damaged or cut off"),
        (input_audio(b"OggS" + bytes(24) + b"OpusHead" + bytes(99), "ogg"), "is Ogg Opus, which is not decoded here"),
        (input_audio(b"\0\0\0 ftypM4A " + bytes(99), "wav"), "is MPEG-4 (M4A), which is not decoded here"),
        (input_audio(wav(A[:0])), "has no samples"),
        (input_audio(wav(A[:40])), "audio of 0.0025 s is too short for the model's processor"),
        (input_audio(wav(A), "exe"), "is 'exe'; known are wav, mp3, flac, ogg"),
        ({"type": "input_audio", "input_audio": {"data": "AA=="}}, "format must be the name of a format"),
        ({"type": "input_audio"}, "must be an object with data and format"),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "input_audio.data must be base64"),
        ({"type": "input_audio", "input_audio": {"data": "!", "format": "wav"}}, "base64 is damaged"),
        ({"type": "audio_url", "audio_url": {"url": "ftp://x/a.wav"}}, "audio_url.url must be an http"),
        ({"type": "audio_url", "audio_url": {"url": "audio:" + 64 * "0" + "/9@9"}}, "audio_url.url must be an http"),
    ]
    for part, why in cases:
        message = refused(await ask(client, part, QUESTION))
        assert why in message and message.startswith("messages"), (message, why)
    assert not backend.requests


def test_an_hour_is_longer_than_the_limit() -> None:
    hour = wav(np.zeros(3600 * 4_000, np.int16), 4_000)
    with pytest.raises(Undecodable, match=r"is longer than 600 s \(media.audio_seconds_max\)"):
        decode_audio(hour, 16_000, AudioLimits(Media().audio_seconds_max, 30.0))


def test_a_length_that_is_not_known_is_read_to_the_end(tmp_path: Path) -> None:
    """A WAV that was written into a pipe says that it has no end."""
    file = bytearray(wav(A))
    file[4:8] = file[40:44] = struct.pack("<I", 0xFFFFFFFF)
    assert decode_audio(bytes(file), 16_000, LIMITS).count == A.size
    with pytest.raises(Undecodable, match=r"longer than 0\.5 s"):
        decode_audio(bytes(file), 16_000, AudioLimits(seconds_max=0.5, timeout_s=30.0))


def test_decoded_samples_are_mlx_vlms(tmp_path: Path) -> None:
    from mlx_vlm.utils import load_audio

    rng = np.random.default_rng(0)
    noise = rng.integers(-20_000, 20_000, (22_050, 2), dtype=np.int16)
    path = tmp_path / "noise.wav"
    path.write_bytes(wav(noise, 22_050, 2))
    ours = decode_audio(path.read_bytes(), 16_000, LIMITS)
    assert np.array_equal(np.frombuffer(ours.samples, "<f4"), load_audio(str(path), sr=16_000))
    assert ours.hash == audio_hash(16_000, ours.samples)


def test_long_audio_of_another_rate_is_converted_as_mlx_vlm_does_it() -> None:
    from mlx_audio.resample import resample_audio_array

    noise = np.random.default_rng(1).integers(-20_000, 20_000, round(44_100 * 3.3), dtype=np.int16)
    ours = decode_audio(wav(noise, 44_100), 16_000, LIMITS)
    wanted = resample_audio_array(noise.astype(np.float32) / 32768, 44_100, 16_000)
    assert np.array_equal(np.frombuffer(ours.samples, "<f4"), wanted)


def test_unusual_rates_are_decoded_to_usual_ones() -> None:
    assert [decoded_rate(rate) for rate in (8_000, 11_025, 44_100, 95_999, 384_000)] == [
        8_000,
        11_025,
        44_100,
        95_975,
        96_000,
    ]
    assert abs(decode_audio(wav(tone(440, 1.0, 15_999), 15_999), 16_000, LIMITS).count - 16_000) <= 2
    with pytest.raises(Undecodable, match="has 1 channels with 768000 samples a second"):
        decode_audio(wav(tone(440, 0.1, 768_000), 768_000), 16_000, LIMITS)


def test_conversion_has_a_time_limit() -> None:
    deadline = Deadline(0.0)
    with pytest.raises(Undecodable, match=r"takes longer than 0 s to decode \(media.timeout_s\)"):
        _converted(np.zeros(8_000, np.float32), 8_000, 16_000, deadline)


def test_flac_of_silence_is_decoded_though_it_is_small() -> None:
    """599.8 s in 33 kB."""
    limits = AudioLimits(seconds_max=600.0, timeout_s=30.0)
    file = silent_flac(2343)
    assert len(file) < 40_000 and longest(file, limits).samples == 2343 * 4096
    audio = decode_audio(file, 16_000, limits)
    assert audio.count == 2343 * 4096 and not any(audio.samples)


def test_flac_with_other_lengths_than_it_states() -> None:
    assert decode_audio(silent_flac(4, stated=0), 16_000, LIMITS).count == 4 * 4096, "it states none"
    for stated in (4096, 5 * 4096):
        with pytest.raises(Undecodable, match="is damaged or cut off"):
            decode_audio(silent_flac(4, stated=stated), 16_000, LIMITS)
    with pytest.raises(Undecodable, match=r"longer than 1 s"):
        decode_audio(silent_flac(4, stated=0), 16_000, AudioLimits(seconds_max=1.0, timeout_s=30.0))


def test_memory_is_reserved_for_what_a_file_may_have() -> None:
    limits = AudioLimits(seconds_max=10_000.0, timeout_s=30.0)
    assert longest(silent_flac(10), limits).bytes_at(16_000) == 2 * 4 * 40_960
    assert longest(silent_flac(10, stated=0), limits).seconds == 10_000
    file = wav(A)
    assert longest(file, limits).samples == 2 * len(file)
    ogg = b"OggS" + bytes(36) + struct.pack("<I", 8_000) + bytes(20) + b"OggS\0\4" + struct.pack("<Q", 80_000)
    assert (longest(ogg, limits).seconds, longest(ogg, limits).samples) == (10, 80_000)
    assert longest(b"hello", limits).bytes_at(16_000) == 0


async def test_audio_that_never_fits_is_refused_by_name(text_model: TextModel) -> None:
    assert text_model.pictures is not None and text_model.pictures.audio is not None
    loader = PictureLoader(Media(audio_seconds_max=10.0, held_bytes_max=2_000_000))
    sources = [
        AudioSource(name, audio_url(silent_flac(8, stated))["audio_url"]["url"])
        for name, stated in (("a", 0), ("b", None))
    ]
    with pytest.raises(InvalidRequest, match=r"^a may need \d+ bytes of memory, more than media\.held_bytes_max$"):
        await loader.load_audio(sources[0], text_model.pictures.audio)
    assert (await loader.load_audio(sources[1], text_model.pictures.audio)).count == 8 * 4096
    await loader.close()


def test_a_config_with_no_room_for_its_longest_audio_is_refused() -> None:
    model = {"name": "a", "source": "b"}
    with pytest.raises(ConfigError, match=r"media: .*audio_seconds_max of 90000 s needs a held_bytes_max of at least"):
        parse_config({"models": [model], "media": {"audio_seconds_max": 90_000}})


def test_mp3_is_decoded() -> None:
    """Ten frames of silence, one channel, 44100 samples a second, 128 kbit/s."""
    frames = (b"\xff\xfb\x90\xc4" + bytes(413)) * 10
    audio = decode_audio(frames, 44_100, LIMITS)
    assert audio.count == 10 * 1152 and not np.frombuffer(audio.samples, "<f4").any()


def test_formats_are_known_by_their_first_bytes() -> None:
    assert format_of(b"\xff\xfb\x90\x00") == "mp3" and format_of(b"\xff\xf1\x50\x80") == "aac"
    assert format_of(b"FORM\0\0\0\0AIFF") == "aiff" and format_of(b"") == ""


async def test_silence_is_audio(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    assert (await ask(client, input_audio(wav(np.zeros(16_000, np.int16))))).status_code == 200


def test_a_processor_that_drops_the_end_refuses_long_audio(text_model: TextModel) -> None:
    assert text_model.pictures is not None and text_model.pictures.audio is not None
    audio = text_model.pictures.audio
    extractor = audio._processor.feature_extractor
    usual = extractor.n_samples
    extractor.n_samples = 16_000
    try:
        fresh = AudioProcessor(
            audio._processor, audio.placeholder, frozenset({audio.token}), audio._added, audio._edges
        )
        assert len(fresh.layout(16_000).span.places) == 13
        with pytest.raises(ValueError, match="it drops the end"):
            fresh.layout(32_000)
    finally:
        extractor.n_samples = usual


def test_layouts_are_made_one_at_a_time_and_refusals_are_kept(
    text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert text_model.pictures is not None and text_model.pictures.audio is not None
    audio, running, made = text_model.pictures.audio, Lock(), list[int]()
    original = audio._layout

    def slow(samples: int) -> MediaLayout:
        assert running.acquire(blocking=False), "another one is being made"
        made.append(samples)
        time.sleep(0.02)
        running.release()
        return original(samples)

    def refusal(samples: int) -> str:
        try:
            audio.layout(samples)
        except ValueError as error:
            return str(error)
        return ""

    monkeypatch.setattr(audio, "_layout", slow)
    with ThreadPoolExecutor(6) as threads:
        refusals = [*threads.map(refusal, [30, 20_001, 31] * 2)]
    assert refusals == ["is too short for the model's processor", "", "is too short for the model's processor"] * 2
    assert sorted(made) == [30, 31, 20_001]


async def test_models_without_audio_refuse_it_by_name(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    for model, why in (("text", ""), ("seeing", ""), ("failed", ": audio fails")):
        message = refused(await ask(client, input_audio(wav(A)), QUESTION, model=model))
        assert message == f"messages[0].content[0]: this model does not support audio{why}"
    assert not backend.requests


async def test_a_model_that_is_being_tested_may_take_it(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    """Its replica says that it is too early."""
    backend.served[0] = served_model(backend.served[0], audio=False, proving="testing")
    assert (await ask(client, input_audio(wav(A)), QUESTION)).status_code == 200
    assert len(sent(backend)[1]) == 1


async def test_earlier_audio_is_left_out_for_models_without_it(
    client: httpx.AsyncClient, backend: FakeBackend, text_model: TextModel
) -> None:
    thread = [
        {"role": "user", "content": [input_audio(wav(A)), QUESTION]},
        {"role": "assistant", "content": "A tone."},
        {"role": "user", "content": "Sure?"},
    ]
    for model in ("text", "seeing", "failed"):
        answer = await talk(client, *thread, model=model)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-satchel-left-out"] == "audio"
        prompt, media = sent(backend)
        assert media == []
    assert WORDS["audio"] in text_model.tokenizer.decode(prompt)


async def test_earlier_audio_that_cannot_be_read_is_left_out(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    damaged = wav(A[:-4000])[:900]
    for part in (input_audio(b"hello"), input_audio(wav(A), "aac"), input_audio(damaged), input_audio(wav(A[:40]))):
        thread = [{"role": "user", "content": [part, QUESTION]}, {"role": "assistant", "content": "A tone."}]
        answer = await talk(client, *thread, {"role": "user", "content": "Sure?"})
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-satchel-left-out"] == "audio" and sent(backend)[1] == []


async def test_audio_that_the_processor_refuses_is_named_where_it_is(client: httpx.AsyncClient) -> None:
    answer = await ask(client, QUESTION, input_audio(wav(A[:1])))
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages[0].content[1]", answer.text


async def test_an_assistant_has_no_audio(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    thread = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": [input_audio(wav(A))]}]
    message = refused(await talk(client, *thread))
    assert message == ("messages[1].content[0]: audio is only allowed in system, developer, user and tool messages")


async def test_a_text_with_the_placeholder_stays_text(
    client: httpx.AsyncClient, backend: FakeBackend, text_model: TextModel
) -> None:
    assert text_model.pictures is not None and text_model.pictures.audio is not None
    mark = text_model.pictures.audio.placeholder
    assert (await ask(client, input_audio(wav(A)), {"type": "text", "text": mark})).status_code == 200
    prompt, (media,) = sent(backend)
    rest = prompt[media.start + len(media.tokens) :]
    assert text_model.pictures.audio.token not in rest and mark in text_model.tokenizer.decode(rest)


def test_a_transcript_names_audio_by_its_hash() -> None:
    audio = Audio(A.astype("<f4").tobytes(), 16_000, bytes(range(32)))
    (message,) = with_references([{"role": "user", "content": [{"type": "audio"}]}], [Medium((), audio=audio)])
    known = referred(message["content"][0])
    assert known is not None and known.audio is not None
    assert (known.audio.hash, known.audio.rate, known.audio.count) == (audio.hash, 16_000, A.size)
    assert known.audio.samples == b""


async def test_an_agents_transcript_names_its_audio(backend: FakeBackend, config: Config) -> None:
    endpoint = Remembering(backend, config)
    async with endpoint.client as client:
        await endpoint.go_on({"role": "user", "content": [input_audio(wav(A)), QUESTION]})
        part = (await endpoint.transcript())[0]["content"][0]
        assert part["type"] == "audio_url" and part["audio_url"]["url"].endswith(f"/{A.size}@16000")
        assert "data" not in str(part)
        first = media_tokens_in(sent(backend)[0])
        answer = await ask(client, {"type": "text", "text": "Sure?"}, agent_id="ann", agent_continue=True)
        assert answer.status_code == 200, answer.text
        prompt, (media,) = sent(backend)
        assert media_tokens_in(prompt) == first and media.pixels == [] and media.audio_rate == 16_000


def test_a_transcript_with_audio_goes_on_with_a_model_that_takes_none(
    backend: FakeBackend, text_model: TextModel
) -> None:
    audio = {"type": "audio_url", "audio_url": {"url": f"audio:{'0' * 64}/16000@16000"}}
    picture = {"type": "image_url", "image_url": {"url": f"picture:{'0' * 64}/80x60"}}
    before: Any = [{"role": "user", "content": [audio, picture]}, {"role": "assistant", "content": "A tone."}]
    request = ChatRequest(agent="a", agent_continue=True, messages=[{"role": "user", "content": "And now?"}])
    failed = next(model for model in backend.served if model.info.name == "failed")
    chat = prepare_chat(text_model, failed, request, Past(before))
    assert WORDS["audio"] in chat.text and request.left_out.names == ["audio"]
    assert [one.audio_rate for one in chat.media] == [0]


def test_a_transcript_goes_on_without_audio_that_another_models_processor_took(
    backend: FakeBackend, text_model: TextModel
) -> None:
    audio = {"type": "audio_url", "audio_url": {"url": f"audio:{'0' * 64}/16000@16000"}}
    short = {"type": "audio_url", "audio_url": {"url": f"audio:{'0' * 64}/30@16000"}}
    before: Any = [{"role": "user", "content": [audio, short]}, {"role": "assistant", "content": "A tone."}]
    request = ChatRequest(agent="a", agent_continue=True, messages=[{"role": "user", "content": "And now?"}])
    chat = prepare_chat(text_model, backend.served[0], request, Past(before))
    assert UNREAD["audio"] in chat.text and request.left_out.names == ["audio"]
    assert [one.audio_rate for one in chat.media] == [16_000]
    strict = replace(backend.served[0], omits_unseen=False)
    with pytest.raises(InvalidRequest, match="is too short"):
        prepare_chat(text_model, strict, request, Past(before))


async def test_the_list_of_models_says_who_takes_audio(client: httpx.AsyncClient) -> None:
    models = (await client.get("/v1/models")).json()["data"]
    takes = {each["id"]: "audio" in each["architecture"]["input_modalities"] for each in models}
    assert takes == {"satchel/tiny": True, "seeing": False, "failed": False, "text": False}


async def test_openais_client(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    asked: Any = [{"role": "user", "content": [input_audio(wav(A)), QUESTION]}]
    backend.say("A tone.")
    http: Any = client
    async with openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", http_client=http) as official:
        answer = await official.chat.completions.create(model="satchel/tiny", messages=asked)
    assert answer.choices[0].message.content == "A tone."
    assert len(sent(backend)[1]) == 1


def _base64(data: bytes) -> str:
    import base64

    return base64.b64encode(data).decode()
