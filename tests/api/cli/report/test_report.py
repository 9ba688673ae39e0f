"""`satchel doctor --report`: what is in the file, and what is not."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from satchel.actors.replica.kernels import decode_kernel
from satchel.actors.replica.selftest import device_report, kernel_check
from satchel.actors.replica.selftest.kernel_check import Shape
from satchel.api.cli.report import run
from satchel.api.cli.report.measuring import Measured, child_command, measure
from satchel.cluster.bring_up.check import Check
from satchel.cluster.bring_up.facts import machine_facts
from satchel.cluster.config.config import default_config, parse_config
from satchel.cluster.errors import ClusterError
from satchel.cluster.home import Home
from satchel.cluster.incidents import note_incident
from tests.api.cli.conftest import Served
from tests.worlds.fake_mac import GIB, fake_mac
from tests.worlds.models.families import write_model
from tests.worlds.replica import fake_kernels

MEASURED = Measured(facts={"device": {"name": "M4", "kind": "metal", "kernels": True}}, last_step="")


def told(source: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a model does here, in a short benchmark."""
    facts: dict[str, Any] = {}
    monkeypatch.setattr(device_report, "LENGTHS", (256, 1024, 10**6))
    monkeypatch.setattr(device_report, "BENCHMARK_S", 120.0)
    monkeypatch.setattr(kernel_check, "checked", lambda *_: iter(()))
    device_report.tell_all(source, facts.__setitem__, lambda step: None)
    # As it is written.
    return json.loads(json.dumps(facts))


def in_file(text: str) -> dict[str, Any]:
    (found,) = re.findall(r"^```json\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return json.loads(found)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(write_model(tmp_path / "model", "qwen2", bits=4))


def test_a_models_ways_its_self_test_and_its_rates_are_told(folder: str, monkeypatch: pytest.MonkeyPatch):
    facts = told(folder, monkeypatch)
    (way,) = facts["decode_ways"]
    assert (way["way"], way["reason"]) == ("in place", "") and way["off"] < 1e-3
    assert facts["model"]["decodes"] == facts["self_test"]["decodes"] == "in place"
    assert facts["self_test"]["served"] and facts["self_test"]["batched"]
    rates = facts["benchmark"]["rates"]
    assert [(rate["tokens"], rate["sequences"]) for rate in rates] == [(256, 1), (1024, 1), (1024, 4)]
    assert all(rate["prefill_tokens_per_s"] > 0 and rate["decode_tokens_per_s"] > 0 for rate in rates)
    assert ["context" in why for why in facts["benchmark"]["left_out"]] == [True]
    assert facts["device"]["kind"] == "cpu" and "kernels" not in facts


def test_the_benchmark_ends_in_time(folder: str, monkeypatch: pytest.MonkeyPatch):
    """A length that would take too long is left out, and said so."""
    monkeypatch.setattr(device_report, "LENGTHS", (256,))
    clock = iter(range(0, 10**6, 15))
    monkeypatch.setattr(device_report.time, "monotonic", lambda: float(next(clock)))
    facts: dict[str, Any] = {}
    device_report.tell_all(folder, facts.__setitem__, lambda step: None)
    assert [rate["tokens"] for rate in facts["benchmark"]["rates"]] == [256]
    assert facts["benchmark"]["left_out"] == ["4 sequences of 1024 tokens: it would take too long"]


@pytest.mark.parametrize("wrong", [pytest.param(False, marks=pytest.mark.slow), True])
def test_kernels_are_told_with_how_far_they_are_off(folder: str, wrong: bool, monkeypatch: pytest.MonkeyPatch):
    with fake_kernels.kernels(), pytest.MonkeyPatch.context() as patch:
        right = decode_kernel.attend
        if wrong:
            patch.setattr(decode_kernel, "attend", lambda *given, **named: 1.5 * right(*given, **named))
        facts = told(folder, monkeypatch)
    kernel = facts["decode_ways"][0]
    assert kernel["way"] == "by a kernel" and bool(kernel["reason"]) == wrong and (kernel["off"] > 0.03) == wrong
    # It is only timed if it agrees.
    assert (kernel["step_s"] is None) == wrong
    compiled = facts["decode_ways"][1:]
    assert bool(compiled) != wrong and all(way["off"] < 1e-3 for way in compiled)
    assert facts["model"]["decodes"].startswith("dequantized" if wrong else "by a kernel")


def test_every_shape_of_the_kernels_is_told_until_the_time_is_over(monkeypatch: pytest.MonkeyPatch):
    facts: dict[str, Any] = {}
    off = {1: 1e-3, 2: 5e-3, 4: 0.5}
    shapes = [Shape("q4", "float16", (64, 64), grouped, 0, off[grouped], 2e-2) for grouped in off]
    shapes += [Shape("fp16", "float16", (96, 96), 1, 0, math.inf, 2e-2, "it cannot be compiled")] * 10
    monkeypatch.setattr(kernel_check, "checked", lambda *_: iter(shapes))
    device_report._check_kernels(facts.__setitem__)
    found = facts["kernels"]
    assert found["farthest"] == {"q4 float16 64/64": 0.5} and found["shapes"] == 3 + device_report.FAILS_MAX
    assert "off by 5.0e-01, more than 2e-02" in found["wrong"][0] and "cannot be compiled" in found["wrong"][1]
    assert "in a row" in found["stopped"] and json.dumps(found, allow_nan=False)
    monkeypatch.setattr(device_report, "KERNELS_S", 0.0)
    device_report._check_kernels(facts.__setitem__)
    assert facts["kernels"]["shapes"] == 1 and "too long" in facts["kernels"]["stopped"]


def test_a_model_that_cannot_be_loaded_leaves_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = measure(child_command(str(tmp_path)), dict(os.environ), lambda step: None)
    (one,) = found
    assert not one.crashed and "config.json" in one.facts["failed"] and one.facts["device"]["kind"]


CRASHES = """
import json, os, signal, sys, time
print(json.dumps({"step": "loading"}), flush=True)
print(json.dumps({"fact": "device", "value": {"name": "M4"}}), flush=True)
print("the driver says: p4ssphrase", file=sys.stderr, flush=True)
if os.environ.get("SATCHEL_KERNELS") != "0":
    HOW
print(json.dumps({"fact": "model", "value": 1}) + "\\n" + json.dumps({"step": ""}), flush=True)
"""


@pytest.mark.parametrize(
    ("how", "ended"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "signal SIGSEGV"),
        ("time.sleep(60)", "longer than 1 s"),
        ("sys.exit(3)", "exit code 3"),
    ],
)
def test_a_crash_or_a_hang_is_told_and_it_is_measured_without_kernels(how: str, ended: str):
    said: list[str] = []
    command = [sys.executable, "-c", CRASHES.replace("HOW", how)]
    environment = {name: value for name, value in os.environ.items() if name != "SATCHEL_KERNELS"}
    first, second = measure(command, environment, said.append, 1.0 if "sleep" in how else 60.0)
    assert ended in first.ended and first.last_step == "loading" and first.facts == {"device": {"name": "M4"}}
    assert first.output == ["the driver says: p4ssphrase"]
    assert not second.crashed and second.facts["model"] == 1 and second.output == []
    assert any("without kernels" in each for each in said)
    assert len(measure(command, {**environment, "SATCHEL_KERNELS": "0"}, said.append)) == 1


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands by which models were measured, in no time."""
    commands: list[list[str]] = []
    monkeypatch.setattr(run, "measure", lambda command, *_: (commands.append(command), [MEASURED])[1])
    return commands


def test_a_report_of_a_mac_has_what_one_needs_to_know_and_no_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: list[list[str]]
):
    fake_mac(tmp_path / "tools", monkeypatch)
    monkeypatch.setenv("HF_TOKEN", "p4ssphrase")
    monkeypatch.setenv("HOME", "/Users/ann")
    monkeypatch.setattr(socket, "gethostname", lambda: "anns-mac.local")
    config = parse_config(
        {
            "models": [{"name": "a/b", "source": "/Users/ann/models/b"}],
            "nodes": [
                {"name": "studio", "address": "10.0.0.1"},
                {"name": "mini", "address": "10.0.0.2", "ssh": "ann@mini.lan"},
            ],
        }
    )
    checks = [
        Check("network to mini", "warn", "10.0.0.2: No route to host, from anns-mac", "ssh ann@mini.lan"),
        Check("last 24 h: refused", "warn", "3 times, last at 12:00:00: tenant-bob asked for p4ssphrase", ""),
        Check("last end", "warn", "studio failed with p4ssphrase", "/Users/ann/.satchel/x says more"),
    ]
    path = run.write_report(config, Home(tmp_path / "home"), checks, {}, tmp_path / "mine.md", "a/b")
    assert path == tmp_path / "mine.md" and measured[0][-1] == "/Users/ann/models/b"
    text = path.read_text()
    for name in ("studio", "mini", "10.0.0", "anns-mac", "p4ssphrase", "/Users/ann", "tenant-bob"):
        assert name not in text, name
    found = in_file(text)
    assert found["machine"]["mac"]["sysctl"]["hw.memsize"] == str(64 * GIB)
    assert found["machine"]["mac"]["power"] == {"sleep": "1", "source": ""}
    assert any("Pages wired down" in line for line in found["machine"]["mac"]["vm_stat"])
    assert found["machine"]["system"]["version"] == "15.1" and found["machine"]["system"]["processor"] == "Apple M4"
    assert {"satchel", "mlx", "mlx-lm", "ray"} <= found["machine"]["packages"].keys()
    assert found["checks"][0]["name"] == "network to node-2" and found["server"] is None
    assert found["measured"][0]["facts"] == MEASURED.facts
    head = text.partition("## All of it")[0]
    assert "15.1" in head and "Device: M4 (metal), kernels: yes" in head and "| network to node-2 | warn |" in head


def test_links_are_told_without_addresses(tmp_path: Path):
    facts = machine_facts(Home(tmp_path / "no" / "home"))
    assert any("loopback" in kind for link in facts["links"] for kind in link["addresses"])
    assert "127.0.0.1" not in json.dumps(facts) and facts["disk_free_bytes"] > 0


def test_a_report_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, measured: list[list[str]]
):
    for file in (tmp_path, tmp_path / "none" / "x.md"):
        with pytest.raises(ClusterError, match="cannot be written"):
            run.write_report(default_config(), Home(tmp_path / "home"), [], {}, file, None)
    assert measured == []


async def test_a_running_server_is_in_the_report(served: Served, tmp_path: Path, measured: list[list[str]]):
    note_incident(served.home, "slower", "mac0 is slow")
    path = tmp_path / "report.md"
    result = await served.run("doctor", "--report", str(path))
    assert f"Written: {path}" in result.output and measured == [child_command("embedded:recall")]
    text = path.read_text()
    server = in_file(text)["server"]
    assert [replica["model"] for replica in server["replicas"]] and server["nodes"] == 2
    assert "a server was running" in text and "mac0" not in text and "mac1" not in text and "10.0.0.1" not in text
    assert re.search(r"node-\d is slow", text)


async def test_a_file_or_a_model_without_a_report_is_a_mistake(served: Served):
    assert "--report" in await served.refuses("doctor", "report.md")
    assert "--report" in await served.refuses("doctor", "--model", "embedded:recall")
