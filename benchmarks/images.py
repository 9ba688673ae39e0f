"""Times an image of 512 x 512 pixels in 20 steps, with a model of the compute scale of Stable Diffusion 1.4.

    python -m benchmarks.images [--side 512] [--steps 20] [--rounds 3] [--json FILE]

Stable Diffusion 1.4 itself is not among mlx-vlm's families, so its time is not measured, and no figure here is one of
it. What is timed is a transformer of mlx-vlm's Z-Image family with random weights, with as many layers as multiply
about as often in a step as Stable Diffusion's UNet. `unet_size` counts the UNet's parameters and multiplications from
its published configuration; it finds the 859,520,964 parameters of the published weights. The decoder has Z-Image's own
shape, the text encoder that of a tiny model. A step computes the prompt and an empty one, as guidance needs.

`satchel` is what a replica runs (`ImagePipeline`), `mlx-vlm` its library alone. They take turns, and the ratio is taken
within a round. The first round, which compiles, does not count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_vlm.generate.image import ImageGenerationRequest, generate_image, load_image_generation_model

from satchel.actors.protocol.replica_messages import ImageRequest
from satchel.actors.replica.device.device import on_gpu
from satchel.actors.replica.images.pipeline import ImagePipeline

from . import machine
from .kept import now, plain
from .prefix import print_table

CHANNELS, CONTEXT_DIM, LATENT_SIDE, LATENT_CHANNELS, TEXT_TOKENS = (320, 640, 1280, 1280), 768, 64, 4, 77
"""Stable Diffusion 1.4's UNet for 512 x 512 pixels (CompVis/stable-diffusion-v1-4, unet/config.json)."""

WIDTH, HEADS, TOKENS = 1024, 8, 1024 + 32
"""The transformer that is timed: its width, its heads, and its tokens of 512 x 512 pixels and of a short prompt."""

GUIDANCE = 4.0


class _Counter:
    """Counts parameters and multiplications of layers."""

    def __init__(self) -> None:
        self.parameters = self.products = 0

    def linear(self, inputs: int, outputs: int, places: int, *, bias: bool = True) -> None:
        self.parameters += inputs * outputs + bias * outputs
        self.products += inputs * outputs * places

    def convolution(self, inputs: int, outputs: int, side: int, kernel: int = 3) -> None:
        self.linear(kernel * kernel * inputs, outputs, side * side)
        # A bias for each output, not for each of the kernel's places.

    def norm(self, channels: int) -> None:
        self.parameters += 2 * channels

    def residual(self, inputs: int, outputs: int, side: int) -> None:
        self.norm(inputs)
        self.convolution(inputs, outputs, side)
        self.linear(4 * CHANNELS[0], outputs, 1)
        self.norm(outputs)
        self.convolution(outputs, outputs, side)
        if inputs != outputs:
            self.convolution(inputs, outputs, side, kernel=1)

    def transformer(self, width: int, side: int) -> None:
        tokens = side * side
        self.norm(width)
        self.convolution(width, width, side, kernel=1)
        for keys, keys_width in ((tokens, width), (TEXT_TOKENS, CONTEXT_DIM)):
            self.norm(width)
            self.linear(width, width, tokens, bias=False)
            self.linear(keys_width, width, keys, bias=False)
            self.linear(keys_width, width, keys, bias=False)
            self.linear(width, width, tokens)
            self.products += 2 * tokens * keys * width
        self.norm(width)
        self.linear(width, 8 * width, tokens)
        self.linear(4 * width, width, tokens)
        self.convolution(width, width, side, kernel=1)


def unet_size() -> tuple[int, int]:
    """Returns the parameters of Stable Diffusion 1.4's UNet, and its multiplications for one latent of 64 x 64."""
    count, first = _Counter(), CHANNELS[0]
    count.linear(first, 4 * first, 1)
    count.linear(4 * first, 4 * first, 1)
    count.convolution(LATENT_CHANNELS, first, LATENT_SIDE)
    kept, side, width = [first], LATENT_SIDE, first
    for level, channels in enumerate(CHANNELS):
        last = level == len(CHANNELS) - 1
        for _ in range(2):
            count.residual(width, channels, side)
            if not last:
                count.transformer(channels, side)
            width = channels
            kept.append(width)
        if not last:
            side //= 2
            count.convolution(width, width, side)
            kept.append(width)
    count.residual(width, width, side)
    count.transformer(width, side)
    count.residual(width, width, side)
    for level, channels in reversed(list(enumerate(CHANNELS))):
        for _ in range(3):
            count.residual(width + kept.pop(), channels, side)
            if level < len(CHANNELS) - 1:
                count.transformer(channels, side)
            width = channels
        if level:
            side *= 2
            count.convolution(width, width, side)
    count.norm(width)
    count.convolution(width, LATENT_CHANNELS, side)
    return count.parameters, count.products


def layer_products() -> int:
    """Returns the multiplications of one layer of the transformer that is timed."""
    feed_forward = 3 * WIDTH * (WIDTH * 8 // 3)
    return TOKENS * (4 * WIDTH * WIDTH + feed_forward) + 2 * TOKENS * TOKENS * WIDTH


def write_model(folder: Path, *, small: bool = False) -> dict[str, int]:
    """Writes the model with random weights, and returns how large it is.

    Args:
        small: for a CPU: the transformer has one layer, and the decoder is that of a tiny model.
    """
    # Here, so that the tests' own tiny models need not be part of what is measured.
    from mlx_vlm.models.z_image.config import ZImageConfig
    from mlx_vlm.models.z_image.text_encoder import ZImageTextEncoder
    from mlx_vlm.models.z_image.transformer import ZImageTransformer
    from mlx_vlm.models.z_image.vae import ZImageVAE

    from tests.worlds.models.image_families import write_image_model

    _, products = unet_size()
    layers = 1 if small else max(1, round(products / layer_products()) - 1)
    write_image_model(folder, "z_image")
    shape = json.loads((folder / "transformer" / "config.json").read_text(encoding="utf-8"))
    shape |= {"dim": WIDTH, "n_heads": HEADS, "n_kv_heads": HEADS, "n_layers": layers, "axes_dims": [32, 48, 48]}
    (folder / "transformer" / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    if not small:
        (folder / "vae" / "config.json").write_text(json.dumps({"_class_name": "AutoencoderKL"}), encoding="utf-8")
    config, dtype = ZImageConfig.from_model_path(folder), mx.bfloat16 if on_gpu() else mx.float32
    sizes = {}
    parts = {"transformer": ZImageTransformer(config.transformer), "vae": ZImageVAE(config.vae)}
    for name, part in {**parts, "text_encoder": ZImageTextEncoder(config.text_encoder)}.items():
        parameters: Any = tree_flatten(part.parameters())
        weights = {key: value.astype(dtype) for key, value in parameters}
        mx.save_safetensors(str(folder / name / "model.safetensors"), weights)
        sizes[f"{name} parameters"] = sum(value.size for value in weights.values())
    # The refiners for the image and for the prompt have a layer each, of which the first has the image's tokens.
    return {**sizes, "layers": layers, "products of a step, G": round((layers + 1) * layer_products() / 1e9)}


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Returns the seconds that `work` takes, and of this process's processor time."""
    wall, processor = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - processor


def measure(folder: Path, side: int, steps: int, rounds: int) -> list[dict[str, Any]]:
    """Returns a line for each of the two ways, and their ratio."""
    pipeline = ImagePipeline.load(folder, "images")
    library = load_image_generation_model(str(folder), evict_text_encoder=False)
    # One more, for this family computes one step less than it is asked for.
    given = {"seed": 1, "steps": steps + 1, "width": side, "height": side, "guidance": GUIDANCE}
    request = ImageRequest("", "", "a red cube on a table", **given)
    ways: dict[str, Callable[[], Any]] = {
        "satchel": lambda: pipeline.make(request, lambda step: None),
        "mlx-vlm": lambda: generate_image(library, ImageGenerationRequest(request.prompt, **given)),
    }
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            seconds[name].append(timed(way))
    lines = []
    for name, all_rounds in seconds.items():
        walls, processors = zip(*all_rounds[1:], strict=True)
        line: dict[str, Any] = {"way": name, "s": statistics.median(walls), "fastest s": min(walls)}
        lines.append(line | {"slowest s": max(walls), "processor s": statistics.median(processors)})
    ratios = [one[0] / other[0] for one, other in zip(*(seconds[name][1:] for name in ways), strict=True)]
    lines[0]["of mlx-vlm"] = statistics.median(ratios)
    lines[1]["of mlx-vlm"] = 1.0
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    parameters, products = unet_size()
    found: dict[str, Any] = {
        "measured": now(),
        "machine": machine.facts("gpu" if on_gpu() else "cpu"),
        "what": f"{given.side} x {given.side} pixels, {given.steps} steps, random weights; not Stable Diffusion itself",
        "the UNet's parameters": parameters,
        "the UNet's products of a step, G": round(products / 1e9),
    }
    with tempfile.TemporaryDirectory() as home:
        found["model"] = write_model(Path(home) / "model")
        print(json.dumps(found, indent=1))
        found["images"] = measure(Path(home) / "model", given.side, given.steps, given.rounds)
    print_table(found["images"])
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(plain(found), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
