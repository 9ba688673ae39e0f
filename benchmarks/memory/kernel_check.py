"""Compares the decode kernel with the reference on this device, over all shapes that models have.

    python -m benchmarks.memory.kernel_check [--policies fp16,q4] [--dtypes bfloat16]

It needs a GPU, and compiles a kernel for every shape: some minutes on CUDA at the first time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from satchel.actors.replica.kernels import gpu_kernels
from satchel.actors.replica.kernels.sealing import POLICIES
from satchel.actors.replica.selftest.kernel_check import DTYPES, checked


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    asked = parser.parse_args(arguments)
    if not gpu_kernels.is_available():
        print("skipped: the kernel runs on a GPU of CUDA or Metal, and there is none")
        return 0
    failed = 0
    for shape in checked(asked.policies.split(","), asked.dtypes.split(",")):
        failed += not shape.agrees
        print(shape, flush=True)
    print(f"{failed} shapes are off by more than the bound")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
