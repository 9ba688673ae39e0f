"""A separate engine whose sequences are forced along given tokens, and the logits of these: how the self-test sees what
an engine computes with a model."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType

import mlx.core as mx
import numpy as np
from PIL import Image

from ....cluster.config.config import Scheduling
from ...model_files.media.media_layouts import SpanLayout
from ...model_files.source import first_sentence
from ...protocol.block_ids import BLOCK_TOKENS, block_ids, root_id
from ...protocol.media_ids import audio_hash, media_key, media_tokens, picture_hash
from ...protocol.replica_messages import GenerateRequest, MediaSpan, Sampling, SequenceUpdate
from ..device.device import as_numpy, device_bytes, multiplies_exactly
from ..device.device_errors import DeviceFailed
from ..execution.followers import Followers
from ..execution.loaded_model import LoadedModel
from ..execution.media.language_inputs import ImageEmbeddings
from ..execution.sampling.sampling import Draw
from ..kernels.sealing import FULL_PRECISION, POLICIES
from ..loading.models import resealed
from ..loop.engine import Engine
from ..proving.pieces import IN_ONE_PIECE, Pieces
from ..scheduling.prefill_budget import PrefillPace

DRAWN = 4
"""How many tokens each sequence draws; their logits are compared."""

ROUNDING, ROUNDING_16 = 2e-3, 6e-2
"""How far a logit may be off, relative to the largest one, in float32 and in 16 bits, in three of four places. Sums are
added in another order, and an expert router may then choose another expert."""

GROSS, GROSS_16 = 5e-2, 0.5
"""How far it may be off in the other places. Models with sealed and recurrent layers reach 0.02: if a state is rounded
differently, later KV may get another 4-bit code."""

TURN_TOKENS = 9
"""New prompt tokens of a second turn."""

MORE_TOKENS = 2 * DRAWN + TURN_TOKENS
"""The most tokens that follow a sequence's prompt."""

NO_DEADLINE_S = 1e6
"""A deadline that is never reached: requests that are served between pieces may take any time."""

_STEPS_MAX = 4000
_ENCODES_S = 300.0
"""How long pictures may take."""

Logits = dict[tuple[int, int], np.ndarray]
"""Logits `(vocabulary,) float32`, by the sequence's number and how many tokens it has drawn."""


@dataclass(frozen=True)
class Shown:
    """A picture of a sequence, frames of a video in the size that its encoder takes, or audio: the first token of its
    span, the span, the frames, their embeddings, and whether they are of a video. `audio` is `(samples,) float32` at
    `audio_rate` samples a second, None for the others."""

    start: int
    span: SpanLayout
    frames: Sequence[Image.Image]
    embeddings: ImageEmbeddings
    video: bool = False
    audio: np.ndarray | None = None
    audio_rate: int = 0

    def in_request(self) -> MediaSpan:
        """Returns it in the form of requests."""
        if self.audio is not None:
            samples = self.audio.astype("<f4").tobytes()
            key = media_key([audio_hash(self.audio_rate, samples)])
            return MediaSpan(self.start, [*self.span.tokens], key, [], 0, 0, [samples], audio_rate=self.audio_rate)
        width, height = self.frames[0].size
        pixels = [frame.tobytes() for frame in self.frames]
        key = media_key([picture_hash(width, height, one) for one in pixels], b"frames" if self.video else b"")
        grid, tokens = list(self.span.grid), list(self.span.tokens)
        return MediaSpan(self.start, tokens, key, grid, width, height, pixels, self.video)


@dataclass(frozen=True)
class ForcedSequence:
    """A sequence: the tokens that the model gets, of which the first `prompt` are its prompt; and its pictures, in
    order."""

    tokens: Sequence[int]
    prompt: int
    pictures: Sequence[Shown] = ()

    def request(self, name: str, number: int, root: bytes, more: int) -> GenerateRequest:
        """Returns a request for the sequence.

        Args:
            number: the sequence's number.
            root: the parent of its first block.
            more: how many tokens after its prompt are also in the request's prompt.
        """
        prompt, media = list(self.tokens[: self.prompt + more]), []
        for shown in self.pictures:
            media.append(span := shown.in_request())
            places, audio = len(shown.span.places), shown.audio is not None
            ids = iter(media_tokens(span.key, places, video=shown.video, audio=audio))
            for place in sorted(shown.span.places):
                prompt[shown.start + place] = next(ids)
        return GenerateRequest(
            request_id=name,
            consumer="trial",
            model="",
            agent="",
            prompt=prompt,
            block_ids=block_ids(root, prompt),
            root_id=root,
            sampling=Sampling(temperature=0.0, max_tokens=DRAWN, seed=number, ignore_eos=True),
            media=media,
            deadline_s=NO_DEADLINE_S,
        )


@dataclass
class Faults:
    """What is wrong, as the end of a sentence; empty if nothing is. `alone`: with one sequence in the engine;
    `together`: with a batch; `again`: with turns that reuse KV."""

    alone: str = ""
    together: str = ""
    again: str = ""

    def __bool__(self) -> bool:
        return bool(self.first)

    @property
    def first(self) -> str:
        return self.alone or self.together or self.again

    @property
    def weight(self) -> int:
        """A larger number means that more cannot be used because of these faults."""
        return 4 * bool(self.alone) + 2 * bool(self.together) + bool(self.again)


def rounding(loaded: LoadedModel) -> tuple[float, float]:
    """Returns how far logits of the model may be off: in three of four places, and in the others."""
    return (ROUNDING, GROSS) if multiplies_exactly(getattr(mx, loaded.dtype)) else (ROUNDING_16, GROSS_16)


def difference(expected: Logits, got: Logits, allowed: tuple[float, float]) -> str:
    """Says how logits differ more than is `allowed` (from `rounding`), as the end of a sentence; empty if they do
    not."""
    if missing := not_finite(got) or ("" if expected.keys() <= got.keys() else "it ends too soon"):
        return missing
    off = [float(np.abs(got[place] - one).max() / np.abs(one).max()) for place, one in expected.items()]
    usual, gross = allowed
    wrong = max(off) > gross or 4 * sum(one > usual for one in off) > len(off)
    return f"it computes something else, off by {max(off):.2g} of its logits" if wrong else ""


def not_finite(logits: Logits) -> str:
    """Says that logits are not finite, as the end of a sentence; empty if they are."""
    finite = all(np.isfinite(values).all() for values in logits.values())
    return "" if finite else "it computes numbers that are not finite"


class _Forced:
    """Replaces a batch's sampler: gives every sequence the next token of its script, and notes its logits."""

    def __init__(self, scripts: Sequence[ForcedSequence], noted: Logits) -> None:
        self._scripts = scripts
        self._noted = noted
        self._sequences: list[tuple[int, int, int]] = []

    def add(self, sampling: Sampling, prompt: Sequence[int], generated: Sequence[int]) -> None:
        self._sequences.append((sampling.seed, len(prompt), len(generated)))

    def state_of(self, index: int) -> tuple[int, int, int]:
        return self._sequences[index]

    def add_state(self, state: tuple[int, int, int]) -> None:
        self._sequences.append(state)

    def keep(self, indices: Sequence[int]) -> None:
        self._sequences = [self._sequences[index] for index in indices]

    def __call__(self, logits: mx.array, masks: object) -> Draw:
        values, tokens = as_numpy(logits.astype(mx.float32)), []
        for place, (sequence, prompt, drawn) in enumerate(self._sequences):
            script = self._scripts[sequence].tokens
            self._noted.setdefault((sequence, drawn), values[place])
            tokens.append(script[min(prompt + drawn, len(script) - 1)])
            self._sequences[place] = (sequence, prompt, drawn + 1)
        return Draw(mx.array(tokens, mx.uint32), mx.ones((len(tokens),), mx.bool_))


class _Steady(PrefillPace):
    """Replaces the measured rate: prompts are prefilled in chunks of one size, so that the batches do not depend on how
    busy the machine is."""

    def budget(self, decoding: bool) -> int:
        return self.chunk_tokens


class Scene:
    """An engine whose sequences are forced. Exceptions of its model are noted, not logged.

    Args:
        pieces: the engine ends a piece after each step, and within a step after each layer of a prompt.
        followers: as for `Engine`.
        between: called before each run, while none of its sequences is computed; it may compute others with the same
            followers.

    Attributes:
        noted: the logits of its sequences.
        failure: what went wrong, as the end of a sentence; empty if nothing did.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        sequences: Sequence[ForcedSequence],
        pieces: Pieces = IN_ONE_PIECE,
        followers: Followers | None = None,
        between: Callable[[], object] | None = None,
    ) -> None:
        self.noted: Logits = {}
        self._pieces, self._between = pieces, between
        self._ends: dict[str, str] = {}
        self._heard: list[BaseException] = []
        self._sequences = sequences
        self._runs = 0
        self._root = root_id(loaded.model_id, "trial")
        memory_bytes = device_bytes(free=True)
        scheduling = Scheduling(sequences_max=8)
        self._engine = engine = Engine(loaded, scheduling, memory_bytes, self._take, followers=followers)
        engine.prefill.pace = _Steady(BLOCK_TOKENS, pause_s=1.0)
        if pieces is not IN_ONE_PIECE:
            engine.executor.pieces = Pieces(self._pause)
        engine.executor.make_sampler = lambda: _Forced(sequences, self.noted)
        engine.executor.clear_batch()

    def __enter__(self) -> Scene:
        self._listening = _listening(self._heard)
        self._listening.__enter__()
        return self

    def _pause(self) -> None:
        """Ends a piece."""
        self._unheard(self._pieces.pause)

    def _unheard(self, serve: Callable[[], object]) -> None:
        """Serves requests. Exceptions that are logged meanwhile are not noted."""
        self._listening.__exit__(None, None, None)
        try:
            serve()
        finally:
            self._listening = _listening(self._heard)
            self._listening.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._engine.prefixes.clear()
            self._engine.executor.clear_batch()
            self._engine.executor.give_back(0)
        except DeviceFailed:
            self._engine.executor.reset()
        finally:
            self._listening.__exit__(None, None, None)

    @property
    def failure(self) -> str:
        if self._heard:
            return f"it fails ({first_sentence(self._heard[0])})"
        wrong = {end for end in self._ends.values() if end != "length"}
        return f"its sequences end with {min(wrong)}" if wrong else ""

    def run(self, sequences: Sequence[int], later: Sequence[int] = (), *, more: int = 0) -> None:
        """Runs sequences to their ends. Those in `later` join when the others have drawn a token.

        Args:
            more: how many tokens after a sequence's prompt are also in the request's prompt.
        """
        if self._between is not None:
            self._unheard(self._between)
            # All processes begin it alike.
            self._engine.executor.clear_batch()
        self._runs += 1
        waiting = list(later)
        for sequence in sequences:
            self._submit(sequence, more)
        steps, ends = 0, self._pieces.now_s() + _ENCODES_S
        while steps < _STEPS_MAX and self._pieces.now_s() < ends:
            try:
                busy = self._engine.step()
            except DeviceFailed as error:
                self._heard.append(error)
                return
            if self._pieces is not IN_ONE_PIECE:
                self._pause()
            if waiting and (self.noted or not (busy or self._engine.pictures)):
                for sequence in waiting:
                    self._submit(sequence, more)
                waiting = []
            elif not busy and self._engine.pictures:
                # They are encoded on another thread.
                time.sleep(0.001)
            elif not busy:
                return
            else:
                steps += 1
        self._ends["all"] = "no end"

    def _submit(self, number: int, more: int) -> None:
        def reply(refusal: Exception | None) -> None:
            if refusal is not None:
                self._heard.append(refusal)

        sequence = self._sequences[number]
        request = sequence.request(f"{self._runs}/{number}", number, self._root, more)
        # Encoders take long: each picture is encoded once.
        embeddings = {index: shown.embeddings for index, shown in enumerate(sequence.pictures)}
        self._engine.submit(request, reply, embeddings=embeddings)

    def _take(self, updates: dict[str, list[SequenceUpdate]]) -> None:
        for one in updates.get("trial", []):
            if one.finish is not None:
                said = (one.error or {}).get("message")
                self._ends[one.request_id] = f"{one.finish} ({said})" if said else one.finish


class ForcedSequences:
    """Sequences that are run in engines of a model: alone, batched, and as second turns. Arguments as for `Scene`."""

    def __init__(
        self,
        loaded: LoadedModel,
        sequences: Sequence[ForcedSequence],
        pieces: Pieces = IN_ONE_PIECE,
        followers: Followers | None = None,
        between: Callable[[], object] | None = None,
    ) -> None:
        self.sequences, self._pieces, self._followers, self._between = sequences, pieces, followers, between
        self._allowed = rounding(loaded)

    def difference(self, expected: Logits, got: Logits) -> str:
        """As the function `difference`, with the tolerance for the model's rounding."""
        return difference(expected, got, self._allowed)

    def alone(self, loaded: LoadedModel) -> tuple[Logits, Logits, str]:
        """Runs every sequence alone.

        Returns:
            Their logits, their logits with KV in full precision, and what is wrong with either. Only the second can be
            compared with the bare model, because the effect of quantized KV is not known.
        """
        logits, wrong = self.cold(loaded)
        policy = loaded.spec.policy
        if policy is None or not policy.quantizes or wrong:
            return logits, logits, wrong
        return logits, *self.cold(replace(resealed(loaded, POLICIES[FULL_PRECISION]), way=loaded.way))

    def cold(self, loaded: LoadedModel) -> tuple[Logits, str]:
        """Runs every sequence alone. Returns their logits, and what is wrong with them."""
        with self._scene(loaded) as scene:
            for sequence in range(len(self.sequences)):
                scene.run([sequence])
        return scene.noted, scene.failure or not_finite(scene.noted)

    def batched(self, loaded: LoadedModel, alone: Logits) -> str:
        """Runs all sequences in one batch, the last one first. Returns what is wrong."""
        *short, long = range(len(self.sequences))
        with self._scene(loaded) as scene:
            scene.run([long], short)
            return scene.failure or self.difference(alone, scene.noted)

    def again(self, loaded: LoadedModel, sequences: Sequence[int]) -> str:
        """Runs a second turn of some sequences from cached KV, and without it. Returns what is wrong."""
        more = DRAWN + TURN_TOKENS
        with self._scene(loaded) as anew:
            anew.run(sequences, more=more)
        with self._scene(loaded) as scene:
            scene.run(sequences)
            scene.noted.clear()
            scene.run(sequences, more=more)
            return scene.failure or self.difference(anew.noted, scene.noted)

    def _scene(self, loaded: LoadedModel) -> Scene:
        return Scene(loaded, self.sequences, self._pieces, self._followers, self._between)


@contextmanager
def _listening(heard: list[BaseException]) -> Iterator[None]:
    """Collects exceptions that the replica's own modules log; all other records are logged as usual."""
    replica = __name__.rpartition(".selftest.")[0]

    class Listener(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            if record.exc_info and record.exc_info[1] is not None:
                heard.append(record.exc_info[1])
                return False
            return True

    # A logger's filters see only its own records, so the filter is added to each module's logger.
    names = [name for name in logging.root.manager.loggerDict if name.startswith(f"{replica}.")]
    listener, loggers = Listener(), [logging.getLogger(replica), *map(logging.getLogger, names)]
    for one in loggers:
        one.addFilter(listener)
    try:
        yield
    finally:
        for one in loggers:
            one.removeFilter(listener)
