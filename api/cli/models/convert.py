"""`satchel convert`: quantizes a model's weights into a new folder, on this machine and without a server."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from ....cluster.home import expanded
from ..options import Dtype, JsonOption
from ..printing import print_json

if TYPE_CHECKING:
    from ....actors.model_files.conversion import Converted

_SHOWN_MAX = 3
"""How many of the layers that stay unquantized are named."""


class Recipe(StrEnum):
    """The keys of `actors.model_files.conversion.RECIPES`."""

    attention_8 = "8-4-4"
    plain_4 = "4"
    plain_8 = "8"
    mixed_2_6 = "mixed_2_6"
    mixed_3_4 = "mixed_3_4"
    mixed_3_6 = "mixed_3_6"
    mixed_4_6 = "mixed_4_6"


def convert(
    model: Annotated[
        str, typer.Argument(help="A Hub id (owner/name or owner/name@revision), a folder, embedded:NAME.")
    ],
    recipe: Annotated[
        Recipe,
        typer.Option(
            "--recipe",
            help="Bits of the weights. 8-4-4: 8 for attention, 4 for embedding and feed-forward; 4 or 8: for all; "
            "mixed_LOW_HIGH: mlx-lm's, more for some layers.",
        ),
    ] = Recipe.attention_8,
    to: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--to",
            metavar="FOLDER",
            help="A new folder (else one in the current folder, named after the model and the recipe).",
        ),
    ] = None,
    dtype: Annotated[
        Dtype, typer.Option("--dtype", help="The data type of weights that are not quantized (else as stored).")
    ] = Dtype.auto,
    json: JsonOption = False,
) -> None:
    """Quantize a model's weights into a folder that can be served."""
    # MLX takes seconds to import.
    from ....actors.model_files.conversion import convert as run
    from ..progress import ProgressDisplay

    target = expanded(to if to is not None else f"{_name(model)}-{recipe.value}").absolute()
    progress = ProgressDisplay(sys.stderr if json else None)
    try:
        converted = run(model, target, recipe.value, dtype.value, progress.report)
    finally:
        progress.close()
    if json:
        layers = [{"bits": bits, "group": size, "layers": n} for (bits, size), n in sorted(converted.layers.items())]
        sizes = {"bytes": converted.nbytes, "bits_per_weight": round(converted.bits_per_weight, 3)}
        print_json({"folder": str(converted.folder), **sizes, "layers": layers, "plain": converted.plain})
        return
    for line in _told(converted):
        print(line)
    print(f"Serve it: satchel models load {converted.folder}")


def _name(model: str) -> str:
    """Returns a folder's name for a source: `small` for `owner/small@main`, `embedded:small` and `some/small/`."""
    return expanded(model.removeprefix("embedded:")).absolute().name.partition("@")[0]


def _told(converted: Converted) -> list[str]:
    layers = ", ".join(
        f"{count} with {bits} bits in groups of {size}" for (bits, size), count in sorted(converted.layers.items())
    )
    lines = [
        f"Wrote {converted.folder}: {converted.nbytes / 1e6:,.1f} MB, {converted.bits_per_weight:.2f} bits a weight",
        f"Layers: {layers}",
    ]
    if converted.plain:
        some = ", ".join(converted.plain[:_SHOWN_MAX])
        more = f" and {len(converted.plain) - _SHOWN_MAX} more" if len(converted.plain) > _SHOWN_MAX else ""
        lines.append(f"Not quantized, because groups of 32 do not divide their inputs: {some}{more}")
    return lines
