"""Layers of a model are models of their own, and their KV is made of that of other ranges."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from satchel.actors.model_files.identity.layer_ranges import LAYERS, LayerRange, identity_of, ids_of_all, pieces_of
from satchel.actors.model_files.identity.model_identity import ModelIdentity

COUNT = 6
RANGES = [LayerRange(*ends) for ends in combinations(range(COUNT + 1), 2)]
WHOLE = ModelIdentity({"model/a": "1"}, {"dtype": "float32"})


def test_ids_follow_from_those_of_any_range():
    part = identity_of(WHOLE, LayerRange(2, 5), COUNT)
    assert part.computing == {"dtype": "float32", LAYERS: "2 to 5 of 6"}
    assert ids_of_all(part, COUNT) == ids_of_all(WHOLE, COUNT)
    assert ids_of_all(part, COUNT)[WHOLE.model_id] == (0, COUNT) and len(ids_of_all(WHOLE, COUNT)) == len(RANGES)
    assert identity_of(part, LayerRange(0, COUNT), COUNT) == WHOLE


@given(st.sampled_from(RANGES), st.dictionaries(st.sampled_from(RANGES), st.integers(0, 3), max_size=6))
def test_as_many_blocks_are_made_as_can_be_of_ranges_that_have_them(wanted: LayerRange, blocks: dict[LayerRange, int]):
    count, pieces = pieces_of(wanted, blocks)
    having = [[n for at, n in blocks.items() if at.start <= layer < at.stop] for layer in range(*wanted)]
    assert count == min(max(found, default=0) for found in having)
    if count:
        assert [layer for piece in pieces for layer in range(*piece.layers)] == [*range(*wanted)]
        for piece in pieces:
            assert piece.source.start <= piece.layers.start < piece.layers.stop <= piece.source.stop
            assert blocks[piece.source] >= count


def test_few_ranges_are_read_rather_than_many():
    whole, halves = LayerRange(0, 6), [LayerRange(0, 3), LayerRange(3, 6)]
    assert pieces_of(whole, dict.fromkeys([*halves, whole], 2)) == (2, [(whole, whole)])
    assert pieces_of(LayerRange(2, 4), dict.fromkeys(halves, 1)) == (1, [(halves[0], (2, 3)), (halves[1], (3, 4))])
