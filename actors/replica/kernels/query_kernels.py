"""Kernels that cut a sequence's queries into padded pieces (`kv/query_pieces.py`), and put together what attention
makes of the pieces. MLX takes two or three operations for each piece."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache

import mlx.core as mx

from .gpu_kernels import int_numbers, is_available, kernel, units

logger = logging.getLogger(__name__)

TOKENS = 64
"""Tokens that a group of threads copies, of one head."""

# Template: U and D (`units`), HEADS. `numbers` are the tokens of a sequence, the sequence, and three numbers of each
# piece: its first token, its tokens, and how many it is padded to.
_CUT = """
  const int length = numbers[0], row = numbers[1];
  int part = GROUP, piece = 0;
  long begin = 0;
  for (; part >= HEADS * ((numbers[4 + 3 * piece] + 63) / 64); piece++) {
    part -= HEADS * ((numbers[4 + 3 * piece] + 63) / 64);
    begin += (long)HEADS * numbers[4 + 3 * piece] * D;
  }
  const int start = numbers[2 + 3 * piece], count = numbers[3 + 3 * piece], size = numbers[4 + 3 * piece];
  const int head = part % HEADS, first = part / HEADS * 64, stop = first + 64 < size ? first + 64 : size;
  const long from = ((long)row * HEADS + head) * length + start, to = begin + (long)head * size * D;
  for (int i = first * D + THREAD; i < stop * D; i += 256)
    ((DEVICE U*)pieces)[to + i] = i / D < count ? ((const DEVICE U*)queries)[from * D + i] : static_cast<U>(0.f);
"""

# Template: as above. `numbers` are those of the pieces alone. PIECES: a branch for each piece.
_JOIN = """
  int part = GROUP;
  #define PIECE(piece, at) { \\
    const int start = numbers[3 * at], count = numbers[1 + 3 * at], size = numbers[2 + 3 * at]; \\
    const int groups = HEADS * ((count + 63) / 64); \\
    if (part < groups) { \\
      const int head = part % HEADS, first = part / HEADS * 64, stop = first + 64 < count ? first + 64 : count; \\
      for (int i = first * D + THREAD; i < stop * D; i += 256) \\
        ((DEVICE U*)joined)[((long)(start + i / D) * HEADS + head) * D + i % D] = \\
          ((const DEVICE U*)piece)[(long)head * size * D + i]; \\
      return; \\
    } \\
    part -= groups; \\
  }
  PIECES
"""

Spans = Sequence[tuple[int, int, int]]
"""Of each piece: its first token, its tokens, and how many it is padded to."""


def cut(queries: mx.array, sequence: int, spans: Spans) -> list[mx.array]:
    """Returns pieces of one sequence's queries, each `(1, heads, padded tokens, dim)`, padded with zeros.

    Args:
        queries: `(sequences, heads, tokens, dim)`.
    """
    _, heads, length, dim = queries.shape
    sizes = [size for _, _, size in spans]
    (flat,) = kernel("cut_queries", ("queries", "numbers"), ("pieces",), _CUT)(
        inputs=[queries, int_numbers(length, sequence, *(number for span in spans for number in span))],
        template=[*units("", queries.dtype, dim), ("HEADS", heads)],
        grid=(heads * sum(map(_groups, sizes)) * 256, 1, 1),
        threadgroup=(256, 1, 1),
        output_shapes=[(heads * sum(sizes) * dim,)],
        output_dtypes=[queries.dtype],
    )
    pieces, start = list[mx.array](), 0
    for size in sizes:
        stop = start + heads * size * dim
        pieces.append(flat[start:stop].reshape(1, heads, size, dim))
        start = stop
    return pieces


def join(pieces: Sequence[mx.array], spans: Spans) -> mx.array:
    """Returns the tokens of all pieces, without padding.

    Args:
        pieces: each `(1, heads, padded tokens, dim)`.

    Returns:
        `(1, tokens, heads, dim)`.
    """
    _, heads, _, dim = pieces[0].shape
    counts, names = [count for _, count, _ in spans], [f"piece_{at}" for at in range(len(pieces))]
    body = _JOIN.replace("PIECES", "\n  ".join(f"PIECE({name}, {at})" for at, name in enumerate(names)))
    return kernel(f"join_queries_{len(pieces)}", (*names, "numbers"), ("joined",), body)(
        inputs=[*pieces, int_numbers(*(number for span in spans for number in span))],
        template=[*units("", pieces[0].dtype, dim), ("HEADS", heads)],
        grid=(heads * sum(map(_groups, counts)) * 256, 1, 1),
        threadgroup=(256, 1, 1),
        output_shapes=[(1, sum(counts), heads, dim)],
        output_dtypes=[pieces[0].dtype],
    )[0]


@cache
def work() -> bool:
    """Whether this device runs these kernels, and they do as plain operations. Computed once."""
    if not is_available():
        return False
    queries, spans = mx.random.normal((2, 3, 150, 64)).astype(mx.float16), [(0, 128, 128), (128, 22, 32)]
    try:
        pieces = cut(queries, 1, spans)
        joined = join(pieces, spans)
        right = mx.array_equal(joined[0], queries[1].swapaxes(0, 1)).item()
        reason = "" if right and not mx.any(pieces[1][:, :, 22:]).item() else "they differ from plain operations"
    except RuntimeError as error:
        reason = str(error)
    if reason:
        logger.warning("queries are cut into pieces without kernels: %s", reason)
    return not reason


def _groups(tokens: int) -> int:
    return -(-tokens // TOKENS)
