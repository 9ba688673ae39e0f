"""The models on this machine: those that ship with Satchel, those in the Hub's cache, and folders that are served."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....actors.model_files.source import EMBEDDED, WEIGHTS, embedded_names, named_by_index, read_json
from ....actors.model_files.source import INDEX as WEIGHTS_INDEX
from ....cluster.errors import ModelLoadError


@dataclass(frozen=True)
class LocalModel:
    """A model on this machine's disk.

    Attributes:
        source: as `satchel serve` takes it.
        place: `shipped`, `hub` or `folder`.
        folder: with its config.json; None for a download that has not got so far.
        root: with all of its files: of a Hub model, the folder of all its revisions.
        nbytes: on the disk.
        kept: its weights' precision, such as `4 bits` or `bfloat16`; "" if unknown.
        complete: whether all its weights are there.
    """

    source: str
    place: str
    folder: Path | None
    root: Path
    nbytes: int
    kept: str
    complete: bool

    def holds(self, folder: str) -> bool:
        """Whether a replica's folder is one of this model's."""
        return Path(folder).is_relative_to(self.root) or (
            self.folder is not None and Path(folder).resolve() == self.folder.resolve()
        )


def local_models(served: Iterable[str] = ()) -> list[LocalModel]:
    """Returns the models on this machine, by place and source.

    Args:
        served: folders from which replicas on this machine have loaded their models.
    """
    shipped = [_in_folder(f"embedded:{name}", "shipped", EMBEDDED / name) for name in embedded_names()]
    known = [*shipped, *hub_models()]
    others = [Path(folder) for folder in dict.fromkeys(served) if not any(each.holds(folder) for each in known)]
    folders = [_in_folder(str(folder), "folder", folder) for folder in others if folder.is_dir()]
    return [*shipped, *known[len(shipped) :], *folders]


def hub_models() -> list[LocalModel]:
    """Returns the models in the Hub's cache, also those that are there only in part."""
    from huggingface_hub.constants import HF_HUB_CACHE

    cache = Path(HF_HUB_CACHE)
    found = []
    for root in sorted(cache.glob("models--*--*")) if cache.is_dir() else []:
        source = root.name.removeprefix("models--").replace("--", "/", 1)
        folder = _newest_snapshot(root)
        nbytes = sum(_bytes_of(path) for path in (root / "blobs").glob("*"))
        begun = any((root / "blobs").glob("*.incomplete"))
        if not begun and not any(root.glob(f"snapshots/*/{WEIGHTS}")):
            # Its tokenizer alone, or the model of another program.
            continue
        whole = folder is not None and not begun and _has_weights(folder)
        found.append(LocalModel(source, "hub", folder, root, nbytes, precision(folder), whole))
    return found


def _newest_snapshot(root: Path) -> Path | None:
    """Returns the folder of a repository's revision that was downloaded last and has a config."""
    snapshots = [path.parent for path in (root / "snapshots").glob("*/config.json") if path.is_file()]
    return max(snapshots, key=lambda path: path.stat().st_mtime, default=None)


def _in_folder(source: str, place: str, folder: Path) -> LocalModel:
    nbytes = sum(_bytes_of(path) for path in folder.rglob("*"))
    return LocalModel(source, place, folder, folder, nbytes, precision(folder), _has_weights(folder))


def _bytes_of(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        return 0


def _has_weights(folder: Path) -> bool:
    try:
        named = named_by_index(folder / WEIGHTS_INDEX)
    except ModelLoadError:
        named = set()
    there = {path.name for path in folder.glob(WEIGHTS) if path.is_file()}
    return bool(there) and (named <= there or not named & there)


def precision(folder: Path | None) -> str:
    """Returns how a model's weights are stored, from its config: `4 bits`, `awq`, `bfloat16`; "" if unknown."""
    if folder is None:
        return ""
    try:
        return precision_of(read_json(folder / "config.json"))
    except ModelLoadError:
        return ""


def precision_of(config: dict[str, Any]) -> str:
    """As `precision`, for the content of a config.json."""
    own, foreign = config.get("quantization"), config.get("quantization_config")
    if isinstance(own, dict) and isinstance(own.get("bits"), int):
        others = {each["bits"] for each in own.values() if isinstance(each, dict) and isinstance(each.get("bits"), int)}
        bits = sorted({own["bits"], *others})
        return f"{' and '.join(map(str, bits))} bits" if len(bits) < 3 else f"{bits[0]} to {bits[-1]} bits"
    if isinstance(foreign, dict):
        return str(foreign.get("quant_method") or "quantized")
    return _dtype(config)


def _dtype(config: dict[str, Any]) -> str:
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    names = (part.get(name) for part in parts for name in ("torch_dtype", "dtype"))
    return next((name for name in names if isinstance(name, str)), "")


def complete_source(incomplete: str) -> Iterator[str]:
    """Yields sources that begin so: models on this machine, and folders."""
    shipped = [f"embedded:{name}" for name in embedded_names()]
    yield from (source for source in shipped if source.startswith(incomplete))
    yield from (each.source for each in hub_models() if each.source.startswith(incomplete))
    parent, _, begins = incomplete.rpartition("/")
    try:
        folder = Path(parent or ("/" if incomplete.startswith("/") else ".")).expanduser()
        for path in sorted(folder.iterdir()) if folder.is_dir() else []:
            if path.name.startswith(begins) and (path.is_dir() or path.suffix in (".yaml", ".yml")):
                yield f"{parent}/{path.name}" if parent else path.name
    except (OSError, RuntimeError):
        return
