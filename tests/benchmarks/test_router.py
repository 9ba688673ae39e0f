"""The benchmark of the router compares fairly and counts rightly. How fast anything is, is no test."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.programs import ROOT, program
from benchmarks.router import cells, decisions, engines, proxies, ray_affinity, replaying, run, workloads

NODES = 3

ROUND_ROBIN = """
import itertools, json, sys, threading, urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

urls = sys.argv[sys.argv.index("--worker-urls") + 1:]
turns, lock = itertools.cycle(urls), threading.Lock()

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(json.dumps({"workers": [{"is_healthy": True} for _ in urls]}).encode())

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        with lock:
            url = next(turns)
        asked = urllib.request.Request(url + self.path, body, {"content-type": "application/json"})
        with urllib.request.urlopen(asked) as answer:
            self.answer(answer.read())

    def answer(self, body):
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def talks() -> Any:
    return workloads.synthetic(0, agents=4, turns=2)


def test_a_proxy_s_decisions_are_those_of_its_rule_in_simulated_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round robin that is another process, with HTTP between, has the outcome of the same rule in this one."""
    script = tmp_path / "peer"
    script.write_text(f"#!{sys.executable}\n{ROUND_ROBIN}")
    script.chmod(0o700)
    monkeypatch.setattr(proxies, "install", lambda peer: script)
    machine = engines.Machine()
    peer = proxies.Peer("peer", "peer", ())
    names = replaying.names(NODES)
    with proxies.running(peer, names, tmp_path / "log") as proxy:
        found = replaying.replay(talks(), proxy, replicas=NODES, machine=machine)
    own = replaying.replay(talks(), replaying.Satchel("round_robin"), replicas=NODES, machine=machine)
    assert len(found.ttft_s) == 8
    assert found == own


def test_a_proxy_that_does_not_start_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxies, "install", lambda peer: Path(sys.executable))
    peer = proxies.Peer("python", "python", ())
    with (
        pytest.raises(proxies.ProxyUnavailable, match="ended with"),
        proxies.running(peer, ["r0"], tmp_path / "log"),
    ):
        pass


def test_texts_have_as_much_in_common_as_their_blocks() -> None:
    def text(*blocks: bytes) -> str:
        request: Any = SimpleNamespace(block_ids=blocks, request_id="q")
        return proxies.text_of(request)

    one, other = text(b"a", b"b", b"c", b"d"), text(b"a", b"b", b"e", b"d")
    assert len(one) == len(other) == 4 * len(text(b"a"))
    common = next(index for index, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1])
    assert 2 * len(text(b"a")) <= common < 3 * len(text(b"a"))
    assert text() == text(), "a prompt without a block has a word of its own"


def test_ray_s_rule_follows_a_prefix_until_its_replica_has_too_many() -> None:
    def routed(imbalanced_threshold: float) -> list[str]:
        router = ray_affinity.RayAffinity(["r0", "r1"], imbalanced_threshold)
        requests: list[Any] = [SimpleNamespace(block_ids=[b"a", b"b"], request_id=str(index)) for index in range(6)]
        return [router.route(request, 0.0).replica for request in requests]

    assert len(set(routed(float("inf")))) == 1, "by default a prefix stays where it is"
    assert set(routed(2.0)) == {"r0", "r1"}


def test_a_recorded_service_comes_at_the_rate_that_is_asked_for(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 1000 * index**2, "input_length": 1200, "output_length": 5, "hash_ids": [1, 2, index]}
        for index in range(50)
    ]
    trace.write_text("\n".join(map(json.dumps, rows)))
    for seed in (0, 1):
        sessions = workloads.chat_service(seed, trace, requests=20, per_s=4.0)
        starts = [session.starts_s for session in sessions]
        assert starts[0] == 0.0 and starts[-1] == pytest.approx(20 / 4.0) and starts == sorted(starts)
    blocks = [session.turns[0].blocks for session in sessions]
    assert all(len(row) == 1200 // 256 for row in blocks)
    assert len({row[:4] for row in blocks}) == 1


def line(router: str, p99: float, hit: float, workload: str = "a (recorded)") -> dict[str, Any]:
    return {
        "nodes": 4, "workload": workload, "rate": "r", "router": router, "ttft_p99_s": p99, "hit_rate": hit,
    }  # fmt: skip


def test_what_is_wanted_is_judged_over_the_cells_that_two_routers_share() -> None:
    """`other` is better in one cell and worse in sum; `part` has one cell only, and its own sum is set beside that."""
    rows = [
        line("satchel", 2.2, 0.50),
        line("other", 2.0, 0.51),
        line("part", 2.1, 0.53),
        line("satchel", 3.0, 0.50, "b (recorded)"),
        line("other", 4.0, 0.40, "b (recorded)"),
        line("satchel", 9.0, 0.10, "made up"),
        line("other", 1.0, 0.90, "made up"),
    ]
    wanted = {what: (found, most) for what, found, most in cells.wanted(rows)}
    found = list(wanted.values())
    assert found[0] == (pytest.approx(1.1), 1.05)
    assert found[1] == (pytest.approx(2.2 / 2.1), 1.0)
    assert found[2] == (pytest.approx(3.0), 2.0)
    assert [total["cells"] for total in cells.totals(rows)] == [3, 3, 1]
    assert cells.wanted(rows[:1]) == [], "alone it is the best of all"


def test_a_router_that_cannot_start_is_named_and_the_others_are_measured() -> None:
    def broken(names: list[str]) -> Any:
        raise proxies.ProxyUnavailable("it does not install: why")

    cell = cells.Cell("w", "r", NODES, engines.Machine(), lambda seed: talks())
    comparison = run.Comparison(NODES, [])
    made = {"broken": broken, "satchel": lambda names: nullcontext(replaying.Satchel("satchel"))}
    *_, part = comparison.measure([cell, cell], made, SimpleNamespace(left_s=1.0))
    assert [row["router"] for row in part["rows"]] == ["satchel"]
    assert part["rows"][0]["requests"] == 8 * cell.seeds
    assert sum("it does not install: why" in note for note in part["notes"]) == 1


def test_decisions_among_many_nodes_are_timed() -> None:
    found = list(decisions.time_large(4, 400, 5))
    assert {"request", "decisions_a_s", "p50_us", "p99_us", "bytes_a_block", "blocks", "fill_s"} <= found[0].keys()


@pytest.mark.parametrize("words", [["--parts", "all"], ["--parts", "nodes-0"], ["--parts", "nodes-x"]])
def test_nonsense_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        run.read_options(words)
    assert refused.value.code == 2 and words[0] in capsys.readouterr().err


def test_the_command_writes_its_results_without_paths_of_the_machine(tmp_path: Path) -> None:
    """And keeps what it did not measure now."""
    command = program("router.run", "--parts", "nodes-1", "--budget-s", "0.5")
    for routers in ("satchel", "round_robin"):
        ended = subprocess.run(
            [*command, "--routers", routers, "--machine", "test", "--out", str(tmp_path)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert ended.returncode == 0, ended.stderr
    written = (tmp_path / "router-test.json").read_text()
    rows = json.loads(written)["parts"]["nodes-1"]["rows"]
    assert {row["router"] for row in rows} == {"satchel", "round_robin"}
    assert str(tmp_path) not in written
    assert (tmp_path / "router-test.md").read_text().startswith("# The router\n")
