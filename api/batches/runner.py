"""Runs batches: sends their requests to the routes that answer them, with the lowest priority, and keeps the answers.

An answer is a line in a file as soon as it is there, so a batch continues behind its last answer when the endpoint
starts again. Requests that the cluster cannot take now are tried again until the batch expires. Only one process runs
batches at a time; the kernel frees its lock when it ends, however it ends.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from fastapi import Request, Response

from ...actors.protocol.replica_messages import IDLE_PRIORITY
from ...cluster.config.config import Config
from ...cluster.detached import background
from ...cluster.errors import GenerationFailed, HomeInUse, KeyRefused, SatchelError
from ...cluster.home import Home, HomeLock
from ...cluster.keys import KeyLimits, KeyRing
from ...cluster.telemetry.context import TRACING, working_for
from ..http.error_shapes import shape_of
from ..requests.callers import Caller, Meter
from ..requests.left_out import LeftOut
from .files import LEFT_S, TenantFiles, private, remove_left
from .input_file import Line, read_lines
from .patience import until_taken
from .records import BatchRecord, BatchRecords, all_records

logger = logging.getLogger(__name__)

Handler = Callable[[Request], Awaitable[Response]]

LOOK_S = 10.0
"""How often batches are looked for that another process has made."""

POLL_S = 1.0
"""How often a running batch looks whether it is cancelled or has expired."""
FAILED_S = 30.0
"""Until a batch that stopped by a fault of this server is tried again."""

SAVED_S = 2.0
"""How often a running batch's counts are saved."""

_WITHOUT_EFFECT = ("stream", "stream_options", "background")
"""Fields of a request that say how its client waits for the answer. A batch waits for it whole."""


@dataclass
class _Run:
    """A batch that is running in this process."""

    records: BatchRecords
    record: BatchRecord
    results: BinaryIO
    saved_at: float = 0.0

    def add(self, line: Line, status: int, request_id: str, body: dict[str, Any]) -> None:
        """Keeps an answer. Does I/O."""
        answer = {
            "id": f"batch_req_{uuid.uuid4().hex[:24]}",
            "custom_id": line.custom_id,
            "response": {"status_code": status, "request_id": request_id, "body": body},
            "error": None,
        }
        self.results.write(json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
        self.results.flush()
        self.count(status, body)
        if time.monotonic() - self.saved_at > SAVED_S:
            self.saved_at = time.monotonic()
            self.records.save(self.record)

    def count(self, status: int, body: dict[str, Any]) -> None:
        right, used = status < 400, Counter(self.record.usage)
        used.update(_usage(body))
        counts = {"completed": self.record.completed + right, "failed": self.record.failed + (not right)}
        self.record = replace(self.record, usage=dict(used), **counts)


class BatchRunner:
    """Runs the batches of all tenants. For one event loop.

    Args:
        root: the folder of all tenants' files and batches.
        handlers: what answers requests, by path.
        keys: of the callers; None if none are needed.
    """

    def __init__(self, root: Path, config: Config, handlers: Mapping[str, Handler], keys: KeyRing | None) -> None:
        self.root, self.handlers = root, handlers
        self._config, self._keys = config, keys
        self._room = asyncio.Semaphore(config.endpoint.batch_requests_at_once)
        self._running: dict[Path, asyncio.Task[None]] = {}
        self._awake = asyncio.Event()
        self._tidied_at = 0.0

    def files(self, tenant: str) -> TenantFiles:
        return TenantFiles(self.root, tenant, self._config.endpoint.files_bytes_max)

    def wake(self) -> None:
        """Tells the runner that there is a new batch, or one to cancel."""
        self._awake.set()

    def running(self) -> AbstractAsyncContextManager[None]:
        """Runs batches in the context; a tenant's one after the other."""
        return background(self._run_all())

    async def _run_all(self) -> None:
        lock = HomeLock(Home(self.root), self.root / "lock")
        try:
            while True:
                self._awake.clear()
                if self.root.is_dir() and (lock.is_held or await asyncio.to_thread(_acquired, lock)):
                    await self._begin()
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._awake.wait()
        finally:
            for task in self._running.values():
                task.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)
            lock.release()

    async def _begin(self) -> None:
        for folder in [folder for folder, task in self._running.items() if task.done()]:
            del self._running[folder]
        for records, record in await asyncio.to_thread(self._look):
            if records.folder not in self._running:
                self._running[records.folder] = asyncio.create_task(self._do(records, record))

    def _look(self) -> list[tuple[BatchRecords, BatchRecord]]:
        """Returns the batches that have not ended, and removes what killed processes left. Does I/O."""
        if (now := time.time()) - self._tidied_at > LEFT_S:
            self._tidied_at = now
            for folder in self.root.glob("*/"):
                remove_left(folder, now)
                BatchRecords(folder).remove_left(now)
        return list(all_records(self.root))

    async def _do(self, records: BatchRecords, record: BatchRecord) -> None:
        try:
            await self._run(records, record)
        except SatchelError as error:
            errors = [{"code": error.code, "message": error.message, "param": error.param, "line": None}]
            await asyncio.to_thread(_fail, records, record, errors)
        except Exception:
            logger.exception("batch %s stopped, and is tried again", record.id)
            await asyncio.sleep(FAILED_S)
        # The tenant's next one can begin.
        self.wake()

    async def _run(self, records: BatchRecords, record: BatchRecord) -> None:
        """Runs a batch to its end. Raises `SatchelError` if it fails as a whole."""
        # Opened once, as the file may be removed at any time.
        with await asyncio.to_thread(self.files(record.tenant).open, record.input_file_id) as file:
            await self._run_lines(records, record, file)

    async def _run_lines(self, records: BatchRecords, record: BatchRecord, file: BinaryIO) -> None:
        most = self._config.endpoint.batch_requests_max
        lines, errors = await asyncio.to_thread(read_lines, file, record.endpoint, most)
        if errors:
            await asyncio.to_thread(_fail, records, replace(record, total=len(lines)), errors)
            return
        record = replace(record, total=len(lines), completed=0, failed=0, usage={})
        if record.status == "validating":
            record = record.now("in_progress")
        with open(records.results(record.id), "ab+", opener=private) as results:
            run = _Run(records, record, results)
            done = await asyncio.to_thread(_resume, run)
            await asyncio.to_thread(records.save, run.record)
            left = iter([line for line in lines if line.custom_id not in done])
            workers = [
                asyncio.create_task(self._work(run, left, file))
                for _ in range(min(len(lines), self._config.endpoint.batch_requests_at_once))
            ]
            ended = await self._wait(run, workers)
        await asyncio.to_thread(self._finish, run, ended)

    async def _wait(self, run: _Run, workers: list[asyncio.Task[None]]) -> str:
        """Waits for the workers, or ends them. Returns how the batch ended."""
        mark, expires = run.records.cancel_mark(run.record.id), run.record.expires_at
        try:
            while not all(worker.done() for worker in workers):
                if await asyncio.to_thread(mark.exists):
                    return "cancelled"
                if time.time() >= expires:
                    return "expired"
                await asyncio.wait(workers, timeout=POLL_S)
            for worker in workers:
                worker.result()
            return "completed"
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _work(self, run: _Run, left: Iterator[Line], file: BinaryIO) -> None:
        for line in left:
            data = await asyncio.to_thread(os.pread, file.fileno(), line.length, line.offset)
            status, request_id, body = await self._answered(run.record, json.loads(data)["body"])
            await asyncio.to_thread(run.add, line, status, request_id, body)

    async def _answered(self, record: BatchRecord, body: dict[str, Any]) -> tuple[int, str, dict[str, Any]]:
        """Returns a request's status, its id and its answer or error, once there is one."""
        request_id = uuid.uuid4().hex

        async def ask() -> tuple[int, dict[str, Any]]:
            async with self._room:
                begun = TRACING.begin(f"batch {record.endpoint}", {}, {"satchel.request.id": request_id})
                with working_for(request_id, begun):
                    try:
                        return await self._ask(record, request_id, body)
                    finally:
                        begun.end()

        try:
            status, shown = await until_taken(ask)
        except SatchelError as error:
            status, shown = shape_of(record.endpoint).body(error, request_id)
        return status, request_id, shown

    async def _ask(self, record: BatchRecord, request_id: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Returns status and body of an answer. Raises `SatchelError`."""
        asked = {name: value for name, value in body.items() if name not in _WITHOUT_EFFECT}
        data = json.dumps({**asked, "priority": IDLE_PRIORITY}).encode()
        told = False

        async def receive() -> dict[str, Any]:
            nonlocal told
            if told:
                # The client never goes away.
                await asyncio.Event().wait()
            told = True
            return {"type": "http.request", "body": data, "more_body": False}

        state = {"request_id": request_id, "arrived": time.perf_counter(), "left_out": LeftOut()}
        scope = {
            "type": "http",
            "method": "POST",
            "path": record.endpoint,
            "query_string": b"",
            "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())],
            "state": {**state, "caller": self._caller(record)},
        }
        try:
            response = await self.handlers[record.endpoint](Request(scope, receive))
        except SatchelError:
            raise
        except Exception as error:
            logger.exception("request %s of batch %s failed", request_id, record.id)
            raise GenerationFailed(f"the server failed; its log has the request id {request_id}") from error
        return response.status_code, json.loads(bytes(response.body))

    def _caller(self, record: BatchRecord) -> Caller:
        """Returns whose request it is, without limits per minute: the batch waits for its turn anyway.

        Raises:
            KeyRefused: the key was revoked.
        """
        if self._keys is None or self._keys.is_open:
            return Caller(record.tenant)
        key = self._keys.find(record.key)
        if key is None:
            raise KeyRefused("the key that made the batch has been revoked")
        limits = replace(key.limits, requests_per_minute=None, tokens_per_minute=None, rows_max=None)
        meter = None if limits == KeyLimits() else Meter(limits, time.monotonic)
        return Caller(key.name, key=key.id, admin=key.admin, meter=meter)

    def _finish(self, run: _Run, ended: str) -> None:
        """Makes the results files of the tenant, and ends the batch."""
        records, record, files = run.records, run.record.now("finalizing"), self.files(run.record.tenant)
        records.save(record)
        made: dict[str, str | None] = {}
        for name, right in (("output", True), ("error", False)):
            file_id = None
            if record.completed if right else record.failed:
                with files.writing() as out, records.results(record.id).open("rb") as results:
                    for answer in results:
                        if (json.loads(answer)["response"]["status_code"] < 400) is right:
                            out.write(answer)
                    out.flush()
                    file_id = files.keep(out.path, f"{record.id}_{name}.jsonl", "batch_output").id
            made[f"{name}_file_id"] = file_id
        records.end(record.now(ended, **made))  # type: ignore[arg-type]


def _fail(records: BatchRecords, record: BatchRecord, errors: list[dict[str, Any]]) -> None:
    """Ends a batch that cannot be run. If it was cancelled before, that is how it ends. Does I/O."""
    cancelled = records.cancel_mark(record.id).exists()
    records.end(record.now("cancelled" if cancelled else "failed", errors=errors))


def _resume(run: _Run) -> set[str]:
    """Counts the answers that are there. Returns their custom ids; a line that was cut off is removed."""
    done: set[str] = set()
    run.results.seek(0)
    end = 0
    for answer in run.results:
        try:
            read = json.loads(answer)
            custom_id, response = read["custom_id"], read["response"]
            run.count(response["status_code"], response["body"])
        except (ValueError, KeyError, TypeError):
            break
        end += len(answer)
        done.add(custom_id)
    run.results.truncate(end)
    run.results.seek(end)
    return done


def _usage(body: dict[str, Any]) -> dict[str, int]:
    """Returns the numbers of an answer's usage, whichever protocol it is of."""
    usage = body.get("usage")
    if not isinstance(usage, dict):
        return {}
    asked = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    made = usage.get("completion_tokens_details") or usage.get("output_tokens_details") or {}
    return {
        "prompt_tokens": usage.get("prompt_tokens") or usage.get("input_tokens") or 0,
        "completion_tokens": usage.get("completion_tokens") or usage.get("output_tokens") or 0,
        "cached_tokens": asked.get("cached_tokens") or 0,
        "reasoning_tokens": made.get("reasoning_tokens") or 0,
    }


def _acquired(lock: HomeLock) -> bool:
    try:
        lock.acquire()
    except HomeInUse:
        return False
    return True
