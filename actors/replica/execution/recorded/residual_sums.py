"""Computes residual sums with what comes before or after them, while a step is recorded.

During the recording, stand-ins replace the norms of a model's layers. Each takes the sum of the stream before the last
norm and of what the layer's part after that norm has returned, and gives the norm of it. The model goes on to compute
the sums itself, but what it computes is used by nothing that is recorded, so it is left out.

On CUDA products compute the sums (`fused_products.py`), and the model's own norms follow. For Metal there is no such
product: there a sum and its norm are one kernel (`sum_norm.py`). On an H200 that kernel took longer than both alone.

If a model adds something else, such as scaled outputs or those of two parts at once, the results differ.
`loading/ways/decode_ways.py` compares them, and finds out whether a step takes less time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx import nn

from ....patches import stood_in
from ...kernels import sum_norm
from ...kernels.head_transform import Norm
from .deferral import CannotDefer
from .fused_products import FusedProducts


class _Part:
    """Stands for a part of a layer, such as attention, whose output is noted."""

    def __init__(self, module: nn.Module, note: Callable[[Any], None]) -> None:
        self._module, self._note = module, note

    def __call__(self, *given: Any, **named: Any) -> Any:
        out = self._module(*given, **named)
        self._note(out)
        return out

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class ResidualSums:
    """The norms of one model that follow a residual sum. Used on the engine's thread.

    Args:
        products: compute the sums, and are active whenever this is; None: sums are computed with the norms.
    """

    def __init__(self, model: nn.Module, products: FusedProducts | None = None) -> None:
        self._products = products
        self._sites: list[tuple[Any, str, Any]] = []
        self._stream: mx.array | None = None
        self._added: Any = None
        # What the model has computed, and the same sum as it is computed here.
        self._sums: list[tuple[mx.array, mx.array]] = []
        for _, module in model.named_modules():
            self._find(module)

    @property
    def is_empty(self) -> bool:
        return not self._sites

    def _find(self, module: nn.Module) -> None:
        """Adds the children of a layer, and the norm after the last one."""
        children = {name: child for name, child in module.items() if isinstance(child, nn.Module)}
        # Those of heads are not the stream's.
        norms = {
            name: norm
            for name, child in children.items()
            if name[0] not in "qk" and (norm := Norm.of(child)) is not None
        }
        if norms:
            for name, child in children.items():
                stand_in = self._norm(norms[name]) if name in norms else _Part(child, self._note)
                self._sites.append((module, name, stand_in))

    def _note(self, out: Any) -> None:
        self._added = out

    def _norm(self, norm: Norm) -> Callable[[mx.array], mx.array]:
        epsilon = mx.array([norm.eps], mx.float32)

        def call(x: mx.array) -> mx.array:
            stream, added, self._added = self._stream, self._added, None
            if x is added:
                # A part's output is normed before it is added.
                self._added = norm.module(x)
                return self._added
            if stream is None:
                self._stream = x
                return norm.module(x)
            if not isinstance(added, mx.array) or not stream.shape == added.shape == x.shape:
                raise CannotDefer("nothing was computed since the last norm that could be added to the stream")
            if not stream.dtype == added.dtype == x.dtype:
                raise CannotDefer("the stream has another dtype than what is added to it")
            if self._products is not None:
                self._stream = self._products.sum(stream, added)
                normed = norm.module(self._stream)
            else:
                self._stream, normed = sum_norm.sum_norm(stream, added, norm.weight, epsilon)
            self._sums.append((x, self._stream))
            return normed

        return call

    def computed(self, array: mx.array) -> mx.array:
        """Returns a sum as it is computed here, given what the model has computed; what is no such sum as it is. Call
        it while this is active."""
        return next((stream for x, stream in self._sums if x is array), array)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Puts the stand-ins in place."""
        self._stream = self._added = None
        try:
            with stood_in(self._sites).for_now():
                yield
        finally:
            self._stream = self._added = None
            self._sums.clear()


def fusions_of(model: nn.Module, *, summed: bool, gated: bool) -> list[ResidualSums | FusedProducts]:
    """Returns what a recorded step of a model computes by fewer operations.

    Args:
        summed: whether residual sums are computed with what is beside them.
        gated: whether products compute what comes after them: gates, and sums if `summed`.
    """
    products = FusedProducts(model) if gated else None
    sums = ResidualSums(model, products) if summed else None
    return [each for each in (products, sums) if each is not None and not each.is_empty]
