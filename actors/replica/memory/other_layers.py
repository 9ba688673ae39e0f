"""KV of a process's layers that is on disk as KV of other ranges of the same model's layers: the model was divided in
another way when it was computed. It is cut out, joined, and written as this process's own; then it is read as any.

What only another node's disk has is pulled first, also if it is this process's own. Only for models whose layers have
one cache each. Of what a window or a state keeps the parts may have different amounts: what
is made has as much as all of them. So it is a snapshot only if each part of it with recurrent layers is one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ....cluster.config.config import Scheduling
from ....cluster.config.timing import Timing
from ....cluster.errors import SatchelError
from ...kv_store.disk.segment_reader import StoredEntry, read_entries
from ...kv_store.disk.segments import grouped
from ...model_files.identity.layer_ranges import LayerRange, Piece, ids_of_all, pieces_of
from ...model_files.identity.model_identity import ModelIdentity
from ...protocol.block_ids import BLOCK_TOKENS, block_ids, is_shared, root_id
from ...protocol.entries import ENTRIES_MAX, Entry, Failure, Location, pack_tokens, unpack_tokens
from ...protocol.store_client import StoreClient
from ...protocol.store_messages import FoundKV, PullKV
from ..execution.loaded_model import LoadedModel
from ..kv.caches import LayerKind, LayerSpec, ModelCacheSpec
from . import slab_codec
from .disk_tier import DiskTier, Prompt, WriterSession

logger = logging.getLogger(__name__)

Tier = TypeVar("Tier", bound=DiskTier)

KNOWN_S = 10.0
"""How long it is taken for true which models' KV a node's disk has."""

AGAIN_S = 60.0
"""How long a node that failed is not asked."""

TAILS_MAX = 4
"""How many tails of a range are looked at."""


class Joined(NamedTuple):
    """An entry's arrays, and how it can be used: the arguments `window_from` and `snapshot` of `Entry`."""

    parts: dict[str, np.ndarray]
    reusable: dict[str, Any]


class Remote(NamedTuple):
    """Another node's store, and the node's name."""

    node: str
    store: StoreClient


class OtherLayers:
    """Makes KV of a process's layers out of what nodes have. For threads that may block.

    Args:
        identity: of the process's layers.
        layers: the process's, out of `count`, with their `spec`.
        store: of the process's node.
        remotes: other nodes whose disks may have KV.
        pull_s: how long a pull may take.
    """

    def __init__(
        self,
        identity: ModelIdentity,
        layers: LayerRange,
        count: int,
        spec: ModelCacheSpec,
        store: StoreClient,
        remotes: Sequence[Remote] = (),
        pull_s: float = 20.0,
    ) -> None:
        self._model, self._layers, self._store, self._remotes = identity.model_id, layers, store, remotes
        self._spec = spec
        ids = ids_of_all(identity, count).items()
        self._ranges = {model: each for model, each in ids if each.start < layers.stop and layers.start < each.stop}
        self._pull_s = pull_s
        self._known: dict[str, tuple[float, list[bytes]]] = {}

    @classmethod
    def of(
        cls, loaded: LoadedModel, store: StoreClient, node: str, nodes: Sequence[str], timing: Timing
    ) -> OtherLayers | None:
        """Returns what makes KV of a loaded model's layers; None if KV of other layers cannot be joined to theirs.

        Args:
            store: of the process's node, `node`.
            nodes: all nodes whose disks may have KV.
        """
        if loaded.layers is None:
            return None
        layers, count = loaded.layers
        remotes = [Remote(name, StoreClient(name, timing)) for name in nodes if name != node]
        return cls(loaded.identity, layers, count, loaded.spec, store, remotes, timing.pull_s)

    def bring(self, prompt: Prompt, session: WriterSession) -> int:
        """Has as much as possible of a prompt's KV on this node's disk, as this process's own. Returns how many blocks
        were made.

        Raises:
            SatchelError: the node's store fails.
        """
        if not prompt.scope or not is_shared(prompt.scope) or len(prompt.tokens) < 2:
            return 0
        for remote in self._remotes:
            try:
                self._pull(remote, prompt)
            except SatchelError as error:
                logger.warning("request %s: %s gives no KV: %s", prompt.request_id, remote.node, error.message)
                self._known[remote.node] = time.monotonic() + AGAIN_S - KNOWN_S, []
        models = [model for model in self._on(self._store, "") if model != self._model]
        if not models:
            return 0
        with self._found({self._model, *models}, prompt) as found:
            return self._make(prompt, session, found)

    def _on(self, store: StoreClient, node: str) -> list[bytes]:
        """Returns the models on a node's disk that have KV of this process's layers."""
        since, models = self._known.get(node, (-KNOWN_S, []))
        if time.monotonic() - since > KNOWN_S:
            models = [model for model in store.kv_models("").wait() if model in self._ranges]
            self._known[node] = time.monotonic(), models
        return models

    def _chain(self, model: bytes, prompt: Prompt) -> tuple[bytes, list[bytes]]:
        """Returns a prompt's root and the ids of the blocks to look for, as `Prompt.wanted`, under a model."""
        root = root_id(model, prompt.scope)
        whole = (len(prompt.tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        return root, block_ids(root, prompt.tokens[:whole])

    def _pull(self, remote: Remote, prompt: Prompt) -> None:
        """Pulls what another node has and this one has not."""
        for model in self._on(remote.store, remote.node):
            with self._found({model}, prompt) as here, self._found({model}, prompt, remote.store) as there:
                known, more = here[model], there[model]
            if (len(more.blocks), _tail(more)) <= (len(known.blocks), _tail(known)):
                continue
            root, chain = self._chain(model, prompt)
            rest = list(prompt.tokens[len(more.blocks) * BLOCK_TOKENS : -1][:BLOCK_TOKENS])
            wanted = PullKV(
                remote.node, model, root, chain[: len(more.blocks)], rest, prompt.owner, self._pull_s, wait_s=0.0
            )
            self._store.pull(wanted).wait()
            self._known.pop("", None)

    @contextmanager
    def _found(
        self, models: set[bytes], prompt: Prompt, store: StoreClient | None = None
    ) -> Iterator[Mapping[bytes, FoundKV]]:
        """A context in which a node's store keeps the files of what it has of a prompt, by model."""
        asked, found = store or self._store, dict[bytes, FoundKV]()
        try:
            for model in models:
                root, chain = self._chain(model, prompt)
                there = asked.disk_find(model, chain, root, pack_tokens(prompt.tokens[:-1]), TAILS_MAX).wait()
                found[model] = FoundKV([], [], "") if there is None else there
            yield found
        finally:
            for each in found.values():
                if each.lease:
                    asked.disk_read(each.lease, [], prompt.owner).wait()

    def _make(self, prompt: Prompt, session: WriterSession, found: Mapping[bytes, FoundKV]) -> int:
        own = found[self._model]
        have = len(own.blocks)
        by_range = {self._ranges[model]: each for model, each in found.items()}
        count, pieces = pieces_of(self._layers, {layers: len(each.blocks) for layers, each in by_range.items()})
        _, chain = self._chain(self._model, prompt)
        root = root_id(self._model, prompt.scope)
        made: list[Entry] = []
        for start in range(have, count, ENTRIES_MAX):
            stop = min(count, start + ENTRIES_MAX)
            rows = [[by_range[piece.source].blocks[number] for piece in pieces] for number in range(start, stop)]
            joined = self._joined(session, pieces, rows)
            for number, (parts, reusable) in enumerate(joined, start):
                tokens = prompt.tokens[number * BLOCK_TOKENS : (number + 1) * BLOCK_TOKENS]
                parent = chain[number - 1] if number else root
                made.append(Entry(chain[number], parent, tokens, parts, owners=(prompt.owner,), **reusable))
            self._write(session, made)
            made = []
            if len(joined) < stop - start:
                return start + len(joined) - have
        if count >= have and (tail := self._tail(prompt, session, by_range, count)) is not None:
            parent = chain[count - 1] if count else root
            tokens, (parts, reusable) = tail
            self._write(session, [Entry.of_tail(parent, tokens, parts, owners=(prompt.owner,), **reusable)])
        self._store.disk_touch(self._model, chain[:count], prompt.owner).wait()
        return max(0, count - have)

    def _tail(
        self, prompt: Prompt, session: WriterSession, by_range: Mapping[LayerRange, FoundKV], blocks: int
    ) -> tuple[Sequence[int], Joined] | None:
        """Returns the longest tail after so many blocks that can be made and is not there, and its tokens."""
        tails: dict[bytes, dict[LayerRange, Location]] = {}
        for layers, each in by_range.items():
            for tail in each.tails if len(each.blocks) == blocks else []:
                tails.setdefault(tail.location.tokens, {})[layers] = tail.location
        rest = pack_tokens(prompt.tokens[blocks * BLOCK_TOKENS :])
        for tokens in sorted(tails, key=lambda tokens: (-_common(tokens, rest), len(tokens))):
            where = tails[tokens]
            if self._layers in where:
                return None
            complete, pieces = pieces_of(self._layers, dict.fromkeys(where, 1))
            if complete and (parts := self._joined(session, pieces, [[where[piece.source] for piece in pieces]])):
                return unpack_tokens(tokens), parts[0]
        return None

    def _joined(
        self, session: WriterSession, pieces: Sequence[Piece], rows: Sequence[Sequence[Location]]
    ) -> list[Joined]:
        """Reads entries, one of each piece's range in a row, and joins their layers; up to the first that fails."""
        made: list[Joined] = []
        columns = [read_entries(session.root, session.key, list(column)) for column in zip(*rows, strict=True)]
        for row in zip(*columns, strict=True):
            found: list[tuple[Piece, StoredEntry]] = []
            for piece, stored in zip(pieces, row, strict=True):
                if isinstance(stored, Failure):
                    return made
                found.append((piece, stored))
            if (joined := self._join(found)) is None:
                return made
            made.append(joined)
        return made

    def _join(self, found: Sequence[tuple[Piece, StoredEntry]]) -> Joined | None:
        """Returns what pieces' entries of the same tokens are together; None if a layer is missing."""
        parts: dict[int, dict[str, np.ndarray]] = {}
        for piece, stored in found:
            for name, array in _cut(stored, piece, self._layers).items():
                parts.setdefault(int(name.partition(".")[0]), {})[name] = array

        def of(wanted: Callable[[LayerSpec], bool]) -> list[Location]:
            """The entries of which such layers are taken."""
            first = self._layers.start
            return [
                stored.location
                for piece, stored in found
                if any(map(wanted, self._spec.layers[piece.layers.start - first : piece.layers.stop - first]))
            ]

        window_from = max((each.window_from for each in of(lambda layer: bool(layer.window))), default=0)
        recurrent = of(lambda layer: layer.kind is LayerKind.RECURRENT)
        snapshot = bool(recurrent) and all(each.snapshot for each in recurrent)
        made, states = dict[str, np.ndarray](), dict[str, np.ndarray]()
        for number, layer in enumerate(self._spec.layers):
            own = parts.get(number, {})
            if layer.kind is LayerKind.RECURRENT:
                states |= own if snapshot else {}
                continue
            tokens = len(unpack_tokens(found[0][1].location.tokens))
            if layer.window and window_from:
                own = _behind(own, tokens - window_from)
            elif not own:
                return None
            made |= own
        return Joined(slab_codec.completed(made | states), {"window_from": window_from, "snapshot": snapshot})

    def _write(self, session: WriterSession, entries: Sequence[Entry]) -> None:
        for group in grouped(entries):
            self._store.disk_commit(session.write(self._model, group)).wait()


def disk_tier_of(
    loaded: LoadedModel,
    node: str,
    nodes: Sequence[str],
    scheduling: Scheduling,
    timing: Timing,
    kind: type[Tier] = DiskTier,
) -> Tier:
    """Returns what writes and reads a loaded model's KV, and makes KV of its layers out of that of others.

    Args:
        node: the process's.
        nodes: as for `OtherLayers.of`.
    """
    store = StoreClient(node, timing)
    disk = kind(loaded.spec, loaded.model_id, store, scheduling.unwritten_bytes_max, timing)
    disk.others = OtherLayers.of(loaded, store, node, nodes, timing)
    return disk


def _cut(stored: StoredEntry, piece: Piece, own: LayerRange) -> dict[str, np.ndarray]:
    """Returns the arrays of a piece's layers, under the numbers that they have in `own`."""
    parts: dict[str, np.ndarray] = {}
    for name, array in stored.parts.items():
        number, _, kind = name.partition(".")
        if number.isdecimal() and piece.layers.start <= (layer := piece.source.start + int(number)) < piece.layers.stop:
            parts[f"{layer - own.start}.{kind}"] = array
    return parts


def _behind(arrays: Mapping[str, np.ndarray], tokens: int) -> dict[str, np.ndarray]:
    """Returns a window layer's arrays, `(1, heads, tokens, dim)`, for the last `tokens` tokens of an entry. A sealed
    block is there for all tokens or for none."""
    return {name: array[:, :, -tokens:] for name, array in arrays.items()} if tokens > 0 else {}


def _tail(found: FoundKV) -> int:
    return max((tail.tokens for tail in found.tails), default=0)


def _common(one: bytes, other: bytes) -> int:
    """Returns how many leading tokens two packed lists share."""
    few = min(len(one), len(other)) // 4
    differ = np.frombuffer(one, "<u4", few) != np.frombuffer(other, "<u4", few)
    return int(differ.argmax()) if differ.any() else few
