"""Warms a device up: runs work of usual shapes in advance, if the device compiles kernels and plans attention for every
new shape.

CUDA does that at the first use of a shape, and a step waits for it: seconds for kernels, 50 ms for plans. A replica
runs such work while there are no requests: first the shapes of a single short conversation, then larger batches, then
prompts of all padded lengths after histories of all padded lengths.
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
from ..execution.executor import BatchExecutor
from ..execution.loaded_model import LoadedModel
from ..execution.padding import SHAPE_TOKENS
from ..execution.vision import SequencePictures, Vision
from ..kv.attention import FEW_QUERIES
from ..kv.caches import PooledBlock, Slab

logger = logging.getLogger(__name__)

ROWS = (2, 4, 8, 16, 32)
MEMORY_FRACTION = 1 / 16
"""Share of the free memory that made-up sequences may use."""

PICTURE_SIDE = 448
"""Side of the made-up picture, pixels."""

Piece = Callable[[], Iterator[None]]
"""An iterator that runs one step of work at each `next`, and holds its sequences until then."""

HISTORY_TOKENS_MAX = 2**17
TOGETHER = (2, 8)
"""Numbers of conversations that decode at once."""

PROMPT_TOKENS = BLOCK_TOKENS - 24
STEPS = 16


def meet_usual(loaded: LoadedModel) -> None:
    """Runs one sequence, with prompts of up to a block and an answer that fills a block, and one picture from its
    pixels to a token. Errors are only logged.

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
    """Warms up for the shapes that a ready replica has not run yet, step by step. A step takes a fraction of a second,
    or some seconds if a kernel is compiled.

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
            RuntimeError: MLX failed. The error may be about anything that was computed before.
        """
        while next(self._steps, self) is self:
            # Every shape leaves buffers of its own sizes, which MLX would cache: tens of GB.
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
    """Yields prompts after histories. Short prompts come first, as an agent's next turn has one; they need only kernels
    and no plans."""
    if loaded.pool is None or not BatchExecutor(loaded).batched_prefill:
        return
    lengths = sorted({SHAPE_TOKENS * size_class(count) for count in range(1, chunk_tokens // SHAPE_TOKENS + 1)})
    most = min(loaded.context_tokens, HISTORY_TOKENS_MAX)
    histories = sorted({size_class(count) for count in range(1, most // BLOCK_TOKENS)})
    for length in lengths:
        # Blocks that the prompt itself seals are read as history too, and the open block is one more.
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
    """Prefills prompts after histories of `blocks` times the same block and a token."""
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
    """Decodes sequences of equal lengths, which need no mask, or of different lengths; each fills a block. Then some
    sequences leave."""
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
