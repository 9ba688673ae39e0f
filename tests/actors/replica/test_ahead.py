"""What is done before a replica needs it: Python's files are compiled, and kernels too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from satchel.actors.replica import ahead


def test_few_processors_are_left_to_ray(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "cpu_count", lambda: ahead.PROCESSORS_MIN - 1)
    assert ahead.preparing(["auto"]) == []
    monkeypatch.setattr(os, "cpu_count", lambda: ahead.PROCESSORS_MIN)
    assert ahead.preparing(["float16", "auto", "auto"]) == ["-m", "satchel.actors.replica.ahead", "auto", "float16"]


@pytest.mark.slow
def test_the_program_compiles_what_replicas_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "cpu_count", lambda: ahead.PROCESSORS_MIN)
    settings = {
        "PYTHONPYCACHEPREFIX": str(tmp_path / "compiled"),
        "PYTHONDONTWRITEBYTECODE": "",
        "SATCHEL_HOME": str(tmp_path / "home"),
    }
    command = [sys.executable, "-P", *ahead.preparing(["auto"])]
    subprocess.run(command, check=True, env=os.environ | settings, timeout=120)
    compiled = {path.name.partition(".")[0] for path in tmp_path.rglob("*/mlx_lm/*.pyc")}
    assert {"utils", "tokenizer_utils"} <= compiled


def test_a_model_of_text_does_not_wait_for_the_pipelines_of_others():
    program = """
import sys
from satchel.actors.replica.serving_of import serving_of
from satchel.cluster.config.config import Logs, Model, Scheduling, Traces
from satchel.cluster.config.nodes import Node
from satchel.cluster.config.timing import USUAL

how = "m-0", Model(name="m", source="s"), Scheduling(), Node(name="n"), USUAL, None
print(type(serving_of(how, None, Logs(), Traces())).__name__, "mlx_vlm" in sys.modules, "mlx_audio" in sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert run.stdout.split() == ["Serving", "False", "False"]
