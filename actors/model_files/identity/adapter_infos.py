"""A model with one of its adapters, described as a model of its own."""

from __future__ import annotations

from dataclasses import replace

from ...protocol.replica_messages import AdapterInfo, EmbeddingInfo, ModelInfo
from .model_identity import adapted_id

NOT_EMBEDDED = "adapters by request do not embed texts; use the model without one, or one with `adapter`"


def with_adapter(info: ModelInfo, adapter: AdapterInfo) -> ModelInfo:
    """Returns the description of a model with one of its adapters. Its files id stays the model's: token ids, and with
    them what agents have said, mean the same."""
    return replace(
        info,
        name=adapter.name,
        parent=info.name,
        adapter=adapter.digest,
        adapters=[],
        model_id=adapted_id(info.model_id, adapter.digest),
        files=info.files | {f"adapter/{name}": digest for name, digest in adapter.files.items()},
        embedding=EmbeddingInfo(refusal=NOT_EMBEDDED),
    )


def all_files(info: ModelInfo) -> dict[str, str]:
    """Returns the digests of a model's files and of its adapters' files, by name."""
    more = {
        f"adapters/{adapter.name}/{name}": digest for adapter in info.adapters for name, digest in adapter.files.items()
    }
    return info.files | more
