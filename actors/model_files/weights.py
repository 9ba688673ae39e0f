"""Weight files: checks that they are complete, and computes their size in memory. Reads only headers.

The format: eight bytes with the length of a JSON header (little-endian), the header with every tensor's type, shape and
offsets, and the data (https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ...cluster.errors import ModelLoadError
from .source import INDEX, WEIGHTS, named_by_index

_HEADER_BYTES_MAX = 100 * 2**20
_FLOATS = {"F64", "F32", "F16", "BF16"}
_OF_PICTURES = re.compile(r"(^|[._])(vision|visual|image|img|vit|vpm|patch|moon)")
"""Parts of the names of tensors in picture encoders and projectors."""
_OF_AUDIO = re.compile(r"(^|[._])(audio|sound|speech|apm)")


@dataclass(frozen=True)
class Tensor:
    """One entry of a header. `dtype` is the format's name for it, such as `BF16`; `nbytes` is its size in the file."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class WeightFile:
    """A complete safetensors file: it has all the data that its header describes."""

    path: Path
    header: bytes
    tensors: dict[str, Tensor]
    size: int


def read_weight_file(path: Path) -> WeightFile:
    """Reads and checks the file's header.

    Raises:
        ModelLoadError: the file cannot be read, is cut off, or is something else.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
            if not 0 < length <= min(_HEADER_BYTES_MAX, size - 8):
                raise ModelLoadError(f"{path} ({size} bytes) is no safetensors file or only the beginning of one")
            header = file.read(length)
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror or error}") from None
    try:
        entries = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        tensors = {
            name: Tensor(
                str(entry["dtype"]),
                tuple(int(extent) for extent in entry["shape"]),
                int(entry["data_offsets"][1]) - int(entry["data_offsets"][0]),
            )
            for name, entry in entries.items()
        }
        end = max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise ModelLoadError(f"{path} is not a safetensors file: its header makes no sense") from None
    present = size - 8 - length
    if end > present:
        raise ModelLoadError(f"{path} is cut off: it has {present} of its {end} bytes of weights; download it again")
    return WeightFile(path, header, tensors, size)


def read_weight_files(folder: Path) -> list[WeightFile]:
    """Reads the headers of the weight files that mlx-lm loads, and checks that every file is complete.

    Raises:
        ModelLoadError: there are none, or one is damaged.
    """
    files = [read_weight_file(path) for path in sorted(folder.glob(WEIGHTS))]
    if not files:
        raise ModelLoadError(f"{folder} cannot be loaded: it has no weights ({WEIGHTS})")
    return files


def missing_files(folder: Path) -> list[str]:
    """Returns the weight files that the folder's index names and that are not there, if any of the others is: an index
    that names none is left over from another layout."""
    try:
        named = named_by_index(folder / INDEX)
    except ModelLoadError:
        return []
    missing = sorted(name for name in named if not (folder / name).is_file())
    return missing if len(missing) < len(named) else []


def has_picture_encoder(files: Iterable[WeightFile]) -> bool:
    """Returns whether some of the tensors are of an encoder of pictures. A conversion of a vision model's language part
    has none, whatever its config says."""
    return any(_OF_PICTURES.search(name) for file in files for name in file.tensors)


def has_audio_encoder(files: Iterable[WeightFile]) -> bool:
    """Returns whether some of the tensors are of an encoder of audio. Families have models with one and without."""
    return any(_OF_AUDIO.search(name) for file in files for name in file.tensors)


def bytes_in_memory(files: Iterable[WeightFile], float_bytes: int | None) -> int:
    """Returns the size of the tensors once loaded, in bytes.

    Args:
        float_bytes: the size of the float type to which all floats are converted; None if they are not converted.
    """
    return sum(
        math.prod(tensor.shape) * float_bytes if float_bytes and tensor.dtype in _FLOATS else tensor.nbytes
        for file in files
        for tensor in file.tensors.values()
    )
