"""What the pool of models says."""

from __future__ import annotations

from dataclasses import dataclass

UNLOADED, WAITING, LOADING, LOADED, UNLOADING = "unloaded", "waiting", "loading", "loaded", "unloading"
"""States of a model: `waiting` for room, or for what keeps it from being loaded now."""


@dataclass(frozen=True, slots=True)
class PooledModel:
    """A model that comes and goes.

    Attributes:
        what: what is done for it now, such as "reading weights"; "" for nothing.
        fraction: how much of that is done, None if unknown.
        used_s: seconds since a request used it, None if none has.
        error: why it could not be loaded the last time, "" if it could.
        restarts: whether it is loaded, but none of its replicas answers now.
    """

    name: str
    state: str
    what: str = ""
    fraction: float | None = None
    used_s: float | None = None
    error: str = ""
    restarts: bool = False

    @property
    def is_loaded(self) -> bool:
        return self.state == LOADED

    @property
    def progress(self) -> str:
        """A few words for people, such as `loading bench 43%: reading weights`."""
        done = "" if self.fraction is None else f" {int(100 * self.fraction)}%"
        return f"{self.state} {self.name}{done}" + (f": {self.what}" if self.what else "")
