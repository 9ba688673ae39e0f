"""The CUDA cards of this machine, as the driver's program `nvidia-smi` lists them, and their free memory. No MLX.

Processes of a node with a card of its own see no other: CUDA_VISIBLE_DEVICES has its UUID. Numbers are those of
`nvidia-smi`, in the order of the PCI bus. CUDA's own numbers may differ on a machine with cards of several kinds.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from ..environment import own_card, visible_cuda_devices
from ..errors import ConfigError

_QUERY = ("nvidia-smi", "--query-gpu=index,uuid,memory.total,name", "--format=csv,noheader,nounits")
_ANSWER_S = 30.0
"""Without the driver's persistence mode every card is initialized first, which takes seconds."""


@dataclass(frozen=True)
class Card:
    """One card; `memory_bytes` is all of its memory, 0 if it is not known."""

    number: int
    uuid: str
    memory_bytes: int
    name: str

    def describe(self) -> str:
        """Returns it as text, such as `card 1 (NVIDIA H200)`."""
        return f"card {self.number} ({self.name})"


def found_cards() -> tuple[Card, ...]:
    """Returns the cards that CUDA programs of this process's environment see; none if the machine has no `nvidia-smi`.

    Takes up to seconds.
    """
    try:
        said = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_ANSWER_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    return visible(listed(said), visible_cuda_devices())


def listed(text: str) -> tuple[Card, ...]:
    """Reads what `nvidia-smi` printed: a line a card, with number, UUID, MiB of memory and name."""
    cards = []
    for line in text.splitlines():
        number, uuid, mib, name = ([part.strip() for part in line.split(",", 3)] + [""] * 4)[:4]
        if number.isdecimal() and uuid:
            # A card that shares the processor's memory has none of its own: `[N/A]`.
            cards.append(Card(int(number), uuid, int(mib) * 2**20 if mib.isdecimal() else 0, name))
    return tuple(cards)


def visible(cards: Sequence[Card], setting: str | None) -> tuple[Card, ...]:
    """Returns the cards that CUDA_VISIBLE_DEVICES leaves, in its order. As for CUDA, the list ends before an entry that
    is no card, or one that is there twice.

    Args:
        setting: the variable's value; None if it is not set.
    """
    if setting is None:
        return tuple(cards)
    seen: list[Card] = []
    for word in setting.split(","):
        card = _called(word.strip(), cards)
        if card is None or card in seen:
            break
        seen.append(card)
    return tuple(seen)


def card_of(device: int | str, cards: Sequence[Card], *, where: str = "device") -> Card:
    """Returns the card that a config means.

    Args:
        device: its number, or its UUID or the begin of it.
        where: the field of the config.

    Raises:
        ConfigError: there is no such card, or it is not visible.
    """
    card = _called(str(device), cards)
    if card is not None:
        return card
    there = ", ".join(str(each.number) for each in cards) or "none"
    setting = visible_cuda_devices()
    hidden = "" if setting is None else f"; CUDA_VISIBLE_DEVICES is {setting!r} and hides the others"
    raise ConfigError(f"{where}: there is no card {device}; there are: {there}{hidden}", param=where)


def _called(word: str, cards: Iterable[Card]) -> Card | None:
    if word.isdecimal():
        return next((card for card in cards if card.number == int(word)), None)
    found = [card for card in cards if word.startswith("GPU-") and card.uuid.startswith(word)]
    return found[0] if len(found) == 1 else None


class _Memory(ctypes.Structure):
    """`nvmlMemory_t`, in bytes."""

    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def own_free_bytes() -> int | None:
    """Returns the free memory of the card on which this process's node computes, in bytes; None if the node has no card
    of its own, or the driver does not answer. Takes microseconds after the first call."""
    uuid = own_card()
    return card_free_bytes(uuid) if uuid else None


def card_free_bytes(uuid: str) -> int | None:
    """As `own_free_bytes`, of the card with that UUID."""
    library = nvml()
    if library is None:
        return None
    handle, memory = ctypes.c_void_p(), _Memory()
    if library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)):
        return None
    return None if library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) else int(memory.free)


@cache
def nvml() -> ctypes.CDLL | None:
    """Returns the driver's library of measurements (NVML), initialized; None if there is none."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        return None if library.nvmlInit_v2() else library
    except (OSError, AttributeError):
        return None
