"""The identity of a model: the one place that makes model ids. `replica/loading/model_id.py` says of what.

`_MODEL_TAG` is raised whenever Satchel itself computes differently. KV under an old id is never found again, and is
evicted as least recently used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...protocol.block_ids import digest

_FILES_TAG = b"satchel.files.1"
_MODEL_TAG = b"satchel.model.3"
_ADAPTER_TAG = b"satchel.adapter.1"
_ADAPTED_TAG = b"satchel.adapted.1"
"""Raised whenever Satchel computes adapters by request differently."""


@dataclass(frozen=True)
class ModelIdentity:
    """A model's files, and how this machine computes with them.

    Attributes:
        files: SHA-256 in hexadecimal, by `model/NAME`, and `adapter/NAME` for an adapter's.
        computing: settings by name.
    """

    files: Mapping[str, str]
    computing: Mapping[str, str]

    @property
    def files_id(self) -> bytes:
        """32 bytes that identify the model's files. Token ids mean the same if they are equal."""
        return digest(_FILES_TAG, *_flat(self.files))

    @property
    def model_id(self) -> bytes:
        """32 bytes that identify everything a block's content depends on besides its tokens. Nodes with equal ids may
        exchange blocks."""
        return digest(_MODEL_TAG, self.files_id, *_flat(self.computing))


def adapter_digest(files: Mapping[str, str]) -> bytes:
    """Returns 32 bytes that identify an adapter by request.

    Args:
        files: SHA-256 in hexadecimal, by the files' names.
    """
    return digest(_ADAPTER_TAG, *_flat(files))


def adapted_id(model_id: bytes, adapter: bytes) -> bytes:
    """Returns the model id of a model with an adapter by request. Files ids stay those of the model: an adapter changes
    no token id.

    Args:
        model_id: the model's own, or b"" if it is not known, which stays so.
        adapter: as `adapter_digest`; b"" for none.
    """
    return digest(_ADAPTED_TAG, model_id, adapter) if model_id and adapter else model_id


def _flat(parts: Mapping[str, str]) -> list[bytes]:
    return [text.encode() for part in sorted(parts.items()) for text in part]
