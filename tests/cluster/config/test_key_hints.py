"""Unknown keys of a config: which one a person meant."""

from __future__ import annotations

from typing import Any

import pytest

from satchel.cluster.config.config import parse_config
from satchel.cluster.errors import ConfigError

MODEL = {"name": "a", "source": "b/c"}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"models": [MODEL], "endpont": {}}, "endpont: Unexpected keyword argument; did you mean endpoint?"),
        (
            {"models": [{**MODEL, "replica": 1}]},
            "models[0].replica: Unexpected keyword argument; did you mean replicas?",
        ),
        (
            {"models": [MODEL], "endpoint": {"prot": 1}},
            "endpoint.prot: Unexpected keyword argument; did you mean port?",
        ),
        ({"models": [MODEL], "port": 1}, "port: Unexpected keyword argument; did you mean endpoint.port?"),
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
    assert error.value.message == "config: xyzzy: Unexpected keyword argument"
