"""Code that a model's folder brings: none of it runs, unless the model's entry in the config trusts it.

Two things in a folder name code. mlx-lm and mlx-vlm import the `model_file` of config.json, so it is looked at before
either. transformers imports what an `auto_map` names, and mlx-vlm's processors tell it to trust every folder; so the
one function by which it gets such a file asks here first. A file of another repository never runs: no entry pins it.
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

_TRUST = "trust_remote_code"


@dataclass
class _Loading:
    """What is being loaded in this context; `refused` is the file that was asked for last."""

    folder: Path
    trusted: bool
    refused: str | None = None

    def allows(self, repository: str, file: str) -> bool:
        inside = Path(repository).resolve() == self.folder.resolve() and Path(file).name == file
        return self.trusted and inside


_loading: ContextVar[_Loading | None] = ContextVar("loading", default=None)


def refuse_model_file(source: str, config: Mapping[str, object], *, trusted: bool) -> None:
    """Refuse a model whose config.json names a file with its architecture, unless it is trusted and in its folder.

    Raises:
        ModelLoadError: with the file's name.
    """
    file = config.get("model_file")
    if file and not (trusted and isinstance(file, str) and Path(file).name == file):
        raise _refusal(source, f"model_file {file}", trusted)


@contextmanager
def own_code_only(source: str, folder: Path, *, trusted: bool) -> Iterator[None]:
    """While this is open transformers imports no code but Satchel's and its libraries', in this thread.

    Args:
        source: what the user calls the model.
        trusted: whether the code in `folder` may run, but still no other.

    Raises:
        ModelLoadError: in place of any error that came of it, with the file's name.
    """
    _install()
    loading = _Loading(folder, trusted)
    token = _loading.set(loading)
    try:
        yield
    except Exception as error:
        # By itself transformers refuses in words that tell a Python programmer what to pass.
        file = loading.refused or ("auto_map" if _TRUST in str(error) else None)
        if file is None:
            raise
        raise _refusal(source, file, trusted) from error
    finally:
        _loading.reset(token)


def _refusal(source: str, file: str, trusted: bool) -> ModelLoadError:
    if trusted:
        return ModelLoadError(f"{source} names code that is not in its own folder ({file}), which is never run")
    return ModelLoadError(
        f"{source} brings code of its own ({file}), which is not run; if you have read it, write {_TRUST}: true into "
        "the model's entry in the config, with a folder or owner/name@COMMIT as its source"
    )


@cache
def _install() -> None:
    from transformers import dynamic_module_utils

    dynamic_module_utils.get_cached_module_file = _asking(dynamic_module_utils.get_cached_module_file)


def _asking(fetch: Callable[..., str]) -> Callable[..., str]:
    @wraps(fetch)
    def get_cached_module_file(repository: Any, file: str, *arguments: Any, **options: Any) -> str:
        loading = _loading.get()
        if loading is None or not loading.allows(str(repository), file):
            if loading is not None:
                loading.refused = file if Path(str(repository)).is_dir() else f"{repository}, {file}"
            raise ValueError(f"code of a model's own: {file}")
        return fetch(repository, file, *arguments, **options)

    return get_cached_module_file
