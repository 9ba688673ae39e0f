"""KV of a process's part of a model that is on disk as KV of other parts: the model was divided in another way when it
was computed. It is cut out, joined, and written as this process's own; then it is read as any.

What only another node's disk has is pulled first, also if it is this process's own. Only for models whose layers have
one cache each. Every head is sealed by itself, so a share's block is a cut through the whole one, to the bit. What a
share computes differs by rounding from what the whole model computes, so KV of another number of shares is as near to
this process's own as that. States of recurrent layers are not cut into shares, nor joined of them.

Of what a window or a state keeps the parts may have different amounts: what is made has as much as all of them. So it
is a snapshot only if each part of it with recurrent layers is one.
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
from ....cluster.errors import SatchelError, Unavailable
from ...kv_store.disk.segment_reader import StoredEntry, read_entries
from ...kv_store.disk.segments import grouped
from ...model_files.identity.model_identity import ModelIdentity
from ...model_files.identity.model_parts import ModelPart, Piece, ids_of_all, pieces_of
from ...protocol.block_ids import BLOCK_TOKENS, block_ids, is_shared, root_id
from ...protocol.clients import RouterClient
from ...protocol.entries import ENTRIES_MAX, Entry, Failure, Location, pack_tokens, unpack_tokens
from ...protocol.store_client import StoreClient
from ...protocol.store_messages import FoundKV, PullKV
from ...rpc.local_threads import NearActorOfThreads
from ..execution.loaded_model import LoadedModel
from ..kv.caches import LayerKind, LayerSpec, ModelCacheSpec
from . import slab_codec
from .disk_tier import DiskTier, Prompt, WriterSession

logger = logging.getLogger(__name__)

Tier = TypeVar("Tier", bound=DiskTier)

KNOWN_S = 10.0
"""How long it is taken for true which models' KV a node's disk has."""

AGAIN_S = 60.0
"""How long a node or a router that failed is not asked."""

TAILS_MAX = 16
"""How many tails of a part are looked at."""


class Joined(NamedTuple):
    """An entry's arrays, and how it can be used: the arguments `window_from` and `snapshot` of `Entry`."""

    parts: dict[str, np.ndarray]
    reusable: dict[str, Any]


class Remote(NamedTuple):
    """Another node's store, and the node's name."""

    node: str
    store: StoreClient


class OtherParts:
    """Makes KV of a process's part of a model out of what nodes have. For threads that may block.

    Args:
        identity: of the process's part.
        part: the process's, of a model with `count` layers, with its `spec`.
        store: of the process's node.
        remotes: other nodes whose disks may have KV. If that is a function, it is called only if this node's disk has
            KV of other parts, and of the process's own part nothing is pulled: the router says from where that comes.
        pull_s: how long a pull may take.
    """

    def __init__(
        self,
        identity: ModelIdentity,
        part: ModelPart,
        count: int,
        spec: ModelCacheSpec,
        store: StoreClient,
        remotes: Sequence[Remote] | Callable[[], Sequence[Remote]] = (),
        pull_s: float = 20.0,
    ) -> None:
        self._model, self._part, self._store, self._remotes = identity.model_id, part, store, remotes
        self._spec = spec
        ids = {**ids_of_all(identity, count), identity.model_id: part}
        self._parts = {model: each for model, each in ids.items() if each.meets(part)}
        if spec.recurrent:
            self._parts = {model: each for model, each in self._parts.items() if each.heads == part.heads}
        self._pull_s = pull_s
        self._known: dict[str, tuple[float, list[bytes]]] = {}
        self._found_remotes: tuple[float, Sequence[Remote]] = (0.0, ())

    @classmethod
    def of(
        cls, loaded: LoadedModel, store: StoreClient, node: str, nodes: Sequence[str] | None, timing: Timing
    ) -> OtherParts | None:
        """Returns what makes KV of a loaded model's part; None if KV of other parts cannot be joined to its own.

        Args:
            store: of the process's node, `node`.
            nodes: all nodes whose disks may have KV; None for all that are there.
        """
        if loaded.part is None:
            return None

        def remotes(names: Sequence[str]) -> list[Remote]:
            return [Remote(name, StoreClient(name, timing)) for name in names if name != node]

        def found() -> list[Remote]:
            reports = RouterClient(timing).nodes().within(timing.brief_answer_s).wait()
            return remotes([each.name for each in reports if each.alive])

        known = found if nodes is None else remotes(nodes)
        return cls(loaded.identity, *loaded.part, loaded.spec, store, known, timing.pull_s)

    def bring(self, prompt: Prompt, session: WriterSession) -> int:
        """Has as much as possible of a prompt's KV on this node's disk, as this process's own, and as its agent's: of a
        prompt of no agent nothing is kept. Returns how many blocks were made.

        Raises:
            SatchelError: the node's store fails.
        """
        if not prompt.owner or not prompt.scope or not is_shared(prompt.scope) or len(prompt.tokens) < 2:
            return 0
        ends = time.monotonic() + self._pull_s
        for remote in self._elsewhere():
            try:
                self._pull(remote, prompt, ends)
            except SatchelError as error:
                logger.warning("request %s: %s gives no KV: %s", prompt.request_id, remote.node, error.message)
                self._known[remote.node] = time.monotonic() + AGAIN_S - KNOWN_S, []
        models = [model for model in self._on(self._store, "") if model != self._model]
        if not models:
            return 0
        with self._found({self._model, *models}, prompt) as found:
            return self._make(prompt, session, found)

    def _elsewhere(self) -> Sequence[Remote]:
        """Returns the other nodes whose disks may have KV."""
        if not callable(self._remotes):
            return self._remotes
        if not {*self._on(self._store, "")} - {self._model}:
            return ()
        until, remotes = self._found_remotes
        if time.monotonic() >= until:
            try:
                remotes, known_s = self._remotes(), KNOWN_S
            except SatchelError as error:
                logger.warning("no KV comes from other nodes: %s", error.message)
                remotes, known_s = (), AGAIN_S
            self._found_remotes = time.monotonic() + known_s, remotes
        return remotes

    def _on(self, store: StoreClient, node: str) -> list[bytes]:
        """Returns the models on a node's disk that have KV of this process's part."""
        since, models = self._known.get(node, (-KNOWN_S, []))
        if time.monotonic() - since > KNOWN_S:
            models = [model for model in store.kv_models("").wait() if model in self._parts]
            self._known[node] = time.monotonic(), models
        return models

    def _chain(self, model: bytes, prompt: Prompt) -> tuple[bytes, list[bytes]]:
        """Returns a prompt's root and the ids of the blocks to look for, as `Prompt.wanted`, under a model."""
        root = root_id(model, prompt.scope)
        whole = (len(prompt.tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        return root, block_ids(root, prompt.tokens[:whole])

    def _pull(self, remote: Remote, prompt: Prompt, ends: float) -> None:
        """Pulls what another node has and this one has not.

        Args:
            ends: when it must be done, by the monotonic clock.

        Raises:
            Unavailable: nothing came.
        """
        skipped = {self._model} if callable(self._remotes) else set[bytes]()
        for model in {*self._on(remote.store, remote.node)} - skipped:
            with self._found({model}, prompt) as here, self._found({model}, prompt, remote.store) as there:
                known, more = here[model], there[model]
            left_s = ends - time.monotonic()
            if _reach(more, prompt) <= _reach(known, prompt) or left_s <= 0:
                continue
            root, chain = self._chain(model, prompt)
            rest = list(prompt.tokens[len(more.blocks) * BLOCK_TOKENS : -1][:BLOCK_TOKENS])
            blocks, limits = chain[: len(more.blocks)], dict(prompt.limits)
            wanted = PullKV(remote.node, model, root, blocks, rest, prompt.owner, left_s, limits, wait_s=0.0)
            came = self._store.pull(wanted).wait()
            if not came.nbytes and not came.complete:
                raise Unavailable("a pull brought nothing")
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
        by_part = {self._parts[model]: each for model, each in found.items()}
        count, pieces = pieces_of(self._part, {part: len(each.blocks) for part, each in by_part.items()})
        _, chain = self._chain(self._model, prompt)
        root = root_id(self._model, prompt.scope)
        made: list[Entry] = []
        for start in range(have, count, ENTRIES_MAX):
            stop = min(count, start + ENTRIES_MAX)
            blocks = [
                {part: each.blocks[number] for part, each in by_part.items() if number < len(each.blocks)}
                for number in range(start, stop)
            ]
            joined = self._joined(session, pieces, blocks)
            for number, (parts, reusable) in enumerate(joined, start):
                tokens = prompt.tokens[number * BLOCK_TOKENS : (number + 1) * BLOCK_TOKENS]
                parent = chain[number - 1] if number else root
                made.append(Entry(chain[number], parent, tokens, parts, owners=(prompt.owner,), **reusable))
            self._write(session, prompt, made)
            made = []
            if len(joined) < stop - start:
                return start + len(joined) - have
        if count >= have and (tail := self._tail(prompt, session, by_part, count)) is not None:
            parent = chain[count - 1] if count else root
            tokens, (parts, reusable) = tail
            entry = Entry.of_tail(parent, tokens, parts, owners=(prompt.owner,), **reusable)
            self._write(session, prompt, [entry])
        self._store.disk_touch(self._model, chain[:count], prompt.owner).wait()
        return max(0, count - have)

    def _tail(
        self, prompt: Prompt, session: WriterSession, by_part: Mapping[ModelPart, FoundKV], blocks: int
    ) -> tuple[Sequence[int], Joined] | None:
        """Returns the longest tail after so many blocks that can be made and is not there, and its tokens. All of them
        are the prompt's: others would be kept as its agent's."""
        tails: dict[bytes, dict[ModelPart, Location]] = {}
        for part, each in by_part.items():
            for tail in each.tails if len(each.blocks) == blocks else []:
                tails.setdefault(tail.location.tokens, {})[part] = tail.location
        rest = pack_tokens(prompt.tokens[blocks * BLOCK_TOKENS : -1])
        for tokens in sorted(filter(rest.startswith, tails), key=len, reverse=True):
            where = tails[tokens]
            if self._part in where:
                return None
            complete, pieces = pieces_of(self._part, dict.fromkeys(where, 1))
            if complete and (parts := self._joined(session, pieces, [where])):
                return unpack_tokens(tokens), parts[0]
        return None

    def _joined(
        self, session: WriterSession, pieces: Sequence[Piece], rows: Sequence[Mapping[ModelPart, Location]]
    ) -> list[Joined]:
        """Reads entries, in each row of the same tokens by part, and joins pieces of them; up to the first that
        fails."""
        made: list[Joined] = []
        sources = list(dict.fromkeys(piece.source for piece in pieces))
        columns = [read_entries(session.root, session.key, [row[source] for row in rows]) for source in sources]
        for row in zip(*columns, strict=True):
            found: dict[ModelPart, StoredEntry] = {}
            for source, stored in zip(sources, row, strict=True):
                if isinstance(stored, Failure):
                    return made
                found[source] = stored
            if (joined := self._join(pieces, found)) is None:
                return made
            made.append(joined)
        return made

    def _join(self, pieces: Sequence[Piece], found: Mapping[ModelPart, StoredEntry]) -> Joined | None:
        """Returns what pieces of entries of the same tokens are together; None if a layer is missing, or if heads are
        not those of the part."""

        def of(wanted: Callable[[LayerSpec], bool]) -> list[Location]:
            """The entries of which such layers are taken."""
            first = self._part.start
            return [
                found[piece.source].location
                for piece in pieces
                if any(map(wanted, self._spec.layers[piece.layers.start - first : piece.layers.stop - first]))
            ]

        window_from = max((each.window_from for each in of(lambda layer: bool(layer.window))), default=0)
        recurrent = of(lambda layer: layer.kind is LayerKind.RECURRENT)
        snapshot = bool(recurrent) and all(each.snapshot for each in recurrent)
        if (parts := self._arrays(pieces, found, window_from)) is None:
            return None
        made, states = dict[str, np.ndarray](), dict[str, np.ndarray]()
        for number, layer in enumerate(self._spec.layers):
            own = parts.get(number, {})
            if layer.kind is LayerKind.RECURRENT:
                states |= own if snapshot else {}
                continue
            if not own and not (layer.window and window_from):
                return None
            if own and not _fits(own, layer):
                return None
            made |= own
        return Joined(slab_codec.completed(made | states), {"window_from": window_from, "snapshot": snapshot})

    def _arrays(
        self, pieces: Sequence[Piece], found: Mapping[ModelPart, StoredEntry], window_from: int
    ) -> dict[int, dict[str, np.ndarray]] | None:
        """Returns the arrays of each layer by name, put together of the pieces' heads. Window layers lack the first
        `window_from` tokens. None if a layer's heads are not divided equally."""
        heads: dict[int, dict[str, list[np.ndarray]]] = {}
        for piece in pieces:
            stored = found[piece.source]
            kept = len(unpack_tokens(stored.location.tokens)) - window_from
            for layer, kind, array in _cut(stored, piece, self._part):
                spec = self._spec.layers[layer]
                own: np.ndarray | None = array
                if piece.source.heads != self._part.heads:
                    own = _heads(array, piece, self._part, spec.heads)
                if own is None:
                    return None
                if spec.window and window_from:
                    if not kept:
                        continue
                    # A sealed block is there for all tokens or for none.
                    own = own[:, :, -kept:]
                heads.setdefault(layer, {}).setdefault(f"{layer}.{kind}", []).append(own)
        return {layer: {name: _side_by_side(each) for name, each in arrays.items()} for layer, arrays in heads.items()}

    def _write(self, session: WriterSession, prompt: Prompt, entries: Sequence[Entry]) -> None:
        for group in grouped(entries):
            self._store.disk_commit(session.write(self._model, group), prompt.limits).wait()


def disk_tier_of(
    loaded: LoadedModel,
    node: str,
    nodes: Sequence[str] | None,
    scheduling: Scheduling,
    timing: Timing,
    kind: type[Tier] = DiskTier,
) -> Tier:
    """Returns what writes and reads a loaded model's KV, and makes KV of its part out of that of others.

    Args:
        node: the process's.
        nodes: as for `OtherParts.of`.
    """
    store = StoreClient(node, timing, kind=NearActorOfThreads)
    disk = kind(loaded.spec, loaded.model_id, store, scheduling.unwritten_bytes_max, timing)
    disk.others = OtherParts.of(loaded, store, node, nodes, timing)
    return disk


def _cut(stored: StoredEntry, piece: Piece, own: ModelPart) -> Iterator[tuple[int, str, np.ndarray]]:
    """Yields the arrays of a piece's layers: the layer's number in `own`, its kind, and all heads that are there."""
    for name, array in stored.parts.items():
        number, _, kind = name.partition(".")
        if number.isdecimal() and piece.layers.start <= (layer := piece.source.start + int(number)) < piece.layers.stop:
            yield layer - own.start, kind, array


def _heads(array: np.ndarray, piece: Piece, own: ModelPart, heads: int) -> np.ndarray | None:
    """Returns a piece's heads of an array of KV, `(1, heads, ...)`; None if they are no whole heads.

    Args:
        heads: how many the layer has in `own`.
    """
    there, source = array.shape[1], piece.source
    if there * source.shares != heads * own.shares:
        # Every share has all heads, such as the one of latent attention: they are taken once.
        once = array if piece.heads.start == own.heads.start else array[:, :0]
        return once if there == heads else None
    start, stop = ((end - source.heads.start) * heads * own.shares for end in piece.heads)
    whole = start.denominator == stop.denominator == 1
    return array[:, int(start) : int(stop)] if whole else None


def _fits(arrays: Mapping[str, np.ndarray], layer: LayerSpec) -> bool:
    """Whether a layer's arrays have as many bytes as its spec says, so that heads of other lengths are refused."""
    is_open = [array for name, array in arrays.items() if name.endswith(".keys")]
    tokens = is_open[0].shape[2] if is_open else BLOCK_TOKENS
    token_bytes = layer.open_bytes // BLOCK_TOKENS if is_open and layer.sealed else layer.token_bytes
    return -(-sum(array.nbytes for array in arrays.values()) // tokens) == token_bytes


def _side_by_side(heads: Sequence[np.ndarray]) -> np.ndarray:
    """Returns arrays of KV, each `(1, heads, ...)`, as one."""
    return heads[0] if len(heads) == 1 else np.concatenate(heads, axis=1)


def _reach(found: FoundKV, prompt: Prompt) -> tuple[int, int]:
    """Returns of how many blocks, and of how many tokens after them, a node has a prompt's KV. Of a tail that differs
    from the prompt nothing is pulled."""
    rest = pack_tokens(prompt.tokens[len(found.blocks) * BLOCK_TOKENS : -1])
    tails = [tail.location.tokens for tail in found.tails]
    return len(found.blocks), max((len(tokens) // 4 for tokens in tails if rest.startswith(tokens)), default=0)
