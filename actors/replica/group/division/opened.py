"""A model that is to be divided, with lazy weights: of text, or a vision model with its language part."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .....cluster.errors import ModelLoadError
from ....model_files.checkpoints import load_checkpoint
from ....model_files.media.processors import sight
from ....model_files.source import first_sentence
from ...execution.media import vision
from ...execution.media.vision import LanguagePart, NotLeftToRightError
from .stages import Chain, find_chain


@dataclass(frozen=True)
class Opened:
    """A model with lazy weights.

    Attributes:
        whole: as its library loads it.
        language: the module that has the layers.
        called: takes tokens and caches as mlx-lm's models do; the language part also takes its other inputs.
        config: its settings.
        seeing: whether it is a vision model.
        blind: why a vision model was opened for text alone; empty for other models.
    """

    whole: Any
    language: Any
    called: Any
    config: dict[str, Any]
    seeing: bool = False
    blind: str = ""

    def chain(self) -> Chain:
        """Returns the model's layers. Raises as `find_chain`."""
        found = find_chain(self.language, self.called if self.seeing else None)
        if self.seeing and not found.adds_levels and _has_levels(self.config):
            raise ModelLoadError(
                "the model cannot be divided among processes: it adds pictures to hidden states (DeepStack) in a way "
                "of its own"
            )
        return found


def _has_levels(config: dict[str, Any]) -> bool:
    """Whether a vision model's settings name layers that get more of a picture than embeddings."""
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    return any(value for part in parts for name, value in part.items() if "deepstack" in name)


def open_lazily(folder: Path) -> Opened:
    """Opens a model as one process would load it: a vision model with mlx-vlm, and if that fails, or if it is a text
    model, with mlx-lm. Nothing is computed.

    Raises:
        Exception: what the libraries raise.
    """
    seeing, blind = sight(folder)
    reason: Exception | None = None
    if seeing:
        try:
            whole, config = vision.load_weights(folder)
            called = LanguagePart(whole)
            # Its caches must be known here.
            called.make_cache()
            return Opened(whole, whole.language_model, called, config, seeing=True)
        except NotLeftToRightError:
            raise
        except (ValueError, ImportError, AttributeError, TypeError, KeyError) as error:
            reason, blind = error, f"with pictures it cannot be loaded ({first_sentence(error)})"
    try:
        whole, config = load_checkpoint(folder, trusted=False)
    except (Exception, SystemExit):
        if reason is not None:
            raise reason from None
        raise
    return Opened(whole, whole, whole, config, blind=blind)
