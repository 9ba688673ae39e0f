"""KV of other parts of a model is cut and joined to what the part itself would have written, to the bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from satchel.actors.kv_store.disk.segment_reader import StoredEntry, read_entries
from satchel.actors.kv_store.disk.segments import grouped
from satchel.actors.model_files.identity.model_identity import ModelIdentity
from satchel.actors.model_files.identity.model_parts import ModelPart, identity_of
from satchel.actors.protocol.block_ids import BLOCK_TOKENS, block_ids, root_id
from satchel.actors.protocol.entries import Entry, pack_tokens, unpack_tokens
from satchel.actors.protocol.store_messages import Fetched
from satchel.actors.replica.kernels.sealing import POLICIES, SealPolicy, seal
from satchel.actors.replica.kv.caches import LayerKV, ModelCacheSpec, Slab, read_spec
from satchel.actors.replica.memory import slab_codec
from satchel.actors.replica.memory.disk_tier import DiskTier, Prompt
from satchel.actors.replica.memory.other_parts import OtherParts, Remote
from satchel.cluster.errors import NoAnswer
from tests.worlds.replica import bench_disk
from tests.worlds.replica.bench_disk import Node

HEADS, DIM, VALUE_DIM = 12, 32, 48
WINDOW = 300
COUNT = 4
AGENT, SCOPE = "default/alice", "t/default"
WHOLE = ModelIdentity({"model/a": "1"}, {"dtype": "float16"})
BLOCKS, TAIL = 2, 20
TOKENS = [*range(BLOCKS * BLOCK_TOKENS + TAIL)]
ALL = ModelPart(0, COUNT)


def shares(count: int) -> list[ModelPart]:
    return [ModelPart(0, COUNT, share, count) for share in range(count)]


def stages(*cuts: int) -> list[ModelPart]:
    ends = [0, *cuts, COUNT]
    return [ModelPart(start, stop) for start, stop in pairwise(ends)]


class Kind:
    """The KV of a model: every other layer has a window.

    Args:
        policy: how it is sealed; None if it is not.
        latent: whether each layer has one head, which every share has.
        recurrent: whether its first layer has a state instead.
    """

    def __init__(self, policy: str | None = "q4", *, latent: bool = False, recurrent: bool = False) -> None:
        self.policy: SealPolicy | None = None if policy is None else POLICIES[policy]
        self._latent, self._recurrent = latent, recurrent

    def _kv(self, part: ModelPart, layer: int, start: int, count: int) -> tuple[mx.array, mx.array]:
        """A part's keys and values of some tokens in a layer."""
        key = mx.random.key(1000 * layer + start)
        sizes = [(1, 1 if self._latent else HEADS, count, dim) for dim in (DIM, VALUE_DIM)]
        keys = mx.random.split(key)
        found = [mx.random.normal(size, key=keys[place]).astype(mx.float16) for place, size in enumerate(sizes)]
        if not self._latent:
            start, stop = (int(end * HEADS) for end in part.heads)
            found = [array[:, start:stop] for array in found]
        return found[0], found[1]

    def spec(self, part: ModelPart) -> ModelCacheSpec:
        """As read from the caches of a process that has the part."""
        caches: list[Any] = []
        for layer in range(part.start, part.stop):
            if self._recurrent and not layer:
                caches.append(ArraysCache(1))
                caches[-1][0] = mx.zeros((1, 8))
                continue
            caches.append(RotatingKVCache(max_size=WINDOW) if layer % 2 else KVCache())
            caches[-1].update_and_fetch(*self._kv(part, layer, 0, 2))
        return read_spec(caches, 2, self.policy)

    def slab(self, part: ModelPart, start: int, count: int, window_from: int = 0) -> Slab:
        """Tokens of the prompt as a process that has the part keeps them."""
        layers: list[LayerKV | None] = []
        for layer in range(part.start, part.stop):
            if self._recurrent and not layer:
                layers.append(None)
                continue
            keys, values = self._kv(part, layer, start, count)
            if count == BLOCK_TOKENS and self.policy is not None:
                layers.append(seal(keys, values, self.policy))
                continue
            lacks = window_from if layer % 2 else 0
            layers.append((keys[:, :, lacks:], values[:, :, lacks:]))
        states = [[mx.full((1, 8), start)]] if self._recurrent and not part.start else None
        slab = Slab(layers, count, window_from, states)
        mx.eval(slab.arrays())
        return slab

    def write(self, node: Node, part: ModelPart, lacks: int = 0) -> None:
        """Writes a part's KV of the prompt, in whose tail windows lack so many tokens."""
        disk = DiskTier(self.spec(part), model_of(part), node.client)
        session = disk._opened()
        assert session is not None
        root = root_id(model_of(part), SCOPE)
        chain = [root, *block_ids(root, TOKENS[: BLOCKS * BLOCK_TOKENS])]
        entries = []
        for number in range(BLOCKS + 1):
            tokens = TOKENS[number * BLOCK_TOKENS : (number + 1) * BLOCK_TOKENS]
            window_from = lacks if number == BLOCKS else 0
            slab = self.slab(part, number * BLOCK_TOKENS, len(tokens), window_from)
            how: dict[str, Any] = {
                "owners": (AGENT,),
                "window_from": window_from,
                "snapshot": slab.states is not None,
            }
            parts = slab_codec.to_parts(self.spec(part), slab)
            if number == BLOCKS:
                entries.append(Entry.of_tail(chain[number], tokens, parts, **how))
            else:
                entries.append(Entry(chain[number + 1], chain[number], tokens, parts, **how))
        for group in grouped(entries):
            node.client.disk_commit(session.write(model_of(part), group)).wait()

    def bring(self, node: Node, part: ModelPart, remotes: Any = ()) -> int:
        """Makes a part's KV of a longer prompt out of what is there. Returns how many blocks were made."""
        spec = self.spec(part)
        disk = DiskTier(spec, model_of(part), node.client)
        others = OtherParts(identity_of(WHOLE, part, COUNT), part, COUNT, spec, node.client, remotes)
        session = disk._opened()
        assert session is not None
        return others.bring(Prompt("r", AGENT, b"", [], [*TOKENS, 7, 8], SCOPE), session)

    def expected(self, part: ModelPart, lacks: int = 0) -> list[dict[str, np.ndarray]]:
        slabs = [self.slab(part, number * BLOCK_TOKENS, BLOCK_TOKENS) for number in range(BLOCKS)]
        slabs.append(self.slab(part, BLOCKS * BLOCK_TOKENS, TAIL, lacks))
        return [slab_codec.to_parts(self.spec(part), slab) for slab in slabs]


def model_of(part: ModelPart) -> bytes:
    return identity_of(WHOLE, part, COUNT).model_id


def read(node: Node, part: ModelPart) -> list[StoredEntry]:
    """The blocks and the tail of the prompt that a node has as a part's own."""
    model = model_of(part)
    root = root_id(model, SCOPE)
    chain = block_ids(root, TOKENS[: BLOCKS * BLOCK_TOKENS])
    found = node.client.disk_find(model, chain, root, pack_tokens([*TOKENS, 7]), 2).wait()
    session = DiskTier(Kind().spec(part), model, node.client)._opened()
    if found is None:
        return []
    assert session is not None
    entries = read_entries(session.root, session.key, [*found.blocks, *(tail.location for tail in found.tails)])
    node.client.disk_read(found.lease, [], AGENT).wait()
    kept = [entry for entry in entries if isinstance(entry, StoredEntry)]
    assert len(kept) == len(entries)
    return kept


def equal(found: Sequence[StoredEntry], expected: Sequence[Mapping[str, np.ndarray]]) -> None:
    assert len(found) == len(expected)
    for stored, arrays in zip(found, expected, strict=True):
        assert [*stored.parts] == [*arrays]
        for name, array in arrays.items():
            assert stored.parts[name].shape == array.shape and stored.parts[name].tobytes() == array.tobytes(), name


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    found = [Node(tmp_path / name) for name in ("here", "there")]
    for node in found:
        node.sources.update({str(place): other for place, other in enumerate(found)})
    yield found
    for node in found:
        node.store.check()
        node.store.close()


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("policy", [*POLICIES])
@pytest.mark.parametrize("value_dim", [64, 80])
def test_heads_that_are_sealed_alone_are_a_cut_through_the_sealed_whole(policy: str, dtype: mx.Dtype, value_dim: int):
    keys, values = (mx.random.normal((1, 4, 512, dim), key=mx.random.key(dim)).astype(dtype) for dim in (64, value_dim))
    whole = seal(keys, values, POLICIES[policy])
    for head in range(4):
        alone = seal(keys[:, head : head + 1], values[:, head : head + 1], POLICIES[policy])
        for one, other in zip(alone, whole, strict=True):
            assert mx.array_equal(one.view(mx.uint8), other[:, head : head + 1].view(mx.uint8))


DIVISIONS = {
    "whole to shares": ([ALL], shares(2)),
    "shares to whole": (shares(2), [ALL]),
    "2 to 4": (shares(2), shares(4)),
    "4 to 2": (shares(4), shares(2)),
    "2 to 3": (shares(2), shares(3)),
    "layers to shares": (stages(1, 3), shares(2)),
    "shares to layers": (shares(2), stages(1, 3)),
    "layers and shares to whole": ([*stages(3)[:1], *shares(2)], [ALL]),
}
POLICIES_AND_DIVISIONS = [
    *(pytest.param("q4", *parts, id=f"{name}, q4") for name, parts in DIVISIONS.items()),
    *(
        pytest.param(policy, *DIVISIONS[name], id=f"{name}, {policy}")
        for policy in ("fp16", "k8v4", None)
        for name in ("whole to shares", "4 to 2")
    ),
]


@pytest.mark.variants(7)
@pytest.mark.parametrize(("policy", "had", "wanted"), POLICIES_AND_DIVISIONS)
def test_what_is_made_is_what_the_part_would_have_written(
    nodes: list[Node], policy: str | None, had: list[ModelPart], wanted: list[ModelPart]
):
    """Full and window layers, sealed blocks and the open tail."""
    kind, (node, _) = Kind(policy), nodes
    for part in had:
        kind.write(node, part)
    for part in wanted:
        assert kind.bring(node, part) == BLOCKS
        equal(read(node, part), kind.expected(part))
        assert kind.bring(node, part) == 0, "it is its own already"


def test_a_share_that_only_another_node_has_is_pulled(nodes: list[Node]):
    """As far as all shares are there: without one of them nothing is made. A node that never had a part of the model
    looks for none elsewhere."""
    kind, (here, there), asked = Kind(), nodes, []

    def remotes() -> list[Remote]:
        asked.append(1)
        return [Remote("1", there.client)]

    kind.write(there, ALL)
    assert kind.bring(here, ALL, remotes) == 0 and not asked
    # Replicas of the whole model get KV of it from where the router says.
    first, second = shares(2)
    kind.write(here, first)
    kind.write(there, second)
    assert kind.bring(here, ALL) == 0 and not read(here, ALL)
    assert kind.bring(here, ALL, remotes) == BLOCKS and asked
    equal(read(here, ALL), kind.expected(ALL))


def test_what_is_here_is_used_though_nobody_says_which_other_nodes_there_are(nodes: list[Node]):
    kind, (node, _) = Kind(), nodes

    def remotes() -> list[Remote]:
        raise NoAnswer("the router does not answer")

    for part in shares(2):
        kind.write(node, part)
    assert kind.bring(node, ALL, remotes) == BLOCKS


def test_windows_have_as_much_as_all_shares(nodes: list[Node]):
    kind, (node, _) = Kind(), nodes
    for part, lacks in zip(shares(2), (4, 8), strict=True):
        kind.write(node, part, lacks)
    assert kind.bring(node, ALL) == BLOCKS
    equal(read(node, ALL), kind.expected(ALL, 8))
    assert read(node, ALL)[-1].location.window_from == 8


@pytest.mark.parametrize(("had", "wanted"), [([ALL], shares(2)), (shares(2), [ALL]), (shares(2), shares(4))])
def test_latent_heads_that_every_share_has_are_taken_once(
    nodes: list[Node], had: list[ModelPart], wanted: list[ModelPart]
):
    kind, (node, _) = Kind(None, latent=True), nodes
    for part in had:
        kind.write(node, part)
    for part in wanted:
        assert kind.bring(node, part) == BLOCKS
        equal(read(node, part), kind.expected(part))


def test_states_are_used_by_other_layers_but_not_by_other_shares(nodes: list[Node]):
    kind, (here, there) = Kind(recurrent=True), nodes
    kind.write(here, ALL)
    assert kind.bring(here, shares(2)[0]) == 0
    assert kind.bring(here, stages(2)[0]) == BLOCKS
    equal(read(here, stages(2)[0]), kind.expected(stages(2)[0]))
    for part in shares(2):
        kind.write(there, part)
    assert kind.bring(there, ALL) == 0
    assert kind.bring(here, ALL, [Remote("1", there.client)]) == 0
    assert not {*here.client.kv_models("").wait()} & {*map(model_of, shares(2))}, "nothing useless is pulled"


def test_heads_that_do_not_fit_are_computed_again(nodes: list[Node]):
    """Another model's heads, of which there are more or which are longer, under the ids of this one."""
    kind, (node, _) = Kind(), nodes
    kind.write(node, ALL)
    spec = kind.spec(shares(2)[0])
    for wrong in (
        [replace(layer, heads=4) for layer in spec.layers],
        [replace(layer, token_bytes=layer.token_bytes + 1) for layer in spec.layers],
    ):
        kind.spec = lambda part, wrong=wrong: replace(spec, layers=tuple(wrong))
        assert kind.bring(node, shares(2)[0]) == 0 and not read(node, shares(2)[0])


def bring(node: Node, part: ModelPart, prompt: Prompt, remotes: Sequence[Remote] = ()) -> int:
    spec = Kind().spec(part)
    session = DiskTier(spec, model_of(part), node.client)._opened()
    assert session is not None
    others = OtherParts(identity_of(WHOLE, part, COUNT), part, COUNT, spec, node.client, remotes)
    return others.bring(prompt, session)


def test_kv_of_other_tokens_is_not_used(nodes: list[Node]):
    kind, (node, _) = Kind(), nodes
    kind.write(node, ALL)
    assert [unpack_tokens(entry.location.tokens)[0] for entry in read(node, ALL)] == [0, 256, 512]
    assert bring(node, shares(2)[1], Prompt("r", AGENT, b"", [], [9, *TOKENS], SCOPE)) == 0


def test_of_another_agents_words_only_the_common_ones_are_kept(nodes: list[Node]):
    """Her tail begins as his prompt does, and goes on otherwise. It would be his when she is forgotten."""
    node, _ = nodes
    Kind().write(node, ALL)
    his = [*TOKENS[: BLOCKS * BLOCK_TOKENS + 1], 9999, 9998, 9997]
    assert bring(node, shares(2)[0], Prompt("r", "default/bob", b"", [], his, SCOPE)) == BLOCKS
    node.store.forget(AGENT)
    node.store.compact()
    kept = [row.record for segment in node.store._shelf.index.segments.values() for row in segment.rows if row.live]
    assert kept and {token for record in kept for token in unpack_tokens(record.tokens)} <= {*his}


def test_for_a_prompt_of_no_agent_nothing_is_made(nodes: list[Node]):
    """Nobody could have it forgotten."""
    node, _ = nodes
    Kind().write(node, ALL)
    assert bring(node, shares(2)[0], Prompt("r", "", b"", [], [*TOKENS, 7], SCOPE)) == 0


def test_a_tail_that_goes_on_otherwise_is_not_asked_for(nodes: list[Node], monkeypatch: pytest.MonkeyPatch):
    here, there = nodes
    Kind().write(there, ALL)
    pulls: list[bytes] = []
    pull = bench_disk._pulled
    monkeypatch.setattr(bench_disk, "_pulled", lambda *asked: (pulls.append(asked[2].model), pull(*asked))[1])
    for last in (1, 2):
        his = [*TOKENS[: BLOCKS * BLOCK_TOKENS + 1], 9999, last]
        bring(here, shares(2)[0], Prompt("r", "default/bob", b"", [], his, SCOPE), [Remote("1", there.client)])
    assert len(pulls) == 1


def test_a_node_of_which_nothing_comes_is_left_alone(nodes: list[Node], monkeypatch: pytest.MonkeyPatch):
    here, there = nodes
    part, spec = shares(2)[0], Kind().spec(shares(2)[0])
    Kind().write(there, ALL)
    pulls: list[bytes] = []
    monkeypatch.setattr(bench_disk, "_pulled", lambda *asked: (pulls.append(asked[2].model), Fetched())[1])
    session = DiskTier(spec, model_of(part), here.client)._opened()
    assert session is not None
    remotes = [Remote("1", there.client)]
    others = OtherParts(identity_of(WHOLE, part, COUNT), part, COUNT, spec, here.client, remotes)
    for _ in range(3):
        assert others.bring(Prompt("r", AGENT, b"", [], [*TOKENS, 7], SCOPE), session) == 0
    assert len(pulls) == 1


def test_after_a_restart_of_the_store_kv_is_made_again(nodes: list[Node]):
    """What is written as before is refused once."""
    node, _ = nodes
    Kind().write(node, ALL)
    part, spec = shares(2)[0], Kind().spec(shares(2)[0])
    disk = DiskTier(spec, model_of(part), node.client)
    disk.others = OtherParts(identity_of(WHOLE, part, COUNT), part, COUNT, spec, node.client)
    disk._opened()
    node.restart()
    for _ in range(2):
        disk._bring(Prompt("r", AGENT, b"", [], [*TOKENS, 7], SCOPE))
    equal(read(node, part), Kind().expected(part))
