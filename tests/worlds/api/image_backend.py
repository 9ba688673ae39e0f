"""A backend with a model that makes images: the tiny backend, with an engine of images on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from satchel.actors.model_files.identity.model_identity import ModelIdentity
from satchel.actors.protocol.replica_messages import ImageInfo, ImageRequest, ImageUpdate
from satchel.actors.replica.images.engine import ImageEngine
from satchel.actors.replica.images.pipeline import ImagePipeline
from satchel.actors.replica.jobs.progress import JobProgress, queue_job
from satchel.api.requests.backend import ImageAnswer, ServedModel
from satchel.api.text.model import TextModel
from satchel.cluster.config.timing import USUAL
from satchel.cluster.errors import from_wire
from tests.worlds.api.fake_backend import FakeBackend
from tests.worlds.api.served_models import served_model

PAINTER = "painter"


class ImageBackend(FakeBackend):
    """Serves a model that makes images, and then what `FakeBackend` serves. Make it on its event loop; `close` ends
    the engine's thread."""

    def __init__(self, text: TextModel, served: list[ServedModel], pipeline: ImagePipeline, waiting_max: int) -> None:
        painter = served_model(name=PAINTER, folder=Path("/painter"), context_tokens=0, images=pipeline.info)
        super().__init__(text, [painter, *served])
        self.images: list[ImageRequest] = []
        self.engine = ImageEngine(pipeline, ModelIdentity({}, {}), waiting_max, 2**30, self._send)
        self._progress = JobProgress(self.engine.abort, USUAL)
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self.engine.run, daemon=True)
        self._thread.start()

    def _send(self, request_id: str, update: ImageUpdate) -> None:
        self._loop.call_soon_threadsafe(self._progress.deliver, request_id, update)

    async def make_image(
        self, model: ServedModel, request: ImageRequest, told: Callable[[ImageUpdate], None]
    ) -> ImageAnswer:
        self.images.append(request)
        number = 0
        try:
            await queue_job(self.engine, self._progress, request)
            while True:
                update = await self._progress.next_update(request.request_id, number)
                if update is None:
                    continue
                number = update.number
                if update.error is not None:
                    raise from_wire(update.error)
                if update.image is None or update.partial:
                    told(replace(update, image=None))
                if update.image is not None:
                    return ImageAnswer(update, f"{PAINTER}#0", "mac0", "test: the only one")
        finally:
            self.engine.abort((request.request_id,))

    def can(self, info: ImageInfo) -> None:
        """Lets the model say that it can do something else."""
        self.served[0] = served_model(self.served[0], images=info)

    def close(self) -> None:
        self.engine.end_all()
        self.engine.stop()
        self._thread.join(30)
