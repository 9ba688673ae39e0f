"""Parts of a model are models of their own, and their KV is made of that of other parts."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations, product

from hypothesis import given
from hypothesis import strategies as st

from satchel.actors.model_files.identity.model_identity import ModelIdentity
from satchel.actors.model_files.identity.model_parts import (
    LAYERS,
    SHARES_MAX,
    LayerRange,
    ModelPart,
    identity_of,
    ids_of_all,
    pieces_of,
)

COUNT = 6
RANGES = [ModelPart(*ends) for ends in combinations(range(COUNT + 1), 2)]
SHARES = [ModelPart(0, COUNT, share, shares) for shares in (2, 3, 4) for share in range(shares)]
WHOLE = ModelIdentity({"model/a": "1"}, {"dtype": "float32"})
CELLS = 12
"""Heads of a layer, of which every share here has whole ones."""


def cells(part: ModelPart) -> set[tuple[int, int]]:
    """The layers and heads of a part."""
    heads = range(int(part.heads.start * CELLS), int(part.heads.stop * CELLS))
    return {*product(range(part.start, part.stop), heads)}


def test_ids_follow_from_those_of_any_part():
    part, share = (identity_of(WHOLE, each, COUNT) for each in (ModelPart(2, 5), ModelPart(0, COUNT, 1, 4)))
    assert part.computing == {"dtype": "float32", LAYERS: "2 to 5 of 6"}
    assert share.computing == {"dtype": "float32", LAYERS: "share 1 of 4 of all 6"}
    ids = ids_of_all(WHOLE, COUNT)
    assert ids == ids_of_all(part, COUNT) == ids_of_all(share, COUNT)
    assert ids[WHOLE.model_id] == ModelPart(0, COUNT) and ids[share.model_id] == ModelPart(0, COUNT, 1, 4)
    assert len(ids) == len(RANGES) + sum(range(2, SHARES_MAX + 1))
    assert identity_of(part, ModelPart(0, COUNT), COUNT) == identity_of(share, ModelPart(0, COUNT), COUNT) == WHOLE


PARTS = st.sampled_from([*RANGES, *SHARES])


@given(PARTS, st.dictionaries(PARTS, st.integers(0, 3), max_size=8))
def test_as_many_blocks_are_made_as_can_be_of_parts_that_have_them(wanted: ModelPart, blocks: dict[ModelPart, int]):
    count, pieces = pieces_of(wanted, blocks)
    having = [[n for part, n in blocks.items() if cell in cells(part)] for cell in cells(wanted)]
    assert count == min(max(found, default=0) for found in having)
    taken = [
        (layer, head)
        for source, layers, heads in pieces
        for layer, head in product(range(*layers), range(int(heads.start * CELLS), int(heads.stop * CELLS)))
    ]
    assert len(taken) == len({*taken}) and ({*taken} == cells(wanted) if count else not taken)
    for source, layers, heads in pieces:
        assert blocks[source] >= count
        assert {*product(range(*layers), [int(heads.start * CELLS)])} <= cells(source) and source.has(heads)
    for layer in range(wanted.start, wanted.stop):
        starts = [heads.start for _, layers, heads in pieces if layer in range(*layers)]
        assert starts == sorted(starts)


def test_few_parts_are_read_rather_than_many():
    whole, halves = ModelPart(0, 6), [ModelPart(0, 3), ModelPart(3, 6)]
    count, (piece,) = pieces_of(whole, dict.fromkeys([*halves, whole], 2))
    assert (count, piece.source, piece.layers) == (2, whole, (0, 6))
    _, pieces = pieces_of(ModelPart(2, 4), dict.fromkeys(halves, 1))
    assert [piece[:2] for piece in pieces] == [(halves[0], (2, 3)), (halves[1], (3, 4))]


def test_shares_are_cut_into_smaller_ones_and_joined_to_larger_ones():
    halves, quarters = ([part for part in SHARES if part.shares == count] for count in (2, 4))
    _, pieces = pieces_of(quarters[2], dict.fromkeys(halves, 1))
    assert pieces == [(halves[1], LayerRange(0, COUNT), (Fraction(1, 2), Fraction(3, 4)))]
    _, pieces = pieces_of(halves[1], dict.fromkeys(quarters, 1))
    assert [piece.source for piece in pieces] == quarters[2:]
    _, pieces = pieces_of(ModelPart(1, 3), dict.fromkeys(halves, 1))
    assert [(piece.source, piece.layers) for piece in pieces] == [(half, (1, 3)) for half in halves]
    assert pieces_of(ModelPart(0, COUNT), {halves[0]: 3}) == (0, [])
