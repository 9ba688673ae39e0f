"""Batches for training: chats end to end in one row of tokens, their pictures end to end in one row of patches."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from .layout import CONTEXT, FRAMES, ID_OF, MERGE, PATCH
from .media import PatchedMedium, prepare
from .talk import PictureChat, any_chat, text_of

HEADER = 3  # tokens of `<|im_start|>assistant\n`
Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(slots=True)
class ChatRow:
    """One chat.

    Attributes:
        tokens: ids (length,).
        positions: of each token in time, down and across (3, length).
        said: whether the model is to say the token (length,).
        seen: whether the token is a part of a picture (length,).
        media: its pictures and videos.
        replies: (start, end, kind) of every reply to be said.
    """

    tokens: Array
    positions: Array
    said: Array
    seen: Array
    media: list[PatchedMedium]
    replies: list[tuple[int, int, str]]


@dataclass(slots=True)
class TrainingBatch:
    """Rows end to end, `tokens` in all, and their frames' patches, `patches` pairs in all.

    Attributes:
        tokens, said, seen: (tokens,); positions: (3, tokens); starts: of every row, and the end.
        frames: distinct patches in bytes (frames, 3 * 16 * 16).
        pairs: which two of `frames` make up each patch (patches, 2).
        grids: rows and columns of patches of every pair of frames (pairs of frames, 2).
    """

    tokens: Array
    said: Array
    seen: Array
    positions: Array
    starts: Array
    frames: Array
    pairs: Array
    grids: Array


def positions_of(lengths: list[tuple[int, tuple[int, int] | None]]) -> Array:
    """Positions (3, length): text counts on; a picture's tokens share the time and differ down and across.

    Args:
        lengths: for each stretch its tokens, and for a picture its grid of tokens.
    """
    parts, start = [], 0
    for length, grid in lengths:
        if grid is None:
            parts.append(np.broadcast_to(np.arange(start, start + length), (3, length)))
            start += length
        else:
            down, across = np.divmod(np.arange(length), grid[1])
            parts.append(np.stack([np.zeros(length, np.int64), down, across]) + start)
            start += max(grid)
    return np.concatenate(parts, axis=1)


def stretches(seen: Array, media: list[PatchedMedium]) -> list[tuple[int, tuple[int, int] | None]]:
    """The stretches of text and of pictures that `positions_of` wants."""
    grids = []
    for medium in media:
        grid = (medium.grid[0] // MERGE, medium.grid[1] // MERGE)
        grids += [grid] * max(1, len(medium.seconds))
    borders = [0, *(np.flatnonzero(np.diff(seen)) + 1).tolist(), len(seen)]
    found: list[tuple[int, tuple[int, int] | None]] = []
    for start, stop in itertools.pairwise(borders):
        found.append((stop - start, grids.pop(0) if seen[start] else None))
    return found


def row_of(chat: PictureChat, tokenizer: Tokenizer) -> ChatRow:
    """The chat in tokens, with its media prepared."""
    media = [prepare(medium) for medium in chat.media]
    left = iter(media)
    texts = [text_of(message, lambda _: next(left).text()) for message in chat.messages]
    ids: list[int] = []
    said: list[bool] = []
    replies = []
    for encoding, kind in zip(tokenizer.encode_batch_fast(texts, add_special_tokens=False), chat.kinds, strict=True):
        if kind:
            replies.append((len(ids) + HEADER, len(ids) + len(encoding.ids) - 1, kind))
            said += [False] * HEADER + [True] * (len(encoding.ids) - HEADER - 1) + [False]
        else:
            said += [False] * len(encoding.ids)
        ids += encoding.ids
    tokens = np.array(ids, np.int64)
    seen = np.isin(tokens, [ID_OF["<|image_pad|>"], ID_OF["<|video_pad|>"]])
    return ChatRow(tokens, positions_of(stretches(seen, media)), np.array(said), seen, media, replies)


def pack(rows: list[ChatRow]) -> TrainingBatch:
    """Puts rows end to end."""
    frames, pairs, grids, offset = [], [], [], 0
    for medium in (medium for row in rows for medium in row.media):
        count, size = medium.patches.shape[:2]
        frames.append(medium.patches.reshape(count * size, -1))
        places = offset + np.arange(count * size).reshape(count, size)
        first, second = (places, places) if count == 1 else (places[::FRAMES], places[1::FRAMES])
        pairs.append(np.stack([first.ravel(), second.ravel()], axis=-1))
        grids += [medium.grid] * len(first)
        offset += count * size
    empty = np.zeros((0, 3 * PATCH * PATCH), np.uint8)
    return TrainingBatch(
        tokens=np.concatenate([row.tokens for row in rows]),
        said=np.concatenate([row.said for row in rows]),
        seen=np.concatenate([row.seen for row in rows]),
        positions=np.concatenate([row.positions for row in rows], axis=1),
        starts=np.cumsum([0] + [len(row.tokens) for row in rows]).astype(np.int32),
        frames=np.concatenate(frames) if frames else empty,
        pairs=np.concatenate(pairs) if pairs else np.zeros((0, 2), np.int64),
        grids=np.array(grids, np.int64).reshape(-1, 2),
    )


def make_rows(seed: str, tokenizer: Tokenizer, level: int, patches: int) -> list[ChatRow]:
    """Chats until their pictures have that many patches; the same seed gives the same ones."""
    rng = random.Random(seed)
    rows: list[ChatRow] = []
    used = 0
    while used < patches:
        row = row_of(any_chat(rng, level), tokenizer)
        if len(row.tokens) > CONTEXT:
            continue
        rows.append(row)
        used += 64 + sum(medium.grid[0] * medium.grid[1] * max(1, len(medium.seconds)) for medium in row.media)
    return rows
