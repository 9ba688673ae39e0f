"""A model's own processor of audio: how many tokens audio has in a prompt, and the encoder's inputs.

As with pictures, the processor gets one piece of audio at a time, with the text that the chat template writes for it.
How many tokens it has depends on its number of samples alone.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

import numpy as np
from cachetools import LRUCache
from PIL import Image

from ...patches import pad_with_end
from .media_layouts import NOT_FOR_THE_MODEL, MediaLayout, SpanLayout, Unfit, token_ids

RATE = 16_000
"""Samples a second, if the processor states nothing else."""

TRIED_S = 1.0
"""Seconds of the audio with which a processor is tried."""

TOKEN_NAMES = ("audio_token_id", "audio_token_index", "sound_context_token_id")
"""What configs call the token that stands for audio."""

_PARAMETERS = ("audio", "audios")
_TAILS_S = (0.02, 0.05, 0.1, 0.2)
_LAYOUTS_KEPT = 256
_TOO_SHORT = "is too short for the model's processor"
_TOO_LONG = "is longer than the model's processor takes: it drops the end"


class AudioProcessor:
    """A model's processor, and how its chat template and prompts represent audio. Thread-safe.

    Args:
        processor: as mlx-vlm loads it.
        placeholder: the text that the template writes for audio.
        named: token ids that the model's config names as audio's.
        added: the tokenizer's added tokens.
        edges: tokens that the processor writes around every text.

    Attributes:
        rate: samples a second of the audio that it takes.
        token: the token id of audio's places.

    Raises:
        Unfit: the template writes nothing for audio, or the prompt has no token for it.
    """

    def __init__(
        self, processor: Any, placeholder: str, named: frozenset[int], added: frozenset[int], edges: frozenset[int]
    ) -> None:
        self._processor, self._tokenizer = processor, processor.tokenizer
        # mlx-vlm does not tell it the rate; this would be logged for each piece of audio.
        logging.getLogger("transformers.models.whisper.feature_extraction_whisper").setLevel(logging.ERROR)
        self.placeholder, self._added, self._edges = placeholder, added, edges
        self._parameter = _parameter_of(processor)
        self._layouts: LRUCache[int, MediaLayout | str] = LRUCache(_LAYOUTS_KEPT)
        self._lock, self._making = Lock(), Lock()
        if not placeholder.strip():
            raise Unfit("its chat template has no place for audio")
        pad_with_end(self._tokenizer)
        self.rate = _rate_of(processor)
        tried = token_ids(self.read(self.placeholder, [np.zeros(round(TRIED_S * self.rate), np.float32)]))
        self.token = self._find_token(tried, named)
        self._tried = tried.count(self.token)
        self._tail = self._find_tail()

    def layout(self, samples: int) -> MediaLayout:
        """Returns the layout of audio with so many samples. A new number takes as long as processing such audio twice.

        Raises:
            ValueError: it is too short, or the processor drops its end; the message is the end of a sentence.
        """
        if (made := self._known(samples)) is None:
            # One at a time: processing long audio takes hundreds of megabytes.
            with self._making:
                if (made := self._known(samples)) is None:
                    try:
                        made = self._layout(samples)
                    except ValueError as refusal:
                        made = str(refusal)
                    with self._lock:
                        self._layouts[samples] = made
        if isinstance(made, str):
            raise ValueError(made)
        return made

    def _known(self, samples: int) -> MediaLayout | str | None:
        with self._lock:
            return self._layouts.get(samples)

    def inputs(self, samples: np.ndarray) -> dict[str, Any]:
        """Returns the encoder's inputs for audio, `(samples,) float32`, by name. Shapes and dtypes are the
        processor's."""
        made = self.read(self.placeholder, [samples])
        return {name: value for name, value in made.items() if name not in NOT_FOR_THE_MODEL and value is not None}

    def read(self, text: str, audio: Sequence[np.ndarray], pictures: Sequence[Image.Image] = ()) -> dict[str, Any]:
        """Returns the processor's output for a text with placeholders, their audio and their pictures, by name: the
        `input_ids`, the encoder's inputs, and more. Shapes and dtypes are the processor's."""
        given: dict[str, Any] = {self._parameter: list(audio)} | ({"images": list(pictures)} if pictures else {})
        return dict(self._processor(text=[text], padding=True, return_tensors="mlx", **given))

    def _find_token(self, ids: list[int], named: frozenset[int]) -> int:
        own = getattr(self._processor, "audio_token_id", None)
        for candidates in (named, {own} if isinstance(own, int) else frozenset[int]()):
            if len(present := candidates & set(ids)) == 1:
                return min(present)
        (token, most), *_ = [*Counter(ids).most_common(), (-1, 0)]
        if token in self._added and most > len(ids) // 2:
            return token
        raise Unfit("neither its config nor its processor says which token stands for audio")

    def _find_tail(self) -> int:
        """Returns how many samples at the end of audio change the encoder's inputs, if nothing is dropped. The last few
        alone do not: most processors leave out an incomplete window."""
        lengths = [round(TRIED_S * self.rate) - short for short in (0, 1)]
        for seconds in _TAILS_S:
            tail = round(seconds * self.rate)
            if all(self._changes(np.zeros(length, np.float32), tail) for length in lengths):
                return tail
        raise Unfit("its processor drops the end of audio")

    def _layout(self, samples: int) -> MediaLayout:
        silence = np.zeros(samples, np.float32)
        try:
            made = self.read(self.placeholder, [silence])
        except MemoryError:
            raise
        except Exception as error:
            # Libraries raise anything for audio that is shorter than one window.
            is_short = samples < TRIED_S * self.rate
            raise ValueError(_TOO_SHORT if is_short else "cannot be read by the model's processor") from error
        ids = token_ids(made)
        if self.token not in ids:
            raise ValueError(_TOO_SHORT)
        if not self._changes(silence, self._tail, made):
            raise ValueError(_TOO_LONG if self._changes(silence, samples, made) else _TOO_SHORT)
        if self._lacks_tokens(silence, ids.count(self.token)):
            raise ValueError(_TOO_LONG)
        places = [index for index, token in enumerate(ids) if token in self._added and token not in self._edges]
        span = tuple(ids[places[0] : places[-1] + 1])
        marks = frozenset(index for index, token in enumerate(span) if token == self.token)
        return MediaLayout(self._text(ids), SpanLayout(span, marks))

    def _changes(self, silence: np.ndarray, tail: int, made: dict[str, Any] | None = None) -> bool:
        """Returns whether noise in the last `tail` samples changes the encoder's inputs.

        Args:
            made: the processor's output for `silence`, if it is known.
        """
        other, tail = silence.copy(), min(tail, silence.size)
        other[silence.size - tail :] = np.random.default_rng(0).uniform(-0.5, 0.5, tail)
        return not _equal(made or self.read(self.placeholder, [silence]), self.read(self.placeholder, [other]))

    def _lacks_tokens(self, silence: np.ndarray, count: int) -> bool:
        """Returns whether audio has as many tokens as audio that is one token's length shorter, and one that is as much
        longer: the processor has a limit of tokens.

        Args:
            count: the tokens of `silence`.
        """
        if count == self._tried or silence.size < 2 * TRIED_S * self.rate:
            # Some processors give all audio the same number of tokens.
            return False
        step = round(TRIED_S * self.rate / self._tried)
        others = (silence[: silence.size - step], np.pad(silence, (0, step)))
        return all(token_ids(self.read(self.placeholder, [other])).count(self.token) == count for other in others)

    def _text(self, ids: list[int]) -> str:
        while ids and ids[0] in self._edges:
            ids = ids[1:]
        while ids and ids[-1] in self._edges:
            ids = ids[:-1]
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def has_audio_parameter(processor: Any) -> bool:
    """Returns whether a processor of mlx-vlm has a parameter for audio."""
    return bool(_parameter_of(processor))


def audio_tokens_of(config: Mapping[str, Any]) -> frozenset[int]:
    """Returns the token ids that a model's config names as audio's."""
    parts = (config, config.get("thinker_config"))
    values = (part.get(name) for part in parts if isinstance(part, dict) for name in TOKEN_NAMES)
    return frozenset(value for value in values if isinstance(value, int))


def _parameter_of(processor: Any) -> str:
    try:
        known = inspect.signature(type(processor).__call__).parameters
    except (TypeError, ValueError):
        return ""
    return next((name for name in _PARAMETERS if name in known), "")


def _rate_of(processor: Any) -> int:
    for part in (getattr(processor, name, None) for name in ("feature_extractor", "audio_processor")):
        if isinstance(rate := getattr(part, "sampling_rate", None), int):
            return rate
    rate = getattr(processor, "audio_sampling_rate", None)
    return rate if isinstance(rate, int) else RATE


def _equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Returns whether two outputs of a processor have equal inputs for the encoder."""
    names = [name for name in one if name not in NOT_FOR_THE_MODEL]
    return all(_same(one[name], other.get(name)) for name in names)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if one is None or other is None:
        return one is other
    return np.array_equal(np.array(one), np.array(other))
