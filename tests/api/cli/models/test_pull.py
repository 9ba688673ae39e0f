"""`satchel pull` and `satchel fit` with a Hub, against a stand-in for it on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.worlds.hub import COMMIT, RECALL, Hub, running_hub

PIECE = 10 * 2**20
"""What the Hub's client writes at a time."""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub() as server:
        yield server


class Machine:
    def __init__(self, folder: Path, hub: Hub) -> None:
        self.folder, self.hub = folder, hub

    def satchel(self, *arguments: str, url: str | None = None) -> subprocess.CompletedProcess[str]:
        # The Hub's client reads the environment while it is imported.
        places = {"HF_HOME": str(self.folder / "hf"), "SATCHEL_HOME": str(self.folder / "home")}
        return subprocess.run(
            [sys.executable, "-m", "satchel.api.cli", *arguments],
            env={**os.environ, **places, "HF_ENDPOINT": url or self.hub.url, "COLUMNS": "80"},
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )

    def says(self, *arguments: str) -> str:
        run = self.satchel(*arguments)
        assert run.returncode == 0, run.stderr
        return run.stdout

    def snapshot(self) -> Path:
        return self.folder / "hf" / "hub" / "models--owner--model" / "snapshots" / COMMIT


@pytest.fixture
def machine(hub: Hub, tmp_path: Path) -> Machine:
    return Machine(tmp_path, hub)


def ranges(hub: Hub) -> list[str | None]:
    return [asked for name, asked in hub.bodies if name == "model.safetensors"]


@pytest.mark.slow
def test_what_will_be_downloaded_is_said_before_and_a_dry_run_ends_there(machine: Machine, hub: Hub) -> None:
    said = machine.says("pull", "owner/model", "--dry-run")
    size = sum(len(data) for name, data in RECALL.items() if name != "README.md")
    assert f"owner/model: {len(RECALL.keys() - {'README.md'})} files, {size / 1e6:.0f} MB; " in said
    assert "are free at " in said and "It fits into this machine's memory" in said
    assert ranges(hub) == ["bytes=0-100000"], "only the header"
    assert not machine.snapshot().exists()
    planned = json.loads(machine.says("pull", "owner/model", "--dry-run", "--json"))
    assert (planned["bytes"], planned["missing_bytes"], planned["fits"], planned["folder"]) == (size, size, True, None)
    assert planned["commit"] == COMMIT and planned["files"]["model.safetensors"] == len(RECALL["model.safetensors"])


def test_a_model_is_pulled_once_and_then_listed(machine: Machine, hub: Hub) -> None:
    said = machine.says("pull", "owner/model")
    assert f"owner/model is in {machine.snapshot()}" in said
    assert (machine.snapshot() / "model.safetensors").read_bytes() == RECALL["model.safetensors"]
    (entry,) = [each for each in json.loads(machine.says("list", "--json")) if each["place"] == "hub"]
    assert (entry["source"], entry["folder"], entry["complete"]) == ("owner/model", str(machine.snapshot()), True)
    hub.bodies.clear()
    assert "and all of them are here" in machine.says("pull", "owner/model")
    assert not hub.bodies


@pytest.mark.slow
def test_after_a_cut_connection_the_same_command_continues(machine: Machine, hub: Hub) -> None:
    """The Hub is gone after the cut, so the command fails; the next one asks only for the rest."""
    hub.cut_after, hub.gone_after_cut = PIECE + 1000, True
    failed = machine.satchel("pull", "owner/model")
    assert failed.returncode == 1 and "Traceback" not in failed.stderr
    assert failed.stderr.count("\n") == 1
    assert failed.stderr.endswith("; what came is kept, and `satchel pull owner/model` continues\n")
    (entry,) = [each for each in json.loads(machine.says("list", "--json")) if each["place"] == "hub"]
    assert (entry["source"], entry["complete"]) == ("owner/model", False)
    hub.gone_after_cut, hub.gone = False, False
    hub.bodies.clear()
    machine.says("pull", "owner/model")
    assert f"bytes={PIECE}-" in ranges(hub), "the first piece is not fetched again"
    assert None not in ranges(hub)
    assert (machine.snapshot() / "model.safetensors").read_bytes() == RECALL["model.safetensors"]


@pytest.mark.slow
def test_what_came_damaged_is_not_used(machine: Machine, hub: Hub) -> None:
    hub.cut_after, hub.gone_after_cut = PIECE + 1000, True
    machine.satchel("pull", "owner/model")
    (begun,) = (machine.snapshot().parents[1] / "blobs").glob("*.incomplete")
    begun.write_bytes(b"x" * PIECE)
    hub.gone_after_cut, hub.gone = False, False
    failed = machine.satchel("pull", "owner/model")
    assert failed.returncode == 1 and "model.safetensors came damaged and was removed" in failed.stderr
    machine.says("pull", "owner/model")
    assert (machine.snapshot() / "model.safetensors").read_bytes() == RECALL["model.safetensors"]


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("owner/nothing", "satchel: the Hub has no owner/nothing, or it is private"),
        ("embedded:recall", "satchel: 'embedded:recall' is neither a folder nor a Hub id"),
        ("owner/model@v9", "satchel: owner/model has no revision 'v9' on the Hub"),
    ],
)
def test_what_cannot_be_pulled_is_one_sentence(machine: Machine, model: str, says: str) -> None:
    failed = machine.satchel("pull", model)
    assert failed.returncode == 1 and failed.stderr.startswith(says) and failed.stderr.count("\n") == 1


def test_without_a_hub_it_says_so(machine: Machine) -> None:
    failed = machine.satchel("pull", "owner/model", url="http://127.0.0.1:9")
    assert failed.returncode == 1 and "the Hub cannot be reached" in failed.stderr


def test_a_model_on_the_hub_is_estimated_from_headers(machine: Machine, hub: Hub) -> None:
    """It needs what the same files need in a folder, and neither weights nor anything in the cache."""

    def fit(model: str) -> dict[str, Any]:
        return json.loads(machine.says("fit", model, "--memory", "4GB", "--json"))

    there, here = fit("owner/model"), fit("embedded:recall")
    assert ranges(hub) == ["bytes=0-100000"] and hub.fetched == {"model.safetensors", "config.json"}
    assert not (machine.folder / "hf" / "hub" / "models--owner--model" / "snapshots").exists()
    assert {**there, "source": None} == {**here, "source": None}
    # A CPU computes in float32.
    assert here["weights_bytes"] in (11_018_240, 2 * 11_018_240)
    (node,) = here["nodes"]
    assert node["agents"].keys() == {"8000"} and node["agents"]["8000"] > 100


@pytest.mark.slow
def test_a_model_that_fits_nowhere_has_another_exit_code_and_advice(machine: Machine) -> None:
    small = machine.satchel("fit", "embedded:recall", "--memory", "12MB")
    assert small.returncode == 1 and not small.stderr
    assert "It does not fit (with 12 MB)" in " ".join(small.stdout.split())
    ample = " ".join(machine.says("fit", "embedded:recall", "--memory", "1GB").split())
    assert "MB of weights (bfloat16" in ample and "Context: 8,192 tokens" in ample and "agents of 8,000" in ample
    assert "does not fit" not in ample
    wrong = machine.satchel("fit", "embedded:recall", "--memory", "much")
    assert wrong.stderr == "satchel: --memory much: a size is a number with an optional unit: 512 MiB, 2 GB\n"
