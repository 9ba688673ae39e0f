"""Runs work of usual shapes in advance, for devices that compile kernels and plan attention for every new shape.

CUDA does that at the first use of a shape, and a step waits for it: kernels for seconds, plans for 50 ms. A replica
meets them while nobody asks for anything: what a single short conversation needs first, then batches of more sequences,
    and
prompts of all padded lengths that go on after histories of all padded lengths.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

import mlx.core as mx

from ...protocol.block_ids import BLOCK_TOKENS
from ...protocol.replica_messages import Sampling
from ..device.device import device_bytes, size_class
from ..device.device_errors import DeviceFailed
from ..execution.executor import SHAPE_TOKENS, BatchExecutor
from ..execution.loaded_model import LoadedModel
from ..execution.vision import SequencePictures, Vision
from ..kv.attention import FEW_QUERIES
from ..kv.caches import PooledBlock, Slab

logger = logging.getLogger(__name__)

ROWS = (2, 4, 8, 16, 32)
MEMORY_FRACTION = 1 / 16
"""Share of the free memory for the made-up sequences."""

PICTURE_SIDE = 448
"""Side of the made-up picture, pixels."""

Piece = Callable[[], Iterator[None]]
"""Runs one step of its work each time it is asked for the next one, and holds its sequences until then."""

HISTORY_TOKENS_MAX = 2**17
TOGETHER = (2, 8)
"""Conversations that go on at once."""

PROMPT_TOKENS = BLOCK_TOKENS - 24
STEPS = 16


def meet_usual(loaded: LoadedModel) -> None:
    """Runs one sequence: prompts up to a block, and an answer that fills a block; and a picture from its pixels on.
    What fails is only logged.

    Args:
        loaded: the model; its arrays belong to the calling thread.
    """
    try:
        for piece in _pieces_of(loaded, 1):
            for _ in piece():
                pass
        if loaded.vision is not None:
            _see(loaded, loaded.vision)
    except (DeviceFailed, RuntimeError, ValueError) as error:
        logger.warning("the warm-up failed: %s", error)
        if loaded.pool is not None:
            loaded.pool.reset()
    mx.clear_cache()


class WarmUp:
    """What a replica has not met yet when it is ready, step by step: each takes a fraction of a second, or some seconds
    where a kernel is compiled.

    Args:
        loaded: the model; its arrays belong to the calling thread.
    """

    def __init__(self, loaded: LoadedModel, chunk_tokens: int) -> None:
        per_sequence = loaded.spec.bytes_per_sequence + 2 * BLOCK_TOKENS * loaded.spec.bytes_per_token
        sequences_max = device_bytes(free=True) * MEMORY_FRACTION / per_sequence
        self._pieces: deque[Piece] = deque()
        self._steps: Iterator[None] = iter(())
        self._pieces += _pieces_of(loaded, 1)
        if loaded.vision is not None:
            self._pieces.append(partial(_seen, loaded, loaded.vision))
        for sequences in ROWS:
            if sequences <= sequences_max:
                self._pieces += _pieces_of(loaded, sequences)
        self._pieces += _histories(loaded, chunk_tokens)

    def step(self) -> bool:
        """Runs the next step. Returns False if there was none.

        Raises:
            RuntimeError: MLX failed. What it tells may be about anything that was computed before.
        """
        while next(self._steps, self) is self:
            # Every shape leaves buffers of sizes of its own, which MLX would keep: tens of GB.
            mx.clear_cache()
            if not self._pieces:
                return False
            self._steps = self._pieces.popleft()()
        return True


def _pieces_of(loaded: LoadedModel, sequences: int) -> Iterator[Piece]:
    for length in range(SHAPE_TOKENS, BLOCK_TOKENS + 1, SHAPE_TOKENS):
        yield partial(_prefill, loaded, sequences, length)
    for spread in (0, 1) if sequences > 1 else (0,):
        yield partial(_decode, loaded, sequences, spread)


def _histories(loaded: LoadedModel, chunk_tokens: int) -> Iterator[Piece]:
    """Short prompts come first: a turn of an agent that goes on is one. They need kernels alone, and no plans."""
    if loaded.pool is None or not BatchExecutor(loaded).batched_prefill:
        return
    lengths = sorted({SHAPE_TOKENS * size_class(count) for count in range(1, chunk_tokens // SHAPE_TOKENS + 1)})
    most = min(loaded.context_tokens, HISTORY_TOKENS_MAX)
    histories = sorted({size_class(count) for count in range(1, most // BLOCK_TOKENS)})
    for length in lengths:
        # What the prompt itself seals is read as history too, and one block more is the open one.
        own = 1 + length // BLOCK_TOKENS
        for blocks in histories:
            if own <= blocks and blocks * BLOCK_TOKENS + length <= most:
                for sequences in (1, *TOGETHER) if length <= FEW_QUERIES else (1,):
                    yield partial(_go_on, loaded, sequences, blocks - own, length)
                if length <= FEW_QUERIES:
                    break


def _seen(loaded: LoadedModel, vision: Vision) -> Iterator[None]:
    try:
        _see(loaded, vision)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("the warm-up of pictures failed: %s", error)
    yield


def _see(loaded: LoadedModel, vision: Vision) -> None:
    """Runs a picture from its pixels to a first token."""
    span, embeddings = vision.example(PICTURE_SIDE)
    pictures, tokens = SequencePictures([(0, len(span.tokens))], {0: embeddings}), list(span.tokens)
    vision.set_positions(pictures, tokens, [(span.grid, False)])
    executor = BatchExecutor(loaded)
    executor.open("", [], None, 0, pictures)
    executor.prefill([("", tokens)])
    executor.join("", [*tokens, 0], Sampling(temperature=0.0, max_tokens=2), 0)
    executor.step()
    executor.leave([""])


def _prefill(loaded: LoadedModel, sequences: int, length: int) -> Iterator[None]:
    """Prefills prompts of one length."""
    executor = BatchExecutor(loaded)
    for sequence in range(sequences):
        executor.open(str(sequence), [], None, 0)
    executor.prefill([(str(sequence), [0] * length) for sequence in range(sequences)])
    yield


def _go_on(loaded: LoadedModel, sequences: int, blocks: int, length: int) -> Iterator[None]:
    """Prefills prompts after histories of so many blocks, which are one block again and again, and a token."""
    executor = BatchExecutor(loaded)
    executor.open("history", [], None, 0)
    executor.prefill([("history", [0] * (BLOCK_TOKENS + 1))])
    block, tail = executor.cut("history", [(0, BLOCK_TOKENS), (BLOCK_TOKENS, BLOCK_TOKENS + 1)])
    assert isinstance(block, PooledBlock) and isinstance(tail, Slab)
    for sequence in range(sequences):
        executor.open(str(sequence), [block] * blocks, tail, 1)
    executor.prefill([(str(sequence), [0] * length) for sequence in range(sequences)])
    yield


def _decode(loaded: LoadedModel, sequences: int, spread: int) -> Iterator[None]:
    """Decodes sequences of equal lengths, which need no mask, or of different ones; each fills a block. Then some
    leave."""
    executor = BatchExecutor(loaded)
    names = [str(sequence) for sequence in range(sequences)]
    prompts = {name: [0] * (PROMPT_TOKENS + spread * (sequence % 8)) for sequence, name in enumerate(names)}
    for name in names:
        executor.open(name, [], None, 0)
    executor.prefill(list(prompts.items()))
    yield
    for name in names:
        executor.join(name, [*prompts[name], 0], Sampling(temperature=0.0, max_tokens=2 * BLOCK_TOKENS), 0)
    while executor.length(names[0]) < BLOCK_TOKENS + STEPS:
        executor.step()
        yield
    if loaded.spec.reusable:
        length = executor.length(names[0])
        executor.cut(names[0], [(0, BLOCK_TOKENS), (BLOCK_TOKENS, length)])
    executor.leave(names[1::2])
    executor.step()
    executor.leave(names)
