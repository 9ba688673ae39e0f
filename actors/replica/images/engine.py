"""The engine of a model that makes images: one image after the other, in steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ....cluster.errors import InvalidRequest, SatchelError
from ...model_files.identity.model_identity import ModelIdentity
from ...protocol.replica_messages import ImageRequest, ImageUpdate, Pixels, image_refusal, image_tokens
from ..jobs.engine import GIVEN_BYTES_MAX, JobCounters, JobEngine
from ..jobs.queue import SerialJob
from .pipeline import ImagePipeline


@dataclass
class ImageCounters(JobCounters):
    """Totals since the engine started."""

    images: int = 0
    steps: int = 0


class ImageEngine(JobEngine[ImageRequest]):
    """Makes images. The arguments but `pipeline` are those of `JobEngine`. A step costs the image's number of tokens,
    patches of 16 x 16 pixels."""

    takes = ImageRequest
    jobs, whole, brought = "images", "image", "the images of edits that wait"
    counters: ImageCounters

    def __init__(
        self,
        pipeline: ImagePipeline,
        identity: ModelIdentity,
        waiting_max: int,
        memory_bytes: int,
        send: Callable[[str, ImageUpdate], None],
        claim: Callable[[int], None] = lambda nbytes: None,
        *,
        given_bytes_max: int = GIVEN_BYTES_MAX,
    ) -> None:
        super().__init__(identity, waiting_max, memory_bytes, send, claim, given_bytes_max=given_bytes_max)
        self.pipeline, self.counters = pipeline, ImageCounters()
        self.does = "makes images"

    @property
    def described(self) -> dict[str, Any]:
        info = self.pipeline.info
        return {"images": info, "layers": f"{self.does} ({info.family})"}

    @property
    def totals(self) -> dict[str, Any]:
        return {"images_total": self.counters.images, "image_steps_total": self.counters.steps}

    def refusal(self, request: ImageRequest) -> SatchelError | None:
        refused = image_refusal(self.pipeline.info, request, self.pipeline.steps_of(request))
        return None if refused is None else InvalidRequest(refused[1], param=refused[0])

    def cost(self, request: ImageRequest) -> tuple[int, int]:
        return image_tokens(request.width, request.height), self.pipeline.steps_of(request)

    def size(self, request: ImageRequest) -> int:
        """Returns the patches of an image and of those that are given for it."""
        return sum(image_tokens(each.width, each.height) for each in [request, *request.images])

    def given_bytes(self, request: ImageRequest) -> int:
        return sum(len(each.data) for each in request.images)

    def too_large(self, needed: int) -> InvalidRequest:
        message = f"size: an image of this size takes about {needed >> 20} MiB of memory beside the model's weights"
        return InvalidRequest(f"{message}; {self.memory_bytes >> 20} MiB are left here", param="size")

    def compute(self, request: ImageRequest) -> ImageUpdate:
        def partial(pixels: Pixels) -> None:
            self._send(request.request_id, self._update(request, partial=[pixels]))

        made = self.pipeline.make(request, self.paused, partial if request.partial_images else None)
        self.counters.images += 1
        return self._update(request, image=made.pixels, prompt_tokens=made.prompt_tokens)

    def failed(self, error: SatchelError) -> ImageUpdate:
        return ImageUpdate(0, 0, 0, error=error.to_wire())

    def tell(self, request_id: str) -> None:
        self._send(request_id, self._update(self._asked[request_id]))

    def note_steps(self, job: SerialJob, new: int, seconds: float) -> None:
        # The first step also waits for what came before it.
        if self._steps:
            self.pace.note_step(job.tokens, seconds)
        self.counters.steps += new

    def _update(self, request: ImageRequest, **new: Any) -> ImageUpdate:
        return ImageUpdate(0, self._steps, self.pipeline.steps_of(request), **new)
