"""What a process of a group has of a vision model besides its layers: all have the inputs of their layers, and the
leader has the encoder of pictures, whose embeddings go to the layers with the calls (`picture_messages.py`).

So pictures are cached, kept on disk and moved where those of a model in one process are: at the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

from .....cluster.errors import ModelLoadError
from ....model_files.media.processors import PictureProcessor, in_words
from ...execution.media.language_inputs import LanguageInputs
from ...execution.media.vision import NotLeftToRightError, Vision
from ...kv.caches import ModelCacheSpec
from ...loading.models import seen_with
from ...proving.findings import Findings
from ...proving.pieces import IN_ONE_PIECE

ComputePart = Callable[[mx.array, mx.array, dict[str, Any]], mx.array]
"""Given tokens `(1, tokens)`, embeddings `(1, tokens, dim)` and a model's other inputs: what a part of the model's
layers makes of them, `(tokens, ...)`."""

_WHOLE_PROMPTS = ("position_ids", "rope_deltas")
"""Inputs that `LanguagePart` makes by itself."""

_ERRORS = (Exception, SystemExit)


def encoder_of(
    whole: Any,
    given: LanguageInputs,
    compute: ComputePart,
    folder: Path,
    spec: ModelCacheSpec,
    findings: Findings,
    *,
    adds_levels: bool,
) -> tuple[Vision | None, str]:
    """Returns the leader's encoder of pictures, or why there is none, as `loading.models` does for one process.

    Args:
        whole: as mlx-vlm loads it, cut to the leader's part.
        given: the inputs of the leader's layers.
        compute: the leader's part, whose layers show which tokens attend to later ones.
        adds_levels: as in `stages.Chain`.

    Raises:
        ModelLoadError: the model cannot be divided, or not be served.
    """
    failed: list[BaseException] = []

    def noting(ids: mx.array, embeds: mx.array, others: dict[str, Any]) -> mx.array:
        try:
            return compute(ids, embeds, {name: each for name, each in others.items() if name not in _WHOLE_PROMPTS})
        except _ERRORS as error:
            failed.append(error)
            raise

    try:
        processor = PictureProcessor.load(folder, trusted=False)
        found = Vision(
            whole,
            processor,
            together=True,
            findings=findings,
            pieces=IN_ONE_PIECE,
            language_inputs=given,
            compute=noting,
            takes_levels=adds_levels,
        )
        seen, blind = seen_with(found, spec)
    except NotLeftToRightError as error:
        raise ModelLoadError(str(error)) from error
    except ModelLoadError:
        raise
    except _ERRORS as error:
        return None, in_words(error, folder)
    if failed:
        raise ModelLoadError(
            f"it is not known which tokens of a picture attend to later ones: {failed[0]}"
        ) from failed[0]
    return seen, blind
