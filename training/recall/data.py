"""Rows of token ids for training: one fresh conversation a row."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from .layout import PAD_ID
from .talk import RunningTalk, TaughtMessage, text_of
from .tools import text_of_tools

CHARACTERS_PER_TOKEN = 3.2
HEADER = 3  # tokens of `<|im_start|>assistant\n`
PADDING, READ, SAID = 0, 1, 2
Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(slots=True)
class TokenRow:
    """Token ids and their roles (`PADDING`, `READ` or `SAID`), and (start, end, kind) of every whole reply."""

    tokens: Array
    roles: Array
    replies: list[tuple[int, int, str]]


def _extend(row: TokenRow, filled: int, turns: list[TaughtMessage], tokenizer: Tokenizer) -> int:
    """Writes the turns from place `filled` on; what does not fit is cut. Returns the new fill."""
    size = len(row.tokens)
    encodings = tokenizer.encode_batch_fast([text_of(turn.message) for turn in turns], add_special_tokens=False)
    for turn, encoding in zip(turns, encodings, strict=True):
        ids = encoding.ids
        end = min(size, filled + len(ids))
        row.tokens[filled:end] = ids[: end - filled]
        row.roles[filled:end] = READ
        if turn.kind:
            start, stop = filled + HEADER, filled + len(ids) - 1
            row.roles[start : min(stop, size)] = SAID
            if stop <= size:
                row.replies.append((start, stop, turn.kind))
        filled = end
        if filled == size:
            break
    return filled


def make_row(rng: random.Random, tokenizer: Tokenizer, length: int) -> TokenRow:
    """A conversation cut to `length` + 1 tokens, so that inputs and targets are `length` long."""
    row = TokenRow(np.full(length + 1, PAD_ID, np.int16), np.zeros(length + 1, np.uint8), [])
    talk = RunningTalk(rng, int(length * CHARACTERS_PER_TOKEN))
    filled = 0
    if talk.tools:
        ids = tokenizer.encode(text_of_tools(talk.tools), add_special_tokens=False).ids[: length + 1]
        filled = len(ids)
        row.tokens[:filled] = ids
        row.roles[:filled] = READ
    while filled <= length:
        filled = _extend(row, filled, talk.exchange(), tokenizer)
    return row


def make_batch(seed: str, tokenizer: Tokenizer, rows: int, length: int) -> tuple[Array, Array, list[TokenRow]]:
    """Tokens and roles, both (rows, length + 1), and the rows themselves; the same seed gives the same batch."""
    rng = random.Random(seed)
    made = [make_row(rng, tokenizer, length) for _ in range(rows)]
    return np.stack([row.tokens for row in made]), np.stack([row.roles for row in made]), made
