"""Wrong values in a config: what is told of them, and which key a person meant."""

from __future__ import annotations

from typing import Any

import pytest

from satchel.cluster.config.config import parse_config
from satchel.cluster.errors import ConfigError

MODEL = {"name": "a", "source": "b/c"}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"models": [MODEL], "endpont": {}}, "endpont: there is no such field; did you mean endpoint?"),
        (
            {"models": [{**MODEL, "replica": 1}]},
            "models[0].replica: there is no such field; did you mean replicas?",
        ),
        (
            {"models": [MODEL], "endpoint": {"prot": 1}},
            "endpoint.prot: there is no such field; did you mean port?",
        ),
        ({"models": [MODEL], "port": 1}, "port: there is no such field; did you mean endpoint.port?"),
        ({"models": [MODEL], "adapter": "x"}, "did you mean models[].adapter?"),
        ({"models": [MODEL], "endpoint": {"tls": {"certifcate": "/a", "key": "/b"}}}, "did you mean certificate?"),
        ({"models": [MODEL], "nodes": [{"name": "n", "adress": "1.2.3.4"}]}, "did you mean address?"),
    ],
)
def test_a_similar_key_is_named(data: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(data)
    assert says in error.value.message


def test_a_key_like_no_other_is_refused_without_a_guess() -> None:
    with pytest.raises(ConfigError) as error:
        parse_config({"models": [MODEL], "xyzzy": 1})
    assert error.value.message == "config: xyzzy: there is no such field"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"models": [{**MODEL, "kv": "q9"}]}, "models[0].kv: Input should be 'auto', 'q4', 'k6v4', 'k8v4' or 'fp16'"),
        ({"models": [{"name": "a"}, 1]}, "models[0].source: must be given; models[1]: must have fields"),
        ({"models": []}, "models: must have at least 1"),
        ({"models": [MODEL], "endpoint": {"origins": "x"}}, "endpoint.origins: must be a list"),
        ([], "(top level): must have fields"),
        (
            {"models": [MODEL], "timeouts": {"request_s": float("inf")}},
            "timeouts.request_s: Input should be a finite number",
        ),
        (
            {"models": [MODEL], "endpoint": {"body_bytes_max": "5 XB"}},
            "endpoint.body_bytes_max: a size is a number with an optional unit: 512 MiB, 2 GB",
        ),
    ],
)
def test_exactly_what_is_wrong_is_told_in_words_of_yaml(data: Any, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(data)
    assert error.value.message == f"config: {says}"
