"""CUDA kernels on a CPU, from their own text (`emulator.py`).

What a lane has of a tensor core's operands is written out in `cuda.h` as PTX documents it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from . import emulator

_NAMES = {
    mx.bfloat16: "bfloat16",
    mx.float16: "float16",
    mx.float32: "float",
    mx.uint32: "unsigned int",
    mx.int32: "int",
    mx.uint8: "unsigned char",
}

_INDICES = "  const unsigned GROUP = group, THREAD = thread, LANE = thread & 31, WARP = thread >> 5;\n"
_PRODUCT = re.compile(r'asm volatile\("mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(b?f16)\..*?"r"\(b1\)\)', re.DOTALL)


def kernel(
    name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], body: str, bounds: tuple[int, int] | None = None
) -> Callable[..., list[mx.array]]:
    """Stands for `gpu_kernels.kernel`. What it changes in place is changed."""

    def run(*, inputs: Sequence[mx.array], template: Sequence[tuple[str, Any]], **how: Any) -> list[mx.array]:
        dtypes = [*(array.dtype for array in inputs), *how["output_dtypes"]]
        how.pop("shared_memory", None)
        return emulator.run(emulator.built(_text(names, dtypes, template, body)), inputs, **how)

    names = (*inputs, *outputs)
    return run


def _text(names: Sequence[str], dtypes: Sequence[mx.Dtype], template: Sequence[tuple[str, Any]], body: str) -> str:
    constants = "".join(
        f"  using {name} = {_NAMES[value]};\n"
        if isinstance(value, mx.Dtype)
        else f"  constexpr int {name} = {int(value)};\n"
        for name, value in template
    )
    arguments = "".join(
        f"  {_NAMES[dtype]}* {name} = ({_NAMES[dtype]}*)given[{at}];\n"
        for at, (name, dtype) in enumerate(zip(names, dtypes, strict=True))
    )
    body = _PRODUCT.sub(r"multiply<\1>(c, a0, a1, a2, a3, b0, b1)", body)
    function = f"static void body(void** given, int group, int thread) {{\n{constants}{arguments}{_INDICES}{body}}}\n"
    return f'#include "cuda.h"\n{function}'
