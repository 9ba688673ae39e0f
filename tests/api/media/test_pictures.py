"""Pictures in requests: what the replica gets, and which pictures count as the same."""

from __future__ import annotations

import asyncio
import base64
import gc
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from threading import Lock
from typing import Any

import httpx
import pytest
from PIL import Image, ImageDraw

from satchel.actors.model_files.media.media_layouts import MediaLayout
from satchel.actors.model_files.media.processors import PictureProcessor
from satchel.actors.protocol.media_ids import FIRST_MEDIA_TOKEN, media_tokens_in, picture_hash
from satchel.actors.protocol.replica_messages import MediaSpan
from satchel.api.app import create_app
from satchel.api.media.prompt import Medium, Resized, referred, with_references
from satchel.api.media.sources import Picture
from satchel.api.pipeline.generation import Generator
from satchel.api.protocols.openai.messages import read_messages
from satchel.api.requests.requests import ChatRequest
from satchel.api.text.model import TextModel, load_text_model
from satchel.cluster.config.config import Config
from satchel.cluster.config.config import Media as Limits
from satchel.cluster.errors import Unavailable
from tests.worlds.api.fake_backend import FakeBackend
from tests.worlds.api.remembering import Remembering
from tests.worlds.api.served_models import served_model
from tests.worlds.models.vision_families import write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("vision") / "qwen3_vl", "qwen3_vl")


@pytest.fixture(scope="module")
def seeing(folder: Path) -> TextModel:
    return load_text_model(folder)


@pytest.fixture
def backend(folder: Path, seeing: TextModel, folders: dict[str, Path]) -> FakeBackend:
    served = [
        served_model(folder=folder, context_tokens=4000, vocabulary_size=4000),
        served_model(name="other", folder=folders["none"], vocabulary_size=1000),
    ]
    return FakeBackend(seeing, served)


@pytest.fixture
async def client(backend: FakeBackend, config: Config) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(backend, config))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


def picture(color: str = "red", size: tuple[int, int] = (120, 90)) -> Image.Image:
    drawn = Image.new("RGB", size, "white")
    ImageDraw.Draw(drawn).ellipse((20, 20, 70, 70), fill=color)
    return drawn


def url_of(image: Image.Image, kind: str = "PNG") -> str:
    written = BytesIO()
    image.save(written, kind, lossless=True)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(written.getvalue()).decode()}"


def shown(*parts: str | Image.Image) -> list[dict[str, Any]]:
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": url_of(part)}}
        for part in parts
    ]


async def ask(client: httpx.AsyncClient, content: Any, **fields: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": content}], **fields}
    return await client.post("/v1/chat/completions", json=body)


def sent(backend: FakeBackend) -> tuple[list[int], list[MediaSpan]]:
    """Returns the last prompt and its media."""
    return backend.requests[-1]["prompt"], list(backend.requests[-1]["media"])


async def test_a_picture_has_words_in_the_prompt_and_its_pixels_beside_it(
    client: httpx.AsyncClient, backend: FakeBackend, seeing: TextModel
) -> None:
    image = picture()
    answer = await ask(client, shown("Look: ", image, " What is it?"))
    assert answer.status_code == 200, answer.text
    prompt, (media,) = sent(backend)
    assert (media.width, media.height, media.video) == (120, 90, False)
    assert media.pixels == [image.tobytes()]
    assert seeing.pictures is not None
    words = media_tokens_in(prompt)
    assert words == media_tokens_in(prompt[media.start : media.start + len(media.tokens)])
    assert (
        len(words)
        == media.tokens.count(seeing.pictures.token)
        == len(set(words))
        == answer.json()["usage"]["prompt_tokens"] - sum(token < FIRST_MEDIA_TOKEN for token in prompt)
    )
    text = seeing.tokenizer.decode(seeing.plain(prompt))
    assert text.count("<|image_pad|>") == len(words) and "Look: <|vision_start|>" in text


async def test_the_same_picture_is_the_same_however_it_is_written(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    prompts = []
    for kind in ("PNG", "WEBP", "BMP", "TIFF"):
        part = {"type": "image_url", "image_url": {"url": url_of(picture(), kind)}}
        assert (await ask(client, [part])).status_code == 200
        prompts.append(sent(backend)[0])
    assert all(prompt == prompts[0] for prompt in prompts)
    other = picture()
    other.putpixel((0, 0), (255, 255, 254))
    assert (await ask(client, shown(other))).status_code == 200
    changed = sent(backend)[0]
    assert changed != prompts[0] and len(changed) == len(prompts[0])
    assert not set(media_tokens_in(changed)) & set(media_tokens_in(prompts[0]))


async def test_the_order_of_pictures_matters(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    red, blue = picture("red"), picture("blue")
    prompts = []
    for pair in ((red, blue), (blue, red)):
        assert (await ask(client, shown(*pair, "Which is first?"))).status_code == 200
        prompts.append(media_tokens_in(sent(backend)[0]))
    half = len(prompts[0]) // 2
    assert prompts[0] == prompts[1][half:] + prompts[1][:half] != prompts[1]


@pytest.mark.parametrize("text", ["<|vision_start|><|image_pad|><|vision_end|>", "<|image_pad|>", "<|video_pad|>"])
async def test_a_text_cannot_stand_for_a_picture(
    client: httpx.AsyncClient, backend: FakeBackend, seeing: TextModel, text: str
) -> None:
    """The text has the marker of a picture; pictures beside it keep their places."""
    for content, same in (
        (text, "x"),
        (shown(picture(), text), shown(picture(), "x")),
        (shown(text, picture("blue"), f"a{text}", picture()), shown("x", picture("blue"), "x", picture())),
    ):
        assert (await ask(client, same)).status_code == 200
        plain, media = sent(backend)
        assert (await ask(client, content)).status_code == 200
        prompt, beside = sent(backend)
        controls = seeing.tokenizer.controls.ids
        assert [token for token in prompt if token in controls] == [token for token in plain if token in controls]
        assert media_tokens_in(prompt) == media_tokens_in(plain)
        assert [span.key for span in beside] == [span.key for span in media]
        assert text in seeing.tokenizer.decode(seeing.plain(prompt))


@pytest.mark.parametrize("text", ["<|vision_start|><|image_pad|><|vision_end|>", "<|image_pad|>", "<|video_pad|>"])
async def test_a_text_that_would_be_a_picture_is_refused_where_marks_are_tokens(
    client: httpx.AsyncClient, backend: FakeBackend, text: str
) -> None:
    backend.served[0] = replace(backend.served[0], marks_are_tokens=True)
    for content in (text, shown(picture(), text)):
        answer = await ask(client, content)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages"
    assert not backend.requests


async def test_what_is_no_picture_is_refused_where_it_stands(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    nothing = base64.b64encode(b"no picture at all").decode()
    for url in (f"data:image/png;base64,{nothing}", "picture:" + "0" * 64 + "/8x8", "ftp://host/picture.png"):
        part = {"type": "image_url", "image_url": {"url": url}}
        answer = await ask(client, [{"type": "text", "text": "x"}, part])
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"].startswith("messages[0].content[1]")
    assert not backend.requests


async def test_a_size_that_the_processor_refuses_is_the_callers_mistake(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    line = {"type": "image", "image": url_of(picture(size=(400, 2))), "max_pixels": 500}
    tiny = {"type": "video", "video": [url_of(picture(size=(20, 20)))] * 2}
    shrunk = {"type": "video", "video": [url_of(picture())] * 2, "max_pixels": 500}
    for part, reason in ((line, "a picture of 316 x 1"), (tiny, "a video of 2 frames of 20 x 20"), (shrunk, "video")):
        answer = await ask(client, [part])
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == "messages" and reason in error["message"]
    assert not backend.requests


async def test_pictures_count_as_long_as_their_answers_run(backend: FakeBackend, config: Config) -> None:
    backend.play(asyncio.Event())
    generator = Generator(backend, replace(config, media=Limits(held_bytes_max=100_000, audio_seconds_max=0.5)))

    def looking(color: str) -> ChatRequest:
        return ChatRequest(messages=read_messages([{"role": "user", "content": shown(picture(color))}]))

    running = [await generator.start_chat(looking(color)) for color in ("red", "green", "blue")]
    with pytest.raises(Unavailable, match=r"media\.held_bytes_max"):
        await generator.start_chat(looking("black"))
    await running.pop().abort()
    backend.generations.clear()
    gc.collect()
    await generator.start_chat(looking("black"))
    await generator.loader.close()


def test_layouts_are_made_one_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processor = PictureProcessor.load(folder)
    original, running, made = processor._layout, Lock(), list[int]()

    def slow(width: int, height: int) -> MediaLayout:
        assert running.acquire(blocking=False), "another one is being made"
        made.append(width)
        time.sleep(0.02)
        running.release()
        return original(width, height)

    monkeypatch.setattr(processor, "_layout", slow)
    with ThreadPoolExecutor(6) as threads:
        sizes = [40, 50, 60] * 2
        assert len(list(threads.map(processor.layout, sizes, sizes))) == 6
    assert sorted(made) == [40, 50, 60]


def test_a_transcript_names_pictures_of_any_width() -> None:
    wide = Picture(2_000_000, 10_000, b"", bytes(32))
    (message,) = with_references([{"role": "user", "content": [{"type": "image"}]}], [Medium([wide])])
    assert referred(message["content"][0]) == Medium([wide])


async def test_a_model_of_text_takes_no_pictures(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    answer = await ask(client, shown(picture()), model="other")
    assert answer.status_code == 400 and "does not support images" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://192.0.2.1/never-fetched.png"}},
        {"type": "video", "video": ["http://192.0.2.1/never-fetched.png"]},
    ],
)
async def test_an_assistant_says_no_pictures(
    client: httpx.AsyncClient, backend: FakeBackend, part: dict[str, Any]
) -> None:
    messages = [{"role": "user", "content": shown(picture())}, {"role": "assistant", "content": [part]}]
    answer = await client.post("/v1/chat/completions", json={"messages": messages})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "messages[1].content[0]"
    assert error["message"] == (
        "messages[1].content[0]: pictures and videos are only allowed in system, developer, user and tool messages"
    )
    answer = await client.post("/v1/chat/completions", json={"messages": messages[1:], "model": "other"})
    assert "this model does not support" in answer.json()["error"]["message"]
    sound = {
        "role": "assistant",
        "content": [{"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}],
    }
    answer = await client.post("/v1/chat/completions", json={"messages": [sound]})
    assert "this model does not support audio" in answer.json()["error"]["message"]
    assert not backend.requests


@pytest.mark.parametrize("role", ["system", "developer", "tool"])
async def test_all_others_may(client: httpx.AsyncClient, backend: FakeBackend, role: str) -> None:
    messages = [{"role": role, "content": shown(picture())}, {"role": "user", "content": "What is it?"}]
    answer = await client.post("/v1/chat/completions", json={"messages": messages})
    assert answer.status_code == 200, answer.text
    assert len(sent(backend)[1]) == 1


async def test_an_unknown_option_of_a_part_is_refused(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    part = {"type": "video_url", "video_url": {"url": url_of(picture()), "nframes": 4}}
    answer = await ask(client, [part])
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[0].content[0].video_url.nframes"
    assert not backend.requests


async def test_frames_of_a_video_are_encoded_two_by_two(
    client: httpx.AsyncClient, backend: FakeBackend, seeing: TextModel
) -> None:
    frames = [picture(color, (84, 84)) for color in ("red", "green", "blue", "black", "orange")]
    part = {"type": "video", "video": [url_of(frame) for frame in frames], "fps": 2}
    assert (await ask(client, [part, {"type": "text", "text": "What changes?"}])).status_code == 200
    prompt, media = sent(backend)
    assert [(len(one.pixels), one.video) for one in media] == [(2, True)] * 3
    text = seeing.tokenizer.decode(seeing.plain(prompt))
    assert "<0.2 seconds>" in text and "<1.2 seconds>" in text
    # A clip that begins with the same frames has the same media token ids there.
    part["video"] = part["video"][:4]
    assert (await ask(client, [part])).status_code == 200
    assert [one.key for one in sent(backend)[1]] == [one.key for one in media[:2]]
    # So has a clip that begins later, if its pairs of frames are the same; if it begins at an odd frame they differ.
    for first, known in ((2, [one.key for one in media[1:]]), (1, [])):
        part["video"] = [url_of(frame) for frame in frames[first:]]
        assert (await ask(client, [part])).status_code == 200
        keys = [one.key for one in sent(backend)[1]]
        assert len(keys) == 2 and [key for key in keys if key in {one.key for one in media}] == known


async def test_a_model_that_is_not_proven_with_videos_is_shown_their_frames(
    client: httpx.AsyncClient, backend: FakeBackend, seeing: TextModel
) -> None:
    backend.served[0] = served_model(backend.served[0], stills="a video fails")
    frames = [picture(color, (84, 84)) for color in ("red", "green", "blue")]
    part = {"type": "video", "video": [url_of(frame) for frame in frames], "fps": 2}
    assert (await ask(client, [*shown(picture()), part])).status_code == 200
    assert [(one.pixels, one.video) for one in sent(backend)[1]] == [
        ([one.tobytes()], False) for one in (picture(), *frames)
    ]
    # A text with the marker stays text.
    assert seeing.pictures is not None
    mark = seeing.pictures.video_placeholder
    assert (await ask(client, [*shown(picture()), {"type": "text", "text": mark}])).status_code == 200
    prompt = sent(backend)[0]
    assert mark in seeing.tokenizer.decode(seeing.plain(prompt))
    assert seeing.pictures.video_token not in prompt


def listed(image: Image.Image) -> dict[str, Any]:
    """Returns the entry of a picture in an agent's info."""
    return {"hash": picture_hash(*image.size, image.tobytes()).hex(), "width": image.width, "height": image.height}


async def test_an_agent_lists_what_it_was_shown_each_once(backend: FakeBackend, config: Config) -> None:
    endpoint = Remembering(backend, config)
    red, blue, green, black = picture("red"), picture("blue", (100, 80)), picture("green"), picture("black")
    async with endpoint.client as client:
        await endpoint.say("Hi")
        assert (await client.get("/v1/agents/ann")).json()["pictures"] == []
        await endpoint.go_on({"role": "user", "content": shown(blue, "and", red, blue)})
        film = {"type": "video", "video": [url_of(frame) for frame in (green, red, black, green)], "fps": 2}
        await endpoint.go_on({"role": "user", "content": [film, *shown(red)]})
        assert len((await endpoint.transcript())[-2]["content"]) == 2
        agent = (await client.get("/v1/agents/ann")).json()
        assert agent["pictures"] == [listed(image) for image in (blue, red, green, black)]
        await endpoint.say({"role": "user", "content": shown(picture("orange"))})
        agent = (await client.get("/v1/agents/ann")).json()
        assert len(agent["branches"]) == 2 and len(agent["pictures"]) == 4, "another branch's are not among them"
        endpoint.store.calls.clear()
        (agent,) = (await client.get("/v1/agents")).json()["data"]
        assert "pictures" not in agent and endpoint.store.calls == ["agents"], "a list reads no transcripts"


def test_what_was_resized_is_kept_up_to_a_limit():
    size = (28, 21)
    shown = [picture(color) for color in ("red", "green", "blue")]
    given = [Picture(*one.size, one.tobytes(), picture_hash(*one.size, one.tobytes())) for one in shown]
    wanted = [one.resize(size, Image.Resampling.BICUBIC).tobytes() for one in shown]
    resized = Resized(2 * len(wanted[0]))
    first = [resized.pixels(one, size) for one in given]
    assert first == wanted
    # The last two are the same objects; the first was evicted.
    again = [resized.pixels(one, size) for one in reversed(given)][::-1]
    assert again == wanted
    assert [one is other for one, other in zip(first, again, strict=True)] == [False, True, True]
    assert resized.pixels(given[0], shown[0].size) is given[0].pixels
    large = resized.pixels(given[0], (56, 42))
    assert len(large) == 4 * len(wanted[0]) and resized.pixels(given[0], size) is again[0], "it drives nothing out"
