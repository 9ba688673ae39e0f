"""One turn of an agent at a time; a turn that is lost changes nothing."""

from __future__ import annotations

from satchel.actors.kv_store.transcripts import Transcripts

USER, REPLY = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


def test_a_turn_reads_all_that_was_committed_before():
    store = Transcripts()
    assert store.begin("x", "t1", 0.0, 60.0) == ([], 0)
    assert store.commit("x", "t1", 0, [USER, REPLY])
    assert store.begin("x", "t2", 0.0, 60.0) == ([USER, REPLY], 1)
    assert store.begin("y", "t3", 0.0, 60.0) == ([], 0), "agents do not share turns"


def test_a_second_turn_waits_until_the_first_ends_or_its_lease_does():
    store = Transcripts()
    store.begin("x", "t1", 0.0, 60.0)
    assert store.begin("x", "t2", 59.0, 60.0) is None
    assert store.renew("x", "t1", 59.0, 60.0)
    assert store.begin("x", "t2", 100.0, 60.0) is None
    assert store.begin("x", "t2", 119.5, 60.0) == ([], 0)
    assert not store.commit("x", "t1", 0, [USER]), "the lost turn cannot write"
    assert not store.renew("x", "t1", 120.0, 60.0)
    assert store.commit("x", "t2", 0, [REPLY])
    assert store.messages("x") == [REPLY]


def test_an_abandoned_turn_leaves_the_transcript_as_it_was():
    store = Transcripts()
    store.begin("x", "t1", 0.0, 60.0)
    store.abandon("x", "t1")
    assert store.begin("x", "t2", 0.0, 60.0) == ([], 0)
    store.abandon("x", "other")
    assert store.begin("x", "t3", 0.0, 60.0) is None, "only its own turn can be abandoned"


def test_a_forgotten_agent_stays_forgotten():
    store = Transcripts()
    store.begin("x", "t1", 0.0, 60.0)
    assert store.forget("x")
    assert not store.commit("x", "t1", 0, [USER])
    assert not store.forget("x")
    assert store.messages("x") == []


def test_the_quietest_agents_are_forgotten_first_and_never_one_in_its_turn():
    store = Transcripts(bytes_max=900)
    long = [{"role": "user", "content": "x" * 300}]
    for index in range(5):
        store.begin(f"a{index}", "t", 0.0, 60.0)
        if index == 0:
            continue
        assert store.commit(f"a{index}", "t", 0, long)
    assert store.nbytes <= 900
    assert [bool(store.messages(f"a{index}")) for index in range(5)] == [False, False, False, True, True]
    assert store.commit("a0", "t", 0, long), "the one that was talking goes on"
    assert store.messages("a0") and store.nbytes <= 900
