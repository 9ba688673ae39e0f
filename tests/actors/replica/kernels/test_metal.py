"""What is wrong on Metal in some versions of MLX is not asked of it while a model is served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from satchel.actors.replica.device.device import on_gpu
from satchel.actors.replica.kernels import decode_kernel
from satchel.actors.replica.kernels.sealing import POLICIES
from satchel.actors.replica.kv.paged_cache import Reads
from satchel.actors.replica.loading import models
from satchel.actors.replica.loading.ways import decode_ways
from tests.worlds.models.families import write_model
from tests.worlds.replica import fake_kernels
from tests.worlds.replica.bench import Bench


@pytest.mark.skipif(on_gpu(), reason="a GPU has its own kernel")
@pytest.mark.parametrize(
    ("kernel", "kv"),
    [
        pytest.param(kernel, kv, marks=() if (place + other) % 3 == 0 else pytest.mark.slow)
        for place, kernel in enumerate(["agrees", "is slower", "is missing"])
        for other, kv in enumerate(name for name, policy in POLICIES.items() if policy.quantizes)
    ],
)
def test_no_product_is_with_what_is_quantized_along_its_columns(kernel: str, kv: str, tmp_path: Path):
    """`quantized_matmul(transpose=False)`, neither where the kernel reads sealed blocks nor where they are dequantized;
    on a CPU it is how they are read."""
    inside, asked, product = [], [], mx.quantized_matmul

    def quantized_matmul(*given: Any, transpose: bool = True, **how: Any) -> mx.array:
        if not inside:
            asked.append(transpose)
        return product(*given, transpose=transpose, **how)

    # What is changed of the fakes is put back before these are.
    with fake_kernels.kernels(), pytest.MonkeyPatch.context() as patch:
        stands_for_kernel = decode_kernel.attend

        def attend(*given: Any) -> mx.array:
            inside.append(True)
            out = stands_for_kernel(*given)
            inside.pop()
            return out

        patch.setattr(decode_kernel, "attend", attend)
        patch.setattr(mx, "quantized_matmul", quantized_matmul)
        if kernel == "is slower":
            patch.setattr(decode_ways, "is_slower", lambda *_: True)
        if kernel == "is missing":
            patch.setattr(decode_ways.gpu_kernels, "is_available", lambda: False)
            patch.setattr(decode_ways, "on_gpu", lambda: True)
        folder = str(write_model(tmp_path / "model", "qwen2", bits=4))
        how: dict[str, Any] = {"dtype": "float32", "weights": "stored", "kv": kv, "warm": False}
        loaded = models.load(folder, context_tokens_max=None, progress=lambda *_: None, **how)
        assert loaded.way.reads is (Reads.KERNEL if kernel == "agrees" else Reads.DEQUANTIZED)
        bench = Bench(loaded, sequences_max=4)
        for number, length in enumerate((600, 250, 3)):
            bench.submit(str(number), [7 + token % 500 for token in range(length)], max_tokens=12)
        bench.drain()
    assert [len(sequence.tokens) for sequence in bench.sequences.values()] == [12] * 3
    assert asked and all(asked)
