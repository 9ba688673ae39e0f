"""The model's side of pictures: the encoder, and positions. `language_inputs.py` has what the language part gets.

Nothing here depends on model families. All of mlx-vlm's models have `get_input_embeddings`, which turns token ids and
pixels into the inputs of the language part: an embedding per token, and for some models (DeepStack) arrays that are
added after the first layers. It is called for a single picture's span, and the result is cached as `ImageEmbeddings`.
So a prompt may be computed in any chunks and batches, and a picture is encoded once.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from functools import lru_cache
from inspect import signature
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ChunkedKVCache, KVCache, RotatingKVCache
from mlx_lm.models.cache import make_prompt_cache as mlx_lm_caches
from PIL import Image

from ....model_files.foreign_code import refuse_model_file
from ....model_files.media.media_layouts import SpanLayout
from ....model_files.media.processors import PictureProcessor
from ....patches import emptied, reset_to_now
from ...device.device import as_numpy, on_gpu, settle
from ...kernels.sealing import copied
from ...kv.caches import is_recurrent
from ...proving.findings import Findings
from ...proving.pieces import Pieces
from .audio import AudioEncoder
from .bidirectional import SIDE, Bidirectional, Compute, find_bidirectional, runs_of
from .language_inputs import ImageEmbeddings, LanguageInputs, SequencePictures, axes_of, has_axes_last, separate
from .levels import levels_of
from .made_inputs import SPARE_BYTES_MAX, check_outputs, check_seen, evaluate_modules

logger = logging.getLogger(__name__)

_BESIDE_THE_PROMPT = {
    "cross_attention_states": "its layers look at pictures beside the prompt (cross attention)",
    "encoder_outputs": "it has an encoder of prompts beside the part that answers",
}
"""Inputs of language parts that need more than the tokens of a sequence."""

PLACES_KEPT = 16
"""Prompts whose positions are cached, 16 bytes per token."""

TOGETHER_TOKENS_MAX = 1024
"""The most tokens of pictures that are encoded together: as many as a picture of 1024 x 1024 pixels has in Qwen3-VL."""

NEAR = 0.1
"""How far a picture's embeddings may be off if it is encoded with another one, compared with encoding it alone,
relative to the distance between the two pictures' embeddings."""


class NotLeftToRightError(ValueError):
    """A model is not causal: its prompts cannot be computed from left to right. The message says why, as half a
    sentence, and what to do."""

    def __init__(self, why: str) -> None:
        super().__init__(f"{why}; use a causal model that gets pictures in its prompts, such as Qwen3-VL")


def load_weights(folder: Path, *, trusted: bool = False) -> tuple[Any, dict[str, Any]]:
    """Loads a model with lazy weights, and its config.

    Raises:
        ValueError: this kind of model is not supported.
        ModelLoadError: it needs code from its own folder, and is not `trusted`.
    """
    from mlx_vlm.utils import load_config, load_model

    # mlx-vlm would run the model's own code without asking.
    refuse_model_file(folder.name, load_config(folder), trusted=trusted)
    model = load_model(folder, lazy=True)
    if not hasattr(model, "get_input_embeddings") or not hasattr(model, "language_model"):
        raise ValueError("it has no language part of its own")
    if wants := signature(type(model.language_model).__call__).parameters.keys() & _BESIDE_THE_PROMPT.keys():
        raise NotLeftToRightError(f"{_BESIDE_THE_PROMPT[min(wants)]}, and here only tokens of prompts have memory")
    return model, load_config(folder)


def _axes_in(made: dict[str, Any]) -> int:
    """Returns how many numbers the positions have that a processor gives, `(1, axes, tokens)`; 0 if it gives none."""
    places = np.array(made.get("position_ids", ()))
    return places.shape[1] if places.ndim == 3 and places.shape[2] == np.array(made["input_ids"]).size else 0


class LanguagePart:
    """The language part of a model, called as mlx-lm's models are.

    Some language parts store a prompt's positions for their next call, but here that may be for another sequence. So
    attributes that were empty when the model was loaded are emptied before each call."""

    def __init__(self, model: Any) -> None:
        self.root = self._language = model.language_model
        """The module that has all modules of the language part."""
        self._axes, self._axes_last = axes_of(self._language), has_axes_last(self._language)
        self._empty = emptied(self._language)

    def __call__(self, tokens: mx.array, cache: Sequence[Any], **given: Any) -> mx.array:
        """Returns logits, `(sequences, tokens, vocabulary)` in the model's dtype.

        Args:
            tokens: `(sequences, tokens)` token ids of an integer dtype.
            given: inputs from `Vision`; none for text alone.
        """
        self._empty()
        if "position_ids" not in given:
            given |= self.places(tokens, _offset_of(cache))
        elif self._axes_last:
            given["position_ids"] = given["position_ids"].transpose(1, 2, 0)
        return self._language(tokens, cache=cache, **given).logits

    def places(self, tokens: mx.array, start: Any) -> dict[str, mx.array]:
        """Returns the positions of text tokens `(sequences, tokens)` as an additional input; none if the model counts
        positions itself.

        Args:
            start: the index of each sequence's first token, a number or `(sequences,)`.
        """
        if not self._axes:
            return {}
        places = mx.broadcast_to(mx.array(start).reshape(-1, 1) + mx.arange(tokens.shape[1]), tokens.shape)
        return {"position_ids": mx.stack([places] * self._axes, axis=-1 if self._axes_last else 0)}

    def at_once(self, tokens: mx.array, embeds: mx.array, given: dict[str, Any]) -> mx.array:
        """Returns the logits of a whole prompt, as `bidirectional.Compute`; `given` are all other inputs."""
        return self._language(tokens, inputs_embeds=embeds, cache=self.make_cache(), **given).logits[0]

    def named_modules(self) -> list[tuple[str, Any]]:
        """Returns the language part's modules."""
        return self._language.named_modules()

    def make_cache(self) -> list[Any]:
        """Returns mlx-lm's caches instead of mlx-vlm's copies of these classes, one per layer.

        Raises:
            ValueError: mlx-lm lacks one of the classes.
        """
        own = self._language.make_cache() if hasattr(self._language, "make_cache") else None
        return mlx_lm_caches(self._language) if own is None else [_cache_like(cache) for cache in own]


def _offset_of(caches: Sequence[Any]) -> Any:
    """Returns how many tokens the sequences have, a number or `(sequences,)`. Recurrent layers do not count tokens."""
    return next((cache.offset for cache in caches if hasattr(cache, "offset")), 0)


def _cache_like(cache: Any) -> Any:
    match type(cache).__name__:
        case "KVCache" | "SimpleKVCache":
            return KVCache()
        case "ChunkedKVCache":
            return ChunkedKVCache(cache.chunk_size)
        case "RotatingKVCache":
            return RotatingKVCache(cache.max_size, cache.keep)
    if is_recurrent(cache):
        return cache
    raise ValueError(f"its layers keep a {type(cache).__name__}, which is not known here")


class Vision:
    """A model's picture encoder, and the extra inputs of its language part.

    Args:
        model: as mlx-vlm loads it.
        together: whether small pictures may be encoded together.
        findings, pieces: as for `find_bidirectional`.
        language_inputs, compute: of the layers that this process has, if others have the rest.
        takes_levels: whether pictures may have levels.

    Attributes:
        together_tokens: how many tokens these pictures may have in total; 0 on a CPU, which gains only 3% from it.
        unbatched: kinds, pictures (False) or video frames (True), that the model cannot encode together.
        bidirectional: whether the tokens of a picture attend to each other.
        language_inputs: the language part's inputs.
        audio: encodes audio; None if the model takes none.
        no_audio: why a model with an encoder of audio takes none, as the end of a sentence; empty if it takes audio,
            and for other models.

    Raises:
        ValueError: prompts with pictures cannot be computed from left to right.
        NotLeftToRightError: no prompts can be.
    """

    def __init__(
        self,
        model: Any,
        processor: PictureProcessor,
        *,
        together: bool,
        findings: Findings,
        pieces: Pieces,
        language_inputs: LanguageInputs | None = None,
        compute: Compute | None = None,
        takes_levels: bool = True,
    ) -> None:
        self._takes_levels = takes_levels
        self._model = separate(model)
        self._language = self._model.language_model
        self._processor = processor
        self._axes, self._axes_last = axes_of(self._language), has_axes_last(self._language)
        self.together_tokens = TOGETHER_TOKENS_MAX if together and on_gpu() else 0
        self.unbatched: set[bool] = set()
        self._tried: set[bool] = set()
        # Cached, because the next turn of a conversation has its pictures at the same places.
        self._placed = lru_cache(PLACES_KEPT)(self._place)
        if compute is None:
            compute = LanguagePart(self._model).at_once
        ahead = find_bidirectional(self._model, processor, compute, findings, pieces)
        if ahead is Bidirectional.TEXTS:
            raise NotLeftToRightError("all tokens of its prompts attend to each other, not only to earlier ones")
        if ahead is Bidirectional.PROMPTS:
            raise ValueError(
                "tokens outside of the picture attend to later ones, so prompts cannot be computed in chunks"
            )
        self.bidirectional = ahead is Bidirectional.PICTURES
        # Only for the prompt's first chunk: after it such models count positions themselves.
        example = {} if self._axes else processor.read(processor.placeholder, [Image.new("RGB", (SIDE, SIDE))])
        self._own_positions = _axes_in(example)
        self.language_inputs = LanguageInputs(self._model) if language_inputs is None else language_inputs
        evaluate_modules(self._model)
        self.audio: AudioEncoder | None = None
        self.no_audio = processor.no_audio
        if self._own_positions and processor.audio is not None:
            self.no_audio = "its processor gives positions of its own"
        elif processor.audio is not None:
            self.audio = AudioEncoder(self._model, processor.audio)
        modules = {id(module): module for root in (model, self._model) for module in root.modules()}
        self._reset = reset_to_now(modules.values())

    @property
    def model(self) -> Any:
        """The model as mlx-vlm loads it."""
        return self._model

    @property
    def processor(self) -> PictureProcessor:
        return self._processor

    def without_audio(self, why: str) -> Vision:
        """Returns this for a model that gets no audio; `why` is the end of a sentence."""
        other = copy.copy(self)
        other.audio, other.no_audio = None, why
        return other

    def forget(self) -> None:
        """Resets the state that modules of the model have stored since it was loaded, such as a prompt's positions."""
        self._reset()

    def encode(self, span: SpanLayout, shown: Sequence[Sequence[Image.Image]], *, video: bool) -> list[ImageEmbeddings]:
        """Encodes pictures of the same layout and size; in one call if this gives the same embeddings as one by one.

        May run on any thread while the language part runs on another, but only once at a time.

        Args:
            shown: for every picture its image, or for every part of a video its frames.

        Returns:
            The evaluated image embeddings of each.

        Raises:
            ValueError: the model has outputs that are not supported.
        """
        if len(shown) > 1 and video not in self._tried:
            if not self._agrees(span, shown[0], video):
                self.unbatched.add(video)
            self._tried.add(video)
        if len(shown) > 1 and video in self.unbatched:
            return [self._encode(span, [frames], video)[0] for frames in shown]
        return self._encode(span, shown, video)

    def _agrees(self, span: SpanLayout, like: Sequence[Image.Image], video: bool) -> bool:
        """Whether two very different pictures get the same embeddings together as alone. Some models treat the pictures
        of one call as parts of one picture; those that are told what each token is take one prompt a row, and would
        read and write behind the only row here."""
        inputs = self._processor.inputs(like, video=video).values()
        if any(tuple(getattr(each, "shape", ())) == (1, len(span.tokens)) for each in inputs):
            return False
        width, height = like[0].size
        noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
        shown = [[Image.fromarray(pixels)] * len(like) for pixels in (noise, 255 - noise)]
        alone = [self._encode(span, [frames], video)[0] for frames in shown]
        try:
            together = self._encode(span, shown, video)
        except Exception as error:
            logger.info("pictures are encoded one by one: %s", error)
            return False
        # Compares the embeddings and every level.
        return all(
            bool(mx.abs(one - two).max() <= NEAR * mx.abs(black - white).max())
            for single, joint in zip(alone, together, strict=True)
            for one, two, black, white in zip(
                single.arrays(), joint.arrays(), *(each.arrays() for each in alone), strict=True
            )
        )

    def _encode(self, span: SpanLayout, shown: Sequence[Sequence[Image.Image]], video: bool) -> list[ImageEmbeddings]:
        spare = mx.get_cache_memory()
        ids = mx.array([list(span.tokens) * len(shown)])
        marked = mx.array([self._processor.marked(span.tokens) * len(shown)])
        made_of = [self._processor.inputs(frames, video=video) for frames in shown]
        given = {name: _merged_inputs([each[name] for each in made_of]) for name in made_of[0]}
        pixels, mask = given.pop("pixel_values", None), mx.ones(marked.shape, dtype=mx.int32)
        made = self._model.get_input_embeddings(marked, pixels, mask=mask, **given).to_dict()
        check_outputs(made, ids.shape[1], "a picture")
        places = mx.array(sorted(span.places))
        check_seen(self._model, ids, made, places, "mlx-vlm does not look at the picture", "the picture")
        every = mx.split(made["inputs_embeds"][0], len(shown))
        seen = [mx.split(level, len(shown)) for level in levels_of(made)]
        if seen and not self._takes_levels:
            raise ValueError("the model adds pictures to hidden states in a way that is not known here")
        embeddings: list[ImageEmbeddings] = []
        for index, inputs in enumerate(every):
            levels = []
            for level in seen:
                whole = mx.zeros(inputs.shape, dtype=level[index].dtype)
                whole[places] = level[index]
                levels.append(whole)
            # Copies, because views would keep the embeddings of all pictures alive.
            positions = self._positions_in(span, shown[index][0]) if self._own_positions else None
            embeddings.append(ImageEmbeddings(copied(inputs) if len(shown) > 1 else inputs, tuple(levels), positions))
        mx.eval([array for one in embeddings for array in one.arrays()])
        evaluate_modules(self._model)
        if mx.get_cache_memory() - spare > SPARE_BYTES_MAX:
            mx.clear_cache()
        return embeddings

    def _positions_in(self, span: SpanLayout, picture: Image.Image) -> mx.array:
        """Returns `ImageEmbeddings.positions`, made from those that the processor gives for a single picture."""
        made = self._processor.read(self._processor.placeholder, [picture])
        ids, tokens = np.array(made["input_ids"]).reshape(-1).tolist(), [*span.tokens]
        start = next(at for at in range(len(ids)) if ids[at : at + len(tokens)] == tokens)
        given = np.array(made["position_ids"])[0, :, start : start + len(tokens)].astype(np.int32)
        index = np.arange(start, start + len(tokens))
        counts = np.ones_like(given)
        for axis, off in enumerate(given != index):
            if (places := np.flatnonzero(off)).size:
                counts[axis, places[0] : places[-1] + 1] = 0
        return mx.array(np.stack([given - start * counts, counts]))

    def example(self, side: int) -> tuple[SpanLayout, ImageEmbeddings]:
        """Encodes a black square of `side` pixels; returns its layout and image embeddings.

        Raises:
            ValueError: as `encode` does.
        """
        span, shown = self._processor.layout(side, side).span, [Image.new("RGB", (side, side))]
        if self.together_tokens >= 2 * len(span.tokens):
            self.encode(span, [shown, shown], video=False)
        return span, self.encode(span, [shown], video=False)[0]

    def set_positions(
        self, pictures: SequencePictures, tokens: Sequence[int], grids: Sequence[tuple[Sequence[int], bool]]
    ) -> None:
        """Sets `positions`, `shift` and `bidirectional` of a sequence's pictures.

        Args:
            tokens: the whole prompt.
            grids: of every picture its grid, and whether it is of a video.
        """
        if self.bidirectional:
            marks = (self._processor.token, self._processor.video_token)
            runs = ((first, runs_of(tokens[first : first + count], marks)) for first, count in pictures.spans)
            pictures.bidirectional = [(first + start, first + stop) for first, found in runs for start, stop in found]
            pictures.unbroken = pictures.bidirectional
        if self._own_positions and pictures.spans:
            pictures.unbroken = [(0, sum(pictures.spans[-1]))]
        marks = self._processor.seen_tokens
        seen = any(token in marks for first, count in pictures.spans for token in tokens[first : first + count])
        if not self._axes or not seen:
            # Positions count on through audio, as through text.
            return
        # After the last picture positions just count on.
        known = np.array(tokens[: sum(pictures.spans[-1])], np.int32).tobytes()
        pictures.positions, pictures.shift = self._placed(known, _joined_grids(pictures.spans, tokens, grids))

    def _place(self, tokens: bytes, grids: tuple[tuple[tuple[int, ...], bool], ...]) -> tuple[np.ndarray, int]:
        """Returns positions, `(axes, tokens)` integers, and the shift of later tokens. Slow: waits for the device many
        times. First waits for all launched work, because reading arrays through NumPy, as mlx-vlm does, would hide an
        error of the device.

        Args:
            tokens: token ids as native 32-bit integers.
        """
        settle()
        ids = mx.array(np.frombuffer(tokens, np.int32)[None])
        stills, videos = ([list(grid) for grid, video in grids if grid and video == kind] for kind in (False, True))
        given = {"image_grid_thw": stills, "video_grid_thw": videos}
        given = {name: mx.array(sizes) for name, sizes in given.items() if sizes}
        positions, shift = self._language.get_rope_index(ids, **given)
        places = as_numpy(positions)
        return places[0].T if self._axes_last else places[:, 0], int(shift.reshape(-1)[0].item())


def _joined_grids(
    spans: Sequence[tuple[int, int]], tokens: Sequence[int], grids: Sequence[tuple[Sequence[int], bool]]
) -> tuple[tuple[tuple[int, ...], bool], ...]:
    """Returns the grids, with adjacent temporal patches of a video joined into one."""
    joined: list[tuple[tuple[int, ...], bool]] = []
    end = 0
    for (start, count), (grid, video) in zip(spans, grids, strict=True):
        if joined and video and start == end and tokens[start - 1] == tokens[start]:
            (frames, *patches), _ = joined.pop()
            grid = (frames + grid[0], *patches)
        joined.append((tuple(grid), video))
        end = start + count
    return tuple(joined)


def _merged_inputs(values: Sequence[Any]) -> Any:
    """Returns an encoder's input for several pictures: arrays are concatenated along the first axis in their dtype,
    other values must be equal.

    Raises:
        ValueError: other values differ.
    """
    if isinstance(values[0], np.ndarray | mx.array):
        arrays = [mx.array(value) if isinstance(value, np.ndarray) else value for value in values]
        return mx.concatenate(arrays) if len(arrays) > 1 else arrays[0]
    if any(value != values[0] for value in values[1:]):
        raise ValueError(f"an input that is not an array differs: {values[0]}")
    return values[0]
