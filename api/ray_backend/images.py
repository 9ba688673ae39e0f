"""Requests for images: a replica queues one, and is asked how far it is until it is there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...actors.protocol.clients import ReplicaClient
from ...actors.protocol.replica_messages import ImageRequest, ImageUpdate
from ...cluster.errors import from_wire
from ..requests.backend import ImageAnswer
from .resending import Resending, next_update
from .routing import Routing


class RayImage(Resending[ImageRequest, ImageUpdate]):
    """One request for an image. On another replica the same seed begins the same image again.

    Args:
        told: called with each update but the last, and with the partial images of that one.
    """

    def __init__(self, routing: Routing, request: ImageRequest, told: Callable[[ImageUpdate], None]) -> None:
        super().__init__(routing, request)
        self._told = told

    async def _ask_replica(self, client: ReplicaClient, left_s: float) -> ImageUpdate:
        request, number = replace(self._request, deadline_s=left_s), 0
        await client.make_image(request)
        while True:
            update = await next_update(request.request_id, number, client.next_image)
            number = update.number
            if update.error is not None:
                raise from_wire(update.error)
            if update.image is None or update.partial:
                # The last partial images may come with the image.
                self._told(replace(update, image=None))
            if update.image is not None:
                return update

    async def run(self) -> ImageAnswer:
        """Raises as `Backend.make_image`."""
        update, decision = await self.answered()
        return ImageAnswer(update, decision.replica, decision.node, decision.why)
