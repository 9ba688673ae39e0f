"""OpenAI's routes for files and batches."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, replace
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from pydantic import Field

from ...cluster.config.config import Endpoint
from ...cluster.errors import InvalidRequest, QueueFull, quoted
from ..http.adding import JSON, add_route
from ..http.exchange import BodyReader
from ..requests.callers import Caller
from ..requests.paging import page_of
from ..requests.request_body import RequestBody
from .files import StoredFile
from .records import BatchRecord, BatchRecords, new_batch
from .runner import BatchRunner
from .upload import Upload

PAGE_MAX, FILES_PAGE_MAX = 100, 10_000
UNFINISHED_MAX = 100
"""How many batches of a tenant may be unfinished."""

FORM, LINES = "multipart/form-data", "application/jsonl"


class BatchBody(RequestBody):
    """A batch to make."""

    input_file_id: str
    endpoint: str
    completion_window: str | None = None
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=16)] | None = None


class BatchRoutes:
    """Handlers for files and batches. A caller sees its tenant's."""

    def __init__(self, runner: BatchRunner, bodies: BodyReader, limits: Endpoint) -> None:
        self._runner, self._bodies, self._limits = runner, bodies, limits

    def add_to(self, app: FastAPI) -> None:
        """Adds the routes to `app`."""
        add_route(app, "POST", "/v1/files", self.upload, takes=FORM)
        add_route(app, "GET", "/v1/files", self.list_files)
        add_route(app, "GET", "/v1/files/{file_id}", self.file)
        add_route(app, "GET", "/v1/files/{file_id}/content", self.content, answers=(LINES,))
        add_route(app, "DELETE", "/v1/files/{file_id}", self.delete_file)
        add_route(app, "POST", "/v1/batches", self.create, BatchBody)
        add_route(app, "GET", "/v1/batches", self.list_batches)
        add_route(app, "GET", "/v1/batches/{batch_id}", self.batch)
        add_route(app, "POST", "/v1/batches/{batch_id}/cancel", self.cancel, answers=(JSON,))

    async def upload(self, request: Request) -> Response:
        """Stores a file of requests. Its `purpose` must be `batch`."""
        files = self._runner.files(_tenant(request))
        most = self._limits.file_bytes_max
        writing = files.writing()
        file = await asyncio.to_thread(writing.__enter__)
        try:
            upload = Upload(request.headers.get("content-type", ""), file.write, most)
            await self._bodies.save(request, lambda piece: asyncio.to_thread(upload.add, piece))
            await asyncio.to_thread(upload.finish)
            purpose = upload.fields.get("purpose", "")
            if purpose != "batch":
                raise InvalidRequest(f"purpose: {quoted(purpose)} is not supported; batch is", param="purpose")
            file.flush()
            kept = await asyncio.to_thread(files.keep, file.path, upload.filename or "", purpose)
        finally:
            await asyncio.to_thread(writing.__exit__, None, None, None)
        return JSONResponse(_file(kept))

    async def list_files(
        self,
        request: Request,
        purpose: str = "",
        after: str = "",
        order: str = "desc",
        limit: Annotated[int, Query(ge=1, le=FILES_PAGE_MAX)] = FILES_PAGE_MAX,
    ) -> Response:
        """Lists files, the newest first."""
        files = await asyncio.to_thread(self._runner.files(_tenant(request)).list)
        found = [file for file in files if purpose in ("", file.purpose)]
        shown = [_file(file) for file in (found[::-1] if order == "asc" else found)]
        return JSONResponse(page_of(shown, after, limit, "file"))

    async def file(self, request: Request, file_id: str) -> Response:
        """Describes a file."""
        return JSONResponse(_file(await asyncio.to_thread(self._runner.files(_tenant(request)).get, file_id)))

    async def content(self, request: Request, file_id: str) -> Response:
        """Returns a file's content."""
        path = await asyncio.to_thread(self._runner.files(_tenant(request)).content, file_id)
        return FileResponse(path, media_type=LINES)

    async def delete_file(self, request: Request, file_id: str) -> Response:
        """Removes a file. A batch that has begun to run goes on with it; one that has not fails."""
        await asyncio.to_thread(self._runner.files(_tenant(request)).delete, file_id)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    async def create(self, request: Request) -> Response:
        """Begins a batch of the requests in a file."""
        caller: Caller = request.state.caller
        body = await self._bodies.read(request, BatchBody)
        if body.endpoint not in self._runner.handlers:
            known = ", ".join(self._runner.handlers)
            raise InvalidRequest(f"endpoint: {quoted(body.endpoint)} has no batches; {known} have", param="endpoint")
        if body.completion_window not in (None, "24h"):
            raise InvalidRequest("completion_window: only 24h is possible", param="completion_window")
        record = new_batch(caller.tenant, caller.key, body.endpoint, body.input_file_id, dict(body.metadata or {}))

        def make() -> None:
            files = self._runner.files(caller.tenant)
            files.get(body.input_file_id)
            records = BatchRecords(files.folder)
            if sum(not other.ended for other in records.list()) >= UNFINISHED_MAX:
                raise QueueFull(f"{UNFINISHED_MAX} batches have not ended yet")
            records.save(record)

        await asyncio.to_thread(make)
        self._runner.wake()
        return JSONResponse(record.shown())

    async def list_batches(
        self, request: Request, after: str = "", limit: Annotated[int, Query(ge=1, le=PAGE_MAX)] = 20
    ) -> Response:
        """Lists batches, the newest first."""
        found = await asyncio.to_thread(self._records(request).list)
        return JSONResponse(page_of([record.shown() for record in found], after, limit, "batch"))

    async def batch(self, request: Request, batch_id: str) -> Response:
        """Says how far a batch is."""
        return JSONResponse((await asyncio.to_thread(self._read, request, batch_id)).shown())

    async def cancel(self, request: Request, batch_id: str) -> Response:
        """Ends a batch; the answers that are there are kept."""

        def mark() -> BatchRecord:
            record = self._read(request, batch_id)
            if record.ended:
                raise InvalidRequest(f"the batch has ended: {record.status}", param="batch_id")
            self._records(request).cancel_mark(record.id).touch(mode=0o600)
            return self._read(request, batch_id)

        record = await asyncio.to_thread(mark)
        self._runner.wake()
        return JSONResponse(record.shown())

    def _records(self, request: Request) -> BatchRecords:
        return BatchRecords(self._runner.files(_tenant(request)).folder)

    def _read(self, request: Request, batch_id: str) -> BatchRecord:
        """Returns a batch; its status is `cancelling` while whoever runs it has not ended it yet."""
        records = self._records(request)
        record, mark = records.get(batch_id), records.cancel_mark(batch_id)
        if record.ended or not mark.exists():
            return record
        return replace(record, status="cancelling", cancelling_at=int(mark.stat().st_mtime))


def _tenant(request: Request) -> str:
    caller: Caller = request.state.caller
    return caller.tenant


def _file(file: StoredFile) -> dict[str, Any]:
    return {"object": "file", "status": "processed", **asdict(file)}
