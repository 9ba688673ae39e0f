"""Which engine's thread a replica has."""

from __future__ import annotations

from typing import Any

from ...cluster.config import Logs, Traces
from ...cluster.stages import GroupPlan
from .group.serving import GroupServing
from .serving import Serving


def serving_of(how: tuple[Any, ...], plan: GroupPlan | None, logs: Logs, traces: Traces) -> Serving:
    """Returns what loads and serves a model.

    Args:
        how: the arguments of `Serving`.
        plan: the stages of a divided model; None if its layers are all here.
    """
    return Serving(*how) if plan is None else GroupServing(*how, plan=plan, logs=logs, traces=traces)
