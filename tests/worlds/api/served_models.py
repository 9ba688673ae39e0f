"""Models as an endpoint serves them."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from satchel.api.requests.backend import ServedModel
from tests.worlds.direct import model_info

_ID = b"4" * 32
_SIZES: dict[str, Any] = {"context_tokens": 1000, "vocabulary_size": 512, "created": 1_700_000_000, "layers": ""}
_TINY = ServedModel(model_info(name="satchel/tiny", folder="", model_id=_ID, files_id=_ID, **_SIZES))
_OWN = {field.name for field in fields(ServedModel)}


def served_model(like: ServedModel = _TINY, /, folder: Path | str | None = None, **said: Any) -> ServedModel:
    """Returns a model with the fields `said`, of `ServedModel` or of its `info`; the other fields are those of
    `like`."""
    if folder is not None:
        said["folder"] = str(folder)
    own = {name: said.pop(name) for name in _OWN & said.keys()}
    return replace(like, info=replace(like.info, **said), **own)
