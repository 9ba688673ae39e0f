"""What is known of a device: whether it multiplies float32 exactly."""

from __future__ import annotations

import os
import platform

import mlx.core as mx
import numpy as np
import pytest

from satchel.actors.replica.device import device
from satchel.actors.replica.device.device import multiplies_exactly, uses_tensor_units
from satchel.actors.replica.proving.agreement import agree
from tests.worlds.replica import metal_on_cpu


@pytest.mark.parametrize(
    ("architecture", "macos", "uses"),
    [
        ("applegpu_g13g", "26.2", False),
        ("applegpu_g16s", "27.0", False),
        ("applegpu_g17s", "26.1.3", False),
        ("applegpu_g17s", "26.2", True),
        ("applegpu_g17g", "26.10", True),
        ("applegpu_g17d", "27", True),
        ("applegpu_g17s", "15.7.2", False),
        # Told to programs built for an older system.
        ("applegpu_g17s", "16.2", True),
        ("applegpu_g17s", "16.1", False),
        # Phones' chips are a generation behind.
        ("applegpu_g17p", "26.2", False),
        ("applegpu_g18p", "26.2", True),
        ("applegpu_g20s", "30.0", True),
        ("applegpu", "26.2", False),
        ("", "26.2", False),
        ("applegpu_g17s", "", False),
    ],
)
def test_tensor_units_are_used_as_mlx_decides(architecture: str, macos: str, uses: bool) -> None:
    assert uses_tensor_units(architecture, macos) is uses


def test_products_of_a_mac_with_tensor_units_are_no_fault_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A self-test allows as much difference as products with ten bits of fraction need there, and with little on an M1,
    where the same difference is a fault; unless TF32 is forbidden."""
    monkeypatch.setattr(device, "device_kind", lambda: "metal")
    monkeypatch.setattr(device, "on_cuda", lambda: False)
    monkeypatch.setattr(platform, "mac_ver", lambda: ("26.2", ("", "", ""), "arm64"))
    monkeypatch.delenv("MLX_ENABLE_TF32", raising=False)
    numbers = np.random.default_rng(0)
    x, weight = (mx.array(numbers.standard_normal(shape, np.float32)) for shape in ((4, 512), (512, 4000)))
    exact = [x @ weight]
    shortened = [metal_on_cpu.tf32(x) @ metal_on_cpu.tf32(weight)]
    found = []
    for architecture in ("applegpu_g13s", "applegpu_g17s"):
        monkeypatch.setattr(mx, "device_info", lambda name=architecture: {"architecture": name})
        found.append((multiplies_exactly(mx.float32), agree(exact, shortened)))
    assert found == [(True, False), (False, True)]
    assert not multiplies_exactly(mx.bfloat16)
    monkeypatch.setenv("MLX_ENABLE_TF32", "0")
    assert multiplies_exactly(mx.float32) and not agree(exact, shortened)


@pytest.mark.parametrize(
    ("gb", "allowed", "wanted"),
    [(141, None, "4512"), (48, None, "1536"), (24, None, "768"), (141, 4, "128"), (2, 4, "100")],
)
def test_graphs_are_as_large_as_the_memory_allows(
    gb: int, allowed: int | None, wanted: str, monkeypatch: pytest.MonkeyPatch
):
    name = "MLX_MAX_MB_PER_BUFFER"
    # So that it is put back as it was.
    monkeypatch.setenv(name, "")
    monkeypatch.delenv(name)
    monkeypatch.setattr(device, "device_bytes", lambda: gb * 2**30)
    device.size_graphs()
    assert name not in os.environ
    monkeypatch.setattr(device, "on_cuda", lambda: True)
    device.size_graphs(None if allowed is None else allowed * 2**30)
    assert os.environ[name] == wanted
    monkeypatch.setenv(name, "5")
    device.size_graphs()
    assert os.environ[name] == "5"
