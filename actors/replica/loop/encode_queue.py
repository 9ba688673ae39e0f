"""Encodes sequences' pictures and audio before the sequences reach the scheduler. Audio takes the way of pictures.

Encoding a picture takes as long as many decode steps, so it runs in parallel with them, on its own thread and stream.
On a GPU pictures of the same layout are encoded together, because one alone does not use the whole device.

The next picture is chosen by its sequence: first by priority, then by the tenant and flow that have been given least
(`fairness.py`), then by least encoder time so far. So many pictures of one sequence do not delay the only picture of
another (fair queueing, Demers et al. 1989). If a picture was already encoded for another sequence, it costs nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from queue import SimpleQueue

import mlx.core as mx
import numpy as np
from PIL import Image

from ....cluster.errors import InvalidRequest, PictureLost, SatchelError
from ...model_files.media.media_layouts import SpanLayout
from ...protocol.media_ids import embeddings_id, is_media_token, name_at
from ...protocol.replica_messages import GenerateRequest, MediaSpan
from ..device.device import settle
from ..execution.media.language_inputs import ImageEmbeddings, SequencePictures
from ..execution.media.vision import Vision
from ..memory.embedding_cache import EmbeddingCache
from ..memory.embedding_tier import EmbeddingTier
from ..memory.sequence_memory import Sequence
from ..scheduling.fairness import FairShares
from ..scheduling.sequence import ScheduledSequence

logger = logging.getLogger(__name__)

LOST = "a picture or audio of this conversation is not in memory any more: send it again"
SLOWER_WEIGHT = 0.3
"""Weight of a slower measurement in the smoothed encoding time. It is low, because the first picture of a shape is
slow: kernels are compiled for it."""


def _id(request: GenerateRequest, index: int) -> bytes:
    media = request.media[index]
    return embeddings_id(request.root_id, name_at(request.prompt, media.start, len(media.tokens)))


def _kind(media: MediaSpan) -> tuple[object, ...]:
    """Returns a key that is equal for pictures that can be encoded together."""
    return media.width, media.height, media.video, media.tokens, media.grid, len(media.pixels), media.audio_rate


_Picture = tuple[Sequence, int]
_Made = tuple[list[ImageEmbeddings], float]
_Job = tuple[Future[_Made], Callable[[], _Made]]


@dataclass
class _PicturedSequence:
    """A sequence that waits for its pictures. `missing` has the `features_id` of each by its index. `had_s` is the
    encoder time that it was given, in seconds; a sequence that comes later starts at the current share, not at 0."""

    sequence: Sequence
    scheduled: ScheduledSequence
    missing: dict[int, bytes]
    had_s: float


@dataclass(frozen=True)
class _Encoding:
    """Pictures that are being encoded, as (sequence, index), and the future of their image embeddings and the seconds
    that they took."""

    pictures: list[_Picture]
    made: Future[_Made]


@cache
def _encoder() -> SimpleQueue[_Job]:
    """Starts this process's encoder, and returns where it takes its jobs from.

    All queues of a process share it: MLX keeps the streams of a thread that has ended. It is a daemon: if the
    interpreter joined it at exit, the process would abort, because MLX's compiled code calls back into Python.
    """
    jobs: SimpleQueue[_Job] = SimpleQueue()
    threading.Thread(target=_encode_forever, args=(jobs,), name="encoder", daemon=True).start()
    return jobs


def _encode_forever(jobs: SimpleQueue[_Job]) -> None:
    while True:
        made, encode = jobs.get()
        try:
            made.set_result(encode())
        except BaseException as error:
            made.set_exception(error)
        # Otherwise the last picture would stay alive until the next one.
        del made, encode


class PictureQueue:
    """The sequences that wait for their pictures, and the cache of image embeddings. For the engine's thread.

    Args:
        vision: None if the model does not support pictures.
        bytes_max: bytes for image embeddings that no sequence needs any more.
        disk: stores agents' image embeddings; None if nothing is written.
        wake: called on another thread when a picture has been encoded.

    Attributes:
        encode_token_s: smoothed seconds of encoding per token of a picture, 0 before the first.
    """

    def __init__(
        self, vision: Vision | None, bytes_max: int, disk: EmbeddingTier | None, wake: Callable[[], None]
    ) -> None:
        self.embeddings = EmbeddingCache(bytes_max)
        self.encode_token_s = 0.0
        self._vision, self._disk, self._wake = vision, disk, wake
        self._encoding: _Encoding | None = None
        self._waiting: dict[str, _PicturedSequence] = {}
        # Seconds of encoder time that a sequence would have had if it had always been waiting.
        self._share_s = 0.0
        self._shares = FairShares()
        # Per sequence, the image embeddings that it needs until it is prefilled.
        self._holding: dict[str, dict[int, ImageEmbeddings]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def pending_tokens(self) -> int:
        """Prompt tokens of the sequences that wait here."""
        return sum(waiting.scheduled.prompt for waiting in list(self._waiting.values()))

    def refusal(self, media: list[MediaSpan], prompt: list[int]) -> SatchelError | None:
        """Returns why a request's pictures, videos and audio are refused, or None."""
        if not media:
            return None
        if self._vision is None:
            kind = "pictures" if any(not one.audio_rate for one in media) else "audio"
            return InvalidRequest(f"this model does not support {kind}", param="messages")
        if any(one.audio_rate for one in media) and self._vision.audio is None:
            return InvalidRequest("this model does not support audio", param="messages")
        ends = [(one.start, one.start + len(one.tokens)) for one in media]
        ordered = all(before[1] <= after[0] for before, after in pairwise(ends))
        if not ordered or ends[0][0] < 0 or ends[-1][1] > len(prompt):
            return InvalidRequest("the places of pictures, videos and audio are not in the prompt", param="messages")
        return None

    def begin(
        self, sequence: Sequence, scheduled: ScheduledSequence, known: int, restored: Mapping[int, ImageEmbeddings]
    ) -> bool:
        """Accepts a sequence with its pictures.

        Args:
            known: how many of its first tokens have KV.
            restored: image embeddings that were read back, by the pictures' indexes.

        Returns:
            Whether it can start at once: every picture's embeddings are there or not needed.

        Raises:
            PictureLost: a picture must be encoded, but neither this sequence nor a waiting one has its pixels.
        """
        media = sequence.request.media
        if not media or self._vision is None:
            return True
        pictures = SequencePictures([(one.start, len(one.tokens)) for one in media])
        self._vision.set_positions(
            pictures, sequence.given(0, len(sequence.request.prompt)), [(one.grid, one.video) for one in media]
        )
        sequence.pictures, scheduled.unbroken = pictures, pictures.unbroken
        known = pictures.usable(known)
        missing = [index for index, one in enumerate(media) if one.start + len(one.tokens) > known]
        for index in missing:
            if media[index].pixels or index in restored:
                continue
            picture = _id(sequence.request, index)
            if picture not in self.embeddings and self._with_pixels(picture) is None:
                raise PictureLost(LOST)
        self._holding[sequence.id] = pictures.embeddings
        # The other pictures need no embeddings, because their KV is cached.
        self.embeddings.hits += len(media) - len(missing)
        for index in restored.keys() & set(missing):
            self._reuse(sequence, index, restored[index])
        named = {index: _id(sequence.request, index) for index in missing if not self._has(sequence, index)}
        lacking = {index: picture for index, picture in named.items() if not self._find(sequence, index, picture)}
        if lacking:
            self._waiting[sequence.id] = _PicturedSequence(sequence, scheduled, lacking, self._share_s)
            self._shares.join(scheduled)
        return not lacking

    def _lacking(self, picture: bytes) -> Iterator[_Picture]:
        """Yields the sequences that wait for a picture, with its index there."""
        for waiting in self._waiting.values():
            for index, wanted in waiting.missing.items():
                if wanted == picture and not self._has(waiting.sequence, index):
                    yield waiting.sequence, index

    def _with_pixels(self, picture: bytes) -> _Picture | None:
        """Returns a sequence that waits for the picture and has its pixels, or None."""
        lacking = self._lacking(picture)
        return next((one for one in lacking if one[0].request.media[one[1]].pixels), None)

    def step(self, attempt: Callable[[str, Callable[[], None]], None]) -> Iterator[ScheduledSequence]:
        """Collects encoded pictures and begins the next one. Yields the sequences that have all embeddings they need.

        Args:
            attempt: runs an action for a request; if it raises, the request ends.
        """
        if self._encoding is not None and self._encoding.made.done():
            encoding, self._encoding = self._encoding, None
            self._finish(encoding, attempt)
        if not self._waiting:
            return
        for waiting in self._by_turn():
            sequence, missing, full = waiting.sequence, waiting.missing, self._is_full()
            for index, picture in list(missing.items()):
                if not self._has(sequence, index) and (full or not self._find(sequence, index, picture)):
                    if self._encoding is None and not full:
                        attempt(sequence.id, lambda sequence=sequence, index=index: self._begin(sequence, index))
                    break
                del missing[index]
            if not missing and self._let_go(sequence.id):
                yield waiting.scheduled

    def _by_turn(self) -> list[_PicturedSequence]:
        """Returns the waiting sequences, the next one first. If sequences hold too much memory already, the order is
        that of arrival, so that the first sequence soon gets its last picture."""
        if self._is_crowded():
            return sorted(self._waiting.values(), key=lambda one: -one.scheduled.priority)

        def turn(one: _PicturedSequence) -> tuple[float, ...]:
            return (-one.scheduled.priority, *self._shares.turn(one.scheduled, taking=True)[:2], one.had_s)

        return sorted(self._waiting.values(), key=turn)

    def _is_full(self) -> bool:
        """Whether embeddings hold so much memory that encoding must wait until sequences that have all theirs are
        prefilled."""
        ready = any(embeddings and name not in self._waiting for name, embeddings in self._holding.items())
        return ready and self._is_crowded()

    @property
    def held_bytes(self) -> int:
        """Bytes of the image embeddings that sequences need."""
        held = {id(one): one.nbytes for embeddings in self._holding.values() for one in embeddings.values()}
        return sum(held.values())

    def _is_crowded(self) -> bool:
        return self.held_bytes >= self.embeddings.bytes_max

    def _begin(self, sequence: Sequence, index: int) -> None:
        if not sequence.request.media[index].pixels:
            sequence, index = self._with_pixels(_id(sequence.request, index)) or (sequence, index)
        made: Future[_Made] = Future()
        pictures = self._batch_with(sequence, index)
        job = self._work(pictures)
        self._encoding = _Encoding(pictures, made)
        made.add_done_callback(lambda _: self._wake())
        _encoder().put((made, job))

    def _batch_with(self, sequence: Sequence, index: int) -> list[_Picture]:
        """Returns the picture and others to encode with it. They have the same layout, and their sequences the same
        priority; pictures of the same sequence come first. Their number is a power of two, because devices compile
        kernels for every new batch size."""
        assert self._vision is not None
        first, own = sequence.request.media[index], self._waiting.get(sequence.id)
        most = 1 if first.video in self._vision.unbatched else self._vision.together_tokens // len(first.tokens)
        if own is None or most < 2 or first.audio_rate:
            return [(sequence, index)]
        kind, batch = _kind(first), {_id(sequence.request, index): (sequence, index)}
        as_urgent = [
            waiting for waiting in self._waiting.values() if waiting.scheduled.priority == own.scheduled.priority
        ]
        sequences = sorted(as_urgent, key=lambda waiting: waiting is not own)
        for other, at, picture in ((each.sequence, *item) for each in sequences for item in each.missing.items()):
            if len(batch) == most:
                break
            if _kind(other.request.media[at]) == kind and not self._has(other, at) and picture not in self.embeddings:
                batch.setdefault(picture, (other, at))
        return list(batch.values())[: 1 << (len(batch).bit_length() - 1)]

    def _finish(self, encoding: _Encoding, attempt: Callable[[str, Callable[[], None]], None]) -> None:
        (sequence, index), error = encoding.pictures[0], encoding.made.exception()
        if error is None:
            # Even if a sequence is gone: others may need the same picture.
            self._all_encoded(encoding)
            # The cache may be too small to keep them for other sequences that wait.
            for (of, at), embeddings in zip(encoding.pictures, encoding.made.result()[0], strict=True):
                for other, place in self._lacking(_id(of.request, at)):
                    self._reuse(other, place, embeddings)
            return
        if len(encoding.pictures) > 1:
            logger.warning("%d pictures could not be encoded together: %s", len(encoding.pictures), error)
            assert self._vision is not None
            self._vision.unbatched.add(sequence.request.media[index].video)
        elif sequence.id in self._waiting:
            logger.warning("a picture of %s could not be encoded beside the steps: %s", sequence.id, error)
            attempt(sequence.id, lambda: self.encode(sequence, index))

    def expired(self, now: float) -> list[str]:
        """Removes and returns the sequences whose deadline has passed."""
        late = [name for name, waiting in self._waiting.items() if waiting.scheduled.deadline <= now]
        for name in late:
            self._let_go(name)
        return late

    def leave(self, request_id: str) -> None:
        """Forgets a sequence that ended; unknown ids are ignored."""
        self._let_go(request_id)
        self._holding.pop(request_id, None)

    def _let_go(self, request_id: str) -> bool:
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            self._shares.leave(waiting.scheduled)
        return waiting is not None

    def drop_embeddings(self, sequence: Sequence) -> None:
        """Releases the sequence's image embeddings after its prefill; a preempted sequence gets them again."""
        if sequence.pictures is not None:
            sequence.pictures.embeddings.clear()

    def require(self, sequence: Sequence, start: int, stop: int) -> None:
        """Makes sure that the sequence has the image embeddings for tokens [start, stop). They may be missing because
        KV that was known at its arrival is gone. May encode or read from disk, blocking.

        Raises:
            PictureLost: a picture must be encoded, but its pixels are missing.
        """
        if sequence.pictures is None:
            return
        for index in sequence.pictures.touched(start, stop):
            if self._encoding is not None and not self._has(sequence, index):
                # Only one encoding may run at a time, and it may be of this very picture.
                encoding, self._encoding = self._encoding, None
                if encoding.made.exception() is None:
                    self._all_encoded(encoding)
            if self._has(sequence, index) or self._find(sequence, index, _id(sequence.request, index)):
                continue
            loaded: dict[int, ImageEmbeddings] = {}
            if not sequence.request.media[index].pixels and self._disk is not None:
                # It was not read back earlier, because its KV was expected to be cached.
                loaded = self._disk.load(sequence.request, [index])
            if index in loaded:
                self._reuse(sequence, index, loaded[index])
            else:
                self.encode(sequence, index)

    def encode(self, sequence: Sequence, index: int) -> None:
        """Encodes a picture of a sequence on the engine's thread, blocking all sequences."""
        settle()
        try:
            (embeddings,), seconds = self._work([(sequence, index)])()
        except RuntimeError:
            # The failure of this encoding must not reach other sequences.
            with suppress(RuntimeError):
                mx.synchronize()
            raise
        self._encoded(sequence, index, embeddings, seconds)

    def _work(self, pictures: list[_Picture]) -> Callable[[], _Made]:
        """Returns a function that encodes pictures of one layout, on any thread.

        Raises:
            PictureLost: the pixels of the first one are missing.
        """
        sequence, index = pictures[0]
        vision, media, prompt = self._vision, sequence.request.media[index], sequence.request.prompt
        assert vision is not None
        if not media.pixels:
            raise PictureLost(LOST)
        places = frozenset(at for at in range(len(media.tokens)) if is_media_token(prompt[media.start + at]))
        span = SpanLayout(tuple(media.tokens), places, tuple(media.grid))

        every = [of.request.media[at].pixels for of, at in pictures]
        if (audio := vision.audio) is not None and media.audio_rate:

            def encode_audio() -> _Made:
                started = time.perf_counter()
                inputs = audio.encode(span, np.frombuffer(media.pixels[0], "<f4"))
                return [ImageEmbeddings(inputs)], time.perf_counter() - started

            return encode_audio

        def encode() -> _Made:
            started = time.perf_counter()
            shown = [[Image.frombytes("RGB", (media.width, media.height), each) for each in frames] for frames in every]
            embeddings = vision.encode(span, shown, video=media.video)
            return embeddings, time.perf_counter() - started

        return encode

    def _all_encoded(self, encoding: _Encoding) -> None:
        embeddings, seconds = encoding.made.result()
        self._share_s += seconds / max(1, len(self._waiting))
        for (sequence, index), one in zip(encoding.pictures, embeddings, strict=True):
            if (waiting := self._waiting.get(sequence.id)) is not None:
                waiting.had_s += seconds / len(embeddings)
                self._shares.charge(waiting.scheduled, round(seconds / len(embeddings) * 1e6))
            self._encoded(sequence, index, one, seconds / len(embeddings))

    def _encoded(self, sequence: Sequence, index: int, embeddings: ImageEmbeddings, seconds: float) -> None:
        self._note_time(seconds / len(sequence.request.media[index].tokens))
        self.embeddings.encodes += 1
        self._keep(sequence, index, embeddings)

    def _note_time(self, token_s: float) -> None:
        slower = 0.0 < self.encode_token_s < token_s
        self.encode_token_s += (SLOWER_WEIGHT if slower else 1.0) * (token_s - self.encode_token_s)

    def read_back(self, request: GenerateRequest, hot_tokens: int) -> dict[int, ImageEmbeddings]:
        """Reads image embeddings of a request's pictures beyond its first `hot_tokens` tokens from disk, by the
        pictures' indexes. Blocks; for any thread."""
        if self._disk is None:
            return {}
        lacking = [
            index
            for index, media in enumerate(request.media)
            if media.start + len(media.tokens) > hot_tokens and _id(request, index) not in self.embeddings
        ]
        return self._disk.load(request, lacking) if lacking else {}

    def _keep(self, sequence: Sequence, index: int, embeddings: ImageEmbeddings) -> None:
        assert sequence.pictures is not None
        self.embeddings.put(_id(sequence.request, index), embeddings)
        sequence.pictures.embeddings[index] = embeddings
        if self._disk is not None:
            self._disk.offer(sequence.request, sequence.request.media[index], embeddings)

    @staticmethod
    def _has(sequence: Sequence, index: int) -> bool:
        assert sequence.pictures is not None
        return index in sequence.pictures.embeddings

    def _find(self, sequence: Sequence, index: int, picture: bytes) -> bool:
        embeddings = self.embeddings.get(picture)
        if embeddings is None:
            return False
        self._reuse(sequence, index, embeddings)
        return True

    def _reuse(self, sequence: Sequence, index: int, embeddings: ImageEmbeddings) -> None:
        self.embeddings.hits += 1
        self._keep(sequence, index, embeddings)
