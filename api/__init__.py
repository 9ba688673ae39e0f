"""What users see: the HTTP endpoint, the client and the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if not __name__.startswith("satchel."):
    raise ImportError("import this package as satchel.api; its folder's bare name belongs to somebody else")

if TYPE_CHECKING:
    from .client.cluster import Agent, Cluster, Reply, connect

__all__ = ["Agent", "Cluster", "Reply", "connect"]


def __getattr__(name: str) -> Any:
    # Imported only on use, because the HTTP application must load without Ray.
    if name in __all__:
        from .client import cluster as client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Returns all names, including those that are imported only on use."""
    return sorted({*globals(), *__all__})
