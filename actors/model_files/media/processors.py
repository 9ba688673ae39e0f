"""A model's own picture processor: how many tokens a picture has in a prompt, and the encoder's inputs.

This works for any model family. A processor of mlx-vlm gets one picture at a time, with the text that the chat template
writes for it, so that a picture's tokens do not depend on what surrounds it. A video is processed as a whole; the
frames of each temporal patch are then encoded separately.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from itertools import groupby, takewhile
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from cachetools import LRUCache
from PIL import Image

from ...protocol.media_ids import is_of_audio, is_of_video
from ..foreign_code import own_code_only, refuse_processor_code
from ..source import WEIGHTS, first_sentence
from ..weights import has_audio_encoder, has_picture_encoder, read_weight_file
from .audio_processor import AudioProcessor, audio_tokens_of, has_audio_parameter
from .media_layouts import NOT_FOR_THE_MODEL, MediaLayout, SpanLayout, Unfit, token_ids
from .skeletons import Skeleton

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
LAYOUTS_KEPT = 256
NO_PLACE_FOR_VIDEOS = "its chat template has no place for them, or its processor does not say which token they have"
CLOCK_HZ = 1000.0
"""Ticks per second of the clock in which a processor gets the times of frames."""

_MARK = "satchel-picture"
_TRIED = (224, 224)
_TOKEN_NAMES = ("image_token_index", "image_token_id")
_ROLES = ("bos_token_id", "eos_token_id")
_PIXELS = "pixel_values"
_PIXELS_MAX = 10**12


@dataclass(frozen=True)
class VideoLayout:
    """The replacement of a video's placeholder: a text with a span for every `frames` frames. The last frame is
    repeated to fill up the last span. The encoder gets frames of `width` x `height`.
    """

    text: str
    spans: tuple[SpanLayout, ...]
    frames: int
    width: int
    height: int


@dataclass(frozen=True)
class Video:
    """A video: its frames, `(frames, height, width, 3) uint8`, and the time of each in seconds."""

    frames: np.ndarray
    seconds: Sequence[float]


def sight(folder: Path) -> tuple[bool, str]:
    """Returns whether the model in `folder` takes pictures. If its config says so but it does not, also returns why."""
    config = json.loads((folder / "config.json").read_text())
    files = [read_weight_file(path) for path in sorted(folder.glob(WEIGHTS))]
    if files and not has_picture_encoder(files):
        return False, "its weights are the language part's alone" if config.get("vision_config") else ""
    # Imported only now: it takes a second.
    from mlx_vlm.utils import get_model_type

    kind = get_model_type(config)
    if kind is not None and find_spec(f"mlx_vlm.models.{kind}") is not None:
        return True, ""
    return False, f"mlx-vlm does not support models of type {kind!r}" if config.get("vision_config") else ""


def sees(folder: Path) -> bool:
    """Returns whether the model in `folder` takes pictures and mlx-vlm knows it."""
    return sight(folder)[0]


def _has_audio(folder: Path) -> bool:
    """Returns whether the model in `folder` has an encoder of audio, or may have one: there are no weights."""
    files = [read_weight_file(path) for path in sorted(folder.glob(WEIGHTS))]
    return not files or has_audio_encoder(files)


def in_words(error: BaseException, folder: Path) -> str:
    """Returns why a processor cannot be loaded, as the end of a sentence."""
    if isinstance(error, ImportError):
        return f"its processor needs a package that is not installed ({error.name or first_sentence(error)})"
    if not any((folder / name).is_file() for name in PROCESSOR_FILES):
        return f"its folder has no processor of pictures ({' or '.join(PROCESSOR_FILES)})"
    if isinstance(error, Unfit):
        return str(error)
    return f"its processor cannot be loaded ({first_sentence(error)})"


class PictureProcessor:
    """A model's processor, and how its chat template and prompts represent a picture. Thread-safe.

    Attributes:
        placeholder: the text that the template writes for a picture.
        token: the token id of a picture's places.
        video_placeholder, video_token: the same for a video; "" and -1 if its frames are processed as pictures.
        stills: why frames are processed as pictures although the processor takes videos, as the end of a sentence; else
            empty.
        audio: the model's processor of audio; None if it takes none.
        no_audio: why a model with an encoder of audio takes none, as the end of a sentence; empty if it takes audio,
            and for other models.

    Args:
        processor: as mlx-vlm loads it.
        named: token ids that the model's config names as a picture's.
        skeleton: makes the model without weights.
        audio_named: token ids that the model's config names as audio's; None if the model has no encoder of audio.

    Raises:
        Unfit: the template writes nothing for a picture, or the prompt has no token for it.
    """

    def __init__(
        self,
        processor: Any,
        named: frozenset[int],
        skeleton: Callable[[], Skeleton],
        audio_named: frozenset[int] | None = None,
    ) -> None:
        self._processor = processor
        self._skeleton, self._mark, self._widens = skeleton, 0, False
        self._widths: dict[tuple[int, int], int] = {}
        self._tokenizer = processor.tokenizer
        self._added = frozenset(self._tokenizer.added_tokens_decoder)
        self._edges = frozenset(self._tokenizer("").input_ids)
        self._layouts: LRUCache[Any, Any] = LRUCache(LAYOUTS_KEPT)
        self._lock = Lock()
        self._making = Lock()
        self.placeholder = self._placeholder_of("image")
        if not self.placeholder.strip():
            raise Unfit("its chat template has no place for pictures")
        self.token = self._read_token(named)
        self._behind = self._wanted_behind()
        self._edges |= self._written_around()
        self.video_placeholder, self.video_token = self._read_video()
        takes_videos = getattr(processor, "video_processor", None) is not None
        self.stills = NO_PLACE_FOR_VIDEOS if takes_videos and not self.video_placeholder else ""
        self._group_processor = self._any_size(processor)
        self.audio, self.no_audio = self._read_audio(audio_named)

    @classmethod
    def load(cls, folder: Path, *, trusted: bool = False) -> PictureProcessor:
        """Loads the processor of the model in `folder`, whose own code runs only if it is `trusted`.

        Raises:
            ModelLoadError: it needs such code.
            Unfit: as the class.
        """
        from mlx_vlm.utils import get_model_and_args, load_image_processor, load_processor

        config = json.loads((folder / "config.json").read_text())
        # This import registers the family's processor in place of transformers', which often needs PyTorch.
        get_model_and_args(config)
        refuse_processor_code(folder.name, folder, trusted=trusted)
        with own_code_only(folder.name, folder, trusted=trusted):
            processor = load_processor(folder, False, trust_remote_code=trusted)
            own = load_image_processor(folder)
        if not hasattr(processor, "tokenizer"):
            raise Unfit("neither mlx-vlm nor transformers knows its processor of pictures")
        if own is not None:
            processor.image_processor = own
        return cls(
            processor,
            _numbers(config.get(name) for name in _TOKEN_NAMES),
            lru_cache(1)(lambda: Skeleton(folder)),
            audio_tokens_of(config) if _has_audio(folder) else None,
        )

    def of_stills(self) -> PictureProcessor:
        """Returns this processor for a model that is shown a video's frames as single pictures."""
        other = copy.copy(self)
        other.video_placeholder = ""
        return other

    def without_audio(self) -> PictureProcessor:
        """Returns this processor for a model that gets no audio."""
        other = copy.copy(self)
        other.audio = None
        return other

    @property
    def placeholders(self) -> tuple[str, ...]:
        """What the template writes for a picture, a video and audio, as far as the model takes them."""
        return (self.placeholder, self.video_placeholder, *(() if self.audio is None else (self.audio.placeholder,)))

    @property
    def seen_tokens(self) -> frozenset[int]:
        """The model's tokens that stand for pictures and videos."""
        return frozenset((self.token, self.video_token)) - {-1}

    @property
    def tokens_of_media(self) -> frozenset[int]:
        """The model's tokens that stand for pictures, videos and audio."""
        return self.seen_tokens if self.audio is None else self.seen_tokens | {self.audio.token}

    def token_of(self, media_token: int) -> int:
        """Returns the model's token in the place of a media token id."""
        if self.audio is not None and is_of_audio(media_token):
            return self.audio.token
        return self.video_token if is_of_video(media_token) else self.token

    def layout(self, width: int, height: int) -> MediaLayout:
        """Returns the layout of a picture of this size. A new size takes milliseconds, or a second for 50 million
        pixels: a blank picture is processed."""
        return self._kept((width, height), lambda: self._layout(width, height))

    def video_layout(self, width: int, height: int, seconds: Sequence[float]) -> VideoLayout:
        """Returns the layout of a video with frames of this size at the times `seconds`."""
        shown = tuple(seconds)
        return self._kept((width, height, shown), lambda: self._video_layout(width, height, shown))

    def inputs(self, frames: Sequence[Image.Image], *, video: bool) -> dict[str, Any]:
        """Returns the encoder's inputs for the frames of one span by name: pixels, and others such as grids. Shapes and
        dtypes are the processor's."""
        if not video:
            made = self._alone(frames[0])
            ids = token_ids(made)
            first, end = self._bounds(ids)
            made = {
                name: np.array(value)[:, first:end] if _of_tokens(value, ids) else value for name, value in made.items()
            }
        else:
            # The frames already have the size that the processing of the whole video gave them.
            made = dict(
                self._group_processor(
                    text=[self.video_placeholder], videos=[np.stack([np.asarray(frame) for frame in frames])]
                )
            )
        return {name: value for name, value in made.items() if name not in NOT_FOR_THE_MODEL}

    def read(self, text: str, pictures: Sequence[Image.Image], videos: Sequence[Video] = ()) -> dict[str, Any]:
        """Returns the processor's output for a text with placeholders, their pictures and their videos, by name: the
        `input_ids`, the encoder's inputs, and more. Shapes and dtypes are the processor's.

        If the processor marks a picture with a number that is no token, the ids have `token` there, once for each of
        the picture's embeddings.
        """
        made = self._made(text, pictures, videos)
        if self._mark:
            made["input_ids"] = np.array([self._with_tokens(token_ids(made), pictures)])
        return made

    def _made(self, text: str, pictures: Sequence[Image.Image], videos: Sequence[Video] = ()) -> dict[str, Any]:
        given: dict[str, Any] = {} if videos and not pictures else {"images": list(pictures)}
        made = dict(self._processor(text=[text], **given, **_of_videos(videos), return_tensors="mlx"))
        # As mlx-vlm does.
        return with_all_tiles({_PIXELS if name == "images" else name: value for name, value in made.items()})

    def marked(self, tokens: Sequence[int]) -> list[int]:
        """Returns tokens of `read` as the model's encoder wants them."""
        if not self._mark:
            return [*tokens]
        marked: list[int] = []
        for is_picture, run in groupby(tokens, key=lambda token: token == self.token):
            own = [self._mark if is_picture else token for token in run]
            marked += own[:1] if is_picture and self._widens else own
        return marked

    def _with_tokens(self, ids: list[int], pictures: Sequence[Image.Image]) -> list[int]:
        """Returns ids with `token` for every embedding of a marked picture."""
        if not self._widens:
            return [self.token if number < 0 else number for number in ids]
        widths = iter([self._width(*picture.size) for picture in pictures])
        return [token for number in ids for token in ([self.token] * next(widths) if number < 0 else [number])]

    def _width(self, width: int, height: int) -> int:
        """Returns how many embeddings the model makes of a picture of this size."""
        if (known := self._widths.get((width, height))) is None:
            made = self._made(self.placeholder, [Image.new("RGB", (width, height))])
            given = {name: value for name, value in made.items() if name not in NOT_FOR_THE_MODEL}
            known = self._skeleton().embeddings(token_ids(made), given) - len(token_ids(made)) + 1
            self._widths[width, height] = known
        return known

    def _alone(self, picture: Image.Image) -> dict[str, Any]:
        return self.read(f"{self.placeholder}{self._behind}", [picture])

    def tokens(self, text: str) -> list[int]:
        """Returns the tokens of a text, without those that stand around every text."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _kept(self, key: Any, make: Any) -> Any:
        if (known := self._known(key)) is not None:
            return known
        # One at a time: processing a large picture takes hundreds of megabytes.
        with self._making:
            if (known := self._known(key)) is not None:
                return known
            made = make()
            with self._lock:
                self._layouts[key] = made
            return made

    def _known(self, key: Any) -> Any:
        with self._lock:
            return self._layouts.get(key)

    def _placeholder_of(self, kind: str) -> str:
        mark = {"type": "text", "text": _MARK}
        messages = [{"role": "user", "content": [mark, {"type": kind}, mark]}]
        text = self._tokenizer.apply_chat_template(messages, tokenize=False)
        return text.partition(_MARK)[2].partition(_MARK)[0]

    def _read_token(self, named: frozenset[int]) -> int:
        made = self._made(self.placeholder, [Image.new("RGB", _TRIED)])
        if marks := [number for number in token_ids(made) if number < 0]:
            self._mark, self._widens = marks[0], len(marks) == 1
            return self._unused()
        of_processor = _numbers(
            value for name in _TOKEN_NAMES for value in (made.get(name), getattr(self._processor, name, None))
        )
        # Models read these from their configs.
        for candidates in (named, of_processor):
            if len(present := candidates.intersection(token_ids(made))) == 1:
                return min(present)
        (token, most), (_, next_most), *_ = [*Counter(token_ids(made)).most_common(), (0, 0)]
        if token in self._added and most > max(next_most, len(token_ids(made)) // 2):
            return token
        raise Unfit("neither its config nor its processor says which token stands for a picture")

    def _unused(self) -> int:
        """Returns an added token that prompts do without.

        Raises:
            Unfit: there is none.
        """
        own = {token for name in _ROLES if (token := getattr(self._tokenizer, name, None)) is not None}
        template = str(self._tokenizer.chat_template)
        for number, token in sorted(self._tokenizer.added_tokens_decoder.items(), reverse=True):
            if number not in own and token.content not in template:
                return number
        raise Unfit("its processor marks pictures with a number that is no token, and all its tokens have a use")

    def _wanted_behind(self) -> str:
        """Returns the text that must follow a placeholder: some processors drop a text's last token."""
        picture, mark = Image.new("RGB", _TRIED), self.placeholder
        counts = [token_ids(self.read(text, [picture])).count(self.token) for text in (mark, f"{mark}\n")]
        return "" if counts[0] == counts[1] else "\n"

    def _written_around(self) -> frozenset[int]:
        """Returns the tokens that the processor writes around every text."""
        picture = Image.new("RGB", _TRIED)
        alone, inside = token_ids(self._alone(picture)), token_ids(self.read(f"a{self.placeholder}a", [picture]))
        edges: set[int] = set()
        for one, other in ((alone, inside), (reversed(alone), reversed(inside))):
            pairs = zip(one, other, strict=False)
            edges.update(token for token, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return frozenset(edges - {self.token})

    def _read_video(self) -> tuple[str, int]:
        token, own = getattr(self._processor, "video_token_id", None), getattr(self._processor, "video_processor", None)
        placeholder = self._placeholder_of("video") if own is not None and isinstance(token, int) else ""
        # A template that does not know videos writes nothing, or the text of the part, which has none.
        known = placeholder.strip() and self._tokenizer.decode([token]) in placeholder
        return (placeholder, token) if known and isinstance(token, int) else ("", -1)

    def _read_audio(self, named: frozenset[int] | None) -> tuple[AudioProcessor | None, str]:
        if named is None:
            return None, ""
        if not has_audio_parameter(self._processor):
            return None, "its processor takes none"
        try:
            placeholder = self._placeholder_of("audio")
            return AudioProcessor(self._processor, placeholder, named, self._added, self._edges), ""
        except Unfit as error:
            return None, str(error)
        except Exception as error:
            # Libraries raise anything if a folder lacks the settings of a feature extractor.
            return None, f"its processor cannot read audio ({first_sentence(error)})"

    @staticmethod
    def _any_size(processor: Any) -> Any:
        """Returns a copy of the processor that does not resize frames, for those that have been resized."""
        other = copy.copy(processor)
        if (own := getattr(processor, "video_processor", None)) is not None:
            other.video_processor = copy.copy(own)
            other.video_processor.min_pixels, other.video_processor.max_pixels = 1, _PIXELS_MAX
        return other

    def _layout(self, width: int, height: int) -> MediaLayout:
        made = self._alone(Image.new("RGB", (width, height)))
        ids = token_ids(made)
        first, end = self._bounds(ids)
        grid = made.get("image_grid_thw")
        grid = () if grid is None else tuple(np.array(grid).reshape(-1).tolist())
        return MediaLayout(self._text(ids), self._span(ids[first:end], self.token, grid))

    def _bounds(self, ids: list[int]) -> tuple[int, int]:
        """Returns where the span of a picture alone begins and ends."""
        added = [index for index, token in enumerate(ids) if token in self._added and token not in self._edges]
        return added[0], added[-1] + 1

    def _video_layout(self, width: int, height: int, seconds: tuple[float, ...]) -> VideoLayout:
        blank = np.zeros((len(seconds), height, width, 3), np.uint8)
        made = dict(self._processor(text=[self.video_placeholder], **_of_videos([Video(blank, seconds)])))
        ids, grid, own = token_ids(made), _video_grid(made), self._processor.video_processor
        spans = self._video_spans(ids)
        width, height = grid[2] * own.patch_size, grid[1] * own.patch_size
        if len(spans) == 1 and grid[0] > 1:
            spans = self._each_patch(spans[0], grid, own, width, height)
        count = len(spans)
        each = (grid[0] // count, grid[1], grid[2])
        return VideoLayout(
            text=self._text(ids),
            spans=tuple(self._span(span, self.video_token, each) for span in spans),
            frames=len(seconds) if count == 1 else own.temporal_patch_size,
            width=width,
            height=height,
        )

    def _each_patch(
        self, span: list[int], grid: Sequence[int], processor: Any, width: int, height: int
    ) -> list[list[int]]:
        """Splits a span into its temporal patches, if its tokens are those of the single patches in order. All parts
        are equal: they leave out the added tokens before the first and after the last.

        Models with such grids encode each temporal patch independently of the others.
        """
        group = np.zeros((getattr(processor, "temporal_patch_size", 1), height, width, 3), np.uint8)
        made = dict(self._group_processor(text=[self.video_placeholder], videos=[group]))
        length, of_video = token_ids(made).count(self.video_token), span.count(self.video_token)
        if _video_grid(made) != [1, *grid[1:]] or length * grid[0] != of_video:
            return [span]
        return [[self.video_token] * length] * grid[0]

    def _video_spans(self, ids: list[int]) -> list[list[int]]:
        """Returns every run of the video's token, with the added tokens directly around it."""
        spans, at = [], 0
        for is_video, run in groupby(ids, key=lambda token: token == self.video_token):
            length = len(list(run))
            if is_video:
                before = [token for token in ids[max(0, at - 1) : at] if token in self._added - self._edges]
                behind = [token for token in ids[at + length : at + length + 1] if token in self._added - self._edges]
                spans.append([*before, *ids[at : at + length], *behind])
            at += length
        return spans

    @staticmethod
    def _span(tokens: list[int], token: int, grid: tuple[int, ...]) -> SpanLayout:
        return SpanLayout(tuple(tokens), frozenset(index for index, one in enumerate(tokens) if one == token), grid)

    def _text(self, ids: list[int]) -> str:
        """Returns the text of the ids, without the tokens that the tokenizer puts around every text."""
        while ids and ids[0] in self._edges:
            ids = ids[1:]
        while ids and ids[-1] in self._edges:
            ids = ids[:-1]
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def _of_videos(videos: Sequence[Video]) -> dict[str, Any]:
    """Returns a processor's inputs for videos; empty if there are none."""
    if not videos:
        return {}
    ticks = [[round(second * CLOCK_HZ) for second in video.seconds] for video in videos]
    return {
        "videos": [video.frames for video in videos],
        "fps": [_rate(video.seconds) for video in videos],
        "video_metadata": [
            {"frames_indices": each, "fps": CLOCK_HZ, "total_num_frames": each[-1] + 1} for each in ticks
        ],
    }


def _video_grid(made: dict[str, Any]) -> list[int]:
    return np.array(made["video_grid_thw"]).reshape(-1).tolist()


def _numbers(values: Iterable[Any]) -> frozenset[int]:
    return frozenset(value for value in values if isinstance(value, int))


def _of_tokens(value: Any, ids: list[int]) -> bool:
    """Returns whether an input has one entry for each token."""
    return tuple(getattr(value, "shape", ())) == (1, len(ids))


def with_all_tiles(made: dict[str, Any]) -> dict[str, Any]:
    """Returns inputs whose counts of tiles, `(prompts, pictures, 2)`, have a row for every tile. DeepSeek-VL2 of
    mlx-vlm counts as many rows as there are tiles, and would read memory behind the array; rows of 0 end its count."""
    counts: Any = made.get("images_spatial_crop")
    pixels: Any = made.get(_PIXELS)
    if getattr(counts, "ndim", 0) != 3 or getattr(pixels, "ndim", 0) != 5:
        return made
    missing = max(0, pixels.shape[1] - counts.shape[1])
    return {**made, "images_spatial_crop": np.pad(np.array(counts), ((0, 0), (0, missing), (0, 0)))}


def _rate(seconds: Sequence[float]) -> float:
    """Returns frames per second."""
    length = seconds[-1] - seconds[0]
    return (len(seconds) - 1) / length if length > 0 else 1.0
