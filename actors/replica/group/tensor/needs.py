"""What one share of a model needs, from the headers of its files. `cluster/config/stages.py` places shares by that."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .....cluster.config.config import Model
from .....cluster.config.stages import LayerNeeds, ModelNeeds, Stage, share
from .....cluster.errors import ModelLoadError
from ....model_files.source import first_sentence
from ...memory.replica_memory import workspace_of
from ..division.needs import TOKENS_MIN, Computed, computed, nbytes_of, open_headers
from ..division.opened import Opened
from .ranks import Ranks
from .sharding import shard

_ERRORS = (Exception, SystemExit)


def shares_of(model: Model, folder: Path, memory_bytes: Mapping[str, int], chunk_tokens: int) -> list[Stage]:
    """Returns the stages of a model of which each node has a share. Its weight files may be holes behind their headers.

    Args:
        memory_bytes: what it may use on each node, in the order of ranks.
        chunk_tokens: the most tokens of one prefill.

    Raises:
        NoRoom: it does not fit; the message has all sizes.
        ModelLoadError: it cannot be served, or not be divided into so many shares.
    """
    assert model.split is not None and model.split.tensor is not None
    count, source = model.split.tensor, model.source
    opened = open_headers(model, folder)
    tower_bytes = nbytes_of(opened.whole) - nbytes_of(opened.language)
    shard(opened.language, Ranks(0, count), opened.called)
    found = computed(model, opened)
    least = min(sorted(memory_bytes.values())[-count:], default=0)
    try:
        needs = _needs(opened, tower_bytes, found, least, chunk_tokens)
    except _ERRORS as error:
        raise ModelLoadError(f"{source} cannot be estimated: {first_sentence(error)}") from error
    return share(needs, len(opened.language.layers), memory_bytes, count)


def _needs(opened: Opened, tower_bytes: int, found: Computed, memory_bytes: int, chunk_tokens: int) -> ModelNeeds:
    """Returns what a share needs on a node that has `memory_bytes`, as a single layer. Nothing is computed.

    Args:
        opened: cut to the share.
        tower_bytes: of the encoder of pictures. Only the leader has it, but any of the nodes may become the leader.
    """
    weights, layers = nbytes_of(opened.language) + tower_bytes, found.spec.layers
    # The hidden states are whole on every node, so a prefill needs nearly as much as that of the whole model.
    room = max(0, memory_bytes - weights)
    workspace = workspace_of(opened.config, found.spec, found.context_tokens, found.dtype, chunk_tokens, room)
    layer = LayerNeeds(
        weights,
        sum(each.token_bytes for each in layers if not each.window),
        sum(each.sequence_bytes for each in layers),
    )
    return ModelNeeds([layer], workspace_bytes=workspace, tokens_min=min(TOKENS_MIN, found.context_tokens))
