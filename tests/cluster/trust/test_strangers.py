"""Strangers do not keep others out, and each other only within their own address."""

from __future__ import annotations

from satchel.cluster.trust.strangers import Strangers, host_of


def test_a_further_one_takes_the_place_of_the_oldest():
    strangers: Strangers[int] = Strangers(2)
    assert [strangers.add(number, "a") for number in range(4)] == [None, None, 0, 1]
    assert len(strangers) == 2


def test_a_crowd_from_one_address_loses_its_own():
    strangers: Strangers[int] = Strangers(3)
    assert [strangers.add(number, address) for number, address in enumerate("abbbb")] == [None, None, None, 1, 2]
    assert strangers.add(9, "a") == 0, "two each: the oldest of all"


def test_who_is_known_or_has_left_holds_no_place():
    strangers: Strangers[int] = Strangers(1)
    strangers.add(1, "a")
    strangers.remove(1)
    strangers.remove(2)
    assert strangers.add(3, "a") is None and len(strangers) == 1


def test_who_has_left_before_it_is_let_in_has_no_address_on_macos():
    assert [host_of(address) for address in (("10.0.0.2", 99), ("::1", 99, 0, 0), None)] == ["10.0.0.2", "::1", ""]
