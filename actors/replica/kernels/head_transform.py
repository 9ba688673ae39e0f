"""What models do with every head's new query and key before attention: an RMS norm, then a rotation by position.

As modules these are four operations a layer. For one token, launching each takes the host longer than computing it
takes the GPU, so `decode_kernel.py` computes them itself. Sources: RMSNorm (Zhang and Sennrich 2019), rotary position
embedding (Su et al. 2021).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np

from ...patches import rope_periods

CHECK_POSITIONS = (0, 1, 300, 5000, 33_000, 131_000)
TOLERANCE, TOLERANCE_16 = 2e-3, 2e-2
"""How far a module's outputs may be off the computation here, relative to the largest number, in float32 and in 16
bits: angles in the thousands are rounded differently."""

ANGLE_TOLERANCE = 2**-21
"""How much further outputs may be off per position: frequencies and angles have 24 bits of precision, and Metal reduces
angles to a turn with as many."""

_CALL_ERRORS = (ValueError, TypeError, RuntimeError)
"""What other kinds of modules raise if they are called in the same way."""


@dataclass(frozen=True, eq=False)
class Norm:
    """An RMS norm over a head; `weight` is (dim,) float32."""

    module: Callable[..., mx.array]
    weight: mx.array
    eps: float

    @classmethod
    def of(cls, module: Any) -> Norm | None:
        """Returns what the module does, None if it is no RMS norm."""
        if (said := cls.said_by(module)) is None:
            return None
        weight, eps = module.weight, said.eps
        x = _random((3, weight.size), weight.dtype)
        wide = x.astype(mx.float32)
        try:
            # The model may add to its weight.
            ones = module(mx.ones_like(weight)[None])[0].astype(mx.float32)
            norm = cls(module, (ones * (1 + eps) ** 0.5).astype(weight.dtype).astype(mx.float32), eps)
            expected = wide * mx.rsqrt(mx.square(wide).mean(axis=-1, keepdims=True) + eps) * norm.weight
            return norm if _agree(module(x), expected) else None
        except _CALL_ERRORS:
            return None

    @classmethod
    def said_by(cls, module: Any) -> Norm | None:
        """Returns what the module seems to do, with a weight of ones, and computes nothing; None if it is no RMS
        norm."""
        weight, eps = getattr(module, "weight", None), getattr(module, "eps", None)
        if not isinstance(weight, mx.array) or weight.ndim != 1 or not isinstance(eps, float):
            return None
        return cls(module, mx.array(np.ones(weight.size, np.float32)), eps)


@dataclass(frozen=True, eq=False)
class Rotation:
    """A rotation of the first `dims` channels of a head by its token's position. Pairs of channels are neighbours if
    `traditional`, else half of `dims` apart; a pair's angle is the position times `scale` times its entry in
    `frequencies`, (dims / 2,) float32. MLX's GPU kernels compute these as powers of two if they are given by a base:
    the `exponents`."""

    module: Callable[..., mx.array]
    dims: int
    traditional: bool
    scale: float
    frequencies: mx.array
    exponents: mx.array | None = None

    @classmethod
    def of(cls, module: Any, dim: int, dtype: mx.Dtype) -> Rotation | None:
        """Returns what the module does with heads of `dim` channels; None if that is not a rotation."""
        if (rotation := cls.said_by(module, dim)) is None:
            return None
        x = _random((1, 2, 1, dim), dtype)
        try:
            for position in CHECK_POSITIONS:
                at, more = mx.array([position]), ANGLE_TOLERANCE * position * abs(rotation.scale)
                if not _agree(module(x, offset=at), rotation(x, at), more):
                    return None
        except _CALL_ERRORS:
            return None
        return rotation

    @classmethod
    def said_by(cls, module: Any, dim: int) -> Rotation | None:
        """Returns what the module seems to do, and calls nothing; None if it is no rotation."""
        dims, base, periods = getattr(module, "dims", None), getattr(module, "base", None), rope_periods(module)
        if not isinstance(dims, int) or dims % 2 or dims > dim:
            return None
        exponents = None
        if isinstance(periods, mx.array) and periods.shape == (dims // 2,):
            frequencies = 1 / periods.astype(mx.float32)
        elif isinstance(base, int | float):
            parts = np.arange(dims // 2, dtype=np.float32) / np.float32(dims // 2)
            powers = -parts * np.log2(np.float32(base))
            exponents, frequencies = mx.array(powers), mx.array(np.exp2(powers))
        else:
            return None
        scale, traditional = getattr(module, "scale", 1.0), getattr(module, "traditional", False)
        return cls(module, dims, bool(traditional), float(scale), frequencies, exponents)

    def __call__(self, x: mx.array, positions: mx.array) -> mx.array:
        """Rotates (sequences, heads, 1, dim), in float32, by (sequences,) positions."""
        x, half = x.astype(mx.float32), self.dims // 2
        angles = (positions[:, None] * self.scale * self.frequencies)[:, None, None]
        turned, rest = x[..., : self.dims], x[..., self.dims :]
        pairs = turned.reshape(*x.shape[:-1], *((half, 2) if self.traditional else (2, half)))
        one, two = (pairs[..., 0], pairs[..., 1]) if self.traditional else (pairs[..., 0, :], pairs[..., 1, :])
        cos, sin = mx.cos(angles), mx.sin(angles)
        both = [one * cos - two * sin, one * sin + two * cos]
        turned = mx.stack(both, axis=-1).reshape(turned.shape) if self.traditional else mx.concatenate(both, axis=-1)
        return mx.concatenate([turned, rest], axis=-1)


@dataclass(frozen=True, eq=False)
class HeadTransform:
    """What is left to do with a layer's new queries and keys."""

    query_norm: Norm | None = None
    key_norm: Norm | None = None
    rotation: Rotation | None = None

    @cached_property
    def constants(self) -> list[float]:
        """What the kernel reads: both norms' eps, the rotation's scale, the weights of the norms that there are, and
        the rotation's frequencies or their exponents."""
        numbers = [0.0 if norm is None else norm.eps for norm in (self.query_norm, self.key_norm)]
        numbers.append(1.0 if self.rotation is None else self.rotation.scale)
        for norm in (self.query_norm, self.key_norm):
            numbers += [] if norm is None else np.array(norm.weight).tolist()
        if (turn := self.rotation) is not None:
            numbers += np.array(turn.frequencies if turn.exponents is None else turn.exponents).tolist()
        # Metal puts short arrays into another address space, into which the kernel's pointers cannot point.
        return numbers + [0.0] * max(0, 8 - len(numbers))

    def of_queries(self, x: mx.array, positions: mx.array) -> mx.array:
        """Applies the model's own modules to (sequences, heads, 1, dim) queries of tokens at (sequences,) positions."""
        return self._apply(self.query_norm, x, positions)

    def of_keys(self, x: mx.array, positions: mx.array) -> mx.array:
        """The same for keys."""
        return self._apply(self.key_norm, x, positions)

    def _apply(self, norm: Norm | None, x: mx.array, positions: mx.array) -> mx.array:
        x = x if norm is None else norm.module(x)
        return x if self.rotation is None else self.rotation.module(x, offset=positions)


NOTHING = HeadTransform()


def _random(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Returns random numbers, always the same ones; the state of MLX's own generator does not change."""
    return mx.array(np.random.default_rng(7).standard_normal(shape, np.float32)).astype(dtype)


def _agree(one: mx.array, other: mx.array, more: float = 0.0) -> bool:
    if one.shape != other.shape:
        return False
    tolerance = more + (TOLERANCE if one.dtype == mx.float32 else TOLERANCE_16)
    off = mx.abs(one.astype(mx.float32) - other.astype(mx.float32)).max()
    return bool(off <= tolerance * mx.abs(other).max())
