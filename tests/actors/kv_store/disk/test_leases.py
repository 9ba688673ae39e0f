"""Files stay for as long as somebody who has not gone silent reads them."""

from __future__ import annotations

from satchel.actors.kv_store.disk.leases import Leases


def test_a_file_stays_until_the_last_lease_on_it_is_over():
    leases = Leases(10)
    first, second = leases.take(["a", "b"], 0.0, 5.0), leases.take(["b", "c"], 1.0, 10.0)
    assert first and second and first != second
    assert leases.held(4.9) == {"a", "b", "c"} and len(leases) == 2
    assert leases.held(5.0) == {"b", "c"} and not leases.give_back(first, 5.0)
    assert leases.give_back(second, 10.9) and leases.held(10.9) == set() and len(leases) == 0
    assert leases.take(["d"], 20.0, 1.0) and leases.held(400.0) == set(), "also long after its end"


def test_a_lease_that_replaces_another_has_its_files_unless_that_is_over():
    leases = Leases(1)
    first = leases.take(["a"], 0.0, 5.0)
    assert first and leases.take(["b"], 1.0, 5.0) is None, "there is only one"
    second = leases.take(["b"], 4.0, 5.0, first)
    assert second and leases.held(8.9) == {"a", "b"} and len(leases) == 1
    assert leases.take(["c"], 9.0, 5.0, second) and leases.held(9.0) == {"c"}


def test_leases_are_bounded_and_expired_ones_make_room():
    leases = Leases(2)
    assert leases.take(["a"], 0.0, 5.0) and leases.take(["b"], 0.0, 9.0)
    assert leases.take(["c"], 4.9, 5.0) is None
    assert leases.take(["c"], 5.0, 5.0) and leases.held(5.0) == {"b", "c"}
