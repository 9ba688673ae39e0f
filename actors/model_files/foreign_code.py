"""Python code in a model's folder: none of it runs unless the model's entry in the config trusts it.

Two settings in a folder name code. mlx-lm and mlx-vlm import the `model_file` of config.json. transformers imports the
files of an `auto_map`, and some of mlx-vlm's processors tell it to trust every folder. Both settings are checked before
anything is imported, and the function by which transformers gets such a file is wrapped with a check. A file of another
repository never runs: no entry pins it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from typing import Any

from ...cluster.errors import ModelLoadError
from ..patches import model_code_checked
from .source import read_json

_TRUST = "trust_remote_code"
_PROCESSOR_FILES = tuple(
    f"{name}.json"
    for name in ("tokenizer_config", "processor_config", "preprocessor_config", "video_preprocessor_config")
)


@dataclass
class _Loading:
    """The model that this context loads, and the refusal of the last file that was requested."""

    source: str
    folder: Path
    trusted: bool
    refused: ModelLoadError | None = None

    def check(self, repository: str, file: str) -> None:
        place, folder = Path(repository).resolve(), self.folder.resolve()
        if place != folder and place.is_relative_to(folder):
            name = (place.relative_to(folder) / file).as_posix()
            self.refused = ModelLoadError(f"{self.source} brings code of its own ({name}), which is never run")
            raise self.refused
        own = place == folder
        if not (self.trusted and own and _is_plain(file)):
            self.refused = _refusal(self.source, file if own else f"{repository}, {file}", own and _is_plain(file))
            raise self.refused


_loading: ContextVar[_Loading | None] = ContextVar("loading", default=None)


def refuse_model_file(source: str, config: Mapping[str, object], *, trusted: bool) -> None:
    """Refuses a model whose config.json names a file with its architecture, unless it is trusted and in its folder.

    Raises:
        ModelLoadError: with the file's name.
    """
    file = config.get("model_file")
    if file and not (trusted and _is_plain(file)):
        raise _refusal(source, f"model_file {file}", _is_plain(file))


def refuse_processor_code(source: str, folder: Path, *, trusted: bool) -> None:
    """Refuses a model whose processor or tokenizer needs code in its folder, unless it is trusted.

    Ignores the `auto_map` of config.json: many repositories still have one for a family that the libraries now know.

    Raises:
        ModelLoadError: with the file's name.
    """
    for name in () if trusted else _PROCESSOR_FILES:
        path = folder / name
        maps = read_json(path).get("auto_map") if path.is_file() else None
        for value in maps.values() if isinstance(maps, Mapping) else ():
            for reference in value if isinstance(value, list) else [value]:
                if isinstance(reference, str):
                    repository, _, wanted = reference.rpartition("--")
                    file = f"{wanted.partition('.')[0]}.py"
                    raise _refusal(source, f"{repository}, {file}" if repository else file, own=not repository)


@contextmanager
def own_code_only(source: str, folder: Path, *, trusted: bool) -> Iterator[None]:
    """While this is open, transformers imports no model's code in this thread, except from a trusted folder.

    Args:
        source: the model's source, as the user gave it.
        trusted: whether the code in `folder` may run; no other code ever does.

    Raises:
        ModelLoadError: code was refused; with the file's name. It replaces the error that this caused.
    """
    _install()
    loading = _Loading(source, folder, trusted)
    token = _loading.set(loading)
    try:
        yield
    except Exception as error:
        # The message of transformers is for Python programmers: it names an argument to pass.
        refusal = loading.refused or (_refusal(source, "auto_map", True) if _TRUST in str(error) else None)
        if refusal is None or refusal is error:
            raise
        raise refusal from error
    finally:
        _loading.reset(token)


def _is_plain(file: object) -> bool:
    return isinstance(file, str) and Path(file).name == file


def _refusal(source: str, file: str, own: bool) -> ModelLoadError:
    if not own:
        return ModelLoadError(f"{source} names code that is not in its own folder ({file}), which is never run")
    return ModelLoadError(
        f"{source} brings code of its own ({file}), which is not run; if you have read it, write {_TRUST}: true into "
        "the model's entry in the config, with a folder or owner/name@COMMIT as its source"
    )


@cache
def _install() -> None:
    model_code_checked(_checking)


def _checking(fetch: Callable[..., str]) -> Callable[..., str]:
    @wraps(fetch)
    def get_cached_module_file(repository: Any, file: str, *arguments: Any, **options: Any) -> str:
        loading = _loading.get()
        if loading is None:
            raise ModelLoadError(f"a model's own code is not run: {repository}, {file}")
        loading.check(str(repository), file)
        return fetch(repository, file, *arguments, **options)

    return get_cached_module_file
