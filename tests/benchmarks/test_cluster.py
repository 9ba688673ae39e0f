"""The benchmark of several nodes counts rightly. How fast anything is, is no test."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import kept
from benchmarks.cluster import arriving, beside, moving, pacing, recovering, run, server, splitting, uneven
from benchmarks.cluster.worker import Worker
from benchmarks.parts import ResultTable


def test_a_stream_goes_on_where_its_longest_gap_ends() -> None:
    """Pieces that were under way arrive after the kill, and are not the next token from elsewhere."""
    arrivals = [1.0, 1.1, 1.2, 1.21, 1.22, 3.2, 3.3, 3.4]
    assert server.resumed_s(arrivals, 1.2) == pytest.approx(2.0)
    assert server.resumed_s(arrivals[:3] + arrivals[5:], 1.2) == pytest.approx(2.0)
    with pytest.raises(ValueError, match="nothing came"):
        server.resumed_s(arrivals, 3.4)


def test_ratios_of_a_move_are_taken_within_a_round() -> None:
    """Each round drifts by itself: 2 : 1 in every one of them, whatever the medians' ratio is."""
    times = {"raw": [1.0, 8.0, 3.0], "memory": [2.0, 10.0, 6.0], "disk": [4.0, 32.0, 12.0], "Ray": [8.0, 20.0, 24.0]}
    part = ResultTable("x")
    row = moving.row("loopback", 6 * 10**9, times, part)
    assert (row["raw, GB/s"], row["into memory, GB/s"]) == (2.0, 1.0)
    assert (row["of raw"], row["of raw, disk"], row["pull / Ray"]) == (0.5, 0.25, 4.0)
    assert [(target.found, target.met) for target in part.targets] == [(0.5, True), (4.0, True)]


def test_what_was_not_measured_is_a_dash_and_no_target() -> None:
    """No tmpfs, no Ray, no time: pulls onto disk stand for all, and nothing is met that nobody saw."""
    part = ResultTable("x")
    row = moving.row("1 Gb/s", 10**9, {"raw": [1.0], "disk": [1.25]}, part)
    assert row["of raw"] is None and row["pull / Ray"] is None and row["Ray, GB/s"] is None
    assert [(target.found, target.met) for target in part.targets] == [(0.8, False)]
    part = ResultTable("x")
    row = moving.row("1 Gb/s", 10**9, {"raw": [], "disk": []}, part)
    assert row["raw, GB/s"] is None and not part.targets


def test_the_router_pulls_over_a_fast_link_and_computes_beside_a_slow_one() -> None:
    """At the break-even both ways take as long; 4,000 tokens of 1,000 bytes, computed in 4 s."""
    rates = arriving.Rates(1000.0, 1e9, 1000.0)
    chosen, estimate_s = arriving.pulls(4000, rates)
    assert chosen and estimate_s < 0.5
    chosen, estimate_s = arriving.pulls(4000, arriving.Rates(1000.0, 1e5, 1000.0))
    assert not chosen and estimate_s == pytest.approx(4.0, rel=0.1)
    # What is pulled takes as long as computing it where bytes a second are about prefill x bytes a token.
    assert arriving.break_even_bytes_per_s(4000, rates) == pytest.approx(1e6, rel=0.1)


def test_an_agent_s_text_has_as_many_tokens_as_asked_and_is_its_own() -> None:
    def count(text: str) -> int:
        return len(text.split())

    text = arriving.text_of(count, 300, "a")
    assert 293 <= count(text) <= 300
    assert text == arriving.text_of(count, 300, "a")
    other = arriving.text_of(count, 300, "b")
    assert text.split(".")[1] != other.split(".")[1], "no block is shared"


def test_ratios_of_split_prompts_are_taken_within_a_round() -> None:
    def said(first_s: float, text: str = "a") -> splitting.Said:
        return splitting.Said(text, first_s, 9.0)

    rounds = [
        {"first alone": said(first), "second alone": said(4 * first), "split": said(2 * first)} for first in (1, 5, 3)
    ]
    row = splitting.row("idle", rounds)
    assert (row["first alone, s"], row["split, s"], row["split / first alone"]) == (3, 6, 2.0)
    assert row["split / second alone"] == 0.5 and row["same words"] and row["rounds"] == 3
    rounds[1]["split"] = said(10, "b")
    assert not splitting.row("idle", rounds)["same words"]


def test_an_uneven_node_computes_as_long_as_its_pace_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "MODULE", "paced_executor")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "paced_executor.py").write_text(
        "class BatchExecutor:\n    def prefill(self, work): pass\n    def step(self): return ['a', 'b']\n"
    )
    pacing.install(pacing.Pace(0.01, 0.02, 0.03))
    executor = importlib.import_module("paced_executor").BatchExecutor()
    told: list[tuple[int, float]] = []
    executor.time_next(lambda *what: told.append(what))
    began = time.perf_counter()
    executor.prefill([("a", [1, 2, 3]), ("b", [4])])
    between = time.perf_counter()
    ((tokens, seconds),) = told
    assert tokens == 4 and 0.04 <= seconds <= between - began, "so the replica measures the pace"
    assert executor.step() == ["a", "b"]
    assert between - began >= 0.04 and time.perf_counter() - between >= 0.08
    monkeypatch.delitem(sys.modules, "paced_executor")


def test_ways_of_uneven_nodes_are_compared_within_a_round() -> None:
    def asked(first_s: float, whole_s: float, why: str = "home", text: str = "a") -> uneven.Asked:
        costs = {"split": {}, "alone": {"x": {"queue": 1.0, "pull": 0.0, "restore": 0.0, "prefill": 2.0, "total": 9.0}}}
        return uneven.Asked(splitting.Said(text, first_s, whole_s), 5.0, why, costs)

    rounds = [
        {
            uneven.ROUTER: asked(n, 2 * n, uneven.SPLIT),
            "first alone": asked(n, 3 * n),
            "second alone": asked(4 * n, 5 * n),
        }
        for n in (1, 8, 3)
    ]
    uneven.compare(part := ResultTable("t"), rounds)
    assert all(goal.met for goal in part.targets) and [row["first token, s"] for row in part.rows] == [3, 3, 12]
    assert part.rows[2]["/ router's way"] == 4.0 and part.rows[0]["as the router reckoned, s"] == 3.0
    rounds[0][uneven.ROUTER] = asked(1, 2)
    rounds[1]["first alone"] = asked(8, 24, text="b")
    uneven.compare(part := ResultTable("t"), rounds)
    assert [goal.found for goal in part.targets if not goal.met] == [2 / 3, 2 / 3]


def test_decoding_beside_a_pull_is_compared_with_the_same_before_and_after() -> None:
    def beside_of(before: float, during: float, after: float) -> beside.Beside:
        first, second, third = (beside.Window(steps, 10.0 / steps, 1.0) for steps in (before, during, after))
        return beside.Beside(first, second, third, 1e8, 0.5, 0.8)

    row = beside.row("link", 10**8, [beside_of(10, 9, 8), beside_of(20, 19, 20), beside_of(10, 5, 10)])
    assert row["pace"] == 0.95 and row["worst"] == 0.5 and row["pull, MB/s"] == 100
    assert (row["steps/s without"], row["with"]) == (10, 9)


def test_nothing_of_the_server_itself_is_killed() -> None:
    """A replica in the server's own session is not on a node of its own."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    try:
        with pytest.raises(RuntimeError, match="not of a node"):
            server.node_processes(child.pid, os.getpid())
    finally:
        child.communicate(b"\n", timeout=20)


def test_the_processes_of_a_node_are_its_session_and_the_command_that_keeps_it() -> None:
    """server -> command (own session) -> keeper (own session) -> replica."""
    keeper = (
        "import subprocess, sys; p = subprocess.Popen(['sleep', '30']); print('replica', p.pid, flush=True); p.wait()"
    )
    command = (
        "import subprocess, sys; "
        f"p = subprocess.Popen([sys.executable, '-c', {keeper!r}], start_new_session=True); "
        "print('keeper', p.pid, flush=True); p.wait()"
    )
    process = subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    try:
        pids = {name.decode(): int(pid) for name, pid in (process.stdout.readline().split() for _ in range(2))}
        found = server.node_processes(pids["replica"], os.getpid())
        assert sorted(found) == sorted([process.pid, *pids.values()])
        server.kill(found)
        assert process.wait(20) == -9
    finally:
        process.kill()
        process.wait(20)
        process.stdout.close()


def test_a_worker_answers_in_turns_and_says_why_it_ended(tmp_path: Path) -> None:
    program = "from benchmarks.cluster.worker import answer; answer(lambda asked: 10 // asked)"
    with Worker([sys.executable, "-c", program], tmp_path / "log") as worker:
        assert worker.ask(2) == 5 and worker.ask(5) == 2
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            worker.ask(0)


def test_a_worker_that_does_not_answer_in_time_is_no_hang(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "input(); input()"]
    with (
        Worker(command, tmp_path / "log") as worker,
        pytest.raises(RuntimeError, match=r"no answer in 0\.2 s"),
    ):
        worker.ask(1, timeout_s=0.2)


def test_a_table_has_only_what_was_measured() -> None:
    assert recovering.table(recovering.Kills()).rows == []
    part = recovering.table(recovering.Kills(next_token=[2.0, 1.0, 9.0]))
    assert [(row["median, s"], row["shortest, s"], row["longest, s"]) for row in part.rows] == [(2.0, 1.0, 9.0)]


def test_parts_of_other_runs_stay_unless_the_machine_or_a_version_is_another(tmp_path: Path) -> None:
    path = tmp_path / "cluster-test"

    def earlier(path: Path, result: dict[str, Any]) -> dict[str, Any]:
        return kept.earlier(path, result, run.PARTS)

    result = {"machine": {"cores": 2, "load_before": 9.0}, "versions": {"ray": "1"}}
    assert earlier(path, result) == {}
    part = {"title": "x", "rows": [], "targets": [], "notes": [], "seconds": 1.0}
    written = {**result, "parts": {"moving": part, "unknown": part}}
    path.with_name("cluster-test.json").write_text(json.dumps(written))
    assert earlier(path, {**result, "machine": {"cores": 2, "load_before": 1.0}}) == {"moving": part}
    assert earlier(path, {**result, "versions": {"ray": "2"}}) == {}
    path.with_name("cluster-test.json").write_text("{")
    assert earlier(path, result) == {}


@pytest.mark.parametrize("words", [["--parts", "all"], ["--rounds", "0"], ["--gbits", "0"], ["--mbits", "4,x"]])
def test_nonsense_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        run.read_options(words)
    assert refused.value.code == 2 and words[0] in capsys.readouterr().err
