"""Which replica of a model runs on which node. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from .config.config import Model
from .errors import InvalidRequest


def place(
    model: Model, nodes: Sequence[str], *, free_bytes: Mapping[str, int] | None = None, taken: Collection[str] = ()
) -> dict[str, str]:
    """Returns replica ids with their nodes: one on each node that the model may run on, or `model.replicas` of them.

    Args:
        nodes: names of the cluster's nodes, the head first.
        free_bytes: free memory by node; if there are fewer replicas than nodes, nodes with more of it come first.
        taken: ids that are in use.

    Raises:
        InvalidRequest: none of the nodes that it may run on has joined.
    """
    allowed = [name for name in nodes if not model.nodes or name in model.nodes]
    if not allowed:
        where = ", ".join(model.nodes)
        raise InvalidRequest(f"{model.name!r} may run on {where} only, and no such node has joined", param="nodes")
    if model.replicas is not None and free_bytes is not None:
        allowed.sort(key=lambda name: -free_bytes.get(name, 0))
    count = len(allowed) if model.replicas is None else model.replicas
    placed: dict[str, str] = {}
    number = 0
    while len(placed) < count:
        replica = f"{model.slug}-{number}"
        if replica not in taken:
            placed[replica] = allowed[len(placed) % len(allowed)]
        number += 1
    return placed
