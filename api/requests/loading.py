"""How far the model of a request is loaded."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Loading:
    """What a request waits for: the backend writes it, and whoever streams the answer reads it.

    Attributes:
        progress: such as `loading bench 43%: reading weights`; "" while the request does not wait for its model.
    """

    progress: str = ""
