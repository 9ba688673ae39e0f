"""Which entries an agent's branches stand on: those that others may find, each once."""

from __future__ import annotations

from dataclasses import replace

from satchel.actors.kv_store.agents.claims import Branch, Census, Claims
from satchel.actors.protocol.block_ids import block_ids
from satchel.actors.protocol.entries import EntryRecord, owner_tag, pack_tokens, tail_id
from tests.worlds.kv_store.kv_files import KEY, MODEL, OTHER_MODEL, ROOT

TOKENS = list(range(600))
BLOCKS = block_ids(ROOT, TOKENS)


def tail_of(tokens: list[int], parent: bytes = BLOCKS[1]) -> EntryRecord:
    packed = pack_tokens(tokens)
    return EntryRecord(tail_id(parent, tokens), parent, True, packed, bytes(16), 0, False, 100)


def test_what_is_shared_with_nobody_is_claimed_by_nobody():
    """A branch without a root has blocks of its own request, which no later turn finds again."""
    alone = Claims([Branch(MODEL, b"", pack_tokens(TOKENS))])
    assert not (alone.blocks or alone.parents() or alone.rests() or alone.embeddings)
    assert not alone.continues(b"", pack_tokens(TOKENS[:7]))
    both = Claims([Branch(MODEL, b"", pack_tokens(TOKENS)), Branch(MODEL, ROOT, pack_tokens(TOKENS))])
    assert list(both.blocks) == BLOCKS and both.parents() == {ROOT, *BLOCKS}
    assert both.rests() == [(BLOCKS[1], pack_tokens(TOKENS[512:]))]
    assert Claims([Branch(MODEL, ROOT, pack_tokens(TOKENS[:512]))]).rests() == [], "nothing is left over"


def test_a_tail_is_claimed_by_who_has_all_of_it_after_the_same_tokens():
    claims = Claims([Branch(MODEL, ROOT, pack_tokens(TOKENS))])
    assert claims.holds(tail_of(TOKENS[512:])) and claims.holds(tail_of(TOKENS[512:520]))
    assert not claims.holds(tail_of([*TOKENS[512:], 7])), "who has its beginning need not have the rest"
    assert not claims.holds(tail_of(TOKENS[512:], BLOCKS[0])) and not claims.holds(tail_of([9, 9]))


def test_an_owner_counts_once_however_many_copies_and_branches_there_are():
    """An entry has so many owners at most; one that is counted twice would take another one's place."""
    tail = tail_of(TOKENS[512:520])
    block = replace(tail, id=BLOCKS[0], parent=ROOT, tail=False, tokens=pack_tokens(TOKENS[:256]))
    census = Census([tail, block, tail, block, tail_of([1])], KEY)
    twice = Claims([Branch(MODEL, ROOT, pack_tokens(TOKENS)), Branch(OTHER_MODEL, ROOT, pack_tokens(TOKENS[:530]))])
    for agent in ("t/a", "t/b"):
        census.count(agent, twice)
    tags = [owner_tag(KEY, "t/a"), owner_tag(KEY, "t/b")]
    assert census.entries == 5 and census.owners == {tail.id: tags, BLOCKS[0]: tags}
