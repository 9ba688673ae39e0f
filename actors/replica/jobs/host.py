"""What a replica's actor has of a model that does jobs: its engine, once it is loaded, and how far its jobs are."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....cluster.config.timing import Timing
from ....cluster.errors import InvalidRequest
from .progress import JobProgress, queue_job

if TYPE_CHECKING:
    from .engine import JobEngine


class JobHost:
    """Jobs as the actor's event loop sees them. Any thread may read the attributes.

    Attributes:
        engine: what does jobs; None if the model generates text, or is not loaded yet.
        folder: the model's, if there is an engine.
    """

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self.engine: JobEngine[Any] | None = None
        self.folder = Path()
        self._progress: JobProgress[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def take_up(self, engine: JobEngine[Any], folder: Path) -> None:
        """Notes what serves the model."""
        self.folder, self.engine = folder, engine

    async def queue(self, engine: JobEngine[Any], request: Any) -> None:
        """Queues a job; as `queue_job`.

        Raises:
            InvalidRequest: the model does other jobs.
        """
        if not isinstance(request, engine.takes):
            raise InvalidRequest(f"the model {request.model!r} {engine.does}, and nothing else", param="model")
        await queue_job(engine, self._known(), request)

    async def next_update(self, request_id: str, number: int) -> Any:
        """As `JobProgress.next_update`."""
        return await self._known().next_update(request_id, number)

    def abort(self, request_ids: tuple[str, ...]) -> None:
        """Ends jobs; unknown ids are ignored."""
        if self.engine is not None:
            self.engine.abort(request_ids)

    def send(self, request_id: str, update: Any) -> None:
        """Delivers how far a job is. Called on the engine's thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._known().deliver, request_id, update)

    def _known(self) -> JobProgress[Any]:
        """Returns the jobs, created at the first call because the event loop starts after this object."""
        if self._progress is None:
            self._loop = asyncio.get_running_loop()
            self._progress = JobProgress(self.abort, self._timing)
        return self._progress
