"""What a type checker sees of the handles."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest

from satchel.api.client.agent import Agent
from satchel.api.client.cluster import Cluster
from satchel.api.requests.options import GenerationOptions, Options


def methods(*classes: type) -> Iterator[Any]:
    for each in classes:
        for name, found in vars(each).items():
            if not name.startswith("_") and inspect.isfunction(found):
                yield pytest.param(inspect.unwrap(found), id=f"{each.__name__}.{name}")


@pytest.mark.parametrize("method", list(methods(Agent, Cluster)))
def test_a_public_signature_has_a_type_for_everything(method: Any):
    signature = inspect.signature(method)
    written = {name: each.annotation for name, each in signature.parameters.items() if name != "self"}
    written["return"] = signature.return_annotation
    assert all(each is not inspect.Signature.empty and "Any" not in each for each in written.values()), written
    assert written.get("options", "Unpack[GenerationOptions]") == "Unpack[GenerationOptions]"


def test_every_option_may_be_a_keyword():
    assert GenerationOptions.__annotations__.keys() == {field.name for field in fields(Options)}
    assert not GenerationOptions.__required_keys__
