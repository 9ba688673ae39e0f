"""vllm-mlx's experiments with pictures and videos: the same request again, when all that was computed is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten
from typing import Any

from ..parts import Budget
from ..serve.targets import RunFolder, TargetFailed
from ..vision.scenery import FILM, TALK, asked, film_file, fresh_number, picture
from ..vision.servers import SATCHEL_FP16, VisionServer
from .figures import IMAGE_SPEEDUP, VIDEO_FRAMES, VIDEO_SPEEDUP, VLLM_MLX, Figure
from .page import PaperTable

MEDIA_SERVERS = (SATCHEL_FP16, "mlx_vlm.server", "vllm-mlx (one at a time)")
"""vllm-mlx keeps pictures only where it does not batch."""
FRAME_SIDE = 448
PAPER_SIDE = 1024
"""Of the pictures that the figure of the abstract is for, as far as it is known."""
ERRORS = (TargetFailed, RuntimeError, OSError, ValueError, KeyError)


@dataclass
class _Seen:
    """One server's times of whole answers in milliseconds, by what was shown, and its memory in MB."""

    new_ms: dict[int, float] = field(default_factory=dict)
    again_ms: dict[int, float] = field(default_factory=dict)
    memory_mb: dict[int, float] = field(default_factory=dict)


def media(
    kind: str,
    sizes: Sequence[int],
    folder: Path,
    model: str,
    place: RunFolder,
    tokens: int,
    budget: Budget,
    names: Sequence[str] = MEDIA_SERVERS,
) -> PaperTable:
    """Pictures of `sizes` pixels a side, or videos of so many frames.

    Args:
        kind: `images` or `video`.
        model: as tables name it.
    """
    pictures = kind == "images"
    part = PaperTable(f"{model}: {'pictures' if pictures else 'videos'} with a content cache", paper=VLLM_MLX)
    found: dict[str, _Seen] = {}
    for name in names:
        if budget.left_s <= 0:
            part.missing.append(f"{name}: there was no time.")
            continue
        try:
            server = VisionServer(name, folder, place)
        except ERRORS as error:
            part.missing.append(f"{name}: {error}")
            continue
        try:
            found[name] = _measured(server, sizes, pictures, tokens, budget, part.missing.append)
        finally:
            server.stop()
    for size in sizes:
        what = f"{size} x {size}" if pictures else f"{size} frames"
        _row(part, found, f"{what}, new: whole answer", "ms", "new_ms", size)
        _row(part, found, f"{what}, again: whole answer", "ms", "again_ms", size)
        _speedup(part, found, what, size, _figure(pictures, size))
        if not pictures:
            _frames_per_s(part, found, what, size)
            _row(part, found, f"{what}: memory of all processes", "MB", "memory_mb", size)
    part.notes.append(
        f"Answers of at most {tokens} tokens over HTTP. New: a fresh {'picture' if pictures else 'video'}, after one "
        "of its size that warmed up; again: the same request once more. Videos are MP4 files of 2 frames a second, "
        "which every server decodes and samples by its own rules. Satchel keeps KV in full precision."
    )
    return part


def _figure(pictures: bool, size: int) -> Figure | None:
    if pictures:
        return IMAGE_SPEEDUP if size == PAPER_SIDE else None
    return VIDEO_SPEEDUP if size == VIDEO_FRAMES else None


def _measured(
    server: VisionServer,
    sizes: Sequence[int],
    pictures: bool,
    tokens: int,
    budget: Budget,
    missing: Callable[[str], None],
) -> _Seen:
    seen = _Seen()
    for size in sizes:
        if budget.left_s <= 0:
            missing(f"{server.name}, {size}: there was no time.")
            continue
        try:
            for _ in range(2):
                shown = picture(size) if pictures else film_file(FRAME_SIDE, size, fresh_number())
                about = asked(shown, [TALK[0][0] if pictures else FILM[0]], [])
                seen.new_ms[size], seen.again_ms[size] = (_whole_ms(server, about, tokens) for _ in range(2))
        except ERRORS as error:
            seen.new_ms.pop(size, None)
            # Some errors quote the whole video.
            said = shorten(f"{type(error).__name__}: {error}", 160)
            missing(f"{server.name}, {size}: {said}")
            continue
        assert server.server is not None
        seen.memory_mb[size] = server.server.memory().rss_bytes / 1e6
    return seen


def _whole_ms(server: VisionServer, about: list[Any], tokens: int) -> float:
    stream = server.eyes.see(about, tokens)
    return (stream.ended - stream.sent) * 1e3


def _values(found: dict[str, _Seen], value: Callable[[_Seen], float | None]) -> tuple[float | None, dict[str, float]]:
    """Ours, and the peers' by name, where they are known."""
    known = {name: figure for name, seen in found.items() if (figure := value(seen)) is not None}
    return known.pop(SATCHEL_FP16, None), known


def _row(part: PaperTable, found: dict[str, _Seen], what: str, unit: str, kind: str, size: int) -> None:
    part.compare(what, unit, *_values(found, lambda seen: getattr(seen, kind).get(size)), less=True)


def _speedup(part: PaperTable, found: dict[str, _Seen], what: str, size: int, figure: Figure | None) -> None:
    def ratio(seen: _Seen) -> float | None:
        return seen.new_ms[size] / seen.again_ms[size] if size in seen.new_ms else None

    part.compare(f"{what}, new over again", "x", *_values(found, ratio), figure=figure)


def _frames_per_s(part: PaperTable, found: dict[str, _Seen], what: str, size: int) -> None:
    def rate(seen: _Seen) -> float | None:
        return 1e3 * size / seen.new_ms[size] if size in seen.new_ms else None

    part.compare(f"{what}, new: frames", "frames/s", *_values(found, rate))
