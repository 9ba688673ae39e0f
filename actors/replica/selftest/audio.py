"""The self-test of a model's audio, as that of its pictures: the model must get the same as from mlx-vlm.

An encoder may drop audio, give the same for any, or encode it differently inside a prompt than alone. The language part
may also change when audio comes, such as a model that switches to other weights. Then text beside it would be computed
wrongly.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from ...model_files.source import first_sentence
from ...protocol.block_ids import BLOCK_TOKENS
from ..execution.loaded_model import LoadedModel
from ..proving.pieces import IN_ONE_PIECE, Pieces
from .forced_sequences import Faults, difference, rounding
from .pictures import DIFFERING, LATE_S, SIZE, plain_logits
from .samples import Exhibit, Exhibition, UnseenError, noise

SHORT_S, LONG_S = 1.0, 2.6
"""Seconds of the two pieces of audio."""

_FEW = 12


def fault_of_audio(loaded: LoadedModel, pieces: Pieces = IN_ONE_PIECE) -> str:
    """Tests a model with audio: alone in a prompt, twice, and with a picture before it. Its pictures must have passed
    their test. State that its modules store during the test is reset.

    Args:
        pieces: the pieces of the test, as for `pictures.faults`.

    Returns:
        What is wrong, as the end of a sentence; empty if nothing is, or if its processor takes no audio.
    """
    vision = loaded.vision
    assert vision is not None
    if vision.audio is None:
        return vision.no_audio
    try:
        before = plain_logits(loaded)
        found = _faults(Exhibition(loaded, vision, pieces), vision.audio.processor.rate, pieces).first
        if not found and (changed := difference(before, plain_logits(loaded), rounding(loaded))):
            found = f"after audio, text is not computed as before: {changed}"
    except UnseenError as reason:
        found = str(reason)
    except Exception as error:
        # Encoders and processors raise all kinds of exceptions.
        found = f"audio fails ({first_sentence(error)})"
    vision.forget()
    return found


def _faults(shows: Exhibition, rate: int, pieces: Pieces) -> Faults:
    began, few = pieces.now_s(), shows.words(_FEW)
    one, other = shows.audio(_noise(1, SHORT_S, rate)), shows.audio(_noise(2, LONG_S, rate))
    _check_differing(shows, one, rate)
    plans: list[list[str | Exhibit]] = [[few, one, few]]
    if pieces.now_s() < began + LATE_S:
        # Prompts that a block border cuts, with two pieces of audio, and with a picture before one.
        cut = shows.words(max(_FEW, BLOCK_TOKENS - 2 * _FEW - other.tokens // 2))
        picture = shows.picture(noise(1, *SIZE))
        plans += [[cut, other, few], [few, one, few, other, few], [few, picture, few, one, few]]
    prompts = shows.prompts(plans)
    sequences = [shows.sequence(prompt) for prompt in prompts]
    return shows.in_engine(sequences, shows.own(prompts, sequences), again=min(1, len(sequences) - 1))


def _check_differing(shows: Exhibition, one: Exhibit, rate: int) -> None:
    """Checks that the encoder gives something else for other audio of the same length.

    Raises:
        UnseenError: it gives the same.
    """
    same_length = shows.audio(_noise(3, SHORT_S, rate))
    places = mx.array(sorted(one.shown[0].span.places))
    left, right = (each.shown[0].embeddings.inputs[places].astype(mx.float32) for each in (one, same_length))
    differing = mx.abs(left - right).max(-1) > shows.near * mx.abs(left).max()
    if float(differing.astype(mx.float32).mean()) < DIFFERING:
        raise UnseenError("its encoder does not use audio: it gives the same for two different pieces")


def _noise(seed: int, seconds: float, rate: int) -> np.ndarray:
    """Returns noise, `(samples,) float32` in [-0.5, 0.5)."""
    return np.random.default_rng(seed).uniform(-0.5, 0.5, round(seconds * rate)).astype(np.float32)
