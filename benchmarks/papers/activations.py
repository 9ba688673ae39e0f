"""Products of a prompt with quantized weights, and with quantized activations too, as ML Drift has them in prefill.

MLX has none of 8-bit integers. What it has is `qqmm`, which quantizes activations to small floating-point numbers, on
some devices.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import mlx.core as mx

from ..memory.desk import on_gpu
from .figures import ML_DRIFT
from .page import PaperTable
from .shapes import MODELS

GROUP, BITS = 64, 8
MODES = ("mxfp8", "nvfp4")
"""Of `qqmm`."""

ROUNDS = 5

Way = Callable[[], mx.array]


def ways_of(x: mx.array, weights: mx.array) -> tuple[dict[str, Way], dict[str, Way]]:
    """Returns how Satchel multiplies `x`, `(tokens, inputs)`, with 8-bit `weights`, `(outputs, inputs)`, of which it
    takes the faster; and how MLX does with quantized activations."""
    quantized = mx.quantize(weights, GROUP, BITS)
    dequantized = mx.dequantize(*quantized, GROUP, BITS)
    small = {mode: mx.quantize(weights, mode=mode) for mode in MODES}
    mx.eval(quantized, dequantized, small)
    ours: dict[str, Way] = {
        "stored": lambda: mx.quantized_matmul(x, *quantized, transpose=True, group_size=GROUP, bits=BITS),
        "dequantized": lambda: x @ dequantized.T,
    }
    theirs: dict[str, Way] = {
        mode: lambda mode=mode, codes=codes, scales=scales: mx.qqmm(x, codes, scales, mode=mode)
        for mode, (codes, scales, *_) in small.items()
    }
    return ours, theirs


def activations(name: str, tokens: int, *, small: bool) -> PaperTable:
    """The product of a layer's feed-forward with a prompt."""
    model = MODELS[name]
    config = model.config(small=small)
    inputs, outputs = config["hidden_size"], config["intermediate_size"]
    title = f"{model.title(small=small)}: {tokens:,} tokens times weights, {inputs:,} to {outputs:,}"
    part = PaperTable(f"{title}, activations quantized too", paper=ML_DRIFT)
    dtype = mx.bfloat16 if on_gpu() else mx.float32
    x = mx.random.normal((tokens, inputs), key=mx.random.key(1)).astype(dtype)
    weights = (mx.random.normal((outputs, inputs), key=mx.random.key(2)) * inputs**-0.5).astype(dtype)
    exact = x.astype(mx.float32) @ weights.astype(mx.float32).T
    ours, theirs = ways_of(x, weights)
    errors: dict[str, float] = {}
    for way, multiply in [*ours.items(), *theirs.items()]:
        try:
            errors[way] = off_by(multiply(), exact)
        except (RuntimeError, ValueError) as error:
            part.missing.append(f"activations in {way}: {error}")
    times = timed({way: multiply for way, multiply in (ours | theirs).items() if way in errors})
    best = min(ours, key=times.__getitem__)
    peers = [way for way in theirs if way in errors]
    part.compare("a product", "ms", times[best], {f"qqmm, {way}": times[way] for way in peers}, less=True)
    part.compare("error", "%", errors[best], {f"qqmm, {way}": errors[way] for way in peers}, less=True)
    part.notes.append(
        f"Ours: weights of 8 bits, {best}, and activations as they are. MLX has no product of 8-bit integers; its "
        f"`qqmm` has activations and weights in {' or '.join(MODES)}. The error is that of random numbers' products, "
        "of their norm."
    )
    return part


def off_by(product: mx.array, exact: mx.array) -> float:
    """Returns how far a product is off, in percent of the norm."""
    return 100 * float(mx.linalg.norm(product.astype(mx.float32) - exact) / mx.linalg.norm(exact))


def timed(ways: dict[str, Way]) -> dict[str, float]:
    """Returns the median times, in ms. All take turns."""
    found: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(ROUNDS):
        for way, multiply in ways.items():
            began = time.perf_counter()
            mx.eval(multiply())
            found[way].append(1000 * (time.perf_counter() - began))
    return {way: statistics.median(all_times) for way, all_times in found.items()}
