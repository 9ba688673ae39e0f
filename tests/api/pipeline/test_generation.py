"""A request's options, as Python handles pass them."""

from __future__ import annotations

import json
import shutil

import pytest

from satchel.actors.protocol.replica_messages import Sampling
from satchel.api.requests.options import Options, make_options
from satchel.api.requests.requests import agent_key
from satchel.api.text.model import load_text_model
from satchel.cluster.errors import InvalidRequest


def test_none_means_the_default():
    assert make_options(temperature=None, stop=None, seed=None) == Options()


def test_one_stop_string_and_a_list_of_one_are_the_same():
    assert make_options(stop="x").stop == make_options(stop=["x"]).stop == ("x",)


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", "0.5"), ("temperature", float("nan")), ("top_p", -0.1), ("seed", 2**63), ("invented", 1)],
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


def sampling(options: Options, own: dict[str, float] | None = None) -> Sampling:
    return options.sampling(own or {}, seed=1, max_tokens=9, vocabulary_size=400)


@pytest.mark.parametrize(
    ("config", "chosen"),
    [
        (None, (1.0, 1.0, 0, 0.0, 1.0)),
        ({"do_sample": False, "top_k": 20, "repetition_penalty": 1.2}, (0.0, 1.0, 0, 0.0, 1.2)),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20}, (0.6, 0.95, 20, 0.0, 1.0)),
        ({"temperature": 1, "top_k": 20.0, "min_p": 0.05, "repetition_penalty": 1.1}, (1.0, 1.0, 20, 0.05, 1.1)),
        ({"temperature": -3, "top_p": "much", "top_k": 5, "min_p": 7, "repetition_penalty": 0}, (1.0, 1.0, 5, 0, 1)),
    ],
)
def test_what_a_request_leaves_open_the_model_decides(tmp_path, folders, config, chosen):
    folder = shutil.copytree(next(iter(folders.values())), tmp_path / "model")
    if config is not None:
        (folder / "generation_config.json").write_text(json.dumps(config))
    own = load_text_model(folder).sampling
    silent = sampling(Options(), own)
    assert (silent.temperature, silent.top_p, silent.top_k, silent.min_p, silent.repetition_penalty) == chosen
    assert type(silent.top_k) is int
    spoken = Options(temperature=2.0, top_p=0.5, top_k=-1, min_p=0.1, repetition_penalty=1.0)
    asked = sampling(spoken, own)
    assert (asked.temperature, asked.top_p, asked.top_k, asked.min_p, asked.repetition_penalty) == (2.0, 0.5, 0, 0.1, 1)


def test_every_option_reaches_the_replica():
    given = make_options(
        presence_penalty=0.5,
        frequency_penalty=-2,
        logit_bias={"7": -100, 8: 1.5},
        min_tokens=3,
        stop_token_ids=[5, 6],
        ignore_eos=True,
        logprobs=4,
    )
    asked = sampling(given)
    assert (asked.presence_penalty, asked.frequency_penalty, asked.logprobs) == (0.5, -2.0, 4)
    assert (asked.logit_bias, asked.stop_token_ids) == ([(7, -100.0), (8, 1.5)], [5, 6])
    assert (asked.min_tokens, asked.max_tokens, asked.ignore_eos, asked.seed) == (3, 9, True, 1)
    assert sampling(make_options(min_tokens=50)).min_tokens == 9, "no sequence is kept from ending at its limit"


def test_a_token_id_written_twice_counts_once():
    """JSON has the key "5" once; a Python caller may pass 5 and "5"."""
    assert make_options(logit_bias={"5": 1, 5: 2}).logit_bias == ((5, 2.0),)


def test_a_temperature_too_small_to_divide_by_is_greedy():
    assert sampling(Options(temperature=1e-9)).temperature == 0
    assert sampling(Options(temperature=0.01)).temperature == 0.01
