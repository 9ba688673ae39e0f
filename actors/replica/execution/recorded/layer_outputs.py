"""What some layers of a model return in a step, for a head that drafts from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from ....patches import recast


class LayerOutputs:
    """The outputs of some layers of one model. Used on the engine's thread.

    Args:
        layers: the layers, whose class this changes to one that notes what a call returns.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self._noted: dict[int, mx.array] | None = None
        self._count = len(layers)
        for number, layer in enumerate(layers):
            recast(layer, _noting(type(layer), number, self._note))

    @contextmanager
    def noted(self, computed: Callable[[mx.array], mx.array] = lambda output: output) -> Iterator[list[mx.array]]:
        """Yields a list that has, once the context is left, what one call of the model within it gave:
        `(sequences, tokens, dimensions of all layers)`.

        Args:
            computed: given what a layer has returned, returns the same as it is computed otherwise.
        """
        self._noted, found = {}, list[mx.array]()
        try:
            yield found
            if len(self._noted) == self._count:
                found.append(mx.concatenate([computed(self._noted[number]) for number in range(self._count)], axis=-1))
        finally:
            self._noted = None

    def _note(self, number: int, output: Any) -> None:
        if self._noted is not None:
            self._noted[number] = output[0] if isinstance(output, tuple) else output


def _noting(kind: type[Any], number: int, note: Any) -> type[Any]:
    def call(layer: Any, *given: Any, **named: Any) -> Any:
        output = kind.__call__(layer, *given, **named)
        note(number, output)
        return output

    return type(kind.__name__, (kind,), {"__call__": call})
