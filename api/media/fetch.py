"""Loads the pictures, videos and audio of messages, from callers' URLs to the pixels and samples that models get.

The config's `media` has the limits: sizes, times, how much is decoded at a time, how much is held. If the caller caused
an error, it is an `InvalidRequest` that names the part of the message.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar, cast
from weakref import WeakValueDictionary

from cachetools import LRUCache

from ...actors.model_files.media.audio_processor import AudioProcessor
from ...cluster.config.config import Media
from ...cluster.errors import InvalidRequest, SatchelError, Unavailable, quoted
from .audio import FORMATS, AudioLimits, decode_audio, longest
from .files import Unreadable, data_url, read_file
from .pixels import Shown, Undecodable, decode, measure
from .sources import Audio, AudioSource, MediaSource, Picture, PictureSource, VideoSource, check_urls
from .video import FRAME_PIXELS_MIN, FRAMES_A_SECOND, FrameSampling, decode_video, evenly
from .web import Fetcher, Unfetchable
from .worker_process import WorkerAhead

T = TypeVar("T")
Loaded = Picture | Audio

_FETCHES_MAX = 8
_READS_MAX = 4
_VIDEO_FETCHES_MAX = 4
_VIDEOS_MAX = 2
_READ_HERE_MAX = 1 << 16
_CACHE_PART = 4
"""The cache for later requests is at most `held_bytes_max` divided by this."""


class Workshop:
    """Threads that decode, with a limit on the pixels that are decoded at a time. Calls run in the order of arrival."""

    def __init__(self, threads: int, pixels_max: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._free = self._pixels_max = pixels_max
        self._turn = asyncio.Lock()
        self._given_back = asyncio.Event()

    async def run(self, pixels: int, function: Callable[..., T], *arguments: object) -> T:
        """Calls `function` in a thread as soon as there is room for this many pixels. Raises what it raises.

        If the caller is cancelled, a call that has begun goes on, and occupies its room until it ends.
        """
        pixels = min(pixels, self._pixels_max)
        async with self._turn:
            while self._free < pixels:
                self._given_back.clear()
                await self._given_back.wait()
            self._free -= pixels
        future = asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)
        future.add_done_callback(lambda done: self._give_back(done, pixels))
        return await asyncio.shield(future)

    def _give_back(self, done: asyncio.Future[T], pixels: int) -> None:
        self._free += pixels
        self._given_back.set()
        if not done.cancelled():
            # Retrieves the error of a call whose caller was cancelled, so that asyncio does not log it.
            done.exception()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class PictureShelf:
    """The decoded pictures and audio in memory: held by requests, or cached for later ones and evicted if there is no
    room."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._kept: LRUCache[bytes, Sequence[Loaded]] = LRUCache(bytes_max // _CACHE_PART, getsizeof=_bytes)
        self._held: WeakValueDictionary[int, Loaded] = WeakValueDictionary()
        self._numbers = itertools.count()
        self._reserved_bytes = 0
        self._given_back = asyncio.Event()

    def find(self, key: bytes) -> Sequence[Loaded] | None:
        return self._kept.get(key)

    @asynccontextmanager
    async def room(self, wanted_bytes: int) -> AsyncIterator[None]:
        """Reserves room for pictures that the `async with` block creates and holds. Waits for other reservations to
        end.

        Raises:
            Unavailable: requests hold too many pictures.
        """
        while (needed := self._held_bytes() + wanted_bytes) + self._reserved_bytes > self._bytes_max:
            if self._kept:
                self._kept.popitem()
            elif needed > self._bytes_max:
                raise Unavailable(
                    "the pictures, videos and audio of all requests are too large together (media.held_bytes_max)",
                    retry_after_s=1.0,
                )
            else:
                self._given_back.clear()
                await self._given_back.wait()
        self._reserved_bytes += wanted_bytes
        try:
            yield
        finally:
            self._reserved_bytes -= wanted_bytes
            self._given_back.set()

    def hold(self, pictures: Sequence[Loaded]) -> None:
        """Counts pictures as held until they are freed."""
        for picture in pictures:
            self._held[next(self._numbers)] = picture

    def keep(self, key: bytes, pictures: Sequence[Loaded]) -> None:
        """Caches pictures for later requests, if they fit."""
        with suppress(ValueError):
            self._kept[key] = pictures

    def _held_bytes(self) -> int:
        # Frames at different times of a video may share their pixels.
        held = map(_content_of, list(self._held.values()))
        return sum({id(content): len(content) for content in held}.values())


def _content_of(loaded: Loaded) -> bytes:
    return loaded.samples if isinstance(loaded, Audio) else loaded.pixels


def _bytes(pictures: Sequence[Loaded]) -> int:
    return sum(len(_content_of(each)) for each in pictures)


class PictureLoader:
    """Loads pictures, videos and audio, for one event loop."""

    def __init__(self, limits: Media) -> None:
        self._limits = limits
        self._fetcher = Fetcher(limits)
        # Limits on files in memory, by (video, remote). Pictures do not wait for videos, which take long.
        self._turns = {
            (False, True): asyncio.Semaphore(_FETCHES_MAX),
            (False, False): asyncio.Semaphore(_READS_MAX),
            (True, True): asyncio.Semaphore(_VIDEO_FETCHES_MAX),
            (True, False): asyncio.Semaphore(_VIDEOS_MAX),
        }
        self._pictures = Workshop(min(_READS_MAX, os.cpu_count() or 1), limits.pixels_max, "picture")
        self._videos = Workshop(_VIDEOS_MAX, _VIDEOS_MAX * limits.pixels_max, "video")
        self._video_ahead, self._audio_ahead = WorkerAhead(), WorkerAhead()
        self._shelf = PictureShelf(limits.held_bytes_max)
        self._layout_turn = asyncio.Lock()

    async def load_all(
        self, sources: Sequence[MediaSource], spared: Sequence[bool] = (), *, audio: AudioProcessor | None = None
    ) -> list[list[Loaded]]:
        """Loads every source, in order: one picture for a picture, the frames for a video, one for audio. The first
        error ends all.

        Args:
            audio: the model's processor of audio; needed if there is audio.
            spared: the sources for which an error that the caller caused is not raised: they give no pictures. Empty
                for none.

        Raises:
            InvalidRequest, Unavailable: as `load`; or there are more than `pictures_max` sources.
        """
        if len(sources) > self._limits.pictures_max:
            raise InvalidRequest(
                f"messages: at most {self._limits.pictures_max} pictures, videos and pieces of audio go into one "
                "request (media.pictures_max)",
                param="messages",
            )
        spare = spared or [False] * len(sources)
        return await _together([self._load_any(*each, audio) for each in zip(sources, spare, strict=True)])

    async def _load_any(self, source: MediaSource, spared: bool, audio: AudioProcessor | None) -> list[Loaded]:
        try:
            check_urls(source)
            if isinstance(source, AudioSource):
                assert audio is not None
                return [await self.load_audio(source, audio)]
            return [*await self.load_video(source)] if isinstance(source, VideoSource) else [await self.load(source)]
        except InvalidRequest:
            if spared:
                return []
            raise

    async def load(self, source: PictureSource) -> Picture:
        """Loads a picture.

        Raises:
            InvalidRequest: anything that a caller can cause; `param` is the source's position.
            Unavailable: pictures of requests hold too much memory.
        """
        shown = Shown.of(source)

        async def decoded(data: bytes) -> Sequence[Loaded]:
            return await self._decoded(data, shown)

        picture = (await self._load(source.url, source.where, shown, decoded, video=False))[0]
        assert isinstance(picture, Picture)
        return picture

    async def load_audio(self, source: AudioSource, processor: AudioProcessor) -> Audio:
        """Loads audio at the processor's rate.

        Raises:
            InvalidRequest, Unavailable: as `load`; or the processor refuses audio of this length.
        """
        if source.form and source.form.lower() not in FORMATS:
            place, known = f"{source.where}.input_audio.format", ", ".join(FORMATS)
            raise InvalidRequest(f"{place} is {quoted(source.form)}; known are {known}", param=place)
        rate, limits = processor.rate, AudioLimits(self._limits.audio_seconds_max, self._limits.timeout_s)

        async def decoded(data: bytes) -> Sequence[Loaded]:
            return [await self._decoded_audio(data, rate)]

        audio = (await self._load(source.url, source.where, ("audio", rate, limits), decoded, video=True))[0]
        assert isinstance(audio, Audio)
        try:
            # One at a time, so that only one thread waits for the processor.
            async with self._layout_turn:
                await asyncio.to_thread(processor.layout, audio.count)
        except ValueError as error:
            what = f"{source.where}: audio of {audio.count / rate:.3g} s {error}"
            raise InvalidRequest(what, param=source.where) from error
        return audio

    async def _decoded_audio(self, data: bytes, rate: int) -> Audio:
        """Returns the audio in a file. Raises `Undecodable`, or `Unavailable` as `load`."""
        limits = AudioLimits(self._limits.audio_seconds_max, self._limits.timeout_s)
        most = longest(data, limits)
        if (wanted := most.bytes_at(rate)) > self._limits.held_bytes_max:
            raise Undecodable(f"may need {wanted} bytes of memory, more than media.held_bytes_max")
        async with self._shelf.room(wanted):
            audio = await self._videos.run(most.samples, decode_audio, data, rate, limits, self._audio_ahead)
            self._shelf.hold([audio])
        return audio

    async def _decoded(self, data: bytes, shown: Shown) -> list[Picture]:
        """Returns the picture in a file. Raises `Undecodable`, or `Unavailable` as `load`."""
        pixels = await self._pictures.run(len(data), measure, data, shown, self._limits.pixels_max)
        async with self._shelf.room(3 * pixels):
            picture = await self._pictures.run(max(pixels, len(data)), decode, data, shown, self._limits.pixels_max)
            self._shelf.hold([picture])
        return [picture]

    async def load_file(self, data: bytes, where: str, side_max: int) -> Picture:
        """As `load`, for an uploaded file. It is made smaller than a square of `side_max`.

        Raises:
            InvalidRequest, Unavailable: as `load`.
        """
        self._check_size(data, where)
        try:
            async with self._turns[False, False]:
                return (await self._decoded(data, Shown(side_max)))[0]
        except Undecodable as error:
            raise InvalidRequest(f"{where} {error}", param=where) from error

    async def load_audio_file(self, data: bytes, where: str, rate: int) -> Audio:
        """Returns the audio in an uploaded file, at `rate` samples a second.

        Raises:
            InvalidRequest, Unavailable: as `load`.
        """
        self._check_size(data, where)
        try:
            async with self._turns[True, False]:
                return await self._decoded_audio(data, rate)
        except Undecodable as error:
            raise InvalidRequest(f"{where} {error}", param=where) from error

    def _check_size(self, data: bytes, where: str) -> None:
        if len(data) > self._limits.source_bytes_max:
            most = f"{self._limits.source_bytes_max} bytes (media.source_bytes_max)"
            raise InvalidRequest(f"{where} has more than {most}", param=where)

    async def load_video(self, source: VideoSource) -> list[Picture]:
        """Loads the frames to show, in order, each with its time.

        Raises:
            InvalidRequest, Unavailable: as `load`.
        """
        limits = self._limits
        frames_most = max(1, limits.pixels_max // (2 * FRAME_PIXELS_MIN))
        frames_max = min(source.frames_max or limits.frames_max, limits.frames_max, frames_most)
        if source.url is None:
            return await self._load_frames(source, frames_max)
        sampling = FrameSampling(
            fps=source.fps or FRAMES_A_SECOND,
            frames_max=frames_max,
            pixels_max=limits.pixels_max,
            timeout_s=limits.timeout_s,
            shown_min=source.pixels_min,
            shown_max=source.pixels_max,
        )

        async def decoded(data: bytes) -> Sequence[Loaded]:
            async with self._shelf.room(3 * limits.pixels_max // 2):
                frames = await self._videos.run(limits.pixels_max, decode_video, data, sampling, self._video_ahead)
                self._shelf.hold(frames)
            return frames

        return cast(list[Picture], await self._load(source.url, source.where, sampling, decoded, video=True))

    async def _load_frames(self, source: VideoSource, frames_max: int) -> list[Picture]:
        rate = source.fps or FRAMES_A_SECOND
        chosen = evenly(list(enumerate(source.frames)), frames_max)
        most = max(1, self._limits.pixels_max // len(chosen))
        smaller = [
            replace(frame, pixels_max=min(frame.pixels_max or most, most), pixels_min=min(frame.pixels_min or 1, most))
            for _, frame in chosen
        ]
        pictures = await _together([self.load(frame) for frame in smaller])
        timed = [replace(picture, seconds=index / rate) for (index, _), picture in zip(chosen, pictures, strict=True)]
        self._shelf.hold(timed)
        return timed

    async def _load(
        self, url: str, where: str, how: object, decoded: Callable[[bytes], Awaitable[Sequence[Loaded]]], *, video: bool
    ) -> Sequence[Loaded]:
        """Returns the content decoded by `decoded`, or the cached result of the same content and parameters `how`."""
        try:
            async with self._turns[video, _is_remote(url)]:
                data = await self._content(url)
                key = await self._read(_key, data, how)
                pictures = self._shelf.find(key)
                if pictures is None:
                    pictures = await decoded(data)
                    self._shelf.keep(key, pictures)
                return pictures
        except (Undecodable, Unfetchable, Unreadable) as error:
            raise InvalidRequest(f"{where} {error}", param=where) from error

    async def _read(self, function: Callable[..., bytes], content: bytes | str, how: object) -> bytes:
        """Calls `function`, in a thread if the content is large. Frames are small and many, and a thread costs more."""
        if len(content) <= _READ_HERE_MAX:
            return function(content, how)
        return await self._pictures.run(len(content), function, content, how)

    async def _content(self, url: str) -> bytes:
        if _is_remote(url):
            return await self._fetcher.fetch(url)
        if url[:5].lower() == "data:":
            return await self._read(data_url, url, self._limits.source_bytes_max)
        bytes_max = self._limits.source_bytes_max
        return await self._pictures.run(bytes_max, read_file, url, self._limits.file_roots, bytes_max)

    async def close(self) -> None:
        self._pictures.close()
        self._videos.close()
        for ahead in (self._video_ahead, self._audio_ahead):
            await asyncio.to_thread(ahead.close)
        await self._fetcher.close()


def _is_remote(url: str) -> bool:
    return url[:4].lower() == "http"


def _key(data: bytes, how: object) -> bytes:
    """Returns the cache key of a file's content and its decoding parameters."""
    return hashlib.sha256(hashlib.sha256(data).digest() + repr(how).encode()).digest()


async def _together(loads: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Returns the results in order. The first error cancels the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(load) for load in loads]
    except* SatchelError as errors:
        error = errors.exceptions[0]
    else:
        return [task.result() for task in tasks]
    raise error
