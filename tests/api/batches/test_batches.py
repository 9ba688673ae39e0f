"""Files and batches: each request is answered once, also if the endpoint ends in between; errors name their lines."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import httpx
import openai
import pytest

from satchel.actors.protocol.replica_messages import IDLE_PRIORITY
from satchel.api.app import create_app
from satchel.api.batches import patience, runner
from satchel.api.batches.files import LEFT_S, TenantFiles, remove_left
from satchel.api.batches.input_file import ERRORS_MAX, read_lines
from satchel.api.batches.records import BatchRecords, new_batch
from satchel.cluster.config.config import Config, parse_config
from satchel.cluster.errors import GenerationFailed, QueueFull
from satchel.cluster.home import Home
from satchel.cluster.keys import KeyRing, create_key, revoke_key
from satchel.cluster.telemetry.context import TRACING
from tests.worlds.api.fake_backend import FakeBackend
from tests.worlds.collector import traced

CHAT = "/v1/chat/completions"


def line(name: str, url: str = CHAT, **body: Any) -> str:
    asked = {"model": "satchel/tiny", "messages": [{"role": "user", "content": name}], **body}
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": asked})


class Endpoint:
    """The application, which runs its batches in the context `running`."""

    def __init__(self, backend: FakeBackend, config: Config, root: Path, keys: KeyRing | None = None) -> None:
        self.root = root
        self.app = create_app(backend, config, batches=root, keys=keys)
        transport = httpx.ASGITransport(self.app)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")

    def client(self, key: str = "none") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(api_key=key, base_url="http://127.0.0.1/v1", http_client=self.http, max_retries=0)  # type: ignore[arg-type]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[openai.AsyncOpenAI]:
        async with self.app.router.lifespan_context(self.app):
            yield self.client()


@pytest.fixture
def endpoint(backend: FakeBackend, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Endpoint:
    monkeypatch.setattr(runner, "LOOK_S", 0.05)
    monkeypatch.setattr(runner, "POLL_S", 0.05)
    monkeypatch.setattr(patience, "RETRY_S", (0.01, 0.05))
    monkeypatch.setattr(runner, "SAVED_S", 0.0)
    return Endpoint(backend, config, tmp_path / "batches")


async def begin(client: openai.AsyncOpenAI, *lines: str, endpoint: Any = CHAT) -> Any:
    file = await client.files.create(file=("asked.jsonl", "\n".join(lines).encode()), purpose="batch")
    assert file.filename == "asked.jsonl" and file.purpose == "batch"
    return await client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")


async def ended(client: openai.AsyncOpenAI, batch_id: str) -> Any:
    async with asyncio.timeout(20):
        while (batch := await client.batches.retrieve(batch_id)).status in (
            "validating", "in_progress", "finalizing", "cancelling",
        ):  # fmt: skip
            await asyncio.sleep(0.02)
    return batch


async def results(client: openai.AsyncOpenAI, file_id: str | None) -> dict[str, Any]:
    assert file_id is not None
    text = (await client.files.content(file_id)).text
    return {read["custom_id"]: read["response"] for read in map(json.loads, text.splitlines())}


async def test_each_request_is_answered_with_its_usage(endpoint: Endpoint, backend: FakeBackend):
    backend.say("Yes.")
    async with endpoint.running() as client:
        made = await begin(client, *[line(str(number), stream=True) for number in range(20)], "", "  ")
        batch = await ended(client, made.id)
        assert batch.status == "completed" and batch.error_file_id is None and batch.errors is None
        assert batch.request_counts.model_dump() == {"total": 20, "completed": 20, "failed": 0}
        answers = await results(client, batch.output_file_id)
        metrics = (await endpoint.http.get("/metrics")).text
    counted = [line for line in metrics.splitlines() if line.startswith("vllm:request_success_total{")]
    assert sum(float(line.split()[-1]) for line in counted if 'finished_reason="stop"' in line) == 20
    assert {*answers} == {*map(str, range(20))}
    bodies = [answer["body"] for answer in answers.values()]
    assert all(body["choices"][0]["message"]["content"] == "Yes." for body in bodies)
    assert batch.usage.total_tokens == sum(body["usage"]["total_tokens"] for body in bodies) > 0
    assert {request["priority"] for request in backend.requests} == {IDLE_PRIORITY}


async def test_each_request_is_a_trace_of_its_own(endpoint: Endpoint):
    with traced() as collector:
        async with endpoint.running() as client:
            batch = await ended(client, (await begin(client, line("a"), line("b"))).id)
            answers = (await client.files.content(batch.output_file_id)).text.splitlines()
        await asyncio.to_thread(TRACING.close)
    spans = [one for one in collector.spans if one.name == f"batch {CHAT}"]
    named = {one.attributes["satchel.request.id"] for one in spans}
    assert named == {json.loads(each)["response"]["request_id"] for each in answers} and len(named) == 2
    assert all(one.attributes["gen_ai.response.finish_reasons"] == ["stop"] and not one.parent for one in spans)


async def test_a_batch_goes_on_where_its_endpoint_ended(endpoint: Endpoint, backend: FakeBackend, config: Config):
    """No request is asked again whose answer was there, and a line that was cut off is no answer."""
    backend.play(asyncio.Event())
    async with endpoint.running() as client:
        made = await begin(client, *[line(str(number)) for number in range(9)])
        while len(backend.requests) < 4:
            await asyncio.sleep(0.01)
    root = endpoint.root
    (part,) = root.glob("*/*.part")
    answer = {"id": "x", "custom_id": "3", "response": {"status_code": 200, "body": {"usage": {"prompt_tokens": 5}}}}
    part.write_text(json.dumps(answer) + "\n" + '{"id": "y", "custom_id": "4", "resp')
    backend.requests.clear()
    backend.say("Yes.")
    again = Endpoint(backend, config, root)
    async with again.running() as client:
        batch = await ended(client, made.id)
        answers = await results(client, batch.output_file_id)
    assert batch.status == "completed" and batch.request_counts.completed == 9
    assert len(backend.requests) == 8 and len(answers) == 9 and answers["3"]["body"] == answer["response"]["body"]


async def test_what_the_cluster_cannot_take_now_is_tried_again_and_errors_are_kept(
    endpoint: Endpoint, backend: FakeBackend
):
    backend.refusal = QueueFull("full")
    async with endpoint.running() as client:
        made = await begin(client, line("a"), line("b", temperature=99))
        while len(backend.requests) < 3:
            await asyncio.sleep(0.01)
        assert (await client.batches.retrieve(made.id)).status == "in_progress"
        backend.refusal = None
        batch = await ended(client, made.id)
        assert batch.status == "completed" and (batch.request_counts.completed, batch.request_counts.failed) == (1, 1)
        assert {*await results(client, batch.output_file_id)} == {"a"}
        wrong = (await results(client, batch.error_file_id))["b"]
        assert wrong["status_code"] == 400 and wrong["body"]["error"]["param"] == "temperature"
        backend.refusal = GenerationFailed("broken")
        batch = await ended(client, (await begin(client, line("c"))).id)
        assert (batch.status, batch.output_file_id, batch.request_counts.failed) == ("completed", None, 1)


async def test_the_next_batch_begins_when_one_ends(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runner, "LOOK_S", 3600.0)
    async with endpoint.running() as client:
        made = [await begin(client, line("a")) for _ in range(3)]
        assert [(await ended(client, each.id)).status for each in made] == ["completed"] * 3


async def test_a_runner_ends_though_it_is_woken_at_that_moment(config: Config, tmp_path: Path):
    made = runner.BatchRunner(tmp_path, config, {}, None)
    async with asyncio.timeout(30):
        async with made.running():
            await asyncio.sleep(0.1)
            made.wake()


async def test_a_cancelled_batch_keeps_the_answers_that_are_there(endpoint: Endpoint, backend: FakeBackend):
    async with endpoint.running() as client:
        backend.refusal = QueueFull("full")
        made = await begin(client, *[line(str(number)) for number in range(3)])
        while not backend.requests:
            await asyncio.sleep(0.01)
        assert (await client.batches.cancel(made.id)).status == "cancelling"
        batch = await ended(client, made.id)
        assert batch.status == "cancelled" and batch.output_file_id is None and batch.cancelled_at
        with pytest.raises(openai.BadRequestError, match="the batch has ended: cancelled"):
            await client.batches.cancel(made.id)


@pytest.mark.parametrize(
    ("lines", "code", "number"),
    [
        (["{"], "invalid_json_line", 1),
        (["[]"], "invalid_request", 1),
        ([line("a"), line("a")], "duplicate_custom_id", 2),
        ([line("a", url="/v1/completions")], "mismatched_endpoint", 1),
        ([line("a").replace("POST", "GET")], "invalid_method", 1),
        ([json.dumps({"custom_id": "a", "method": "POST", "url": CHAT})], "missing_required_parameter", 1),
        ([line("")], "missing_required_parameter", 1),
        ([""], "empty_file", None),
    ],
)
async def test_a_file_with_a_wrong_line_is_not_run(
    endpoint: Endpoint, backend: FakeBackend, lines: list[str], code: str, number: int | None
):
    async with endpoint.running() as client:
        batch = await ended(client, (await begin(client, *lines)).id)
    assert batch.status == "failed" and backend.requests == []
    assert [(error.code, error.line) for error in batch.errors.data] == [(code, number)]


def test_so_many_requests_and_errors_and_no_more():
    asked = "\n".join(line(str(number)) for number in range(5))
    lines, errors = read_lines(BytesIO(asked.encode()), CHAT, 3)
    assert len(lines) == 3 and errors[0]["code"] == "too_many_tasks"
    assert len(read_lines(BytesIO(b"{\n" * 500), CHAT, 3)[1]) == ERRORS_MAX


async def test_files_are_listed_described_and_deleted(endpoint: Endpoint):
    client = endpoint.client()
    made = [await client.files.create(file=(f"{name}.jsonl", b"x" * 9), purpose="batch") for name in "abc"]
    listed = (await client.files.list()).data
    assert {file.id for file in listed} == {file.id for file in made} and listed[0].bytes == 9
    assert (await client.files.retrieve(made[0].id)).filename == "a.jsonl"
    assert (await client.files.content(made[0].id)).content == b"x" * 9
    assert (await client.files.delete(made[0].id)).deleted
    for file_id in (made[0].id, "file-" + "0" * 24, "../../etc/passwd", "file-..%2f"):
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(file_id)
    with pytest.raises(openai.NotFoundError):
        await client.batches.create(input_file_id=made[0].id, endpoint=CHAT, completion_window="24h")
    with pytest.raises(openai.NotFoundError):
        await client.batches.retrieve("batch_1")
    with pytest.raises(openai.BadRequestError, match="endpoint"):
        await client.batches.create(input_file_id=made[1].id, endpoint="/v1/x", completion_window="24h")  # type: ignore[arg-type]
    with pytest.raises(openai.BadRequestError, match="purpose"):
        await client.files.create(file=("a", b"x"), purpose="fine-tune")


FORM = "multipart/form-data; boundary=b"
NO_FILE = b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n'
CUT = b'--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\nab'
NO_LAST_LINE = NO_FILE.removesuffix(b"--b--\r\n") + CUT + b"\r\n--b\r\n"


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"{}", "application/json", 415),
        (b"nonsense", FORM, 400),
        (NO_FILE, FORM, 400),
        (CUT, FORM, 400),
        (NO_LAST_LINE, FORM, 400),
    ],
)
async def test_a_form_that_is_none_is_refused_and_leaves_nothing(
    endpoint: Endpoint, content: bytes, kind: str, status: int
):
    answer = await endpoint.http.post("/v1/files", content=content, headers={"content-type": kind})
    assert answer.status_code == status and answer.json()["error"]["message"]
    assert not list(endpoint.root.glob("*/*"))


async def test_files_have_limits(backend: FakeBackend, tmp_path: Path):
    limits = {"file_bytes_max": 1000, "files_bytes_max": 1500}
    config = parse_config({"models": [{"name": "satchel/tiny", "source": "x"}], "endpoint": limits})
    client = Endpoint(backend, config, tmp_path).client()
    first = await client.files.create(file=("a", b"x" * 1000), purpose="batch")
    for size, why in ((1001, "file_bytes_max"), (501, "files_bytes_max")):
        with pytest.raises(openai.APIStatusError, match=why) as refused:
            await client.files.create(file=("b", b"x" * size), purpose="batch")
        assert refused.value.status_code == 413
    await client.files.delete(first.id)
    await client.files.create(file=("b", b"x" * 501), purpose="batch")


async def test_a_tenant_sees_its_own_and_a_revoked_key_answers_nothing(
    backend: FakeBackend, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(runner, "LOOK_S", 0.05)
    monkeypatch.setattr(runner, "POLL_S", 0.05)
    home = Home(tmp_path / "home")
    home.root.mkdir()
    (_, ann), (_, bob) = (create_key(home, name, requests_per_minute=100) for name in ("ann", "bob"))
    endpoint = Endpoint(backend, config, home.batches, KeyRing(home, required=True))
    ours, theirs = endpoint.client(ann), endpoint.client(bob)
    async with endpoint.running():
        made = await begin(ours, line("a"))
        assert (await ended(ours, made.id)).status == "completed"
        assert backend.requests[-1]["tenant"] == "ann"
        assert (await theirs.files.list()).data == [] and (await theirs.batches.list()).data == []
        for asked in (theirs.batches.retrieve(made.id), theirs.files.content(made.input_file_id)):
            with pytest.raises(openai.NotFoundError):
                await asked
    waiting = await begin(ours, line("a"))
    revoke_key(home, "ann")
    (_, new) = create_key(home, "ann")
    async with endpoint.running():
        batch = await ended(endpoint.client(new), waiting.id)
    assert (batch.status, batch.request_counts.failed) == ("completed", 1)


async def test_only_one_process_runs_batches(endpoint: Endpoint, backend: FakeBackend, config: Config):
    other = Endpoint(backend, config, endpoint.root)
    async with endpoint.running() as client:
        assert (await ended(client, (await begin(client, line("a"))).id)).status == "completed"
        async with other.running():
            made = await begin(other.client(), *[line(str(number)) for number in range(5)])
            assert (await ended(client, made.id)).request_counts.completed == 5
    assert len(backend.requests) == 6


async def test_other_routes_have_batches_too(endpoint: Endpoint, backend: FakeBackend):
    backend.say("Yes.")
    asked = {"/v1/completions": {"prompt": "a"}, "/v1/responses": {"input": "a"}}
    async with endpoint.running() as client:
        for url, body in asked.items():
            request = {"custom_id": "a", "method": "POST", "url": url, "body": {"model": "satchel/tiny", **body}}
            batch = await ended(client, (await begin(client, json.dumps(request), endpoint=url)).id)
            assert batch.status == "completed" and batch.request_counts.completed == 1, await results(
                client, batch.error_file_id
            )
            assert batch.usage.output_tokens > 0


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/v1/responses", {"input": "a", "background": True}),
        ("/v1/completions", {"prompt": "a", "stream": True, "stream_options": {"include_usage": True}}),
    ],
)
async def test_a_batch_has_whole_answers_however_its_requests_would_wait(
    endpoint: Endpoint, backend: FakeBackend, url: str, body: dict[str, Any]
):
    """Of a background response it would else have only that it is queued."""
    backend.say("Yes.")
    request = {"custom_id": "a", "method": "POST", "url": url, "body": {"model": "satchel/tiny", **body}}
    async with endpoint.running() as client:
        batch = await ended(client, (await begin(client, json.dumps(request), endpoint=url)).id)
        assert batch.request_counts.completed == 1
        assert "Yes." in json.dumps((await results(client, batch.output_file_id))["a"]["body"])


async def test_a_batch_that_failed_leaves_no_answers_behind(endpoint: Endpoint, backend: FakeBackend, config: Config):
    """They would count against `files_bytes_max` for ever, and no route removes them."""
    backend.say("Yes.")
    async with endpoint.running() as client:
        made = await begin(client, *[line(str(number)) for number in range(3)])
        batch = await ended(client, made.id)
        folder = next(path for path in endpoint.root.iterdir() if path.is_dir())
        records = BatchRecords(folder)
        # As if the endpoint had been killed before the end, and its client had then removed the input.
        records.save(replace(records.get(batch.id), status="in_progress"))
        records.results(batch.id).write_bytes(b"{}\n")
        await client.files.delete(batch.input_file_id)
        assert (await ended(client, batch.id)).status == "failed"
    assert {path.suffix for path in folder.glob("batch_*")} == {".json"}


async def test_a_batch_that_was_cancelled_ends_so_though_its_file_is_gone(endpoint: Endpoint, backend: FakeBackend):
    """It waits for the tenant's batch before it, and its client may clean up meanwhile."""
    backend.play(asyncio.Event())
    async with endpoint.running() as client:
        first, second = await begin(client, line("a")), await begin(client, line("b"))
        await client.batches.cancel(second.id)
        await client.files.delete(second.input_file_id)
        await client.batches.cancel(first.id)
        batch = await ended(client, second.id)
        assert batch.status == "cancelled"
        await ended(client, first.id)
    assert not list(endpoint.root.glob("*/*.cancel"))


async def test_a_batch_whose_file_is_removed_as_it_begins_runs(
    endpoint: Endpoint, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
):
    """It has been opened by then, so nothing fails, and the tenant's next batch need not wait."""
    backend.say("Yes.")

    def removed(file: BinaryIO, *given: Any) -> Any:
        Path(file.name).unlink()
        return read_lines(file, *given)

    monkeypatch.setattr(runner, "read_lines", removed)
    async with endpoint.running() as client:
        assert (await ended(client, (await begin(client, line("a"))).id)).status == "completed"


def test_what_killed_processes_left_is_removed(tmp_path: Path):
    """An upload, content without a description and answers of a batch that has ended; nothing that may be in use."""
    files, records = TenantFiles(tmp_path, "ann", 1000), BatchRecords(TenantFiles(tmp_path, "ann", 1000).folder)
    with files.writing() as out:
        out.write(b"{}")
        out.flush()
        kept = files.keep(out.path, "asked.jsonl", "batch")
        ran, running = new_batch("ann", "", CHAT, kept.id, {}), new_batch("ann", "", CHAT, kept.id, {})
        records.save(ran.now("completed"))
        records.save(running)
        left = ("new-1.jsonl.part", f"file-{'0' * 24}.jsonl", ".batch_1.json.1.ab", f"{ran.id}.cancel")
        for path in (*(files.folder / name for name in left), records.results(ran.id), records.results(running.id)):
            path.touch()
        before = {path.name for path in files.folder.iterdir()}
        for later_s, removed in ((0.0, set()), (LEFT_S + 60, {*left, records.results(ran.id).name})):
            remove_left(files.folder, time.time() + later_s)
            records.remove_left(time.time() + later_s)
            assert before - {path.name for path in files.folder.iterdir()} == removed


def test_the_oldest_batches_that_have_ended_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A tenant's folder is read at each look for batches, so it may not grow for ever."""
    monkeypatch.setattr("satchel.api.batches.records.ENDED_MAX", 2)
    records, made = BatchRecords(tmp_path), [new_batch("ann", "", CHAT, "", {}) for _ in range(4)]
    records.save(replace(made[0], created_at=0))
    for age, record in enumerate(made[1:]):
        records.end(replace(record, created_at=100 + age).now("completed"))
    assert {record.id for record in records.list()} == {made[0].id, made[2].id, made[3].id}
