"""Parts of a model as models of their own, consecutive layers or shares of the heads of all layers: their ids, and
which of them have the KV of others. Pure.

A process that has a part of a model keeps its KV under the model id of this part. If the model is divided in another
way later, or not at all, that KV is used again: it is cut out of the KV of other parts, and joined.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction
from itertools import pairwise, starmap
from typing import NamedTuple

from .model_identity import ModelIdentity

LAYERS = "layers"
"""The name, in how a model is computed, of the part that a process has; absent if it has all of the model."""

SHARES_MAX = 16
"""KV of models that were divided into more shares is not looked for."""


class LayerRange(NamedTuple):
    """Layers [start, stop)."""

    start: int
    stop: int


class Heads(NamedTuple):
    """The heads of a layer from one fraction of them to another."""

    start: Fraction
    stop: Fraction


ALL_HEADS = Heads(Fraction(0), Fraction(1))


class ModelPart(NamedTuple):
    """Layers [start, stop) of a model, and of each of them share number `share` of `shares` equal shares of its
    heads."""

    start: int
    stop: int
    share: int = 0
    shares: int = 1

    @property
    def heads(self) -> Heads:
        return Heads(Fraction(self.share, self.shares), Fraction(self.share + 1, self.shares))

    def has(self, heads: Heads) -> bool:
        """Whether it has all of these heads."""
        return self.heads.start <= heads.start and heads.stop <= self.heads.stop

    def meets(self, other: ModelPart) -> bool:
        """Whether both have the same heads of a layer."""
        layers = max(self.start, other.start) < min(self.stop, other.stop)
        return layers and max(self.heads.start, other.heads.start) < min(self.heads.stop, other.heads.stop)


def identity_of(whole: ModelIdentity, part: ModelPart, count: int) -> ModelIdentity:
    """Returns the identity of a part of a model with `count` layers, given that of the whole model or of another
    part. A share is of all layers."""
    computing = {name: value for name, value in whole.computing.items() if name != LAYERS}
    if part.shares > 1:
        computing[LAYERS] = f"share {part.share} of {part.shares} of all {count}"
    elif part[:2] != (0, count):
        computing[LAYERS] = f"{part.start} to {part.stop} of {count}"
    return ModelIdentity(whole.files, computing)


def ids_of_all(identity: ModelIdentity, count: int) -> dict[bytes, ModelPart]:
    """Returns the model ids of all parts of a model with `count` layers, given the identity of any of them: with 80
    layers 3,375 ids, which takes a tenth of a second."""
    parts = [ModelPart(start, stop) for start in range(count) for stop in range(start + 1, count + 1)]
    parts += [ModelPart(0, count, share, shares) for shares in range(2, SHARES_MAX + 1) for share in range(shares)]
    return {identity_of(identity, part, count).model_id: part for part in parts}


class Piece(NamedTuple):
    """Layers and heads that are taken from the KV of a part."""

    source: ModelPart
    layers: LayerRange
    heads: Heads = ALL_HEADS


def pieces_of(wanted: ModelPart, blocks: Mapping[ModelPart, int]) -> tuple[int, list[Piece]]:
    """Returns how many blocks of the wanted part can be made of what others have, and of which: as many as possible, of
    few parts. Pieces of the same layers are in the order of their heads.

    Args:
        blocks: by part, of how many leading blocks there is KV.
    """
    for count in sorted({*blocks.values()} - {0}, reverse=True):
        if pieces := _cover(wanted, [part for part, found in blocks.items() if found >= count]):
            return count, pieces
    return 0, []


def _cover(wanted: ModelPart, parts: Iterable[ModelPart]) -> list[Piece]:
    """Returns the pieces of which `wanted` can be made; none if something of it is in no part."""
    meeting = [part for part in parts if part.meets(wanted)]
    ends = {end for part in [wanted, *meeting] for end in part.heads}
    cuts = sorted(end for end in ends if wanted.heads.start <= end <= wanted.heads.stop)
    found: dict[tuple[ModelPart, LayerRange], Heads] = {}
    for heads in starmap(Heads, pairwise(cuts)):
        at = wanted.start
        while at < wanted.stop:
            here = [part for part in meeting if part.start <= at < part.stop and part.has(heads)]
            if not here:
                return []
            # The part with the most heads is taken for all heads that it has, so its pieces are one.
            source = max(here, key=lambda part: (-part.shares, part.stop, -part.start))
            layers = LayerRange(at, min(source.stop, wanted.stop))
            known = found.get((source, layers), heads)
            found[source, layers] = Heads(known.start, heads.stop)
            at = layers.stop
    return [Piece(*where, heads) for where, heads in found.items()]
