"""Finds a model's folder: one that ships with Satchel, any folder, or one in the Hub's cache, downloaded if need be.

A source is `embedded:NAME`, a folder, or a Hub id: `owner/name`, or `owner/name@revision` for a branch, tag or commit.
"""

from __future__ import annotations

import errno
import json
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from glob import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ...cluster.errors import ModelLoadError
from .resuming import fetch

EMBEDDED = Path(__file__).parent / "embedded"
WEIGHTS = "model*.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER_WEIGHTS = "adapters.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
HUB_PATTERNS = ["*.json", WEIGHTS, "*.jinja", "tokenizer.model", "*.tiktoken", "*.txt"]
CODE = "*.py"
COMPONENTS = "model_index.json"
"""In the place of `config.json`, in folders of models that make images, which have a folder for each component."""

IMAGE_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
SPEECH_PATTERNS = [*IMAGE_PATTERNS, "*.npz", "*.yaml"]
"""Models of speech have voices, codecs and tokenizers in folders."""

_MARKS = ("config.json", COMPONENTS)

_SUBFOLDERS = ["*/*"]
_OTHER_SUBFOLDERS = ["[!0-9]*/*", "[0-9]*/[!c]*"]
"""Files in subfolders of a repository belong to other formats, but for those like `1_Pooling/config.json`, which say
how sentence-transformers goes on with the model's output."""

Progress = Callable[[str, float | None], None]
"""Called with the present activity and the fraction done, None if unknown."""

_GB = 1e9
_RESUMED_BYTES_MIN = 8 * 2**20
"""Smaller files are fetched by the Hub's client, which does not continue them."""


def resolve(source: str, progress: Progress, *, code: bool = False, speech: bool = False) -> Path:
    """Returns the folder of a model. A Hub id is downloaded if it is not in the Hub's cache yet.

    Args:
        code: whether to download its Python files, too.
        speech: whether it is a model of speech, of which the weights may have any name, and folders belong to it.

    Raises:
        ModelLoadError: no such folder or embedded model, or the download failed; says what to do.
    """
    if source.startswith("embedded:"):
        folder = EMBEDDED / source.removeprefix("embedded:")
        if not (folder / "config.json").is_file():
            known = ", ".join(embedded_names()) or "none"
            raise ModelLoadError(f"no embedded model {folder.name!r}; there are: {known}")
        return folder
    if speech:
        return _find(source, (_MARKS,), SPEECH_PATTERNS, progress, ())
    return _find(source, (_MARKS,), [*HUB_PATTERNS, CODE] if code else HUB_PATTERNS, progress)


def is_model_folder(folder: Path) -> bool:
    """Returns whether a folder is laid out as that of a model."""
    return any((folder / name).is_file() for name in _MARKS)


def embedded_names() -> list[str]:
    """Returns the names of the models that ship with Satchel."""
    return sorted(path.parent.name for path in EMBEDDED.glob("*/config.json"))


def default_name(source: str) -> str:
    """Returns what clients call a model if nobody says: the Hub id without its revision, or the folder's name."""
    folder = Path(source).expanduser()
    return folder.resolve().name if folder.is_dir() else source.removeprefix("embedded:").partition("@")[0]


def found_here(source: str) -> Path | None:
    """Returns the folder of a model as `resolve` does, without asking the Hub; None if it is not on this machine.

    Raises:
        ModelLoadError: as `resolve`.
    """
    if source.startswith("embedded:") or Path(source).expanduser().is_dir():
        return resolve(source, lambda what, fraction: None)
    from huggingface_hub import try_to_load_from_cache

    repository, _, revision = source.partition("@")
    try:
        found = [try_to_load_from_cache(repository, name, revision=revision or None) for name in _MARKS]
    except ValueError:
        # It is not a Hub id.
        return None
    return next((Path(path).parent for path in found if isinstance(path, str)), None)


def resolve_adapter(source: str, progress: Progress) -> Path:
    """Returns the folder of an adapter; otherwise as `resolve`."""
    files = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
    return _find(source, [(name,) for name in files], files, progress)


def files_in(folder: Path, pattern: str) -> list[Path]:
    """Returns the files in a folder that match a pattern, in order. A file `._NAME` is none: macOS keeps attributes of
    `NAME` there, on disks that cannot keep them."""
    return sorted(path for path in folder.glob(pattern) if path.is_file() and not path.name.startswith("._"))


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file.

    Raises:
        ModelLoadError: the file cannot be read or holds something else.
    """
    data = _parsed(path)
    if not isinstance(data, dict):
        raise ModelLoadError(f"{path} holds no JSON object")
    return data


def read_json_list(path: Path) -> list[Any]:
    """As `read_json`, for a list."""
    data = _parsed(path)
    if not isinstance(data, list):
        raise ModelLoadError(f"{path} holds no JSON list")
    return data


def _parsed(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from None


def _find(
    source: str,
    needed: Sequence[Sequence[str]],
    patterns: Sequence[str],
    progress: Progress,
    ignored: Sequence[str] = tuple(_OTHER_SUBFOLDERS),
) -> Path:
    """Returns the folder of a source. Of each of the `needed` lists it must have one file. Files like the `ignored` are
    not downloaded."""
    try:
        folder = Path(source).expanduser()
    except RuntimeError:
        raise ModelLoadError(f"{source!r} names the home of a user who does not exist") from None
    if folder.is_dir():
        for names in needed:
            if not any((folder / name).is_file() for name in names):
                raise ModelLoadError(f"{folder} has no {names[0]}; it must be a folder as the Hub or mlx-lm lay it out")
        return folder
    repository, at, revision = source.partition("@")
    if source.startswith(("/", ".", "~")) or repository.count("/") != 1 or (at and not revision):
        raise ModelLoadError(_no_source(source))
    wanted = _Download(source, repository, revision or None, needed, patterns, progress, ignored)
    with _in_words(wanted):
        return wanted.run()


@contextmanager
def _in_words(wanted: _Download) -> Iterator[None]:
    """
    Raises:
        ModelLoadError: for every error of the Hub's client.
    """
    try:
        yield
    except ModelLoadError:
        raise
    except Exception as error:
        # The Hub's client passes on errors of three HTTP stacks.
        raise ModelLoadError(_sentence(wanted, error)) from error


@dataclass(frozen=True)
class DownloadPlan:
    """What the download of a model fetches.

    Attributes:
        commit: of the revision.
        files: bytes by name, of all files of the model.
        missing: names of those that are not in the Hub's cache yet.
        cache: the Hub's.
        place: the cache, or the folder in which it will be made, with `free_bytes` on its disk.
    """

    repository: str
    commit: str
    files: Mapping[str, int]
    missing: Sequence[str]
    cache: Path
    place: Path
    free_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(self.files.values())

    @property
    def missing_bytes(self) -> int:
        return sum(self.files[name] for name in self.missing)


def plan_download(source: str) -> DownloadPlan:
    """Returns what the download of a Hub id would fetch. Nothing is put into the Hub's cache.

    Raises:
        ModelLoadError: it is no Hub id, the Hub has no such model, or it does not answer.
    """
    with _of_hub(source) as wanted, TemporaryDirectory(prefix="satchel-") as scratch:
        return wanted.plan(Path(scratch))


@contextmanager
def headers_of(source: str) -> Iterator[Path]:
    """Makes a folder with the config of a model on the Hub, and weight files with their headers and with holes instead
    of the weights. The headers come by range requests.

    Raises:
        ModelLoadError: as for `plan_download`, or a header makes no sense.
    """
    from huggingface_hub import HfApi, hf_hub_download

    with TemporaryDirectory(prefix="satchel-") as folder:
        with _of_hub(source) as wanted:
            plan = wanted.plan(Path(folder))
            hf_hub_download(plan.repository, "config.json", revision=plan.commit, local_dir=folder)
            for name in [name for name in plan.files if fnmatch(name, WEIGHTS)]:
                found = HfApi().parse_safetensors_file_metadata(plan.repository, name, revision=plan.commit)
                _write_holes(Path(folder) / name, found.tensors)
        yield Path(folder)


def _write_holes(path: Path, tensors: Mapping[str, Any]) -> None:
    """Writes a safetensors file with these tensors, whose data take no place on the disk."""
    entries = {
        name: {"dtype": each.dtype, "shape": list(each.shape), "data_offsets": list(each.data_offsets)}
        for name, each in tensors.items()
    }
    header = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(file.tell() + max((each.data_offsets[1] for each in tensors.values()), default=0))


@contextmanager
def _of_hub(source: str) -> Iterator[_Download]:
    """Gives the download of a Hub id, and turns errors of the Hub's client into sentences."""
    from huggingface_hub.errors import DryRunError

    repository, _, revision = source.partition("@")
    if repository.count("/") != 1 or source.startswith(("/", ".", "~")):
        raise ModelLoadError(_no_source(source))
    wanted = _Download(source, repository, revision or None, (_MARKS,), HUB_PATTERNS, lambda what, done: None)
    with _in_words(wanted):
        try:
            yield wanted
        except DryRunError as error:
            cause = error.__cause__ or error
            raise ModelLoadError(_unreachable(wanted, "not in the local Hub cache", cause)) from error


@dataclass(frozen=True)
class _Download:
    """The download of one snapshot of a repository into the Hub's cache.

    The files are chosen before the first byte is fetched, so that a hopeless download (no room, not a model) fails at
    once, and the total for the progress is known.
    """

    source: str
    repository: str
    revision: str | None
    needed: Sequence[Sequence[str]]
    patterns: Sequence[str]
    progress: Progress
    ignored: Sequence[str] = tuple(_OTHER_SUBFOLDERS)

    def run(self) -> Path:
        from huggingface_hub.errors import DryRunError

        self.progress(f"downloading {self.source}", None)
        try:
            plan = self.plan()
        except DryRunError as error:
            return self.from_cache(error.__cause__ or error)
        if plan.missing_bytes > plan.free_bytes:
            raise ModelLoadError(
                f"{self.source} takes {plan.missing_bytes / _GB:.2f} GB more on the disk, of which "
                f"{plan.free_bytes / _GB:.2f} GB are free at {plan.place}; make room, or set HF_HOME to a folder on "
                "another disk"
            )
        if self.ignored and any("/" in name for name in plan.files if name.endswith(".safetensors")):
            return self._with_components().fetched(plan)
        return self.fetched(plan)

    def fetched(self, plan: DownloadPlan) -> Path:
        whole = plan.missing_bytes
        large = [name for name in plan.missing if plan.files[name] >= _RESUMED_BYTES_MIN]
        small = [escape(name) for name in plan.files if name not in large]
        folder = self._snapshot(allow_patterns=small, tqdm_class=self._bar(whole))
        done = whole - sum(plan.files[name] for name in large)
        for name in large:
            fetch(plan.repository, plan.commit, name, plan.cache, self._bar(whole, done))
            done += plan.files[name]
        if large:
            # Puts the files into the snapshot.
            folder = self._snapshot(allow_patterns=[escape(name) for name in plan.files], tqdm_class=self._bar(0))
        return Path(folder)

    def plan(self, scratch: Path | None = None) -> DownloadPlan:
        """Returns what the download fetches.

        Args:
            scratch: a folder for files that are read meanwhile; None is the Hub's cache.

        Raises:
            DryRunError: the Hub does not answer.
            ModelLoadError: a file that is needed is missing there.
        """
        files = {
            file.filename: file
            for file in self._snapshot(allow_patterns=list(self.patterns), dry_run=True, tqdm_class=self._bar(0))
        }
        if COMPONENTS in files and "config.json" not in files and self.ignored:
            return self._with_components().plan(scratch)
        for names in self.needed:
            if not any(name in files for name in names):
                raise ModelLoadError(f"{self.source} on the Hub has no {names[0]}")
        wanted = self._without_other_weights(files, scratch)
        from huggingface_hub.constants import HF_HUB_CACHE

        cache = Path(HF_HUB_CACHE)
        place = next(folder for folder in (cache, *cache.parents) if folder.exists())
        return DownloadPlan(
            repository=self.repository,
            commit=files[wanted[0]].commit_hash,
            files={name: files[name].file_size or 0 for name in wanted},
            missing=[name for name in wanted if files[name].will_download],
            cache=cache,
            place=place,
            free_bytes=shutil.disk_usage(place).free,
        )

    def _with_components(self) -> _Download:
        """Returns the download of a model that makes images: with the folders of its components."""
        return replace(self, patterns=IMAGE_PATTERNS, ignored=())

    def _snapshot(self, ignored: Sequence[str] | None = None, **options: Any) -> Any:
        from huggingface_hub import snapshot_download

        ignores = list(self.ignored if ignored is None else ignored)
        return snapshot_download(self.repository, revision=self.revision, ignore_patterns=ignores, **options)

    def _without_other_weights(self, files: dict[str, Any], scratch: Path | None) -> list[str]:
        """Returns the files without weights that the index does not name: some repositories have the weights twice."""
        if INDEX not in files:
            return list(files)
        from huggingface_hub import hf_hub_download

        index = hf_hub_download(self.repository, INDEX, revision=files[INDEX].commit_hash, local_dir=scratch)
        named = named_by_index(Path(index))
        # An index that names absent files is left over from another layout; mlx-lm ignores it.
        if not named or not named <= files.keys():
            return list(files)
        return [name for name in files if name in named or not fnmatch(name, WEIGHTS)]

    def from_cache(self, cause: BaseException) -> Path:
        """Returns the snapshot of an earlier download; `cause` is why the Hub does not answer."""
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import IncompleteSnapshotError, LocalEntryNotFoundError

        patterns = list(self.patterns)
        has = {
            name: isinstance(try_to_load_from_cache(self.repository, name, revision=self.revision), str)
            for name in _MARKS
        }
        if has[COMPONENTS] and not has["config.json"] and self.ignored:
            return self._with_components().from_cache(cause)
        index = try_to_load_from_cache(self.repository, INDEX, revision=self.revision)
        if WEIGHTS in patterns and isinstance(index, str):
            named = named_by_index(Path(index))
            if named and all((Path(index).parent / name).is_file() for name in named):
                patterns = [pattern for pattern in patterns if pattern != WEIGHTS] + [escape(name) for name in named]
        there = "not in the local Hub cache"
        # Without the files in subfolders a model is still served.
        for ignored in (self.ignored, _SUBFOLDERS) if self.ignored else ((),):
            try:
                return Path(self._snapshot(ignored, allow_patterns=patterns, local_files_only=True))
            except IncompleteSnapshotError:
                there = "only in part in the local Hub cache"
            except LocalEntryNotFoundError:
                break
        raise ModelLoadError(_unreachable(self, there, cause)) from cause

    def _bar(self, total: int, before: int = 0) -> type:
        """Returns a progress bar class that forwards the Hub's byte counters to `progress`.

        Args:
            total: bytes of the whole download; 0 shows nothing.
            before: bytes of it that came before.
        """
        from tqdm.auto import tqdm

        progress, what = self.progress, f"downloading {self.source}"
        # The Hub has a bar for bytes received and one for bytes written; which is ahead depends on the storage.
        most = [0.0]

        class Bar(tqdm):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                kwargs["disable"] = False
                kwargs["file"] = _Nowhere()
                kwargs.pop("name", None)
                super().__init__(*args, **kwargs)

            def update(self, n: float | None = 1) -> bool | None:
                result = super().update(n)
                if self.unit == "B" and total and self.n > most[0]:
                    most[0] = self.n
                    progress(what, min(1.0, (before + self.n) / total))
                return result

        return Bar


class _Nowhere:
    """A text stream that drops what is written: the command line draws the bar itself."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        return None


def named_by_index(path: Path) -> set[str]:
    """Returns the weight files that an index names."""
    weight_map = read_json(path).get("weight_map")
    return {str(name) for name in weight_map.values()} if isinstance(weight_map, dict) else set()


def _unreachable(wanted: _Download, there: str, cause: BaseException) -> str:
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    if isinstance(cause, OfflineModeIsEnabled):
        why = "HF_HUB_OFFLINE keeps it from being downloaded: start the server without it once"
    elif isinstance(cause, HfHubHTTPError):
        return _sentence(wanted, cause)
    else:
        why = "the Hub cannot be reached: connect once to download it"
    return f"{wanted.source} is {there}, and {why}, or give a folder as the source"


def _no_source(source: str) -> str:
    return f"{source!r} is neither a folder nor a Hub id of the form owner/name or owner/name@revision"


def _sentence(wanted: _Download, error: BaseException) -> str:
    """Returns why a download failed, and what to do about it."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        # The client reports a refusal as "not in the cache either"; its cause is the refusal.
        error = error.__cause__
    if isinstance(error, errors.GatedRepoError):
        page = f"{constants.ENDPOINT}/{wanted.repository}"
        return f"{wanted.source} is gated: accept its terms at {page}, then log in with `hf auth login` or set HF_TOKEN"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{wanted.repository} has no revision {wanted.revision!r} on the Hub"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"the Hub has no {wanted.repository}, or it is private: check the name, or log in with `hf auth login` or "
            "set HF_TOKEN"
        )
    if isinstance(error, errors.HFValidationError):
        return _no_source(wanted.source)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"{wanted.source} cannot be downloaded: no space is left on the disk of {constants.HF_HUB_CACHE}"
    return f"{wanted.source} cannot be downloaded: {first_sentence(error)}"


def first_sentence(error: BaseException) -> str:
    """Returns a library error's message on one line of at most 300 characters; never empty."""
    if isinstance(error, SystemExit):
        # mlx-lm's code for some models prints which package it misses, and exits.
        return "the library's code for it needs a package that is not installed"
    # KeyError shows its message quoted.
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    shown = " ".join(lines[:2]).rstrip(",") if lines else type(error).__name__
    return shown if len(shown) <= 300 else f"{shown[:299]}…"
