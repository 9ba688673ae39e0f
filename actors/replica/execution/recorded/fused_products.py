"""Has products compute what comes after them, while a step is recorded: a residual sum, or what gates let through.

During the recording, layers whose products a kernel computes note what they have multiplied. If a sum or a gate gets
the very arrays that such a product has returned, the kernel computes both from the same inputs. The product alone is
then used by nothing that is recorded, so it is left out. What an adapter has added something to is another array.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import mlx.core as mx
from mlx import nn

from ....patches import NO_CHANGE, rebound, stood_in
from ...kernels import few_rows
from ...kernels.few_rows import FewRowsLinear, Product

GATE = "swiglu"
"""The function of mlx-lm that its models call with a gate and what it lets through."""


class FusedProducts:
    """The products of one model that a kernel computes. Used on the engine's thread."""

    def __init__(self, model: nn.Module) -> None:
        layers = [module for _, module in model.named_modules() if isinstance(module, FewRowsLinear)]
        self._noting = stood_in([(layer, "note", self._note) for layer in layers])
        self._gating = rebound(model, GATE, self._gate) or NO_CHANGE
        self._products: dict[int, Product] = {}
        self.is_empty = not layers

    def _note(self, product: Product) -> None:
        # Kept products keep their outputs alive, so no two have the same id.
        self._products |= {id(output): product for output in product.outputs}

    def _gate(self, plain: Callable[[mx.array, mx.array], mx.array]) -> Callable[[mx.array, mx.array], mx.array]:
        def gate(gate: mx.array, x: mx.array) -> mx.array:
            product = self._products.get(id(gate))
            if product is not None and few_rows.gates([output.shape[-1] for output in product.outputs]):
                first, second = product.outputs
                if gate is first and x is second:
                    return few_rows.multiply_gated(product.layer, product.x)
            return plain(gate, x)

        return gate

    def sum(self, stream: mx.array, added: mx.array) -> mx.array:
        """Returns the sum of two arrays of one shape and dtype, computed by the product whose output `added` is, if
        there is one."""
        product = self._products.get(id(added))
        if product is None or len(product.outputs) > 1:
            return stream + added
        return few_rows.multiply(product.layer, product.x, (added.shape[-1],), stream)[0]

    @contextmanager
    def active(self) -> Iterator[None]:
        """While this is open, products are noted, and gates are computed by them."""
        self._products = {}
        try:
            with self._noting.for_now(), self._gating.for_now():
                yield
        finally:
            self._products = {}
