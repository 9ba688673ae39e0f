"""The attacks notice what they are there to notice. No server runs here."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.attack import bodies, http, large, report, streams
from tests.attack.attacks import ATTACKS


def error(status: int, **fields: Any) -> dict[str, Any]:
    return {"error": {"message": "no", "type": "invalid_request_error", "param": None, "code": "x", **fields}}


def test_answers_are_judged() -> None:
    answer, outcome = http.AttackAnswer, http.AttackOutcome(allowed=(503,))
    for right in (
        answer(200, b"{}"),
        answer(400, json.dumps(error(400)).encode()),
        answer(503, json.dumps(error(503)).encode()),
    ):
        assert outcome.wrong(right) == ""
    for wrong in (
        answer(0, error="ConnectionResetError"),
        answer(500, json.dumps(error(500)).encode()),
        answer(400, b"<html>"),
        answer(400, b'{"detail": "no"}'),
        answer(200, b'data: {"error": {}}'),
        answer(200, b"Traceback (most recent call last)"),
    ):
        assert outcome.wrong(wrong)
        outcome.count(wrong, "asked")
    assert len(outcome.unexpected) == 6
    assert outcome.statuses["500"] == 1


def said(stream: int, began: float, **fields: Any) -> Any:
    return streams.StreamedAnswer(stream, began, **{"ended": began + 10, "text": f"story {stream}", **fields})


def row(found: dict[str, Any], **fields: Any) -> dict[str, Any]:
    calm = report.Peace({}, 0.1)
    given = {"outcome": http.AttackOutcome(), "memory": ({"endpoint": 300.0}, {"endpoint": 310.0}), "alive": True}
    given = {**given, "judged": True, **fields}
    outcome, memory = given.pop("outcome"), given.pop("memory")
    return report.entry("a", ("does", "expected"), outcome, found, memory, 1.0, calm=calm, **given)


def test_what_happens_to_streams_is_counted_where_it_happens() -> None:
    calm = report.peace([said(0, 0.0, gap_s=0.2), said(1, 0.0), said(0, 20.0)])
    assert calm.gap_s == 0.2
    span = report.AttackSpan(100.0, 200.0)
    heard = [
        said(0, 95.0, gap_s=5.0, gap_at=97.0),
        said(0, 120.0, gap_s=1.5, gap_at=125.0),
        said(1, 130.0, text="another story"),
        said(1, 150.0, error="it ended early"),
        said(1, 170.0, refused="503"),
        said(1, 300.0, error="afterwards"),
    ]
    waiting = [streams.LongestWait(180.0, 2.5), streams.LongestWait(250.0, 60.0)]
    found = report.streams_in(heard, waiting, span, calm)
    counts = {name: found[name] for name in ("streams", "changed", "cut off", "refused", "longest gap, s")}
    assert counts == {"streams": 5, "changed": 1, "cut off": 1, "refused": 1, "longest gap, s": 2.5}


def test_streams_that_fail_in_peace_end_the_run() -> None:
    with pytest.raises(ValueError, match="failed in peace"):
        report.peace([said(0, 0.0, error="cut")])
    with pytest.raises(ValueError, match="different things"):
        report.peace([said(0, 0.0), said(0, 20.0, text="another")])


def test_what_breaks_is_named() -> None:
    good = {"streams": 16, "changed": 0, "cut off": 0, "refused": 2, "longest gap, s": 0.9, "errors": []}
    assert row(good)["broken"] == []
    assert row({**good, "longest gap, s": 9.0}, judged=False)["broken"] == []
    unexpected = http.AttackOutcome(unexpected=["500: x"])
    broken = [
        row({**good, "longest gap, s": 1.1}),
        row({**good, "changed": 1}),
        row({**good, "cut off": 1}),
        row(good, outcome=unexpected),
        row(good, memory=({"endpoint": 300.0}, {"endpoint": 500.0})),
        row(good, alive=False),
    ]
    assert all(len(each["broken"]) == 1 for each in broken)
    skipped = row(good, outcome=http.AttackOutcome(skipped="no rights"), alive=False)
    assert skipped["broken"] == []
    part = {
        "when": "now",
        "settings": {"streams": 16},
        "gap in peace, s": 0.1,
        "doctor": [],
        "attacks": [*broken, skipped],
    }
    facts = {"processor": "p", "cores": 2, "system": "s"}
    shown = report.markdown({"machine": facts, "versions": {}, "parts": {"attacks": part}})
    assert "not done: no rights" in shown
    assert not report.passed(part)
    assert report.passed({"attacks": [row(good), skipped]})


def test_a_seed_draws_the_same() -> None:
    def drawn(seed: int) -> list[Any]:
        return list(bodies.Bodies(seed, ("a", "b")).draw(1000))

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    routes = {each.path.split("?")[0].split("/")[2] for each in drawn(1) if each.path.startswith("/v1/")}
    assert routes >= {"chat", "agents", "models", "responses", "messages", "embeddings", "tokenize", "conversations"}
    assert any(each.path.endswith("/satchel") for each in drawn(1))
    assert any(each.path.startswith("/api/") for each in drawn(1))


def test_every_attack_is_listed_once() -> None:
    names = [each.name for each in ATTACKS]
    assert len(set(names)) == len(names)
    assert names[-1] == "engine"


def test_large_bodies_are_within_what_is_taken() -> None:
    path, make = large.CASES["equal keys"]
    assert path == "/v1/chat/completions"
    assert 31 * 2**20 < len(make()) <= 32 * 2**20
