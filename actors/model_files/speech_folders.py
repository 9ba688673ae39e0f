"""Folders of models of speech: which of mlx-audio's families a model is of, by its config.json alone."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...cluster.errors import ModelLoadError
from .source import files_in, read_json
from .weights import WeightFile, read_weight_file

LISTENS, SPEAKS = "stt", "tts"
"""mlx-audio's names for what a model of speech does."""

_READ = (".safetensors", ".json", ".jinja", ".txt", ".model", ".tiktoken", ".npz", ".yaml")
_NEMO = "nemo.collections.asr"
_PLACES = ("path", "dir", "folder", "repo", "file", "checkpoint", "ckpt", "tokenizer", "model")
"""A key with one of these words names a place on the disk, if its value is one."""

_ADDRESS = re.compile(
    r"\s*(?:[a-z][a-z0-9+.-]*:/|(?:https?|ftps?|file|data|hf|s3|gs|git):)/*[^\s/]", re.ASCII | re.IGNORECASE
)
"""A text that begins so is an address (`https://…`, `hf://…`, `file:…`), which a library may fetch."""


@dataclass(frozen=True)
class SpeechFolder:
    """What a folder's config.json says.

    Attributes:
        kind: `stt` or `tts`.
        type: the model's type, as mlx-audio knows it.
    """

    kind: str
    type: str


def speech_folder(folder: Path) -> SpeechFolder | None:
    """Returns what mlx-audio calls the model in a folder; None if it is not one of its models that listen or speak.

    A type that mlx-lm or mlx-vlm knows too is that of a model of text.
    """
    try:
        config = read_json(folder / "config.json")
    except ModelLoadError:
        return None
    return speech_type(config)


def speech_type(config: Mapping[str, Any]) -> SpeechFolder | None:
    """As `speech_folder`, of a config."""
    if find_spec("mlx_audio") is None:
        return None
    from mlx_audio.registry import model_type_from_config, supported_model_types

    target = config.get("target")
    if isinstance(target, str) and target.startswith(_NEMO):
        # NeMo's own configs have no type.
        return SpeechFolder(LISTENS, "canary" if "MultiTask" in target else "parakeet")
    if not isinstance(config.get("model_type") or config.get("architecture") or "", str):
        return None
    kind = model_type_from_config(dict(config))
    if not isinstance(kind, str) or _is_of_text(kind):
        return None
    architectures = config.get("architectures")
    for_asr = isinstance(architectures, list) and any("ASR" in str(each) for each in architectures)
    for part in (LISTENS, SPEAKS) if for_asr else (SPEAKS, LISTENS):
        if kind.lower() in supported_model_types(part):
            return SpeechFolder(part, kind)
    return None


@cache
def _is_of_text(kind: str) -> bool:
    """Returns whether mlx-lm or mlx-vlm has models of a type. Neither is imported: that takes seconds."""
    name = kind.replace("-", "_").lower()
    if not name.isidentifier():
        return False
    for library in ("mlx_lm", "mlx_vlm"):
        spec = find_spec(library)
        for place in spec.submodule_search_locations or () if spec is not None else ():
            if any((Path(place) / "models" / each).exists() for each in (name, f"{name}.py")):
                return True
    return False


def speech_files(folder: Path) -> dict[str, Path]:
    """Returns the files that identify a model of speech, by name."""
    paths = [path for path in files_in(folder, "**/*") if path.suffix in _READ]
    return {f"model/{path.relative_to(folder).as_posix()}": path for path in paths}


def read_speech_weights(folder: Path) -> list[WeightFile]:
    """Reads the headers of all weights, and checks that every file is complete.

    Raises:
        ModelLoadError: there are none, or one is damaged.
    """
    paths = files_in(folder, "**/*.safetensors")
    if not any(path.parent == folder for path in paths):
        raise ModelLoadError(f"{folder} cannot be loaded: it has no weights (*.safetensors)")
    return [read_weight_file(path) for path in paths]


def refuse_other_places(source: str, folder: Path) -> None:
    """Refuses a model one of whose config files names an address, or a file or a folder that is there, and not in the
    model's folder. Libraries fetch some addresses by other clients than the Hub's.

    Raises:
        ModelLoadError: with the file and the name.
    """
    root = folder.absolute()
    for path in files_in(folder, "**/*.json"):
        if not path.name.endswith(("config.json", "configs.json")):
            continue
        for key, value in _texts(read_json(path)):
            # By its parts alone: files in the Hub's cache are links to others.
            place = Path(os.path.normpath(root / value))
            if _ADDRESS.match(value) or (not place.is_relative_to(root) and _is_place(key, value, place)):
                name = path.relative_to(folder).as_posix()
                raise ModelLoadError(f"{source} is not loaded: {name} names {value!r}, which is not in its folder")


def _is_place(key: str, value: str, place: Path) -> bool:
    """Returns whether a text of a config names what is at a place of the disk. A list of characters may have `/`."""
    try:
        if place.is_file():
            return True
        return len(value) > 1 and any(word in key.lower() for word in _PLACES) and place.is_dir()
    except (ValueError, OSError):
        # It has a NUL, or is too long for a name.
        return False


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yields the texts in a JSON value, each with the key that it is under."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from _texts(each, str(name))
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each, key)
