"""The directory against a plain model, and its limits."""

from __future__ import annotations

import random

import pytest

from satchel.actors.protocol.block_ids import BLOCK_TOKENS
from satchel.actors.router.directory import FEW_BITS, PART_BLOCKS, Directory, Disk, Seat
from tests.worlds.routing import held_tokens

BLOCKS = [bytes([index]) * 32 for index in range(20)]


def ids(count: int, name: bytes = b"") -> list[bytes]:
    return [name + index.to_bytes(4, "big") for index in range(count)]


def update(directory: Directory, replica: str, announced: list[bytes], retracted: list[bytes], *, whole: bool) -> int:
    """Take a report, and check the tables at every pause. Returns how many there were."""
    pauses = 0
    for _ in directory.update(replica, announced, retracted, whole=whole):
        pauses += 1
        directory.check()
    return pauses


@pytest.mark.parametrize("seed", range(10))
def test_it_holds_what_a_plain_model_holds(seed: int):
    """Whatever is announced, retracted, replaced and forgotten, in whatever order: the same blocks as in plain sets,
    and of a prefix only the leading run counts, holes or not. Replicas outnumber the bits of a machine's word."""
    rng = random.Random(seed)
    names = [f"r{index}" for index in range(70)]
    directory, model = Directory(), {name: set[bytes]() for name in names}
    for _ in range(400):
        name, blocks, action = rng.choice(names), rng.choices(BLOCKS, k=rng.randrange(15)), rng.random()
        if action < 0.4:
            directory.announce(name, blocks)
            model[name] |= set(blocks)
        elif action < 0.6:
            directory.retract(name, blocks)
            model[name] -= set(blocks)
        elif action < 0.8:
            gone = rng.choices(BLOCKS, k=3)
            whole = rng.random() < 0.7
            update(directory, name, blocks, gone, whole=whole)
            model[name] = ((set() if whole else model[name]) | set(blocks)) - set(gone)
        elif action < 0.9:
            directory.forget(name)
            model[name] = set()
        directory.check()
        asked = rng.sample(names, rng.randrange(1, 70))
        chain = BLOCKS[: rng.randrange(len(BLOCKS))]
        held = held_tokens(directory, chain, asked)
        assert list(held) == asked
        for replica in asked:
            run = next((index for index, block in enumerate(chain) if block not in model[replica]), len(chain))
            assert held[replica] == run * BLOCK_TOKENS
    for name in names:
        assert directory.held(name) == model[name]
    assert directory.blocks == len(set().union(*model.values()))


def test_a_large_report_is_taken_in_parts():
    """Between parts others get a turn; after the last the directory is what was reported, and no more."""
    directory = Directory()
    first, second = ids(PART_BLOCKS * 3, b"a"), ids(PART_BLOCKS * 2, b"b")
    directory.announce("other", first[:5])
    assert update(directory, "r", first, [], whole=True) >= 3
    assert directory.held("r") == set(first)
    assert update(directory, "r", first[:10] + second, [], whole=True) >= 5, "what goes, goes in parts as well"
    assert directory.held("r") == {*first[:10], *second}
    assert update(directory, "r", [], second, whole=False) >= 2
    assert directory.held("r") == set(first[:10])
    assert directory.held("other") == set(first[:5])


def test_what_is_announced_twice_hides_nothing_that_went():
    directory = Directory()
    directory.announce("r", BLOCKS[:2])
    update(directory, "r", [BLOCKS[1], BLOCKS[1]], [], whole=True)
    assert directory.held("r") == {BLOCKS[1]}


def test_homes_are_bounded_and_the_least_recently_seen_goes():
    directory = Directory(agents_max=3)
    for index in range(3):
        directory.set_seat(f"a{index}", "m", Seat("r", 100))
    directory.set_seat("a0", "m", Seat("s", 200))
    directory.set_seat("a3", "m", Seat("r", 100))
    assert directory.agents == 3
    assert directory.seat("a1", "m") is None
    assert directory.seat("a0", "m") == Seat("s", 200)
    assert directory.seat("a0", "n") is None, "an agent has a home for each model"


def test_who_is_forgotten_leaves_no_blocks_no_homes_and_no_bit():
    """Replicas that come and go under ever new names leave nothing, so their integers stay short."""
    directory = Directory()
    directory.announce("stays", BLOCKS[:3])
    for index in range(100):
        name = f"r{index}"
        directory.announce(name, BLOCKS)
        directory.set_seat("agent", "m", Seat(name, 100))
        assert held_tokens(directory, BLOCKS, [name, "stays"]) == {name: 20 * BLOCK_TOKENS, "stays": 3 * BLOCK_TOKENS}
        directory.forget(name)
        directory.check()
        assert directory.seat("agent", "m") is None
        assert directory.holders == {"stays"} and directory.blocks == 3
    directory.forget("never seen")
    directory.announce("new", BLOCKS[:1])
    assert max(directory._holders.values()) < 1 << 2


@pytest.mark.parametrize("count", [1, FEW_BITS, FEW_BITS + 1, 200])
def test_many_holders_of_one_prefix_are_all_found(count: int):
    """However many drop out at the same block, and wherever their places are; memory and disk of one name are two."""
    directory = Directory()
    for index in range(count):
        directory.announce(f"r{index}", BLOCKS[:4])
        directory.announce(Disk(f"r{index}"), BLOCKS[:9])
    directory.announce("last", BLOCKS[:1])
    runs = directory.runs(BLOCKS[:12])
    assert [runs[directory.index(f"r{index}")] for index in range(count)] == [4] * count
    assert [runs[directory.index(Disk(f"r{index}"))] for index in range(count)] == [9] * count
    assert runs[directory.index("last")] == 1
    assert runs[directory.index("nobody")] == runs[-1] == 0
    assert directory.held(Disk("r0")) == set(BLOCKS[:9]) and directory.count("r0") == 4


def test_a_place_is_free_again_and_nobody_else_moves():
    directory = Directory()
    for name in "abcd":
        directory.announce(name, BLOCKS[:2])
    places = [directory.index(name) for name in "abcd"]
    for name in "bc":
        directory.forget(name)
    directory.announce("e", BLOCKS[:3])
    directory.check()
    assert [directory.index(name) for name in "aed"] == [places[0], places[1], places[3]]
    assert held_tokens(directory, BLOCKS, "abde") == {
        "a": 2 * BLOCK_TOKENS, "b": 0, "d": 2 * BLOCK_TOKENS, "e": 3 * BLOCK_TOKENS,
    }  # fmt: skip


def test_blocks_with_the_same_holders_share_one_integer():
    """With a thousand holders it is longer than the block's id."""
    directory = Directory()
    for name in ("a", "b"):
        for index in range(100):
            directory.announce(f"{name}{index}", [])
    directory.announce("b99", ids(50))
    directory.announce(Disk("n"), ids(50))
    assert len({id(mask) for mask in directory._holders.values()}) == 1
    directory.retract("b99", ids(50)[:10])
    assert len({id(mask) for mask in directory._holders.values()}) == 2
