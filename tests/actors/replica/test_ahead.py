"""What is done before a replica needs it: files are compiled, kernels too, and models' files hashed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from satchel.actors.model_files.identity import digests
from satchel.actors.replica import ahead
from satchel.actors.replica.loading.model_id import files_of
from satchel.cluster.home import Home


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    home = Home(tmp_path / "home")
    monkeypatch.setattr(ahead, "default_home", lambda: home)
    return home


def test_few_processors_are_left_to_ray(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "cpu_count", lambda: ahead.PROCESSORS_MIN - 1)
    assert ahead.preparing(["auto"]) == []
    monkeypatch.setattr(os, "cpu_count", lambda: ahead.PROCESSORS_MIN)
    assert ahead.preparing(["float16", "auto", "auto"]) == ["-m", "satchel.actors.replica.ahead", "auto", "float16"]


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


def test_loading_finds_the_digests_that_were_made_ahead(tmp_path: Path, home: Home, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text(name)
    # Digests of files that have just been changed are not kept.
    monkeypatch.setattr(digests, "SETTLED_NS", 0)
    ahead.digest_ahead("m", folder, lambda what, part: None).join()
    monkeypatch.setattr(digests, "_hash_all", lambda files, *how: {} if not files else pytest.fail("it is read again"))
    found = digests.digest_files(files_of(folder), home.digests_file, lambda part: None)
    assert found.keys() == {"model/config.json", "model/model.safetensors"}


def test_a_folder_that_cannot_be_read_is_left_to_loading(tmp_path: Path, home: Home, monkeypatch: pytest.MonkeyPatch):
    failed = list[object]()
    monkeypatch.setattr("threading.excepthook", failed.append)
    ahead.digest_ahead("m", tmp_path / "gone", lambda what, part: None).join()
    assert not failed and not home.digests_file.exists()
