"""Images: what clients see, what the model gets, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import pytest_asyncio
from PIL import Image

from satchel.actors.protocol.replica_messages import Pixels
from satchel.actors.replica.images.pipeline import ImagePipeline
from satchel.api.app import create_app
from satchel.api.http.server import HttpServer
from satchel.api.protocols.openai.image_answers import encoded_image
from satchel.cluster.bring_up.ports import free_port
from satchel.cluster.config.config import Config
from satchel.cluster.home import Home, prepare_home
from satchel.cluster.keys import OWNER, KeyRing, create_key
from tests.worlds.api.fake_backend import tiny_backend
from tests.worlds.api.image_backend import PAINTER, ImageBackend
from tests.worlds.models.image_families import write_image_model

QUEUE_MAX = 2
BODY = {"model": PAINTER, "prompt": "a red cube", "size": "32x32", "steps": 2, "seed": 3, "guidance": 0}


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> ImagePipeline:
    return ImagePipeline.load(write_image_model(tmp_path_factory.mktemp("images") / "tiny", "z_image"), "tiny")


@pytest_asyncio.fixture
async def painter(folders: dict[str, Path], text, pipeline: ImagePipeline) -> AsyncIterator[ImageBackend]:
    backend = ImageBackend(text, tiny_backend(folders, text).served, pipeline, QUEUE_MAX)
    yield backend
    await asyncio.to_thread(backend.close)


@pytest_asyncio.fixture
async def http(painter: ImageBackend, config: Config) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(painter, config))
    async with httpx.AsyncClient(transport=transport, base_url="http://satchel", timeout=60) as client:
        yield client


@pytest.fixture
def client(http: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url="http://satchel/v1", api_key="none", http_client=http, max_retries=0)


def opened(b64_json: str | None) -> Image.Image:
    assert b64_json is not None
    image = Image.open(io.BytesIO(base64.b64decode(b64_json)))
    image.load()
    return image


def png(width: int = 40, height: int = 24) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(1).integers(0, 256, (height, width, 3), np.uint8)
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


async def test_the_openai_client_gets_images_with_their_seeds(client: openai.AsyncOpenAI, painter: ImageBackend):
    how: dict[str, Any] = {"model": PAINTER, "prompt": "a red cube", "size": "32x48", "n": 2}
    made = await client.images.generate(**how, extra_body={"seed": 3, "steps": 2})
    assert made.data is not None and made.usage is not None
    first, second = (opened(each.b64_json) for each in made.data)
    assert (first.format, first.size, first.mode) == ("PNG", (32, 48), "RGB")
    assert [each.model_extra for each in made.data] == [{"seed": 3}, {"seed": 4}]
    assert first.tobytes() != second.tobytes()
    assert (made.size, made.background, made.output_format) == ("32x48", "opaque", "png")
    assert (made.usage.output_tokens, made.usage.input_tokens_details.image_tokens) == (2 * 6, 0)
    assert made.usage.total_tokens == made.usage.input_tokens + 12 > 12
    again = await client.images.generate(**{**how, "n": 1}, extra_body={"seed": 4, "steps": 2})
    assert again.data is not None
    assert opened(again.data[0].b64_json).tobytes() == second.tobytes()
    assert [(each.seed, each.steps, each.tenant) for each in painter.images[:2]] == [(3, 2, OWNER), (4, 2, OWNER)]


async def test_without_a_seed_a_fresh_one_comes_with_the_answer(http: httpx.AsyncClient):
    body = {name: value for name, value in BODY.items() if name != "seed"}
    answers = [(await http.post("/v1/images/generations", json=body)).json()["data"][0] for _ in range(2)]
    assert answers[0]["seed"] != answers[1]["seed"]
    again = (await http.post("/v1/images/generations", json={**body, "seed": answers[1]["seed"]})).json()["data"][0]
    assert again == answers[1]


async def test_the_first_image_model_is_the_default_of_image_routes_and_no_default_of_text(
    http: httpx.AsyncClient, painter: ImageBackend
):
    answer = await http.post("/v1/images/generations", json={**BODY, "model": None})
    assert answer.status_code == 200 and answer.json()["model"] == PAINTER
    answer = await http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}]})
    assert answer.status_code == 200 and answer.json()["model"] == "satchel/tiny"


async def test_a_stream_says_each_step_and_has_partial_images(client: openai.AsyncOpenAI, http: httpx.AsyncClient):
    stream = await client.images.generate(
        model=PAINTER, prompt="x", size="32x32", stream=True, partial_images=2, extra_body={"steps": 6, "seed": 1}
    )
    events = [event async for event in stream]
    assert [event.type for event in events] == ["image_generation.partial_image"] * 2 + ["image_generation.completed"]
    assert [event.partial_image_index for event in events[:2]] == [0, 1]  # type: ignore[union-attr]
    assert len({event.b64_json for event in events}) == 3
    assert all(opened(event.b64_json).size == (32, 32) and event.size == "32x32" for event in events)
    last = events[-1]
    assert last.type == "image_generation.completed" and last.usage.output_tokens == 4
    whole = await http.post(
        "/v1/images/generations", json={**BODY, "prompt": "x", "steps": 6, "seed": 1, "guidance": None}
    )
    assert whole.json()["data"][0]["b64_json"] == last.b64_json
    plain = await http.post("/v1/images/generations", json={**BODY, "steps": 4, "stream": True})
    comments = [line for line in plain.text.splitlines() if line.startswith(": step")]
    assert plain.headers["content-type"].startswith("text/event-stream")
    assert ": step 3 of 4" in comments and plain.text.count("data: ") == 1


@pytest.mark.parametrize("name", ["image", "image[]"])
async def test_the_openai_client_edits_images(client: openai.AsyncOpenAI, painter: ImageBackend, name: str):
    files = ("a.png", png(), "image/png")
    given: Any = [files] if name == "image[]" else files
    made = await client.images.edit(model=PAINTER, prompt="bluer", image=given, extra_body={"seed": 3, "steps": 2})
    assert made.data is not None and made.usage is not None
    # The size of the image, in multiples of 16.
    assert opened(made.data[0].b64_json).size == (32, 16) and made.size == "32x16"
    assert made.usage.input_tokens_details.image_tokens == 2
    (asked,) = painter.images
    expected = Image.open(io.BytesIO(png()))
    assert asked.images == [Pixels(40, 24, expected.tobytes())]
    stream = await client.images.edit(
        model=PAINTER, prompt="x", image=given, size="32x32", stream=True, partial_images=1, extra_body={"steps": 4}
    )
    events = [event async for event in stream]
    assert [event.type for event in events] == ["image_edit.partial_image", "image_edit.completed"]


@pytest.mark.parametrize(("kind", "magic"), [("png", b"\x89PNG"), ("jpeg", b"\xff\xd8"), ("webp", b"RIFF")])
def test_images_have_the_format_that_is_asked_for(kind: str, magic: bytes):
    noise = np.random.default_rng(0).integers(0, 256, (32, 32, 4), np.uint8)
    for channels in (3, 4):
        pixels = Pixels(32, 32, noise[..., :channels].tobytes(), channels)
        best, worst = (base64.b64decode(encoded_image(pixels, kind, quality)) for quality in (100, 10))
        assert best.startswith(magic) and Image.open(io.BytesIO(best)).size == (32, 32)
        assert (len(worst) < len(best)) == (kind != "png")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": " \n"}, "prompt"),
        ({"prompt": ["a"]}, "prompt"),
        ({"prompt": "x" * 32_001}, "prompt"),
        ({"n": 0}, "n"),
        ({"n": 11}, "n"),
        ({"n": "2"}, "n"),
        ({"size": "10000x32"}, "size"),
        ({"size": "33x32"}, "size"),
        ({"size": "32"}, "size"),
        ({"size": 32}, "size"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**32}, "seed"),
        ({"steps": 1}, "steps"),
        ({"steps": 251}, "steps"),
        ({"guidance": -1}, "guidance"),
        ({"response_format": "url"}, "response_format"),
        ({"output_format": "gif"}, "output_format"),
        ({"output_compression": 50}, "output_compression"),
        ({"output_compression": 101, "output_format": "jpeg"}, "output_compression"),
        ({"partial_images": 1}, "partial_images"),
        ({"partial_images": 4, "stream": True}, "partial_images"),
        ({"n": 2, "stream": True}, "n"),
        ({"quality": "high"}, "quality"),
        ({"style": "vivid"}, "style"),
        ({"background": "transparent"}, "background"),
        ({"input_fidelity": "high"}, "input_fidelity"),
        ({"mask": "data:image/png;base64,AA=="}, "mask"),
        ({"model": "satchel/tiny"}, "model"),
        ({"stream": "yes"}, "stream"),
    ],
)
async def test_a_wrong_field_is_refused_by_its_name(
    http: httpx.AsyncClient, painter: ImageBackend, fields: dict[str, Any], param: str
):
    answer = await http.post("/v1/images/generations", json={**BODY, **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error") and error["message"]
    assert painter.images == []


@pytest.mark.parametrize(
    "fields",
    [
        {"quality": "auto", "background": "opaque", "moderation": "low", "user": "u", "response_format": "b64_json"},
        {"size": None, "output_format": "webp", "output_compression": 20, "n": 1, "stream": False},
        {"style": None, "safety_identifier": "s", "partial_images": 0, "seed": 3.0},
    ],
)
async def test_fields_that_change_nothing_or_the_file_are_accepted(
    http: httpx.AsyncClient, painter: ImageBackend, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("satchel.api.pipeline.images.USUAL_SIDE", 32)
    answer = await http.post("/v1/images/generations", json={**BODY, **fields})
    assert answer.status_code == 200, answer.text
    assert (painter.images[0].width, painter.images[0].height) == (32, 32)


def form(**fields: Any) -> dict[str, Any]:
    return {"data": {"model": PAINTER, "prompt": "x", "steps": "2", "seed": "3", **fields}}


@pytest.mark.parametrize(
    ("sent", "param", "status"),
    [
        ({"files": {"image": ("a.png", b"no picture")}, **form()}, "image", 400),
        ({"files": {"image": ("a.png", png()[:60])}, **form()}, "image", 400),
        ({"files": {"image": ("a.png", png()), "mask": ("m.png", png())}, **form()}, "mask", 400),
        ({"files": {"image": ("a.png", png()), "other": ("m.png", png())}, **form()}, "other", 400),
        ({"files": [("image[]", ("a.png", png(16, 16)))] * 17, **form()}, "image", 400),
        ({"files": {"image": ("a.png", png())}, **form(n="many")}, "n", 400),
        ({"files": {"image": ("a.png", png())}, **form(mask="file-1")}, "mask", 400),
        ({"files": {"image": ("a.png", png())}, **form(prompt="")}, "prompt", 400),
        ({"files": {"image": ("a.png", png())}, **form(size="9x9")}, "size", 400),
        ({"files": {"unnamed": (None, b"x")}, **form()}, "image", 400),
        ({"json": {"prompt": "x"}}, None, 415),
        ({"content": b"--x\r\nno", "headers": {"content-type": "multipart/form-data; boundary=x"}}, None, 400),
        ({"files": {"image": ("a.png", b"\x00" * 2**21)}, **form()}, None, 413),
    ],
)
async def test_a_wrong_form_is_refused_by_its_field(
    http: httpx.AsyncClient, painter: ImageBackend, sent: dict[str, Any], param: str | None, status: int
):
    answer = await http.post("/v1/images/edits", **sent)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == param
    assert painter.images == []


async def test_an_edit_says_which_fields_it_ignores(http: httpx.AsyncClient):
    sent = {"files": {"image": ("a.png", png())}, **form(size="32x32", negative_prompt="blue", image="file-1")}
    answer = await http.post("/v1/images/edits", **sent)
    assert answer.status_code == 200, answer.text
    assert set(answer.headers["x-satchel-ignored"].split(", ")) == {"negative_prompt", "image"}


async def test_other_routes_say_which_routes_serve_the_model(http: httpx.AsyncClient):
    routes = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
        "/v1/completions": {"prompt": "Hi"},
        "/v1/embeddings": {"input": "Hi"},
        "/v1/responses": {"input": "Hi"},
    }
    for path, body in routes.items():
        answer = await http.post(path, json={"model": PAINTER, **body})
        assert answer.status_code == 400, answer.text
        assert "/v1/images/generations" in answer.json()["error"]["message"]
        assert answer.json()["error"]["param"] == "model"
    answer = await http.post("/v1/images/generations", json={**BODY, "model": "satchel/tiny"})
    assert "/v1/chat/completions" in answer.json()["error"]["message"]
    answer = await http.post("/v1/images/variations", files={"image": ("a.png", png())})
    assert answer.status_code == 400 and "/v1/images/edits" in answer.json()["error"]["message"]


async def test_the_list_of_models_says_what_makes_images(http: httpx.AsyncClient):
    painter, tiny, _ = (await http.get("/v1/models")).json()["data"]
    assert painter["id"] == PAINTER and tiny["images"] is None
    assert painter["architecture"] == {"input_modalities": ["text", "image"], "output_modalities": ["image"]}
    assert painter["images"]["family"] == "z_image" and painter["images"]["side"]["multiple"] == 16


async def until(what: Any) -> None:
    async with asyncio.timeout(30):
        while not what():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_hang_up_ends_the_image_between_two_steps(painter: ImageBackend, config: Config, stream: bool):
    port = free_port()
    server = HttpServer(create_app(painter, config), "127.0.0.1", port)
    await server.start()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as caller:
        body = {**BODY, "steps": 250, "stream": stream}
        asks = asyncio.create_task(caller.post("/v1/images/generations", json=body))
        await until(lambda: painter.engine.counters.steps > 2)
        asks.cancel()
        await asyncio.wait({asks})
        await until(lambda: not painter.engine.queue.request_ids)
    await server.close(10)
    assert painter.engine.counters.images == 0 and painter.engine.counters.steps < 250


async def test_a_full_queue_is_a_503_in_openais_shape(http: httpx.AsyncClient, painter: ImageBackend):
    body = {**BODY, "steps": 250}
    running = [asyncio.create_task(http.post("/v1/images/generations", json=body))]
    await until(lambda: painter.engine.queue.running)
    running += [asyncio.create_task(http.post("/v1/images/generations", json=body)) for _ in range(QUEUE_MAX)]
    await until(lambda: len(painter.engine.queue.request_ids) == 1 + QUEUE_MAX)
    refused = await http.post("/v1/images/generations", json=BODY)
    assert refused.status_code == 503 and "retry-after" in refused.headers
    assert refused.json()["error"]["type"] == "service_unavailable"
    for each in running:
        each.cancel()
    await asyncio.wait(running)
    await until(lambda: not painter.engine.queue.request_ids)
    assert (await http.post("/v1/images/generations", json=BODY)).status_code == 200


async def test_a_deadline_is_a_504(http: httpx.AsyncClient, painter: ImageBackend):
    answer = await http.post("/v1/images/generations", json={**BODY, "steps": 250, "timeout_s": 0.3})
    assert answer.status_code == 504 and answer.json()["error"]["message"]
    await until(lambda: not painter.engine.queue.request_ids)


async def test_a_stream_that_fails_late_ends_with_the_error(http: httpx.AsyncClient, painter: ImageBackend):
    stream = asyncio.create_task(http.post("/v1/images/generations", json={**BODY, "steps": 250, "stream": True}))
    await until(lambda: painter.engine.counters.steps > 2)
    painter.engine.end_all()
    answer = await stream
    assert answer.status_code == 200
    assert json.loads(answer.text.split("data: ")[-1])["error"]["message"] == "the server is shutting down"


@pytest.fixture
def keys(tmp_path: Path) -> Iterator[KeyRing]:
    home = Home(tmp_path)
    prepare_home(home)
    yield KeyRing(home, required=True)


async def test_keys_limit_images_as_they_limit_answers(
    painter: ImageBackend, config: Config, tmp_path: Path, keys: KeyRing
):
    few = create_key(Home(tmp_path), "few", rows_max=1)[1]
    other = create_key(Home(tmp_path), "other", models=("satchel/tiny",))[1]
    transport = httpx.ASGITransport(create_app(painter, config, keys=keys))
    async with httpx.AsyncClient(transport=transport, base_url="http://satchel", timeout=60) as http:

        async def asked(key: Any, **fields: Any) -> httpx.Response:
            headers = {"Authorization": f"Bearer {key}"}
            return await http.post("/v1/images/generations", json={**BODY, **fields}, headers=headers)

        assert (await http.post("/v1/images/generations", json=BODY)).status_code == 401
        assert (await asked(few)).status_code == 200
        assert (await asked(few, n=2)).status_code == 400
        assert (await asked(other)).status_code == 404
    assert [each.tenant for each in painter.images] == ["few"]
