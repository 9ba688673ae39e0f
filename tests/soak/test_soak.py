"""The soak notices what it is there to notice. No server runs here."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import httpx

from tests.soak import client, driver, ledger, plan, reference, report

KINDS_WITH_AN_AGENT = {"fork", "delete", "release", "inject"}


def steps(seed: int, slot: int, count: int) -> list[Any]:
    slots = plan.SlotPlan(seed, slot, lambda text: len(text) // 2)
    return [slots.next() for _ in range(count)]


def attempt(number: int, **fields: Any) -> Any:
    base = {"life": "a", "kind": "ask", "messages": [{"role": "user", "content": "?"}], "continues": True}
    times = {"began": 100.0 * number, "ended": 100.0 * number + 1}
    done = {"text": "yes", "whole": True, "finish": "stop", "kept": True}
    return ledger.Attempt(**{**base, **times, **done, **fields}, number=number)


def info(messages: int, tokens: int, epoch: int = 1) -> dict[str, Any]:
    return {
        "messages": messages,
        "tokens": tokens,
        "branches": [{"messages": messages, "tokens": tokens, "epoch": epoch}],
    }


def test_a_seed_gives_the_same_plan() -> None:
    """What is done depends on the seed and the slot, and on nothing else."""
    assert steps(1, 4, 200) == steps(1, 4, 200)
    assert steps(1, 4, 200) != steps(2, 4, 200)
    assert steps(1, 4, 200) != steps(1, 12, 200)


def test_a_plan_has_all_kinds_and_no_agent_before_it_lives() -> None:
    """Deleted agents stay deleted, forks begin where their source is, and no two are told the same word."""
    for slot in (0, 3, 4):
        alive: set[str] = set()
        gone: set[str] = set()
        done = steps(7, slot, 800)
        for step in done:
            assert step.life not in gone
            assert step.kind not in KINDS_WITH_AN_AGENT or step.life in alive
            alive.add(step.life)
            if step.kind == "fork":
                assert step.other not in alive | gone
                alive.add(step.other)
            if step.kind == "delete":
                alive.remove(step.life)
                gone.add(step.life)
        assert {step.kind for step in done} == set(plan.KINDS)
        assert any(
            step.kind == "delete" and step.life in {fork.life for fork in done if fork.kind == "fork"} for step in done
        )
    names = [mark.name for slot in range(6) for step in steps(7, slot, 300) for mark in step.marks]
    assert len(names) == len(set(names)) > 500


def test_a_stop_string_occurs_in_the_answer() -> None:
    """Else the turn would not be ended by it."""
    stops = [step for slot in range(8) for step in steps(3, slot, 300) if step.kind == "stop"]
    assert len(stops) > 100
    assert all(step.stop in step.expected and not step.expected.startswith(step.stop) for step in stops)


def test_a_wrong_answer_is_noticed() -> None:
    """A whole answer is equal in words, end and length of its prompt; what a hang-up left is a beginning."""
    wrong = ledger.wrong_answer
    whole = attempt(1, text="one, two", prompt=30)
    assert wrong(whole, "one, two", "stop", 30) == ""
    assert "from character 6" in wrong(whole, "one, too", "stop", 30)
    assert wrong(whole, "one, two, three", "stop", 30)
    assert "length" in wrong(whole, "one, two", "length", 30)
    assert "31" in wrong(whole, "one, two", "stop", 31)
    cut = replace(whole, whole=False, finish="", prompt=0)
    assert wrong(cut, "one, two, three", "stop", 30) == ""
    assert wrong(cut, "one, three", "stop", 30)


def test_a_lost_message_is_noticed() -> None:
    """An agent has as many messages as its client believes, on the line that the client goes on with."""
    held = ledger.tokens_held
    assert held(info(4, 90), True, 4) == 90
    assert held(info(2, 50), True, 4) is None
    assert held(None, True, 4) is None
    assert held(None, True, 0) == 0
    assert held(info(2, 50), True, 0) is None
    side = info(2, 50)
    side["branches"] += [{"messages": 4, "tokens": 90, "epoch": 3}, {"messages": 4, "tokens": 88, "epoch": 2}]
    assert held(side, False, 4) == 90 and held(side, True, 4) is None


def test_what_a_turn_keeps_is_what_it_sent_and_one_answer() -> None:
    life = ledger.AgentRecord("a", True, kept=6)
    assert life.after(attempt(1)) == 8
    assert life.after(attempt(1, kind="inject")) == 7
    stateless = ledger.AgentRecord("a", False, kept=6)
    assert stateless.after(attempt(1, messages=[{}] * 9)) == 10
    assert stateless.after(attempt(1, kind="inject")) == 7


def test_tokens_computed_again_are_noticed_and_have_a_reason_or_none() -> None:
    """Its own new tokens and one block are free; beyond that there is a fault to name, or the law is broken."""
    fault = ledger.Fault
    first = attempt(1, prompt=400, held=0)
    lawful = attempt(2, prompt=1000, held=900, cached=644)
    assert ledger.computed_too_much(first) == ledger.computed_too_much(lawful) == 0
    late = attempt(2, prompt=1000, held=900, cached=512)
    assert ledger.computed_too_much(late) == 132
    found = lambda *faults, roomy=True: ledger.excesses({"a": [first, late]}, faults, roomy)  # noqa: E731
    assert [each.reason for each in found()] == [""]
    assert [each.reason for each in found(roomy=False)] == ["no room"]
    assert [each.reason for each in found(fault("replica", 150.0, 160.0))] == [""], "KV outlives a replica"
    assert [each.reason for each in found(fault("replica", 101.5, 110.0))] == ["before it was written: replica"]
    assert [each.reason for each in found(fault("store", 198.0, 210.0))] == ["during: store"]
    assert [each.reason for each in found(fault("disk full", 150.0, 160.0))] == ["since: disk full"]
    table = ledger.by_reason(found())
    assert table == {"none": {"turns": 1, "tokens": 132}}


def test_a_repeated_turn_is_not_computed_again() -> None:
    """What was computed before a client hung up is worth keeping."""
    cut = attempt(1, whole=False, kept=False, prompt=0)
    again = attempt(2, prompt=900, cached=350, held=300, repeats=True)
    assert not ledger.computed_too_much(again), "it would be lawful for a turn that nobody has begun"
    (found,) = ledger.excesses({"a": [cut, again]}, [], True)
    assert found.repeat and found.tokens == 294 and not found.reason
    assert not ledger.excesses({"a": [cut, replace(again, cached=700)]}, [], True)


def test_what_is_computed_again_is_told_by_the_request_before() -> None:
    """Within the bound of the law a turn's end by a stop string or a hang-up may cost more than another's."""
    known = [
        attempt(1, kind="tell", prompt=100),
        attempt(2, kind="stop", prompt=150, held=120, cached=120),
        attempt(3, kind="hang_up", prompt=0, held=200, whole=False, kept=False),
        attempt(4, kind="hang_up", prompt=250, held=200, cached=200, repeats=True),
        attempt(5, prompt=300, held=270, cached=200),
    ]
    assert ledger.computed_again({"a": known}) == {
        "hang_up": {"turns": 1, "tokens": 70},
        "hang_up, cut short": {"turns": 1, "tokens": 50},
        "tell": {"turns": 1, "tokens": 0},
    }


def test_a_word_found_is_noticed_once_nobody_owns_it_and_a_minute_is_over() -> None:
    """A fork owns what its source was told before; while the server is started again nobody can erase."""
    marks = ledger.Marks()
    marks.tell("a", ["early", "late"])
    marks.tell("fork", ["early"])
    marks.forget("a", 1000.0)
    assert marks.due(1059.0, []) == []
    assert marks.due(1061.0, [ledger.Fault("everything", 1010.0, 1040.0)]) == []
    assert marks.due(1091.0, [ledger.Fault("everything", 1010.0, 1040.0)]) == ["late"]
    assert marks.due(2000.0, []) == []
    marks.forget("fork", 3000.0)
    assert marks.due(3061.0, []) == ["early"]
    needles = {"late": [b"late", b"\x01\0\0\0\x02\0\0\0"], "early": [b"early"]}
    assert ledger.found_in(b"..\x01\0\0\0\x02\0\0\0..", needles) == ["late"]
    assert ledger.found_in(b"nothing", needles) == []


def test_an_error_without_a_fault_breaks_a_law() -> None:
    faults = [ledger.Fault("store", 1000.0, 1010.0)]
    assert ledger.excuse_of("503", 1005.0, 1006.0, faults) == "store"
    assert ledger.excuse_of("503", 1040.0, 1041.0, faults) == ""
    assert ledger.excuse_of("409 agent_busy", 1040.0, 1041.0, faults) == "store", "a turn's lease runs out"


def test_counters_add_up_over_restarts() -> None:
    counters = ledger.RestartedCounters()
    for value in (5.0, 9.0, 2.0, 4.0):
        counters.add({"requests": value})
    assert counters.sums["requests"] == 13.0


def test_an_answer_that_says_it_is_not_kept_is_believed() -> None:
    """In the header of a whole answer, and in the last piece of a streamed one."""
    for value, unkept in (("not-kept; reason=disk_full, earlier-let-go", True), ("not-copied", False)):
        told = client.TurnResult()
        told.headers(httpx.Headers({"x-satchel-memory": value}))
        assert told.unkept is unkept
    for field, unkept in (({"kept": False, "reason": "disk_full"}, True), ({"kept": True, "copied": False}, False)):
        told = client.TurnResult()
        told.body({"choices": [{"delta": {}, "finish_reason": "stop"}], "satchel": field})
        told.body({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}})
        assert told.unkept is unkept and told.finish == "stop"


def test_a_run_passes_only_without_a_broken_law() -> None:
    """The report counts what the driver saw, what the comparison found, and errors without a fault."""

    def part(*, compared: Any = None, **fields: Any) -> dict[str, Any]:
        seen = driver.Seen(records={0: [attempt(1, prompt=400), attempt(2, prompt=420, held=400, cached=400)]})
        for name, value in fields.items():
            setattr(seen, name, value)
        return report.summary(seen, compared, {}, {}, True)

    assert report.passed(part())
    wrong = reference.Compared(2, 2, {2: "'no' instead of 'yes'"})
    assert part(compared=wrong)["broken"]["answers"] == 1 and not report.passed(part(compared=wrong))
    lost = [ledger.Broken("words", "a", "gone")]
    assert not report.passed(part(broken=lost))
    refused = [{"life": "a", "kind": "ask", "error": "500", "fault": "", "at": 1.0}]
    assert part(errors=refused)["broken"]["answered"] == 1
    assert report.passed(part(errors=[{**refused[0], "fault": "store"}]))
    assert not report.passed(part(controls={"looked before": 2, "words found before": 2, "token ids found before": 1}))
    text = report.markdown(
        {
            "machine": {"processor": "x", "cores": 2, "system": "y"},
            "versions": {},
            "parts": {"roomy": {"when": "now", **part(broken=lost)}},
        }
    )
    assert "| no agent's words are lost | 1 |" in text and "- words: a: gone" in text


def test_the_undisturbed_run_replays_what_was_kept_and_notices_a_spoiled_answer() -> None:
    """What was not kept is said to a copy that is deleted; a spoiled expectation is a wrong answer."""
    calls: list[tuple[str, str]] = []

    class Http:
        async def say(self, ask: Any) -> Any:
            calls.append(("say", ask.agent))
            return client.TurnResult(text="yes", whole=True, finish="stop", prompt=0)

        async def json(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
            calls.append((method, path))
            return 200, {}

        async def close(self) -> None: ...

    def replay(spoil: int) -> Any:
        again = reference.Reference("http://127.0.0.1:1", 2, lambda text: None, spoil)
        http: Any = Http()
        again._http = http
        records = [
            attempt(1),
            attempt(2, kept=False, whole=False, text="ye"),
            attempt(3, kept=False, whole=False, text=""),
            ledger.Deed("delete", "a"),
        ]
        return asyncio.run(again.run({0: records}))

    assert replay(0).wrong == {}
    assert calls == [
        ("say", "a"),
        ("POST", "/v1/agents/a/fork"),
        ("say", "a.unkept"),
        ("DELETE", "/v1/agents/a.unkept"),
        ("DELETE", "/v1/agents/a"),
    ]
    assert set(replay(1).wrong) == {1}


def test_the_undisturbed_run_may_follow_and_waits_until_it_is_known_what_was_kept() -> None:
    """Of a request that is when its life has had another one, or when all is over."""
    records: list[Any] = [attempt(1), attempt(2, life="b"), ledger.Deed("delete", "b")]
    is_settled = reference.is_settled
    assert [is_settled(records, index) for index in range(4)] == [False, True, True, False]
    records.append(attempt(4))
    assert is_settled(records, 0)
