"""Rows whose pictures are encoded before the scheduler hears of them, and what is kept of them.

A picture takes as long to encode as many decode steps. So it is done beside the steps, on a thread and a stream of its
own, on a GPU together with others of its layout, which alone are too small for it. Next is one of the most urgent
rows', of these one's of the tenant and flow that was given least (`fairness.py`), and of those the one's that has had
least of its share: many pictures of one do not hold up another's only one (fair queueing, Demers et al. 1989). What
others have encoded meanwhile costs nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import pairwise
from queue import SimpleQueue

from PIL import Image

from ...cluster.errors import InvalidRequest, PictureLost, SatchelError
from ..model_files.processors import Layout
from ..protocol.media_ids import features_id, is_word, name_at
from ..protocol.messages import GenerateRequest, Media
from .execution.vision import Features, RowPictures, Vision
from .scheduling.fairness import FairShares
from .scheduling.scheduler import ScheduledRow
from .tiers.feature_cache import FeatureCache
from .tiers.feature_tier import FeatureTier
from .tiers.memory import Sequence

logger = logging.getLogger(__name__)

LOST = "a picture of this conversation is not in memory any more: send it again"
SLOWER_WEIGHT = 0.3
"""The share of a new measure in the time of encoding where that got slower: the first of a shape compiles kernels."""


def _id(request: GenerateRequest, index: int) -> bytes:
    media = request.media[index]
    return features_id(request.root_id, name_at(request.prompt, media.start, len(media.tokens)))


def _kind(media: Media) -> tuple[object, ...]:
    """What pictures have in common that can be encoded together."""
    return media.width, media.height, media.video, media.tokens, media.grid, len(media.pixels)


_Picture = tuple[Sequence, int]
_Made = tuple[list[Features], float]
_Job = tuple[Future[_Made], Callable[[], _Made]]


@dataclass
class _PicturedRow:
    """`missing` are the pictures that it waits for, by their indexes: what they are called as `features_id`.
    `had_s` is the encoder's time (seconds) that it has had, more for one that came later."""

    sequence: Sequence
    row: ScheduledRow
    missing: dict[int, bytes]
    had_s: float


@dataclass(frozen=True)
class _Encoding:
    """What the encoder has in hand: pictures of rows, by their indexes there, and their features and the time that they
    took (seconds)."""

    pictures: list[_Picture]
    made: Future[_Made]


def _encode_forever(jobs: SimpleQueue[_Job]) -> None:
    while True:
        made, work = jobs.get()
        try:
            made.set_result(work())
        except BaseException as error:
            made.set_exception(error)
        # Else the last picture would be held until the next one comes.
        del made, work


class PictureQueue:
    """For the engine's thread.

    Args:
        vision: None for a model that takes no pictures.
        bytes_max: for features that no row needs any more.
        disk: where agents' are written down; None for nowhere.
        wake: called on another thread when a picture has been encoded.

    Attributes:
        encode_token_s: the smoothed time of encoding (seconds) for each token of a picture, 0 before the first.
    """

    def __init__(
        self, vision: Vision | None, bytes_max: int, disk: FeatureTier | None, wake: Callable[[], None]
    ) -> None:
        self.features = FeatureCache(bytes_max)
        self.encode_token_s = 0.0
        self._vision, self._disk, self._wake = vision, disk, wake
        self._jobs: SimpleQueue[_Job] | None = None
        self._encoding: _Encoding | None = None
        self._waiting: dict[str, _PicturedRow] = {}
        # What a row had that was always there.
        self._share_s = 0.0
        self._shares = FairShares()
        # What every row has been given and needs until it is prefilled.
        self._holding: dict[str, dict[int, Features]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def pending_tokens(self) -> int:
        """What is to be prefilled of the rows that wait here."""
        return sum(waiting.row.prompt for waiting in list(self._waiting.values()))

    def refusal(self, media: list[Media], prompt: list[int]) -> SatchelError | None:
        """Why pictures are not taken; None where they are."""
        if not media:
            return None
        if self._vision is None:
            return InvalidRequest("this model takes no pictures", param="messages")
        ends = [(one.start, one.start + len(one.tokens)) for one in media]
        ordered = all(before[1] <= after[0] for before, after in pairwise(ends))
        if not ordered or ends[0][0] < 0 or ends[-1][1] > len(prompt):
            return InvalidRequest("the pictures' places are not in the prompt", param="messages")
        return None

    def begin(self, sequence: Sequence, row: ScheduledRow, known: int, found: Mapping[int, Features]) -> bool:
        """Take in a row with its pictures, whose first `known` tokens have KV. Whether it need not wait here, as
        everything is known or not needed.

        Args:
            found: what was read back of the pictures, by their indexes.

        Raises:
            PictureLost: a picture is to be encoded, and its pixels were not sent with this row or one that waits.
        """
        media = sequence.request.media
        if not media or self._vision is None:
            return True
        pictures = RowPictures([(one.start, len(one.tokens)) for one in media])
        self._vision.set_positions(
            pictures, sequence.given(0, len(sequence.request.prompt)), [(one.grid, one.video) for one in media]
        )
        sequence.pictures = pictures
        missing = [index for index, one in enumerate(media) if one.start + len(one.tokens) > known]
        for index in missing:
            if media[index].pixels or index in found:
                continue
            picture = _id(sequence.request, index)
            if picture not in self.features and self._with_pixels(picture) is None:
                raise PictureLost(LOST)
        self._holding[sequence.id] = pictures.features
        # Of the others nobody needs more than their KV.
        self.features.hits += len(media) - len(missing)
        for index in found.keys() & set(missing):
            self._reuse(sequence, index, found[index])
        named = {index: _id(sequence.request, index) for index in missing if not self._has(sequence, index)}
        lacking = {index: picture for index, picture in named.items() if not self._find(sequence, index, picture)}
        if lacking:
            self._waiting[sequence.id] = _PicturedRow(sequence, row, lacking, self._share_s)
            self._shares.join(row)
        return not lacking

    def _lacking(self, picture: bytes) -> Iterator[_Picture]:
        """The rows that wait for these features, and which of their pictures it is."""
        for waiting in self._waiting.values():
            for index, wanted in waiting.missing.items():
                if wanted == picture and not self._has(waiting.sequence, index):
                    yield waiting.sequence, index

    def _with_pixels(self, picture: bytes) -> _Picture | None:
        """One of those that has the picture's pixels."""
        lacking = self._lacking(picture)
        return next((found for found in lacking if found[0].request.media[found[1]].pixels), None)

    def step(self, attempt: Callable[[str, Callable[[], None]], None]) -> Iterator[ScheduledRow]:
        """Take what was encoded and begin with the next picture. Gives the rows that need no more.

        Args:
            attempt: does something for a request, which ends if that fails.
        """
        if self._encoding is not None and self._encoding.made.done():
            encoding, self._encoding = self._encoding, None
            self._finish(encoding, attempt)
        for waiting in self._by_turn():
            sequence, missing, full = waiting.sequence, waiting.missing, self._is_full()
            for index, picture in list(missing.items()):
                if not self._has(sequence, index) and (full or not self._find(sequence, index, picture)):
                    if self._encoding is None and not full:
                        attempt(sequence.id, lambda sequence=sequence, index=index: self._begin(sequence, index))
                    break
                del missing[index]
            if not missing and self._let_go(sequence.id):
                yield waiting.row

    def _by_turn(self) -> list[_PicturedRow]:
        """Where rows hold too much already they come as they came, so that the first has its last picture soon."""
        if self._is_crowded():
            return sorted(self._waiting.values(), key=lambda one: -one.row.priority)

        def turn(one: _PicturedRow) -> tuple[float, ...]:
            return (-one.row.priority, *self._shares.turn(one.row, taking=True)[:2], one.had_s)

        return sorted(self._waiting.values(), key=turn)

    def _is_full(self) -> bool:
        """Whether rows that have all of their features, and wait for the model only, are to go on first."""
        ready = any(features and name not in self._waiting for name, features in self._holding.items())
        return ready and self._is_crowded()

    def _is_crowded(self) -> bool:
        held = {id(one): one.nbytes for features in self._holding.values() for one in features.values()}
        return sum(held.values()) >= self.features.bytes_max

    def _begin(self, sequence: Sequence, index: int) -> None:
        if not sequence.request.media[index].pixels:
            sequence, index = self._with_pixels(_id(sequence.request, index)) or (sequence, index)
        made: Future[_Made] = Future()
        pictures = self._company(sequence, index)
        work = self._work(pictures)
        if self._jobs is None:
            self._jobs = SimpleQueue()
            # One that ended with the interpreter would abort it: what MLX has compiled there wants Python once more.
            threading.Thread(target=_encode_forever, args=(self._jobs,), name="encoder", daemon=True).start()
        self._encoding = _Encoding(pictures, made)
        made.add_done_callback(lambda _: self._wake())
        self._jobs.put((made, work))

    def _company(self, sequence: Sequence, index: int) -> list[_Picture]:
        """The picture, and as many others as may be encoded with it: of its layout, for rows as urgent, its own first;
        1, 2, 4, ... in all, as a device prepares itself for every number."""
        assert self._vision is not None
        first, own = sequence.request.media[index], self._waiting.get(sequence.id)
        most = 1 if first.video in self._vision.apart else self._vision.together_tokens // len(first.tokens)
        if own is None or most < 2:
            return [(sequence, index)]
        kind, found = _kind(first), {_id(sequence.request, index): (sequence, index)}
        as_urgent = [waiting for waiting in self._waiting.values() if waiting.row.priority == own.row.priority]
        rows = sorted(as_urgent, key=lambda waiting: waiting is not own)
        for other, at, picture in ((row.sequence, *item) for row in rows for item in row.missing.items()):
            if len(found) == most:
                break
            if _kind(other.request.media[at]) == kind and not self._has(other, at) and picture not in self.features:
                found.setdefault(picture, (other, at))
        return list(found.values())[: 1 << (len(found).bit_length() - 1)]

    def _finish(self, encoding: _Encoding, attempt: Callable[[str, Callable[[], None]], None]) -> None:
        (sequence, index), error = encoding.pictures[0], encoding.made.exception()
        if error is None:
            # Also where a row is gone: others may ask for the same picture.
            self._all_encoded(encoding)
            # They may be too large to be kept for them.
            for (of, at), features in zip(encoding.pictures, encoding.made.result()[0], strict=True):
                for other, place in self._lacking(_id(of.request, at)):
                    self._reuse(other, place, features)
            return
        if len(encoding.pictures) > 1:
            logger.warning("%d pictures could not be encoded together: %s", len(encoding.pictures), error)
            assert self._vision is not None
            self._vision.apart.add(sequence.request.media[index].video)
        elif sequence.id in self._waiting:
            logger.warning("a picture of %s could not be encoded beside the steps: %s", sequence.id, error)
            attempt(sequence.id, lambda: self.encode(sequence, index))

    def expired(self, now: float) -> list[str]:
        """Rows whose deadline has passed; they are let go."""
        late = [name for name, waiting in self._waiting.items() if waiting.row.deadline <= now]
        for name in late:
            self._let_go(name)
        return late

    def leave(self, request_id: str) -> None:
        """The row is over; one that is not here is ignored."""
        self._let_go(request_id)
        self._holding.pop(request_id, None)

    def _let_go(self, request_id: str) -> bool:
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            self._shares.leave(waiting.row)
        return waiting is not None

    def drop_features(self, sequence: Sequence) -> None:
        """The row needs its features no more, unless it is sent back."""
        if sequence.pictures is not None:
            sequence.pictures.features.clear()

    def require(self, sequence: Sequence, start: int, stop: int) -> None:
        """See that the features for tokens [start, stop) are there: what was thought to be known may have gone."""
        if sequence.pictures is None:
            return
        for index in sequence.pictures.touched(start, stop):
            if self._encoding is not None and not self._has(sequence, index):
                # Two at a time would disturb each other, and it may be this very one.
                encoding, self._encoding = self._encoding, None
                if encoding.made.exception() is None:
                    self._all_encoded(encoding)
            if self._has(sequence, index) or self._find(sequence, index, _id(sequence.request, index)):
                continue
            found: dict[int, Features] = {}
            if not sequence.request.media[index].pixels and self._disk is not None:
                # Its KV was thought to be there, so its features have not been read back.
                found = self._disk.load(sequence.request, [index])
            if index in found:
                self._reuse(sequence, index, found[index])
            else:
                self.encode(sequence, index)

    def encode(self, sequence: Sequence, index: int) -> None:
        """Encode a picture of a row, while everybody waits."""
        (features,), seconds = self._work([(sequence, index)])()
        self._encoded(sequence, index, features, seconds)

    def _work(self, pictures: list[_Picture]) -> Callable[[], _Made]:
        """Encodes pictures of one layout, on any thread.

        Raises:
            PictureLost: nobody has the first one's pixels any more.
        """
        sequence, index = pictures[0]
        vision, media, words = self._vision, sequence.request.media[index], sequence.request.prompt
        assert vision is not None
        if not media.pixels:
            raise PictureLost(LOST)
        places = frozenset(at for at in range(len(media.tokens)) if is_word(words[media.start + at]))
        span = Layout(tuple(media.tokens), places, tuple(media.grid))

        every = [of.request.media[at].pixels for of, at in pictures]

        def work() -> _Made:
            started = time.perf_counter()
            shown = [[Image.frombytes("RGB", (media.width, media.height), each) for each in frames] for frames in every]
            features = vision.encode(span, shown, video=media.video)
            return features, time.perf_counter() - started

        return work

    def _all_encoded(self, encoding: _Encoding) -> None:
        features, seconds = encoding.made.result()
        self._share_s += seconds / max(1, len(self._waiting))
        for (sequence, index), one in zip(encoding.pictures, features, strict=True):
            if (waiting := self._waiting.get(sequence.id)) is not None:
                waiting.had_s += seconds / len(features)
                self._shares.charge(waiting.row, round(seconds / len(features) * 1e6))
            self._encoded(sequence, index, one, seconds / len(features))

    def _encoded(self, sequence: Sequence, index: int, features: Features, seconds: float) -> None:
        self._note_time(seconds / len(sequence.request.media[index].tokens))
        self.features.encodes += 1
        self._keep(sequence, index, features)

    def _note_time(self, token_s: float) -> None:
        slower = 0.0 < self.encode_token_s < token_s
        self.encode_token_s += (SLOWER_WEIGHT if slower else 1.0) * (token_s - self.encode_token_s)

    def read_back(self, request: GenerateRequest, hot_tokens: int) -> dict[int, Features]:
        """What the disk has of a request's pictures beyond its first `hot_tokens` tokens. For any thread."""
        if self._disk is None:
            return {}
        lacking = [
            index
            for index, media in enumerate(request.media)
            if media.start + len(media.tokens) > hot_tokens and _id(request, index) not in self.features
        ]
        return self._disk.load(request, lacking) if lacking else {}

    def _keep(self, sequence: Sequence, index: int, features: Features) -> None:
        assert sequence.pictures is not None
        self.features.put(_id(sequence.request, index), features)
        sequence.pictures.features[index] = features
        if self._disk is not None:
            self._disk.offer(sequence.request, sequence.request.media[index], features)

    @staticmethod
    def _has(sequence: Sequence, index: int) -> bool:
        assert sequence.pictures is not None
        return index in sequence.pictures.features

    def _find(self, sequence: Sequence, index: int, picture: bytes) -> bool:
        features = self.features.get(picture)
        if features is None:
            return False
        self._reuse(sequence, index, features)
        return True

    def _reuse(self, sequence: Sequence, index: int, features: Features) -> None:
        self.features.hits += 1
        self._keep(sequence, index, features)
