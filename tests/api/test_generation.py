"""The options of a request, as the Python handles give them."""

from __future__ import annotations

import json
import shutil

import pytest

from satchel.api.generation import Options, agent_key, make_options
from satchel.api.text import load_text_model
from satchel.cluster.errors import InvalidRequest


def test_none_means_the_default():
    assert make_options(temperature=None, stop=None, seed=None) == Options()


def test_one_stop_string_and_a_list_of_one_are_the_same():
    assert make_options(stop="x").stop == make_options(stop=["x"]).stop == ("x",)


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", "0.5"), ("temperature", float("nan")), ("top_p", 0.0), ("seed", 2**63), ("invented", 1)],
)
def test_a_wrong_option_is_named(field, value):
    with pytest.raises(InvalidRequest) as error:
        make_options(**{field: value})
    assert error.value.param == field


def test_an_agent_has_a_key_in_its_tenant_and_no_agent_has_none():
    assert agent_key("ann") == "default/ann"
    assert agent_key("") == ""
    with pytest.raises(InvalidRequest):
        agent_key("a/b")


@pytest.mark.parametrize(
    ("config", "chosen"),
    [
        (None, (1.0, 1.0, 0)),
        ({"do_sample": False, "top_k": 20}, (0.0, 1.0, 0)),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20}, (0.6, 0.95, 20)),
        ({"temperature": -3, "top_p": "much", "top_k": 5}, (1.0, 1.0, 5)),
    ],
)
def test_what_a_request_leaves_open_the_model_decides(tmp_path, folders, config, chosen):
    folder = shutil.copytree(next(iter(folders.values())), tmp_path / "model")
    if config is not None:
        (folder / "generation_config.json").write_text(json.dumps(config))
    own = load_text_model(folder).sampling
    silent = Options().completed(own)
    assert (silent.temperature, silent.top_p, silent.top_k) == chosen
    spoken = Options(temperature=2.0, top_p=0.5, top_k=-1).completed(own)
    assert (spoken.temperature, spoken.top_p, spoken.top_k) == (2.0, 0.5, -1)
