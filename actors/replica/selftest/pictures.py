"""The self-test of a model's pictures before it is served: the model must get the same as from mlx-vlm.

An encoder may expect its pixels under another name, return another number of embeddings than a picture has tokens, need
inputs of the language part that are not given, or encode a picture differently inside a prompt than alone. Such a model
loads without an error, and then describes pictures that nobody sent. So pictures are encoded, and compared with each
other and with what mlx-vlm computes for whole prompts; and sequences with pictures are forced through an engine, as
sequences of text are. If a model supports videos, the same is done with a video.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from PIL import Image

from ...model_files.source import first_sentence
from ...protocol.block_ids import BLOCK_TOKENS
from ..device.device import as_numpy
from ..execution.followers import Followers
from ..execution.loaded_model import LoadedModel
from ..execution.media.vision import Vision
from ..proving.pieces import IN_ONE_PIECE, Pieces
from .forced_sequences import Faults, Logits, difference, rounding
from .samples import Exhibit, Exhibition, SeenPrompt, UnseenError, noise

SIZE = (224, 168)
"""Width and height of the pictures."""

WIDE = (728, 364)
"""Width and height of a picture that many processors cut into parts."""

SECONDS = (0.0, 0.5, 1.0, 1.5)
"""The times of the video's frames, in seconds."""

LATE_S = 20.0
"""After this time in an encoder the test is shortened: on a CPU a large encoder takes a minute for a picture."""

REPEATS = 4
"""How often a picture is encoded again, with other numbers in freed memory: some encoders read beyond an array's
end."""

DIFFERING = 0.5
"""The part of a picture's tokens that must differ between two pictures of noise; some tokens only mark ends of
lines."""

_FEW = 12


def faults(loaded: LoadedModel, pieces: Pieces = IN_ONE_PIECE, followers: Followers | None = None) -> Faults:
    """Tests a vision model. State that its modules store during the test is reset.

    Args:
        pieces: the pieces of the test. A prompt with a picture that mlx-vlm computes is one piece, and so is the
            encoding of a picture.
        followers: have the other layers, if the model is divided. Then nothing is compared with mlx-vlm.

    Returns:
        The faults of sequences with pictures. If there is a fault `alone`, the model cannot get pictures.
    """
    vision = loaded.vision
    assert vision is not None
    try:
        # The layers of a group compute only together.
        before = plain_logits(loaded) if followers is None else {}
        found = _PictureTest(loaded, vision, pieces, followers).faults()
        if before and not found.alone and (changed := difference(before, plain_logits(loaded), rounding(loaded))):
            found.alone = f"after a picture, text is not computed as before: {changed}"
    except UnseenError as reason:
        found = Faults(alone=str(reason))
    except Exception as error:
        # Encoders and processors raise all kinds of exceptions.
        found = Faults(alone=f"a picture fails ({first_sentence(error)})")
    vision.forget()
    return found


def fault_of_videos(loaded: LoadedModel, pieces: Pieces = IN_ONE_PIECE, followers: Followers | None = None) -> str:
    """Tests a model with a video, alone and with a picture before it. Its pictures must have passed their test.

    Args:
        pieces, followers: as for `faults`.

    Returns:
        What is wrong, as the end of a sentence; empty if nothing is, or if its processor does not support videos.
    """
    vision = loaded.vision
    assert vision is not None
    if not vision.processor.video_placeholder:
        return vision.processor.stills
    try:
        found = _of_videos(Exhibition(loaded, vision, pieces), pieces, followers).first
    except UnseenError as reason:
        found = str(reason)
    except Exception as error:
        found = f"a video fails ({first_sentence(error)})"
    vision.forget()
    return found


def plain_logits(loaded: LoadedModel) -> Logits:
    """Returns the logits of a text prompt with the model's own caches."""
    tokens = mx.array([[2, 3, 5, 7, 11, 13]], mx.uint32) % loaded.vocabulary_size
    logits = loaded.model(tokens, cache=make_prompt_cache(loaded.model))[0, -1]
    return {(0, 0): as_numpy(logits.astype(mx.float32))}


class _PictureTest:
    def __init__(self, loaded: LoadedModel, vision: Vision, pieces: Pieces, followers: Followers | None = None) -> None:
        self._vision, self._shows, self._pieces = vision, Exhibition(loaded, vision, pieces), pieces
        self._followers = followers
        self._late = pieces.now_s() + LATE_S

    def faults(self) -> Faults:
        """Returns what is wrong.

        Raises:
            UnseenError: the pictures do not reach the model correctly.
        """
        shows = self._shows
        one, other = self._encode()
        few = shows.words(_FEW)
        cut = shows.words(max(_FEW, BLOCK_TOKENS - 2 * _FEW - one.tokens // 2))
        plans: list[list[str | Exhibit]] = [[few, one, few]]
        if not self._is_late():
            # Prompts with one picture that a block border cuts, and with two pictures.
            plans += [[cut, other, few], [few, one, cut, other, few]]
            plans += [[few, wide, few] for wide in self._wide()]
        prompts = shows.prompts(plans)
        found = _tested(shows, prompts, min(2, len(prompts) - 1), self._followers)
        if found.alone:
            found.alone = f"with a picture in its prompt {found.alone}"
        return found

    def _is_late(self) -> bool:
        return self._pieces.now_s() > self._late

    def _encode(self) -> tuple[Exhibit, Exhibit]:
        """Encodes two pictures, and compares them."""
        picture = noise(1, *SIZE)
        opposite = Image.fromarray(255 - np.asarray(picture))
        one, other = self._shows.picture(picture), self._shows.picture(opposite)
        span, encoded = one.shown[0].span, one.shown[0].embeddings.inputs
        places = mx.array(sorted(span.places))
        left, right = (each.shown[0].embeddings.inputs[places].astype(mx.float32) for each in (one, other))
        differing = mx.abs(left - right).max(-1) > self._shows.near * mx.abs(left).max()
        if float(differing.astype(mx.float32).mean()) < DIFFERING:
            raise UnseenError("its encoder does not look at pictures: it gives the same for two different ones")
        for _ in range(REPEATS):
            if self._is_late():
                break
            _leave_noise()
            again = self._pieces.beside(lambda: self._vision.encode(span, [[picture]], video=False)[0].inputs)
            self._pieces.pause()
            if not float(mx.abs(again - encoded).max()) <= self._shows.near * float(mx.abs(again).max()):
                raise UnseenError("its encoder gives something else for the same picture every time")
        return one, other

    def _wide(self) -> list[Exhibit]:
        """Encodes a wide picture, if it has another layout than the others."""
        if self._vision.processor.layout(*WIDE).span == self._vision.processor.layout(*SIZE).span:
            return []
        try:
            return [self._shows.picture(noise(2, *WIDE))]
        except Exception as error:
            raise UnseenError(f"a picture of {WIDE[0]} x {WIDE[1]} pixels fails ({first_sentence(error)})") from error


def _tested(shows: Exhibition, prompts: Sequence[SeenPrompt], again: int, followers: Followers | None) -> Faults:
    sequences = [shows.sequence(prompt) for prompt in prompts]
    if followers is not None:
        return shows.in_group(sequences, followers, again)
    return shows.in_engine(sequences, shows.own(prompts, sequences), again)


def _of_videos(shows: Exhibition, pieces: Pieces, followers: Followers | None = None) -> Faults:
    began = pieces.now_s()
    few, video = shows.words(_FEW), shows.video([noise(3 + number, *SIZE) for number in range(len(SECONDS))], SECONDS)
    plans: list[list[str | Exhibit]] = [[few, video, few]]
    if pieces.now_s() < began + LATE_S:
        # A prompt with a video that a block border cuts, and one with a picture before the video.
        cut = shows.words(max(_FEW, BLOCK_TOKENS - 2 * _FEW - video.tokens // 2))
        plans += [[cut, video, few], [few, shows.picture(noise(1, *SIZE)), few, video, few]]
    prompts = shows.prompts(plans)
    return _tested(shows, prompts, len(prompts) - 1, followers)


def _leave_noise() -> None:
    """Leaves numbers other than zero in freed memory of small arrays."""
    sizes = [2**power for power in range(1, 10) for _ in range(16)]
    mx.eval([mx.random.randint(1, 1000, (size,), dtype=mx.int32) for size in sizes])
