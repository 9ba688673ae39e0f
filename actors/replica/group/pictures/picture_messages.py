"""Pictures as they are told to followers with calls: where they are in a prompt, and what layers need of them.

A follower gets the embeddings of the tokens that the call is about, and only what its layers use: the first stage the
embeddings, each stage the levels that are added after its first layer or later. These bytes follow the message.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import mlx.core as mx
import msgpack
import numpy as np

from ...device.device import as_numpy
from ...execution.followers import ShownPictures
from ...execution.media.language_inputs import ImageEmbeddings, SequencePictures


class Wanted(NamedTuple):
    """What a process's layers need of pictures: embeddings, and levels from a number on."""

    embeds: bool = False
    levels_from: int = 0


@dataclass(frozen=True)
class Told:
    """What one follower is told of shown pictures: a message's value, and the arrays that follow it."""

    packed: bytes
    arrays: list[mx.array]


def pack_pictures(pictures: SequencePictures) -> bytes:
    """Returns a sequence's pictures without their embeddings."""
    positions = _packed_numbers(pictures.positions)
    return _packed([pictures.spans, positions, pictures.shift, pictures.bidirectional, pictures.unbroken])


def read_pictures(packed: bytes) -> SequencePictures:
    """Returns what `pack_pictures` packed."""
    spans, positions, shift, bidirectional, unbroken = msgpack.unpackb(packed)
    return SequencePictures(
        [(start, count) for start, count in spans],
        {},
        _numbers_in(positions),
        shift,
        [(start, stop) for start, stop in bidirectional],
        [(start, stop) for start, stop in unbroken],
    )


def tell(shown: ShownPictures, wanted: Wanted) -> Told:
    """Returns what a follower is told of pictures."""
    rows: list[list[Any]] = []
    arrays: list[mx.array] = []
    for sequence_id, pictures in shown.sequences.items():
        for index, each in pictures.items():
            count = len(each.levels)
            levels = each.levels[wanted.levels_from :]
            # Levels that come before its layers have left no trace but their number.
            arrays += [each.inputs] * wanted.embeds + [*levels]
            numbers = None if each.positions is None else as_numpy(each.positions)
            rows.append(
                [sequence_id, index, each.first, each.inputs.shape[0], count, len(levels), _packed_numbers(numbers)]
            )
    return Told(_packed([wanted.embeds, rows]), arrays)


def read_shown(packed: bytes, arrays: Iterator[mx.array]) -> ShownPictures:
    """Returns what a follower was told.

    Args:
        arrays: those that followed the message, in order.
    """
    embeds, rows = msgpack.unpackb(packed)
    found: dict[str, dict[int, ImageEmbeddings]] = {}
    for sequence_id, index, first, tokens, count, given, positions in rows:
        # In place of what these layers do not need.
        nothing = mx.zeros((tokens, 0))
        inputs = next(arrays) if embeds else nothing
        levels = (*[nothing] * (count - given), *(next(arrays) for _ in range(given)))
        numbers = _numbers_in(positions)
        found.setdefault(sequence_id, {})[index] = ImageEmbeddings(
            inputs, levels, None if numbers is None else mx.array(numbers), first
        )
    return ShownPictures(found)


def _packed(value: Any) -> bytes:
    return cast(bytes, msgpack.packb(value))


def _packed_numbers(numbers: np.ndarray | None) -> Any:
    """Returns integers in few bytes: most positions are one more than the one before."""
    if numbers is None:
        return None
    steps = np.diff(numbers.astype("<i4"), axis=-1, prepend=np.int32(0))
    return [list(numbers.shape), zlib.compress(np.ascontiguousarray(steps).tobytes(), 1)]


def _numbers_in(packed: Any) -> np.ndarray | None:
    if packed is None:
        return None
    shape, steps = packed
    return np.cumsum(np.frombuffer(zlib.decompress(steps), "<i4").reshape(shape), axis=-1, dtype=np.int32)
