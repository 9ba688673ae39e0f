"""The samples of a self-test: pictures, videos and audio of noise, prompts with them, and what mlx-vlm computes for
these.

Each picture or video is encoded as for a request, and then placed into a prompt's text. mlx-vlm gets whole prompts with
whole pictures and videos. If the two differ, the model would get something else here than it was trained for.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from PIL import Image

from ...model_files.media.processors import Video
from ..device.device import as_numpy, multiplies_exactly
from ..execution.followers import Followers
from ..execution.loaded_model import LoadedModel
from ..execution.media.audio import as_arrays
from ..execution.media.language_inputs import ImageEmbeddings, SequencePart, SequencePictures
from ..execution.media.levels import levels_of
from ..execution.media.vision import Vision
from ..proving.pieces import IN_ONE_PIECE, Pieces
from .forced_sequences import DRAWN, MORE_TOKENS, Faults, ForcedSequence, ForcedSequences, Logits, Shown

NEAR, NEAR_16 = 1e-3, 5e-2
"""How far embeddings may be off, relative to the largest one, in float32 and in 16 bits."""

_SENTENCE = "The boats came back to the harbour in the morning, and nobody had seen the storm. "


class UnseenError(Exception):
    """Says why something cannot be shown to a model, as the end of a sentence."""


@dataclass(frozen=True)
class Exhibit:
    """A picture, a video or audio.

    Attributes:
        placeholder: what the chat template writes for it.
        text: what the processor writes in that place.
        shown: its spans; their places in a prompt are not known yet.
        pictures, videos, audio: what the processor gets; two of them are empty.
    """

    placeholder: str
    text: str
    shown: Sequence[Shown]
    pictures: Sequence[Image.Image] = ()
    videos: Sequence[Video] = ()
    audio: Sequence[np.ndarray] = ()

    @property
    def tokens(self) -> int:
        """About how many tokens it has in a prompt."""
        return sum(len(each.span.tokens) for each in self.shown)


@dataclass(frozen=True)
class SeenPrompt:
    """A prompt as mlx-vlm reads it: its tokens, its processor's other outputs, and the spans with their places.

    Attributes:
        single: whether it has just one picture or video. With several, mlx-vlm may compute something else than for
            each alone.
    """

    tokens: Sequence[int]
    given: dict[str, Any]
    shown: Sequence[Shown]
    single: bool


def noise(seed: int, width: int, height: int) -> Image.Image:
    """Returns a picture of noise."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


class Exhibition:
    """Shows pictures and videos to a model, as requests do and as mlx-vlm does.

    Args:
        pieces: a piece ends after each encoding, and after each prompt of mlx-vlm.
    """

    def __init__(self, loaded: LoadedModel, vision: Vision, pieces: Pieces = IN_ONE_PIECE) -> None:
        self._pieces = pieces
        self.loaded, self.vision, self.processor = loaded, vision, vision.processor
        self.near = NEAR if multiplies_exactly(getattr(mx, loaded.dtype)) else NEAR_16

    def picture(self, picture: Image.Image) -> Exhibit:
        """Encodes a picture."""
        laid = self.processor.layout(*picture.size)
        embeddings = self._pieces.beside(lambda: self.vision.encode(laid.span, [[picture]], video=False)[0])
        self._pieces.pause()
        return Exhibit(
            self.processor.placeholder, laid.text, [Shown(0, laid.span, [picture], embeddings)], pictures=[picture]
        )

    def video(self, frames: Sequence[Image.Image], seconds: Sequence[float]) -> Exhibit:
        """Encodes a video, whose frames all have one size."""
        laid = self.processor.video_layout(*frames[0].size, seconds)
        # In the size that the encoder needs, so that they are not resized again.
        frames = [frame.resize((laid.width, laid.height), Image.Resampling.BICUBIC) for frame in frames]
        video = Video(np.stack([np.asarray(frame) for frame in frames]), seconds)
        frames += frames[-1:] * (len(laid.spans) * laid.frames - len(frames))
        shown = []
        for index, span in enumerate(laid.spans):
            group = frames[index * laid.frames : (index + 1) * laid.frames]
            encode = partial(self.vision.encode, span, [group], video=True)
            shown.append(Shown(0, span, group, self._pieces.beside(encode)[0], video=True))
            self._pieces.pause()
        return Exhibit(self.processor.video_placeholder, laid.text, shown, videos=[video])

    def audio(self, samples: np.ndarray) -> Exhibit:
        """Encodes audio, `(samples,) float32`. The model must take audio."""
        encoder = self.vision.audio
        assert encoder is not None
        processor = encoder.processor
        laid = processor.layout(samples.size)
        embeddings = ImageEmbeddings(self._pieces.beside(lambda: encoder.encode(laid.span, samples)))
        self._pieces.pause()
        shown = Shown(0, laid.span, (), embeddings, audio=samples, audio_rate=processor.rate)
        return Exhibit(processor.placeholder, laid.text, [shown], audio=[samples])

    def words(self, count: int) -> str:
        """Returns a text of about `count` tokens."""
        return _SENTENCE * max(1, round(count / len(self.processor.tokens(_SENTENCE))))

    def prompts(self, plans: Sequence[Sequence[str | Exhibit]]) -> list[SeenPrompt]:
        """Returns prompts made of texts, pictures and videos; those that exceed the model's context are left out.

        Raises:
            UnseenError: not even one fits; or the processor writes something differently inside a prompt than alone.
        """
        prompts = [self._prompt(plan) for plan in plans]
        prompts = [each for each in prompts if len(each.tokens) + MORE_TOKENS < self.loaded.context_tokens]
        if not prompts:
            raise UnseenError("its context has no room for it")
        return prompts

    def _prompt(self, plan: Sequence[str | Exhibit]) -> SeenPrompt:
        exhibits = [part for part in plan if isinstance(part, Exhibit)]
        text = "".join(part.placeholder if isinstance(part, Exhibit) else part for part in plan)
        placed = self.processor.tokens("".join(part.text if isinstance(part, Exhibit) else part for part in plan))
        pictures = [each for one in exhibits for each in one.pictures]
        videos = [each for one in exhibits for each in one.videos]
        audio = [each for one in exhibits for each in one.audio]
        try:
            given = self._read(text, pictures, videos, audio)
            tokens = np.array(given.pop("input_ids")).reshape(-1).tolist()
        except Exception:
            if len(exhibits) == 1:
                raise
            # Some processors cannot read a prompt with several pictures that is written in this way.
            given, tokens = {}, placed
        shown, at, here = list[Shown](), 0, 0
        for each in [each for one in exhibits for each in one.shown]:
            at, here = _find(each.span.tokens, tokens, at), _find(each.span.tokens, placed, here)
            shown.append(replace(each, start=at))
            at, here = at + len(each.span.tokens), here + len(each.span.tokens)
        return SeenPrompt(tokens, given, shown, len(exhibits) == 1)

    def _read(
        self, text: str, pictures: list[Image.Image], videos: list[Video], audio: list[np.ndarray]
    ) -> dict[str, Any]:
        if not audio:
            return self.processor.read(text, pictures, videos)
        assert self.processor.audio is not None and not videos
        return self.processor.audio.read(text, audio, pictures)

    def sequence(self, prompt: SeenPrompt) -> ForcedSequence:
        """Returns a sequence with the prompt, forced along tokens of text."""
        draw, vocabulary = random.Random(1).randrange, self.loaded.vocabulary_size
        more = [draw(min(256, vocabulary // 2), vocabulary) for _ in range(MORE_TOKENS)]
        # The last token of a picture, or the one after it, may be special.
        special = self.processor.tokens_of_media
        more = [token if token not in special else min(special) - 1 for token in more]
        return ForcedSequence([*prompt.tokens, *more], len(prompt.tokens), prompt.shown)

    def own(self, prompts: Sequence[SeenPrompt], sequences: Sequence[ForcedSequence]) -> Logits:
        """Returns what mlx-vlm computes for sequences. If mlx-vlm treats several pictures or videos in a prompt
        differently than each alone, returns what the bare model computes with the separate encodings.

        Raises:
            UnseenError: mlx-vlm computes something else for a picture or video inside a prompt than alone.
        """
        own: Logits = {}
        for number, (prompt, sequence) in enumerate(zip(prompts, sequences, strict=True)):
            logits = self._by_mlx_vlm(prompt, sequence) or self._in_one_piece(sequence)
            own |= {(number, drawn): one for drawn, one in enumerate(logits)}
            self._pieces.pause()
        self.vision.forget()
        return own

    def _by_mlx_vlm(self, prompt: SeenPrompt, sequence: ForcedSequence) -> list[np.ndarray]:
        from mlx_vlm.models.cache import make_prompt_cache as own_caches

        if not prompt.given:
            return []
        model, ids = self.vision.model, mx.array([prompt.tokens])
        try:
            given = {name: as_arrays(value) for name, value in prompt.given.items() if name != "attention_mask"}
            marked = mx.array([self.processor.marked(prompt.tokens)])
            pixels, mask = given.pop("pixel_values", None), mx.ones(marked.shape, dtype=mx.int32)
            made = model.get_input_embeddings(marked, pixels, mask=mask, **given).to_dict()
            self._compare(made, sequence)
        except Exception:
            if prompt.single:
                raise
            return []
        given |= {name: value for name, value in made.items() if value is not None}
        language, caches = model.language_model, own_caches(model.language_model)
        logits = [language(ids, cache=caches, **given).logits[0, -1]]
        for token in sequence.tokens[sequence.prompt : sequence.prompt + DRAWN - 1]:
            logits.append(language(mx.array([[token]]), cache=caches).logits[0, -1])
        return [as_numpy(each.astype(mx.float32)) for each in logits]

    def _compare(self, made: dict[str, Any], sequence: ForcedSequence) -> None:
        """Compares the embeddings of a whole prompt with those assembled from separate encodings."""
        whole, tokens = made["inputs_embeds"][0], sequence.tokens[: sequence.prompt]
        if whole.shape[0] != len(tokens):
            raise UnseenError(f"mlx-vlm makes {whole.shape[0]} embeddings of a prompt of {len(tokens)} tokens")
        beside = self.vision.language_inputs.of_parts([SequencePart(tokens, 0, self._known(sequence))], len(tokens))
        pairs = [(whole, beside["inputs_embeds"][0])]
        ours, theirs = levels_of(beside), levels_of(made)
        if len(ours) != len(theirs):
            raise UnseenError("the picture reaches other layers inside a prompt than alone")
        for one, other in zip(ours, theirs, strict=True):
            pairs.append((_spread(other, made["visual_pos_masks"]), _spread(one, beside["visual_pos_masks"])))
        for expected, got in pairs:
            off = float(mx.abs(expected - got).max() / mx.abs(expected).max())
            if not off <= self.near:
                raise UnseenError(f"inside a prompt mlx-vlm encodes it differently than alone, off by {off:.2g}")

    def _known(self, sequence: ForcedSequence) -> SequencePictures:
        """Returns the pictures of a sequence, with their embeddings and positions."""
        pictures = SequencePictures([(each.start, len(each.span.tokens)) for each in sequence.pictures])
        for index, each in enumerate(sequence.pictures):
            pictures.embeddings[index] = each.embeddings
        grids = [(each.span.grid, each.video) for each in sequence.pictures]
        self.vision.set_positions(pictures, sequence.tokens[: sequence.prompt], grids)
        return pictures

    def _in_one_piece(self, sequence: ForcedSequence) -> list[np.ndarray]:
        model, pictures, caches = self.loaded.model, self._known(sequence), make_prompt_cache(self.loaded.model)
        tokens, beside = sequence.tokens[: sequence.prompt], self.vision.language_inputs.of_parts
        logits = [
            model(mx.array([tokens]), cache=caches, **beside([SequencePart(tokens, 0, pictures)], len(tokens)))[0, -1]
        ]
        for place in range(sequence.prompt, sequence.prompt + DRAWN - 1):
            further = self.vision.language_inputs.of_steps([place], [pictures])
            logits.append(model(mx.array([[sequence.tokens[place]]]), cache=caches, **further)[0, -1])
        return [as_numpy(each.astype(mx.float32)) for each in logits]

    def in_group(self, sequences: Sequence[ForcedSequence], followers: Followers, again: int) -> Faults:
        """As `in_engine`, for the leader of a divided model. No process has the whole model, so the sequences are
        compared with themselves alone."""
        found, forced = Faults(), ForcedSequences(self.loaded, sequences, self._pieces, followers)
        alone, found.alone = forced.cold(self.loaded)
        if not found.alone:
            found.together = forced.batched(self.loaded, alone)
            if self.loaded.spec.reusable:
                found.again = forced.again(self.loaded, [again])
        return found

    def in_engine(self, sequences: Sequence[ForcedSequence], own: Logits, again: int) -> Faults:
        """Forces sequences through an engine: alone, batched, and one of them once more from its cached KV.

        Args:
            own: the expected logits.
            again: the number of the sequence that runs again.
        """
        loaded, found, forced = self.loaded, Faults(), ForcedSequences(self.loaded, sequences, self._pieces)
        alone, plain, wrong = forced.alone(loaded)
        if wrong := wrong or forced.difference(own, plain):
            found.alone = wrong
            return found
        found.together = forced.batched(loaded, alone)
        if loaded.spec.reusable:
            found.again = forced.again(loaded, [again])
        return found


def _find(span: Sequence[int], tokens: Sequence[int], at: int) -> int:
    """Returns where a span begins, from `at` on.

    Raises:
        UnseenError: it is not there.
    """
    wanted = list(span)
    for place in range(at, len(tokens) - len(wanted) + 1):
        if list(tokens[place : place + len(wanted)]) == wanted:
            return place
    raise UnseenError("inside a prompt its processor writes it differently than alone")


def _spread(level: mx.array, mask: mx.array) -> mx.array:
    """Returns a level as `(tokens, dim)`, zero for tokens outside the mask `(1, tokens)`."""
    places = np.flatnonzero(np.array(mask).reshape(-1))
    spread = mx.zeros((mask.size, level.shape[-1]), level.dtype)
    spread[mx.array(places)] = level
    return spread
