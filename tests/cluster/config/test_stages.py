"""A model is divided so that every node has room, and refused with sizes where none of the divisions has."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from satchel.cluster.config.nodes import Node
from satchel.cluster.config.stages import ENDLESS, GIB, GroupPlan, LayerNeeds, ModelNeeds, Split, Stage, divide, share
from satchel.cluster.errors import NoRoom

AUTO = Split("auto")

LAYERS = st.lists(
    st.builds(LayerNeeds, st.integers(0, 50), st.integers(0, 4), st.integers(0, 9)), min_size=1, max_size=7
)
NEEDS = st.builds(
    ModelNeeds,
    layers=LAYERS,
    first_bytes=st.integers(0, 40),
    last_bytes=st.integers(0, 40),
    workspace_bytes=st.integers(0, 20),
    tokens_min=st.integers(1, 10),
    sequences=st.integers(1, 3),
)
MEMORY = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 400), min_size=1)


def bytes_of(needs: ModelNeeds, stage: Stage, tokens: int) -> int:
    """What a stage takes with so many tokens of KV, written out."""
    layers = needs.layers[stage.start : stage.stop]
    kv = sum(tokens * layer.token_bytes + needs.sequences * layer.sequence_bytes for layer in layers)
    ends = needs.first_bytes * (stage.start == 0) + needs.last_bytes * (stage.stop == len(needs.layers))
    return sum(layer.weights_bytes for layer in layers) + kv + ends + needs.workspace_bytes


def divisions(needs: ModelNeeds, nodes: list[str]) -> list[list[Stage]]:
    """All divisions among all of these nodes."""
    count = len(needs.layers)
    cuts = combinations(range(1, count), len(nodes) - 1)
    return [
        [Stage(node, *span, 0) for node, span in zip(nodes, pairwise([0, *each, count]), strict=True)] for each in cuts
    ]


def fits(needs: ModelNeeds, memory: dict[str, int], stages: list[Stage], tokens: int) -> bool:
    return all(bytes_of(needs, stage, tokens) <= memory[stage.node] for stage in stages)


@given(NEEDS, MEMORY)
def test_what_is_divided_fits_on_as_few_nodes_as_can_be_with_room_for_the_most_tokens(
    needs: ModelNeeds, memory: dict[str, int]
):
    """Against all divisions among the nodes with the most memory."""
    ordered = sorted(memory, key=lambda name: -memory[name])
    candidates = [
        divisions(needs, [name for name in memory if name in ordered[:count]]) for count in range(1, len(memory) + 1)
    ]
    fitting = [[stages for stages in group if fits(needs, memory, stages, needs.tokens_min)] for group in candidates]
    fewest = next((group for group in fitting if group), None)
    if fewest is None:
        with pytest.raises(NoRoom):
            divide(needs, memory, AUTO)
        return
    found = divide(needs, memory, AUTO)
    assert [stage[:3] for stage in found] in [[stage[:3] for stage in stages] for stages in fewest]
    assert all(stage.tokens >= needs.tokens_min for stage in found)
    room = min(stage.tokens for stage in found)
    assert fits(needs, memory, found, room)
    assert room == ENDLESS or not any(fits(needs, memory, stages, room + 1) for stages in fewest)


@given(NEEDS, MEMORY, st.data())
def test_layers_that_are_named_are_taken_or_refused(needs: ModelNeeds, memory: dict[str, int], data: st.DataObject):
    layers = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    split = Split(tuple(layers))
    if sum(layers) != len(needs.layers) or len(layers) > len(memory):
        with pytest.raises(NoRoom, match=r"layers on \d+ nodes; the model has"):
            divide(needs, memory, split)
        return
    starts = [sum(layers[:number]) for number in range(len(layers))]
    wanted = [Stage(node, start, start + count, 0) for node, start, count in zip(memory, starts, layers, strict=False)]
    if fits(needs, memory, wanted, needs.tokens_min):
        assert [stage[:3] for stage in divide(needs, memory, split)] == [stage[:3] for stage in wanted]
    else:
        with pytest.raises(NoRoom, match=r"[MG]iB"):
            divide(needs, memory, split)


def test_two_macs_share_a_model_by_their_memory():
    """80 layers of 0.5 GiB with 4 KiB of KV a token each: on 40 and 24 GiB that may be used."""
    needs = ModelNeeds([LayerNeeds(GIB // 2, 4096)] * 80, GIB, GIB, GIB // 2, tokens_min=8192)
    studio, book = divide(needs, {"studio": 40 * GIB, "book": 24 * GIB}, AUTO)
    assert (studio.node, studio.start, book.node, book.stop) == ("studio", 0, "book", 80)
    assert studio.stop == book.start == 51 and 50_000 < book.tokens < studio.tokens + 200_000
    assert divide(needs, {"big": 64 * GIB, "book": 28 * GIB}, AUTO) == [Stage("big", 0, 80, 70451)]
    with pytest.raises(NoRoom, match=r"42\.50 GiB and 2\.50 GiB of KV for 8192 tokens, .*studio 16\.00 GiB, book"):
        divide(needs, {"studio": 16 * GIB, "book": 20 * GIB}, AUTO)
    with pytest.raises(NoRoom, match=r"layers 10 to 80 need 36\.50 GiB without KV on book, which may use 28\.00 GiB"):
        divide(needs, {"studio": 48 * GIB, "book": 28 * GIB}, Split((10, 70)))


@pytest.mark.parametrize("pipeline", ["all", (), (0, 3), (4, -1), 3, ("a",)])
def test_a_split_is_auto_or_numbers_of_layers(pipeline: object):
    with pytest.raises(ValidationError):
        TypeAdapter(Split).validate_python({"pipeline": pipeline})


def test_a_split_is_read_from_a_config():
    split = TypeAdapter(Split).validate_python({"pipeline": [20, 12]})
    assert split == Split((20, 12)) and TypeAdapter(Split).validate_python({"pipeline": "auto"}) == AUTO
    with pytest.raises(ValidationError):
        TypeAdapter(Split).validate_python({"pipelines": "auto"})


def test_shares_have_all_layers_on_the_nodes_with_the_most_memory():
    """Each has room for as many tokens as its node's memory holds; the plan names the shares, not layers."""
    needs = ModelNeeds([LayerNeeds(100, 2, 10)], workspace_bytes=20, tokens_min=5)
    stages = share(needs, 12, {"a": 150, "b": 100, "c": 230}, 2)
    assert stages == [Stage("a", 0, 12, 10), Stage("c", 0, 12, 50)]
    plan = GroupPlan(tuple(stages), (Node(name="a"), Node(name="c")))
    assert plan.shared and plan.describe() == "layers 0 to 12, 1/2 of each on a, c"
    with pytest.raises(NoRoom, match="each of 3 nodes needs a share"):
        share(needs, 12, {"a": 150, "b": 100, "c": 230}, 3)
    layered = GroupPlan((Stage("a", 0, 5, 1), Stage("c", 5, 12, 1)), plan.nodes)
    assert not layered.shared and layered.describe() == "layers 0 to 5 on a, 5 to 12 on c"
