"""OpenBLAS's products equal the reference's to the last bit; if that is not sure, OpenBLAS is not used."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from satchel.actors.replica.device import blas
from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.loading import prepare

HERE = sys.platform == "linux" and platform.machine() == "x86_64"
UNWANTED = os.environ.get("SATCHEL_OPENBLAS", "1") != "1"
here_only = pytest.mark.skipif(UNWANTED or not HERE, reason="SATCHEL_OPENBLAS is not 1, or it is no Linux")
again: Callable[[], blas.Blas] = blas.chosen.__wrapped__  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def wanted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SATCHEL_OPENBLAS", "1")


def numbers(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def in_order(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """(rows, columns), each the sum in float32 of one product after the other."""
    return np.add.accumulate(left[:, None] * right.T[None], axis=2)[:, :, -1]


@here_only
def test_it_is_in_use_here(loaded: LoadedModel):
    assert blas.chosen() == blas.Blas("OpenBLAS 0.3.15 (Nehalem)")
    assert loaded.identity.computing["blas"] == blas.chosen().name
    assert loaded.multiplying == "with OpenBLAS 0.3.15 (Nehalem)"


@here_only
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("summed", [1, 7, 64, 300, 513, 1100, 3000])
def test_each_number_is_its_sum_in_order(summed: int, transposed: bool):
    for rows, columns in ((1, 8), (1, 7), (2, 1), (2, 6), (3, 64), (5, 9), (8, 2), (13, 34), (17, 255), (170, 4)):
        left, right = numbers(rows, rows, summed), numbers(columns, summed, columns)
        multiplied = mx.array(left) @ (mx.array(right.T.copy()).T if transposed else mx.array(right))
        assert np.array_equal(np.array(multiplied), in_order(left, right)), (rows, columns)


@here_only
def test_a_sum_longer_than_a_part_is_in_order_too():
    left, right = numbers(0, 3, 140_000), numbers(1, 140_000, 2)
    assert np.array_equal(np.array(mx.array(left) @ mx.array(right)), in_order(left, right))


@here_only
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 32), (600, 33), (96, 1)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_computes_a_row_in_a_batch_as_alone(inputs: int, outputs: int, bias: bool):
    model = nn.Sequential(nn.Linear(inputs, outputs, bias=bias))
    prepare.prepare_weights(model, None, "stored", lambda fraction: None)
    x = mx.array(numbers(1, 40, inputs))
    whole = np.array(model(x))
    for count in (1, 2, 3, 4, 7, 16, 39):
        assert np.array_equal(np.array(model(x[:count])), whole[:count]), count
        assert np.array_equal(np.array(model(x[None, -count:]))[0], whole[-count:]), count


PLAIN = [(64, 1, "none"), (128, 2, "none")]
CASES = [*PLAIN, (64, 2, "sinks"), (80, 4, "window"), (256, 1, "softcap"), (64, 4, "softcap")]


@here_only
@pytest.mark.parametrize(("dim", "group", "what"), CASES)
def test_attention_is_the_same_beside_other_queries_and_keys(dim: int, group: int, what: str):
    """Alone with as many keys as it sees, and among 600 queries with all keys: for every number of keys up to 600."""
    queries, keys, values = (
        mx.array(numbers(seed, 1, heads, 600, dim)) for seed, heads in ((1, 2 * group), (2, 2), (3, 2))
    )
    sinks = mx.array(numbers(4, 2 * group)) if what == "sinks" else None
    back = mx.arange(600)[:, None] - mx.arange(600)
    mask = (back >= 0) & (back < 300) if what == "window" else back >= 0
    attend = with_softcap if what == "softcap" else mx.fast.scaled_dot_product_attention
    named: dict[str, Any] = {"sinks": sinks} if sinks is not None else {}
    whole = np.array(attend(queries, keys, values, scale=0.1, mask=mask, **named))
    for count in range(1, 601):
        some = slice(count - 1, count)
        seen = mask[some, :count] if what == "window" else None
        alone = attend(queries[:, :, some], keys[:, :, :count], values[:, :, :count], scale=0.1, mask=seen, **named)
        assert np.array_equal(np.array(alone), whole[:, :, some]), count


def with_softcap(
    queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, mask: mx.array | None
) -> mx.array:
    """As Gemma 2's own."""
    rows, heads, count, dim = queries.shape
    grouped = (queries * scale).reshape(rows, keys.shape[1], -1, count, dim)
    scores = mx.tanh(grouped @ keys[:, :, None].swapaxes(-1, -2) / 50.0) * 50.0
    if mask is not None:
        scores = mx.where(mask, scores, mx.finfo(scores.dtype).min)
    return (mx.softmax(scores, precise=True, axis=-1) @ values[:, :, None]).reshape(rows, heads, count, dim)


@here_only
def test_it_is_taken_once():
    """The second time MLX does not call the reference any more."""
    assert "its sizes are" in again().reason
    with pytest.raises(blas._Unfit, match="it multiplies with nothing"):
        blas._redirect(blas._load(blas._bundled()))


@here_only
@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("find_spec", lambda name: None, "opencv-python brings no OpenBLAS here"),
        ("find_spec", lambda name: SimpleNamespace(origin=__file__), "opencv-python brings no OpenBLAS here"),
        ("_bundled", lambda: Path(__file__), "OpenBLAS cannot be loaded"),
        ("_VERSION", "OpenBLAS 0.4", "is not OpenBLAS 0.4"),
        ("_CORE", "Haswell", "OpenBLAS was loaded before, for Nehalem and 1 threads"),
        ("_USUAL_SIZES", [1, 2, 3, 4, 5], "built differently: its sizes are"),
    ],
)
def test_what_is_not_as_it_is_meant_to_be_is_not_used(
    name: str, value: Any, reason: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(blas, name, value)
    refused = again()
    assert refused.is_fallback and reason in refused.reason
    assert refused.describe() == f"with MLX's own BLAS ({refused.reason})"


@here_only
def test_one_that_adds_otherwise_is_not_used(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(blas, "_USUAL_SIZES", [*blas._SIZES, 4, 8])
    monkeypatch.setattr(blas, "_adds_in_order", lambda library: False)
    assert "adds up in another order" in again().reason


@here_only
def test_sizes_that_do_not_hold_are_put_back():
    found = in_new_process("""
import ctypes
blas._adds_in_order = lambda library: False
assert "adds up in another order" in blas.chosen().reason
table = ctypes.POINTER(ctypes.c_int).in_dll(blas._load(blas._bundled()), "gotoblas")
print([table[blas._SIZES_AT + at] for at in range(5)])
""")
    assert found == str(blas._USUAL_SIZES)


@here_only
@pytest.mark.parametrize("rows", [2, 13])
def test_a_wrong_sum_is_seen(rows: int):
    """A library that multiplies with parts of the usual length does not pass."""
    found = in_new_process(f"""
library = blas._load(blas._bundled())
blas._PRODUCTS = (({rows}, 2),)
print(blas._adds_in_order(library))
blas._lengthen(library)
print(blas._adds_in_order(library))
""")
    assert found == "False\nTrue"


def test_it_is_not_used_elsewhere_or_if_it_is_not_wanted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(blas, "wants_openblas", lambda: False)
    assert not again().name and not again().is_fallback
    monkeypatch.setattr(blas.platform, "machine", lambda: "aarch64")
    assert not again().name and not again().is_fallback and "Linux on x86-64" in again().reason


@here_only
def test_an_openblas_that_is_in_use_for_other_things_stays_as_it_is():
    reason = in_new_process("import cv2; print(blas.chosen().reason)")
    assert reason.startswith("OpenBLAS was loaded before")


@here_only
def test_factorizations_stay_mlxs_own():
    """OpenBLAS's of float32 would end the process, with such sizes."""
    program = """
        import mlx.core as mx
        assert blas.chosen().name
        x = mx.random.normal((300, 300), key=mx.random.key(0)) + 50 * mx.eye(300)
        print(mx.abs(x @ mx.linalg.inv(x, stream=mx.cpu) - mx.eye(300)).max().item() < 1e-3)
    """
    assert in_new_process("\n".join(line.strip() for line in program.splitlines())) == "True"


def in_new_process(program: str) -> str:
    program = f"from satchel.actors.replica.device import blas\n{program}"
    run = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()
