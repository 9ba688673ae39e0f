"""Leaves the norms and rotations of new queries and keys to the decode kernel, while a step is recorded.

During the recording, stand-ins replace these modules of a model: they return their input and note that they were
called. What a layer has noted when its attention is called is that layer's `HeadTransform`. If a model calls these
modules in another order, or does more between them, it cannot be recorded this way. `decode_ways.py` also compares the
results.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ....patches import stood_in
from ...kernels.head_transform import HeadTransform, Norm, Rotation


class CannotDefer(RuntimeError):
    """The model does something with queries and keys that the kernel cannot do."""


@dataclass
class _Noted:
    """The modules that were called since the last attention, and their channels per head."""

    norms: dict[str, Norm] = field(default_factory=dict)
    rotations: list[Rotation] = field(default_factory=list)
    dims: set[int] = field(default_factory=set)


class Deferral:
    """The modules of one model that can be left to the kernel. Used on the engine's thread."""

    def __init__(self, model: Any) -> None:
        self._sites: list[tuple[Any, str, Any]] = []
        self._noted = _Noted()
        self._offset: mx.array | None = None
        for _, module in model.named_modules():
            self._find(module)

    @property
    def is_empty(self) -> bool:
        return not self._sites

    def _find(self, module: Any) -> None:
        """Adds the children of a layer's attention."""
        norms, rotations, dims = {}, {}, set()
        children = _children(module)
        for name, child in children.items():
            if _norms_heads(name) and (norm := Norm.of(child)) is not None:
                norms[name] = norm
                dims.add(norm.weight.size)
        dim = next(iter(dims)) if len(dims) == 1 else getattr(module, "head_dim", 0)
        dtype = next((norm.module.weight.dtype for norm in norms.values()), mx.float32)  # type: ignore[attr-defined]
        for name, child in children.items():
            if hasattr(child, "dims") and (rotation := Rotation.of(child, dim or child.dims, dtype)) is not None:
                rotations[name] = rotation
        if not rotations:
            return
        for name, norm in norms.items():
            self._sites.append((module, name, self._norm_stand_in(name[0], norm)))
        for name, rotation in rotations.items():
            self._sites.append((module, name, self._rotation_stand_in(rotation)))

    def _norm_stand_in(self, whose: str, norm: Norm) -> Any:
        def call(x: mx.array) -> mx.array:
            noted = self._noted
            if x.ndim != 4:
                # A norm over all heads together.
                return norm.module(x)
            if whose in noted.norms or noted.rotations:
                raise CannotDefer("a norm is called at another time")
            noted.norms[whose] = norm
            noted.dims.add(x.shape[-1])
            return x

        return call

    def _rotation_stand_in(self, rotation: Rotation) -> Any:
        def call(x: mx.array, offset: Any = None, **more: Any) -> mx.array:
            noted = self._noted
            others = any(before is not rotation for before in noted.rotations)
            if offset is not self._offset or more or others or len(noted.rotations) == 2:
                raise CannotDefer("a rotation differs between queries and keys, or is not by the token's position")
            noted.rotations.append(rotation)
            noted.dims.add(x.shape[-1])
            return x

        return call

    @contextmanager
    def active(self, offset: mx.array) -> Iterator[None]:
        """Puts the stand-ins in place.

        Args:
            offset: (sequences,), the positions that caches tell the model.
        """
        self._offset, self._noted = offset, _Noted()
        try:
            with stood_in(self._sites).for_now():
                yield
        finally:
            self._offset = None

    def take(self, dim: int) -> HeadTransform:
        """Returns what the layer whose attention is called now has left to the kernel, and begins the next layer.

        Args:
            dim: channels per head of its queries and keys.

        Raises:
            CannotDefer: only a part of the queries or keys is rotated or normed.
        """
        noted, self._noted = self._noted, _Noted()
        if len(noted.rotations) == 1 or not noted.dims <= {dim}:
            raise CannotDefer("only a part of queries or keys is rotated or normed")
        rotation = noted.rotations[0] if noted.rotations else None
        return HeadTransform(noted.norms.get("q"), noted.norms.get("k"), rotation)


def likely_transforms(model: Any, dim: int) -> list[HeadTransform]:
    """Returns what layers seem to leave to the kernel, one of each kind, as far as their modules say without being
    called: the weights may be lazy. What they do may be something else.

    Args:
        dim: channels per head.
    """
    found: dict[Any, HeadTransform] = {}
    for _, module in model.named_modules():
        children = _children(module)
        turns = (Rotation.said_by(child, dim) for child in children.values() if hasattr(child, "dims"))
        if (turn := next(filter(None, turns), None)) is None:
            continue
        said = {name[0]: Norm.said_by(child) for name, child in children.items() if _norms_heads(name)}
        norms = {whose: norm for whose, norm in said.items() if norm is not None and norm.weight.size == dim}
        kind = (*sorted(norms), turn.dims, turn.traditional, turn.exponents is None)
        found.setdefault(kind, HeadTransform(norms.get("q"), norms.get("k"), turn))
    return list(found.values())


def _children(module: Any) -> dict[str, Any]:
    return dict(module.items()) | {name: value for name, value in vars(module).items() if callable(value)}


def _norms_heads(name: str) -> bool:
    return name[0] in "qk" and "norm" in name
