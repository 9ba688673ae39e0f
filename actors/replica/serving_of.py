"""Which engine's thread a replica has."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...cluster.config.config import Logs, Traces
from ...cluster.config.stages import GroupPlan
from ..model_files.image_folders import has_image_layout
from ..model_files.speech_folders import speech_folder

if TYPE_CHECKING:
    from .group.followers import Followers
    from .jobs.serving import JobServing
    from .serving import Serving


def serving_of(
    how: tuple[Any, ...],
    plan: GroupPlan | None,
    logs: Logs,
    traces: Traces,
    folder: Path | None = None,
    followers: Followers | None = None,
) -> Serving | JobServing:
    """Returns what loads and serves a model.

    Args:
        how: the arguments of `Serving`.
        plan: the stages of a divided model; None if its layers are all here.
        folder: the model's, if it is known already.
        followers: of a divided model, if they were started already.
    """
    # Each is imported where it is used: a model of text need not wait for the pipelines of images.
    if folder is not None and has_image_layout(folder):
        from .images.serving import ImageServing

        return ImageServing(*how)
    if folder is not None and speech_folder(folder) is not None:
        from .audio.serving import SpeechServing

        return SpeechServing(*how)
    if plan is not None:
        from .group.serving import GroupServing

        return GroupServing(*how, plan=plan, logs=logs, traces=traces, followers=followers)
    from .serving import Serving

    return Serving(*how)
