"""CUDA cards as `nvidia-smi` lists them, what CUDA_VISIBLE_DEVICES leaves of them, and their memory."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from satchel.cluster.devices import available_memory, cards
from satchel.cluster.devices.cards import Card, card_free_bytes, card_of, found_cards, listed, visible
from satchel.cluster.errors import ConfigError
from tests.worlds.fake_cards import UUIDS, fake_nvidia_smi, listing, path_with

A, B = (Card(number, uuid, 143771 * 2**20, "NVIDIA H200") for number, uuid in enumerate(UUIDS))


@pytest.fixture(autouse=True)
def none_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_cards_are_those_that_nvidia_smi_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", path_with(fake_nvidia_smi(tmp_path)))
    assert found_cards() == (A, B)
    assert B.describe() == "card 1 (NVIDIA H200)"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert found_cards() == (B,)


def test_without_a_driver_there_is_no_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert found_cards() == ()
    failing = fake_nvidia_smi(tmp_path / "failing", text="NVIDIA-SMI has failed", status=9)
    monkeypatch.setenv("PATH", path_with(failing))
    assert found_cards() == ()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (listing(), [A, B]),
        ("", []),
        ("No devices were found\n", []),
        (f"0, {UUIDS[0]}, [N/A], NVIDIA GB10\n", [Card(0, UUIDS[0], 0, "NVIDIA GB10")]),
        (f"0, {UUIDS[0]}\n", [Card(0, UUIDS[0], 0, "")]),
    ],
)
def test_what_nvidia_smi_prints_is_read(text: str, found: list[Card]):
    assert list(listed(text)) == found


@pytest.mark.parametrize(
    ("setting", "seen"),
    [
        (None, [A, B]),
        ("", []),
        ("1,0", [B, A]),
        (" 1 ", [B]),
        (f"{UUIDS[1]},0", [B, A]),
        ("GPU-0b", [B]),
        ("1,7,0", [B]),
        ("-1", []),
        ("0,0,1", [A]),
        # It means two cards, so none.
        ("GPU-0", []),
        ("NoDevFiles", []),
    ],
)
def test_cuda_visible_devices_hides_cards_as_cuda_reads_it(setting: str | None, seen: list[Card]):
    assert list(visible((A, B), setting)) == seen


def test_a_card_is_called_by_number_or_uuid_and_others_are_refused(monkeypatch: pytest.MonkeyPatch):
    assert card_of(1, (A, B)) == card_of(UUIDS[1], (A, B)) == card_of("GPU-0b", (A, B)) == B
    with pytest.raises(ConfigError, match=r"devices\[0\]: there is no card 2; there are: 0, 1$"):
        card_of(2, (A, B), where="devices[0]")
    with pytest.raises(ConfigError, match="there is no card 0; there are: none"):
        card_of(0, ())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES is '0' and hides the others"):
        card_of(1, (A,))


class Driver:
    """NVML with one card."""

    def __init__(self, uuid: str, free: int) -> None:
        self.uuid, self.free = uuid, free

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        handle._obj.value = 77
        return 0 if uuid.decode() == self.uuid else 6

    def nvmlDeviceGetMemoryInfo(self, handle: ctypes.c_void_p, memory: Any) -> int:
        memory._obj.free = self.free
        return 0 if handle.value == 77 else 2


def test_the_memory_of_a_node_is_that_of_its_own_card(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cards, "nvml", lambda: Driver(UUIDS[1], 5 * 2**30))
    monkeypatch.setattr(available_memory, "available_bytes", lambda: 7)
    assert card_free_bytes(UUIDS[1]) == 5 * 2**30 and card_free_bytes(UUIDS[0]) is None
    assert available_memory.node_available_bytes() == 7, "a node without a card of its own"
    monkeypatch.setenv("SATCHEL_CARD", UUIDS[1])
    assert available_memory.node_available_bytes() == 5 * 2**30
    monkeypatch.setattr(cards, "nvml", lambda: None)
    assert available_memory.node_available_bytes() == 7, "no driver"
