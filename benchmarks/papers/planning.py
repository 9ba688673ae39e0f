"""How much memory a call's intermediate arrays need if each has a buffer of its own, and if buffers are planned
beforehand by size.

Greedy by size is the strategy that ML Drift uses: arrays get offsets in one arena, the largest first, each the lowest
offset where no array lies that lives at the same time (Pisarchyk and Lee, "Efficient Memory Management for Deep Neural
Net Inference", 2020).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import mlx.core as mx

VIEWS = {"AsStrided", "Broadcast", "ExpandDims", "Flatten", "Reshape", "Slice", "Split", "Squeeze", "StopGradient",
         "Transpose", "Unflatten", "View"}  # fmt: skip
"""Operations whose results are in the memory of their first input, as a rule."""


@dataclass(frozen=True)
class Usage:
    """An array of so many bytes, written by step `first` and read for the last time by step `last`."""

    nbytes: int
    first: int
    last: int


def total_bytes(usages: Iterable[Usage]) -> int:
    """Returns the bytes if each array has a buffer of its own."""
    return sum(usage.nbytes for usage in usages)


def least_bytes(usages: Sequence[Usage]) -> int:
    """Returns the most bytes that are in use at one step: no plan can need less."""
    changes: dict[int, int] = {}
    for usage in usages:
        changes[usage.first] = changes.get(usage.first, 0) + usage.nbytes
        changes[usage.last + 1] = changes.get(usage.last + 1, 0) - usage.nbytes
    most = now = 0
    for _, change in sorted(changes.items()):
        now += change
        most = max(most, now)
    return most


def greedy_by_size_bytes(usages: Sequence[Usage]) -> int:
    """Returns the bytes of the arena."""
    placed: list[tuple[int, Usage]] = []
    size = 0
    for usage in sorted(usages, key=lambda usage: -usage.nbytes):
        offset = 0
        for start, other in placed:
            if other.first > usage.last or other.last < usage.first:
                continue
            if start - offset >= usage.nbytes:
                break
            offset = max(offset, start + other.nbytes)
        placed.append((offset, usage))
        placed.sort(key=lambda entry: entry[0])
        size = max(size, offset + usage.nbytes)
    return size


def usages_of(call: Callable[..., Any], *arguments: mx.array) -> list[Usage]:
    """Returns the intermediate arrays of a call, in the order in which MLX computes them: no arguments, no constants
    and no results. Nothing is computed."""
    steps: list[dict[str, Any]] = []
    mx.export_function(steps.append, call, *arguments)
    results = {name for step in steps if step["type"] == "outputs" for name, *_ in step["outputs"]}
    owner: dict[Any, Any] = {}
    size: dict[Any, int] = {}
    first: dict[Any, int] = {}
    last: dict[Any, int] = {}
    for number, step in enumerate(steps):
        if step["type"] != "primitive":
            continue
        for name, *_ in step["inputs"]:
            last[owner.get(name, name)] = number
        for name, shape, dtype in step["outputs"]:
            if step["name"] in VIEWS and step["inputs"]:
                source = step["inputs"][0][0]
                owner[name] = owner.get(source, source)
            else:
                size[name], first[name], last[name] = prod(shape) * dtype.size, number, number
    kept = {owner.get(name, name) for name in results}
    return [Usage(size[name], first[name], last[name]) for name in size if name not in kept and size[name]]
