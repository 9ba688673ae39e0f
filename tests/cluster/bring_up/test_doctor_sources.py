"""What `satchel doctor` says of folders that a config names."""

from __future__ import annotations

from pathlib import Path

import pytest

from satchel.cluster.bring_up.doctor import check_adapter, check_source
from satchel.cluster.config.config import load_config

UNKNOWN = "~nobody-of-this-name/x"


@pytest.fixture
def model(tmp_path: Path):
    file = tmp_path / "config.yaml"
    file.write_text(f"models: [{{name: a, source: '{UNKNOWN}', adapters: {{b: '{UNKNOWN}'}}}}]")
    return load_config(file).models[0]


def test_a_folder_of_an_unknown_user_is_one_that_does_not_exist(model):
    """Not an exception, which would keep every other check from being shown."""
    source = check_source(model)
    assert (source.result, source.found) == ("fail", f"there is no folder {UNKNOWN}")
    adapter = check_adapter(model, "b")
    assert (adapter.result, adapter.found) == ("fail", f"{UNKNOWN} has no adapter_config.json")
