"""Warms a device up: runs work of usual shapes in advance, if the device compiles kernels and plans attention for new
shapes.

CUDA does that at the first use of a shape, and a step waits for it: seconds for kernels, 60 to 100 ms for plans. A
replica runs such work while there are no requests: first the kernels of a single conversation, then the plans of
attention, of which there are few (`query_pieces.py`), then the kernels of larger batches.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import mlx.core as mx

from ....protocol.block_ids import BLOCK_TOKENS
from ....protocol.replica_messages import Sampling
from ...device.device import device_bytes
from ...device.device_errors import DeviceFailed
from ...execution.executor import BatchExecutor
from ...execution.loaded_model import LoadedModel
from ...execution.media.language_inputs import SequencePictures
from ...execution.media.vision import Vision
from ...kv import attention
from ...kv.caches import PooledBlock, Slab
from ...kv.query_pieces import PIECES, padded_blocks

logger = logging.getLogger(__name__)

ROWS = (2, 4, 8, 16, 32)
MEMORY_FRACTION = 1 / 16
"""Share of the free memory that made-up sequences may use."""

PICTURE_SIDE = 448
"""Side of the made-up picture, pixels."""

Piece = Callable[[], Iterator[None]]
"""An iterator that runs one step of work at each `next`, and holds its sequences until then."""

PROMPTS = (64, 320)
"""Lengths of short prompts: the first attends by plain products, the second in pieces."""

COLUMNS_MAX = 2**17
"""The most columns of attention for which plans are made in advance."""

FAR_BLOCKS = 40
"""Blocks of a history before which a short prompt attends head by head."""

PROMPT_TOKENS = BLOCK_TOKENS - 24
STEPS, DRAFTED = 16, 1


def meet_usual(loaded: LoadedModel) -> None:
    """Runs one sequence, with prompts of up to a block and an answer that fills a block, and one picture from its
    pixels to a token. Errors are only logged.

    Args:
        loaded: the model; its arrays belong to the calling thread.
    """
    _run_all(loaded, _pieces_of(loaded, 1), loaded.vision)


def meet_prompts(loaded: LoadedModel) -> None:
    """Runs a prompt of one sequence and prompts of two together, which a self-test has not: the first of each compiles
    kernels, and cuDNN takes seconds for its first plan. Arguments and errors as for `meet_usual`."""
    _run_all(loaded, [partial(_prefill, loaded, sequences, PROMPTS[-1]) for sequences in (1, 2)])


def _run_all(loaded: LoadedModel, pieces: Iterable[Piece], vision: Vision | None = None) -> None:
    try:
        for piece in pieces:
            for _ in piece():
                pass
        if vision is not None:
            _see(loaded, vision)
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
        bytes_max = int(device_bytes(free=True) * MEMORY_FRACTION)
        self._pieces: deque[Piece] = deque()
        self._steps: Iterator[None] = iter(())
        self._pieces += _pieces_of(loaded, 1)
        if loaded.vision is not None:
            self._pieces.append(partial(_seen, loaded, loaded.vision))
        if loaded.pool is not None and BatchExecutor(loaded).batched_prefill:
            self._pieces += _kernels(loaded, chunk_tokens)
            self._pieces.append(partial(_plan, loaded, chunk_tokens, bytes_max))
        for sequences in ROWS:
            if sequences * per_sequence <= bytes_max:
                self._pieces += _pieces_of(loaded, sequences)

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
    for length in PROMPTS if sequences <= 2 else ():
        yield partial(_prefill, loaded, sequences, length)
    for spread in (0, 1) if sequences > 1 else (0,):
        yield partial(_decode, loaded, sequences, spread)


def _plan(loaded: LoadedModel, chunk_tokens: int, bytes_max: int) -> Iterator[None]:
    """Makes the plans of attention in pieces, those of short histories first; an agent's grows."""
    # Blocks that a chunk itself seals are read twice: sealed and as computed.
    tokens = min(loaded.context_tokens + chunk_tokens, COLUMNS_MAX)
    # In full precision, of one layer.
    layer = max(layer.open_bytes // BLOCK_TOKENS or layer.token_bytes for layer in loaded.spec.layers)
    for blocks in sorted({padded_blocks(count) for count in range(1, -(-tokens // BLOCK_TOKENS) + 1)}):
        columns = blocks * BLOCK_TOKENS
        for queries in sorted(PIECES):
            if queries <= columns and columns * (layer + 2 * queries) <= bytes_max:
                attention.prepare_plans(loaded.model, queries, columns)
                yield


def _kernels(loaded: LoadedModel, chunk_tokens: int) -> Iterator[Piece]:
    """Yields prompts after histories, for their kernels. Those that multiply with weights differ with the number of
    tokens, so each length is twice the one before."""
    most = loaded.context_tokens - BLOCK_TOKENS
    for sequences in (1, 2):
        yield partial(_go_on, loaded, sequences, 1, PROMPTS[0])
    if most >= FAR_BLOCKS * BLOCK_TOKENS:
        yield partial(_go_on, loaded, 1, FAR_BLOCKS, PROMPTS[0])
    length = 2 * PROMPTS[0]
    while length <= min(chunk_tokens, most):
        yield partial(_go_on, loaded, 1, 1, length)
        length *= 2


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
    executor.wait_for_prefill()
    executor.join("", [*tokens, 0], Sampling(temperature=0.0, max_tokens=2), 0)
    executor.step()
    executor.leave([""])


def _prefill(loaded: LoadedModel, sequences: int, length: int) -> Iterator[None]:
    """Prefills prompts of one length."""
    executor = BatchExecutor(loaded)
    for sequence in range(sequences):
        executor.open(str(sequence), [], None, 0)
    executor.prefill([(str(sequence), [0] * length) for sequence in range(sequences)])
    executor.wait_for_prefill()
    yield


def _go_on(loaded: LoadedModel, sequences: int, blocks: int, length: int) -> Iterator[None]:
    """Prefills prompts after histories of `blocks` times the same block and a token."""
    executor = BatchExecutor(loaded)
    executor.open("history", [], None, 0)
    executor.prefill([("history", [0] * (BLOCK_TOKENS + 1))])
    executor.wait_for_prefill()
    block, tail = executor.cut("history", [(0, BLOCK_TOKENS), (BLOCK_TOKENS, BLOCK_TOKENS + 1)])
    assert isinstance(block, PooledBlock) and isinstance(tail, Slab)
    for sequence in range(sequences):
        executor.open(str(sequence), [block] * blocks, tail, 1)
    executor.prefill([(str(sequence), [0] * length) for sequence in range(sequences)])
    executor.wait_for_prefill()
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
    executor.wait_for_prefill()
    yield
    for name in names:
        executor.join(name, [*prompts[name], 0], Sampling(temperature=0.0, max_tokens=2 * BLOCK_TOKENS), 0)
    while executor.length(names[0]) < BLOCK_TOKENS + STEPS:
        executor.step()
        yield
    if not loaded.undrafted and executor.takes_drafts:
        # Twice: what is computed after a draft has its kernels too.
        for _ in range(2):
            executor.step_with([[0] * DRAFTED for _ in names])
            yield
    if loaded.spec.reusable:
        length = executor.length(names[0])
        executor.copied(executor.cut(names[0], [(0, BLOCK_TOKENS), (BLOCK_TOKENS, length)]))
    executor.leave(names[1::2])
    executor.step()
    executor.leave(names)
