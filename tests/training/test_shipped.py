"""The programs of `training/` write what ships, but for what only a GPU trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from satchel.actors.model_files.source import EMBEDDED
from training import script
from training.recall import layout as recall
from training.recall import tokenizer as recall_tokenizer
from training.shapes import layout as shapes
from training.shapes import tokenizer as shapes_tokenizer


@pytest.mark.parametrize(
    ("name", "write", "template"),
    [
        ("recall", lambda folder: recall.write_configs(folder, recall.RecallShape()), recall_tokenizer.TEMPLATE),
        ("shapes", lambda folder: shapes.write_configs(folder, shapes.PictureModelShape()), shapes_tokenizer.TEMPLATE),
    ],
)
def test_configurations_and_templates(name: str, write: Callable[[Path], None], template: Path, tmp_path: Path) -> None:
    write(tmp_path)
    written = {path.name for path in tmp_path.iterdir()}
    assert {"config.json", "generation_config.json"} <= written
    for file in written:
        assert (tmp_path / file).read_bytes() == (EMBEDDED / name / file).read_bytes(), file
    assert template.read_bytes() == (EMBEDDED / name / "chat_template.jinja").read_bytes()


def test_the_scripted_model(tmp_path: Path) -> None:
    script.write(tmp_path)
    shipped = EMBEDDED / "script"
    assert {path.name for path in shipped.iterdir()} - {path.name for path in tmp_path.iterdir()} == {
        "README.md",
        "script.json",
    }
    for path in tmp_path.iterdir():
        if path.suffix != ".safetensors":
            assert path.read_bytes() == (shipped / path.name).read_bytes(), path.name
    ours, theirs = mx.load(str(tmp_path / "model.safetensors")), mx.load(str(shipped / "model.safetensors"))
    assert isinstance(ours, dict) and isinstance(theirs, dict) and ours.keys() == theirs.keys()
    # A GPU may round what it draws otherwise.
    assert all(mx.allclose(ours[name], theirs[name], rtol=0.01, atol=1e-3) for name in ours)
