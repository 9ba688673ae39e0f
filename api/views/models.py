"""The served models as clients see them, whether loaded or not. Independent of Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from ...actors.protocol.pool_messages import LOADED, UNLOADED, PooledModel
from ...actors.protocol.replica_messages import StageInfo
from ..requests.backend import Backend, ListedModel


def stage_views(stages: Sequence[StageInfo]) -> list[dict[str, Any]]:
    """Returns which layers of a divided model are on which node, in order; empty for a model that is not divided."""
    return [{"node": one.node, "first_layer": one.start, "layers": one.stop - one.start} for one in stages]


def model_state(model: ListedModel, state: PooledModel | None) -> dict[str, Any]:
    """Returns what is known of a model without its files. `state` is `unloaded`, `waiting` (for room), `loading`,
    `loaded` or `unloading`, and `progress` says what is done.

    Args:
        state: the pool's, None if unknown or for a model that stays loaded.
    """
    known = PooledModel(model.name, LOADED if model.loaded else UNLOADED) if state is None else state
    busy = known.state not in (LOADED, UNLOADED)
    return {
        "aliases": list(model.aliases),
        "load": "request" if model.comes_and_goes else "start",
        "state": known.state,
        "progress": {"what": known.what, "fraction": known.fraction} if busy else None,
        "error": known.error or None,
    }


async def model_views(backend: Backend) -> list[dict[str, Any]]:
    """Returns every served model with its source and its state, the default first.

    Raises:
        NoReplica: the registry could never be read.
    """
    listed, states = await asyncio.gather(backend.listed(), backend.pool_states())
    return [
        {"id": model.name, "source": model.source or None, **model_state(model, states.get(model.name))}
        for model in listed
    ]
