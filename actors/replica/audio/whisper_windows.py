"""Follows Whisper from window to window of 30 s, as mlx-audio decodes them in one call: what is said in each, which is
encoded once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import mlx.core as mx

from ...patches import windows_decoded_by, windows_encoded_by

NO_SPEECH, LOGPROB = 0.6, -1.0
"""mlx-audio's defaults: a window is silent if silence is more probable than the first and its text less than the second
(mean logarithm)."""


class WhisperWindows:
    """The windows of one transcript.

    Args:
        model: mlx-audio's.
        began: called before each window but the first, with the text of the one before.
    """

    def __init__(self, model: Any, began: Callable[[str], None]) -> None:
        self._model, self._began = model, began
        self._window: Any = None
        self._result: Any = None

    def followed(self) -> AbstractContextManager[None]:
        """While this is open, the model's windows are followed."""
        return windows_decoded_by(self._model, self._decode).for_now()

    def last(self) -> str:
        """Returns the text of the last window, once all are decoded."""
        return "" if self._result is None else said(self._model, self._result)

    def _decode(self, decode: Callable[..., Any], window: Any, *given: Any, **named: Any) -> Any:
        # A window whose text is improbable is decoded again, at a higher temperature.
        if self._window is not None and window is not self._window:
            self._began(self.last())
        self._window = window
        self._result = decode(window, *given, **named)
        return self._result


class EncodedOnce:
    """The last window of one transcript, encoded: it is decoded again if its text is improbable, and read again for the
    times of words."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._frames: mx.array | None = None
        self._features: Any = None

    def used(self) -> AbstractContextManager[None]:
        """While this is open, the model encodes no window twice in a row."""
        return windows_encoded_by(self._model, self._encode).for_now()

    def _encode(self, encode: Callable[[mx.array], Any], frames: mx.array) -> Any:
        if self._frames is None or frames.dtype != self._frames.dtype or not mx.array_equal(frames, self._frames):
            self._frames, self._features = frames, encode(frames)
        return self._features


def said(model: Any, result: Any) -> str:
    """Returns what mlx-audio takes over of a decoded window: nothing if it is silent, and no segment that has not ended
    or has no length."""
    if result.no_speech_prob > NO_SPEECH and not result.avg_logprob > LOGPROB:
        return ""
    tokenizer = model.get_tokenizer(language=result.language)
    begin, end = tokenizer.timestamp_begin, tokenizer.eot
    tokens = list(result.tokens)
    cuts = [at for at in range(1, len(tokens)) if tokens[at - 1] >= begin and tokens[at] >= begin]
    if not cuts:
        return _text(tokenizer, [token for token in tokens if token < end])
    if len(tokens) > 1 and tokens[-1] >= begin and tokens[-2] < begin:
        cuts.append(len(tokens))
    kept: list[int] = []
    for start, stop in zip([0, *cuts], cuts, strict=False):
        piece = tokens[start:stop]
        words = [token for token in piece if token < end]
        if piece[0] != piece[-1] and _text(tokenizer, words).strip():
            kept += words
    return _text(tokenizer, kept)


def _text(tokenizer: Any, tokens: list[int]) -> str:
    return tokenizer.decode(tokens) if tokens else ""
