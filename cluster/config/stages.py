"""Which node has which layers of a model that is divided among several, or which share of all of them. Pure.

A stage is consecutive layers on one node; the first has the embedding too, the last the output layer. A node's memory
must hold its stage's weights and the workspace of a prefill; what is left is for KV. A sequence needs KV on all nodes,
so all that count are the tokens for which every node has room.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass as validated

from ..errors import NoRoom
from .nodes import Node
from .units import STRICT, Count

GIB = 2**30
ENDLESS = 2**62
"""For so many tokens there is room where KV does not grow with them."""


@validated(frozen=True, config=STRICT)
class Split:
    """How a model is divided among nodes: by its layers (`pipeline`) or within each of them (`tensor`)."""

    pipeline: Literal["auto"] | Annotated[tuple[Count, ...], Field(min_length=1)] | None = None
    """How many layers each node has, in the order of the nodes; `auto` divides them by memory."""
    tensor: Annotated[int, Field(ge=2, le=64)] | None = None
    """So many nodes each have an equal share of every layer's heads and of its feed-forward part. They exchange sums
    twice in every layer, so it needs a link with a latency of microseconds."""
    backend: Literal["jaccl", "nccl", "ring"] | None = None
    """What exchanges the sums of `tensor`: `jaccl` between Macs with RDMA over Thunderbolt 5, `nccl` between NVIDIA
    cards of one host, or `ring` over TCP, for tests."""
    trusted_wires: bool = False
    """Must be true for `ring` and `nccl`, which neither authenticate nor encrypt: whoever reaches the nodes' addresses
    can read and change what they compute."""
    rdma: tuple[tuple[str | None, ...], ...] = ()
    """For `jaccl`: for each node, in their order, the RDMA device that leads to each node, such as `rdma_en5`, and null
    for the node itself. `mlx.distributed_config` finds them."""

    @model_validator(mode="after")
    def _is_one_way(self) -> Self:
        if (self.pipeline is None) == (self.tensor is None):
            raise ValueError("split needs either `pipeline` or `tensor`")
        if why := self._wrong_backend():
            raise ValueError(why)
        return self

    def _wrong_backend(self) -> str:
        """Returns what is wrong with what exchanges the sums; empty if nothing is."""
        if self.tensor is None:
            return "backend, trusted_wires and rdma are for tensor" if self.backend or self.rdma else ""
        if self.backend is None:
            return "tensor needs a backend: jaccl, nccl or ring"
        if self.backend != "jaccl":
            return (
                "" if self.trusted_wires else f"backend {self.backend} protects nothing: it needs trusted_wires: true"
            )
        rows = len(self.rdma)
        if rows != self.tensor or any(len(row) != rows for row in self.rdma):
            return f"backend jaccl needs rdma: {self.tensor} rows of {self.tensor} devices"
        if any(
            (device is None) != (row == column)
            for row, devices in enumerate(self.rdma)
            for column, device in enumerate(devices)
        ):
            return "rdma has null for each node itself, and a device for every other"
        return ""


@dataclass(frozen=True)
class LayerNeeds:
    """What one layer needs: bytes of its weights, of a token's KV, and of what a sequence has whatever its length
    (windows, states and open blocks)."""

    weights_bytes: int
    token_bytes: int
    sequence_bytes: int = 0


@dataclass(frozen=True)
class ModelNeeds:
    """What a model needs.

    Attributes:
        layers: at least one.
        first_bytes: of the weights before the layers, which the first stage has.
        last_bytes: of the weights after them, which the last stage has. An embedding that is also the output layer
            counts in both.
        workspace_bytes: temporary memory of a prefill, on every node.
        tokens_min: for so many tokens of KV there must be room.
        sequences: this many sequences may have them.
    """

    layers: Sequence[LayerNeeds]
    first_bytes: int = 0
    last_bytes: int = 0
    workspace_bytes: int = 0
    tokens_min: int = 1
    sequences: int = 1

    @cached_property
    def sums(self) -> list[LayerNeeds]:
        """What all layers before each need together, and at the end what all layers need."""
        found = [LayerNeeds(0, 0)]
        for layer in self.layers:
            last = found[-1]
            found.append(
                LayerNeeds(
                    last.weights_bytes + layer.weights_bytes,
                    last.token_bytes + layer.token_bytes,
                    last.sequence_bytes + layer.sequence_bytes,
                )
            )
        return found


class Stage(NamedTuple):
    """Layers [start, stop) on a node, and for how many tokens of KV it has room; negative if they do not fit."""

    node: str
    start: int
    stop: int
    tokens: int


@dataclass(frozen=True)
class GroupPlan:
    """The stages of a divided model and their nodes, both in order. The last stage leads."""

    stages: tuple[Stage, ...]
    nodes: tuple[Node, ...]

    @property
    def leader(self) -> Stage:
        return self.stages[-1]

    @property
    def shared(self) -> bool:
        """Whether each node has a share of every layer."""
        first = self.stages[0]
        return all(stage[1:3] == first[1:3] for stage in self.stages[1:])

    def describe(self) -> str:
        """Returns which layers are where, as text, such as `layers 0 to 3 on mac0, 3 to 6 on mac1`."""
        if self.shared:
            stage, nodes = self.stages[0], ", ".join(each.node for each in self.stages)
            return f"layers {stage.start} to {stage.stop}, 1/{len(self.stages)} of each on {nodes}"
        first, *others = [f"{stage.start} to {stage.stop} on {stage.node}" for stage in self.stages]
        return ", ".join([f"layers {first}", *others])


def divide(needs: ModelNeeds, memory_bytes: Mapping[str, int], split: Split) -> list[Stage]:
    """Returns the stages of a model, in order. With `auto` they are as few as have room, so a model that fits on one
    node is not divided; and among divisions of that many, the one with room for the most tokens.

    Args:
        memory_bytes: what the model may use on each node that may take part, in the order of stages.

    Raises:
        NoRoom: it does not fit; the message has all sizes.
    """
    if split.pipeline != "auto":
        return _checked(needs, memory_bytes, split.pipeline or ())
    count = len(needs.layers)
    for nodes in range(1, min(len(memory_bytes), count) + 1):
        # Those with the most memory, in the order that was given.
        most = sorted(memory_bytes, key=lambda name: -memory_bytes[name])[:nodes]
        stages = _best(needs, {name: memory_bytes[name] for name in memory_bytes if name in most})
        if _fits(needs, stages):
            return stages
    raise NoRoom(_why(needs, memory_bytes))


def share(needs: ModelNeeds, layers: int, memory_bytes: Mapping[str, int], nodes: int) -> list[Stage]:
    """Returns the stages of a model of which each node has an equal share of every layer. Of more nodes than are needed
    it takes those with the most memory, in the order that was given.

    Args:
        needs: of one share, as a single layer.
        layers: of the model.
        memory_bytes: as for `divide`.

    Raises:
        NoRoom: a node has no room for a share; the message has all sizes.
    """
    if len(memory_bytes) < nodes:
        raise NoRoom(f"tensor: {nodes} needs {nodes} nodes, and there are {len(memory_bytes)}")
    most = sorted(memory_bytes, key=lambda name: -memory_bytes[name])[:nodes]
    found = [_stage(needs, node, memory_bytes[node], 0, 1) for node in memory_bytes if node in most]
    if not _fits(needs, found):
        raise NoRoom(f"each of {nodes} nodes needs a share: {_why(needs, {node: memory_bytes[node] for node in most})}")
    return [Stage(stage.node, 0, layers, stage.tokens) for stage in found]


def _checked(needs: ModelNeeds, memory_bytes: Mapping[str, int], layers: Sequence[int]) -> list[Stage]:
    if sum(layers) != len(needs.layers) or len(layers) > len(memory_bytes):
        raise NoRoom(
            f"pipeline has {' + '.join(map(str, layers))} = {sum(layers)} layers on {len(layers)} nodes; the model has "
            f"{len(needs.layers)}, and there are {len(memory_bytes)} nodes"
        )
    places = zip(memory_bytes, pairwise([0, *accumulate(layers)]), strict=False)
    stages = [_stage(needs, node, memory_bytes[node], start, stop) for node, (start, stop) in places]
    if _fits(needs, stages):
        return stages
    raise NoRoom(_why(needs, memory_bytes, stages))


def _stage(needs: ModelNeeds, node: str, memory_bytes: int, start: int, stop: int) -> Stage:
    before, after = needs.sums[start], needs.sums[stop]
    own = needs.sequences * (after.sequence_bytes - before.sequence_bytes)
    room = memory_bytes - _fixed(needs, start, stop) - own
    token = after.token_bytes - before.token_bytes
    return Stage(node, start, stop, room // token if token else ENDLESS if room >= 0 else room)


def _fixed(needs: ModelNeeds, start: int, stop: int) -> int:
    """Returns the bytes of a stage's weights and its workspace."""
    fixed = needs.sums[stop].weights_bytes - needs.sums[start].weights_bytes + needs.workspace_bytes
    fixed += needs.first_bytes if start == 0 else 0
    return fixed + (needs.last_bytes if stop == len(needs.layers) else 0)


def _fits(needs: ModelNeeds, stages: Sequence[Stage]) -> bool:
    return all(stage.tokens >= needs.tokens_min for stage in stages)


def _best(needs: ModelNeeds, memory_bytes: Mapping[str, int]) -> list[Stage]:
    """Returns the division among all these nodes with room for the most tokens."""
    count, nodes = len(needs.layers), list(memory_bytes)
    # For every number of layers, how the nodes so far have them best.
    best: dict[int, list[Stage]] = {0: []}
    for number, node in enumerate(nodes):
        left = len(nodes) - number - 1
        found: dict[int, list[Stage]] = {}
        for start, before in best.items():
            for stop in range(start + 1, count - left + 1) if left else [count]:
                stages = [*before, _stage(needs, node, memory_bytes[node], start, stop)]
                if stop not in found or _room(stages) > _room(found[stop]):
                    found[stop] = stages
        best = found
    return best[count]


def _room(stages: Sequence[Stage]) -> int:
    return min(stage.tokens for stage in stages)


def _why(needs: ModelNeeds, memory_bytes: Mapping[str, int], stages: Sequence[Stage] = ()) -> str:
    """Returns why a model does not fit, with sizes."""
    whole, every = _fixed(needs, 0, len(needs.layers)), needs.sums[-1]
    kv = needs.tokens_min * every.token_bytes + needs.sequences * every.sequence_bytes
    said = f"the model needs {_gib(whole)} and {_gib(kv)} of KV for {needs.tokens_min} tokens"
    if stages:
        tight = min(stages, key=lambda stage: stage.tokens)
        fixed, memory = _fixed(needs, tight.start, tight.stop), memory_bytes[tight.node]
        return (
            f"{said}: layers {tight.start} to {tight.stop} need {_gib(fixed)} without KV on {tight.node}, which may "
            f"use {_gib(memory)}"
        )
    nodes = ", ".join(f"{node} {_gib(memory)}" for node, memory in memory_bytes.items())
    return f"{said}, and {_gib(needs.workspace_bytes)} more on each further node; its nodes may use: {nodes}"


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB / 10 else f"{nbytes / 2**20:.1f} MiB"
