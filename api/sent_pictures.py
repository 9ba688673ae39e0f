"""Pictures whose pixels a replica has been sent: it keeps what its encoder made of them, and is not sent them again.

A conversation shows its pictures in every turn, up to some tens of megabytes for each. A replica that has forgotten one
says so (`PictureLost`), and is sent it then.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

from ..actors.messages import GenerateRequest, Media

SENT_MAX = 4096


class SentPictures:
    """Of one replica, the latest `SENT_MAX`."""

    def __init__(self) -> None:
        self._sent: OrderedDict[tuple[bytes, bytes], None] = OrderedDict()

    def without(self, request: GenerateRequest) -> GenerateRequest:
        """The request without the pixels that have been sent; itself where it has none of those."""
        if not any(self._knows(request, one) for one in request.media):
            return request
        return replace(
            request, media=[replace(one, pixels=[]) if self._knows(request, one) else one for one in request.media]
        )

    def note(self, request: GenerateRequest) -> None:
        """The replica has taken the request, and has or had all of its pictures."""
        for one in request.media:
            if one.pixels:
                self._sent[request.root_id, one.key] = None
                self._sent.move_to_end((request.root_id, one.key))
        while len(self._sent) > SENT_MAX:
            self._sent.popitem(last=False)

    def forget(self, request: GenerateRequest) -> None:
        """The replica lacks some of the request's pictures."""
        for one in request.media:
            self._sent.pop((request.root_id, one.key), None)

    def _knows(self, request: GenerateRequest, one: Media) -> bool:
        return bool(one.pixels) and (request.root_id, one.key) in self._sent
