"""The model's encoder of audio.

mlx-vlm's `get_input_embeddings` is called for the span of one piece of audio, as for a picture's. Audio has no levels
and no positions of its own, so its embeddings are the language part's inputs for its span, and everything that is done
with a picture's embeddings is done with them.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from ....model_files.media.audio_processor import AudioProcessor
from ....model_files.media.media_layouts import SpanLayout
from .levels import levels_of
from .made_inputs import SPARE_BYTES_MAX, check_outputs, check_seen, evaluate_modules


class AudioEncoder:
    """A model's encoder of audio.

    Args:
        model: as mlx-vlm loads it; state that it stores for the language part's next call must not matter.
    """

    def __init__(self, model: Any, processor: AudioProcessor) -> None:
        self._model, self.processor = model, processor

    def encode(self, span: SpanLayout, samples: np.ndarray) -> mx.array:
        """Encodes audio. May run on any thread while the language part runs on another, but only once at a time.

        Args:
            samples: `(samples,) float32`, at the processor's rate.

        Returns:
            The evaluated embeddings, `(tokens, dim)` in the model's dtype.

        Raises:
            ValueError: the model does not use audio, or has outputs that are not supported.
        """
        spare = mx.get_cache_memory()
        ids, given = mx.array([[*span.tokens]]), self.inputs(samples)
        mask = mx.ones(ids.shape, dtype=mx.int32)
        made = self._model.get_input_embeddings(ids, None, mask=mask, **given).to_dict()
        check_outputs(made, len(span.tokens), "audio")
        if levels_of(made):
            raise ValueError("audio is also added after its first layers")
        places = mx.array(sorted(span.places))
        check_seen(self._model, ids, made, places, "mlx-vlm does not use the audio", "audio")
        embeddings = made["inputs_embeds"][0]
        mx.eval(embeddings)
        evaluate_modules(self._model)
        if mx.get_cache_memory() - spare > SPARE_BYTES_MAX:
            mx.clear_cache()
        return embeddings

    def inputs(self, samples: np.ndarray) -> dict[str, Any]:
        """Returns the encoder's inputs for audio, by name."""
        return {name: as_arrays(value) for name, value in self.processor.inputs(samples).items()}


def as_arrays(value: Any) -> Any:
    """Returns a processor's output with MLX's arrays in place of NumPy's."""
    if isinstance(value, list | tuple):
        return [as_arrays(each) for each in value]
    return mx.array(value) if isinstance(value, np.ndarray) else value
