"""Loads the text sides of models while their replicas load them: a tokenizer takes a second or two."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ...actors.model_files.image_folders import has_image_layout
from ...actors.model_files.source import found_here
from ...actors.model_files.speech_folders import speech_folder
from ...cluster.config.config import Model
from ...cluster.errors import ModelLoadError
from .model import TextModel, load_text_model


class _Early(NamedTuple):
    trusted: bool
    files: set[tuple[str, int, int]]
    loading: Future[TextModel]


class TextsAhead:
    """Loads text sides: `load` as `load_text_model`, but those that it began to load earlier are there sooner. Each of
    these is returned once, and only if the model's files are the same as when it began. Thread-safe."""

    def __init__(self) -> None:
        self._early: dict[str, _Early] = {}

    def begin(self, models: Iterable[Model]) -> None:
        """Loads the text sides of those models in the background that are loaded at the start and are on this machine.
        Errors are left to `load`."""
        # One after the other: replicas need processors too.
        pool = ThreadPoolExecutor(1, "texts")
        for model in models:
            with suppress(ModelLoadError, OSError):
                folder = found_here(model.source) if model.load == "start" else None
                if folder is None or has_image_layout(folder) or speech_folder(folder) is not None:
                    continue
                trusted, files = model.trust_remote_code, _files(folder)
                loading = pool.submit(load_text_model, folder, name=model.name, trusted=trusted)
                self._early[str(folder)] = _Early(trusted, files, loading)
        pool.shutdown(wait=False)

    def load(self, folder: str, *, name: str = "", trusted: bool = False) -> TextModel:
        """As `load_text_model`."""
        early = self._early.pop(folder, None)
        with suppress(ModelLoadError, OSError):
            if early is not None and early.trusted == trusted and early.files == _files(Path(folder)):
                return early.loading.result()
        return load_text_model(folder, name=name, trusted=trusted)


def _files(folder: Path) -> set[tuple[str, int, int]]:
    """Returns what changes if a file of a folder is changed."""
    status = [(entry.name, entry.stat()) for entry in os.scandir(folder)]
    return {(name, found.st_mtime_ns, found.st_size) for name, found in status}
