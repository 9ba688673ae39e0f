"""Names of models in the registry, over a control store that is a table."""

from __future__ import annotations

import pytest

from satchel.actors.protocol import control_store, registry
from satchel.cluster.config.config import Model
from satchel.cluster.config.stages import Split, Stage
from satchel.cluster.errors import InvalidRequest


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    values: dict[str, bytes] = {}

    def put(key: str, value: str, *, overwrite: bool = True) -> bool:
        known = key in values
        if overwrite or not known:
            values[key] = value.encode()
        return known

    monkeypatch.setattr(control_store, "put", put)
    monkeypatch.setattr(control_store, "get", values.get)
    monkeypatch.setattr(control_store, "holds", values.__contains__)
    monkeypatch.setattr(control_store, "delete", lambda key: values.pop(key, None) is not None)
    monkeypatch.setattr(control_store, "keys", lambda prefix: [key for key in values if key.startswith(prefix)])
    return values


def test_a_model_that_comes_and_goes_has_an_entry_while_it_is_not_loaded():
    model = Model(name="a/b", source="s", load="request", idle_s=60.0, aliases=("x",))
    registry.add(model)
    (entry,) = registry.entries()
    assert entry.model == model and entry.comes_and_goes and entry.replicas == {}
    registry.place(model, "a-b-0", "mac0")
    (loaded,) = registry.entries()
    assert loaded == entry and loaded.replicas == {"a-b-0": "mac0"} and registry.places("a-b-0")
    registry.unplace("a-b-0")
    assert registry.entries()[0].replicas == {} and not registry.places("a-b-0")


def test_a_divided_model_has_its_stages():
    model = Model(name="a", source="s", split=Split((2, 3)))
    registry.add(model)
    stages = (Stage("mac0", 0, 2, 100), Stage("mac1", 2, 5, 90))
    registry.place(model, "a-0", "mac1", stages)
    (entry,) = registry.entries()
    assert entry.model == model and entry.replicas == {"a-0": "mac1"} and entry.stages == {"a-0": stages}


@pytest.mark.parametrize(
    ("model", "param"),
    [
        (Model(name="x", source="s"), "name"),
        (Model(name="c", source="s", aliases=("a",)), "aliases"),
        (Model(name="c", source="s", aliases=("x",)), "aliases"),
        (Model(name="c", source="s", aliases=("c",)), "aliases"),
        (Model(name="mine", source="s"), "name"),
        (Model(name="c", source="s", aliases=("mine",)), "aliases"),
        (Model(name="c", source="s", adapters={"mine": "f"}), "adapters"),
        (Model(name="c", source="s", adapters={"x": "f"}), "adapters"),
    ],
)
def test_names_and_aliases_are_unique_in_the_whole_server(model: Model, param: str):
    registry.add(Model(name="a", source="s", aliases=("x",), adapters={"mine": "folder"}))
    with pytest.raises(InvalidRequest) as caught:
        registry.add(model)
    assert caught.value.param == param
    registry.add(Model(name="c", source="s", aliases=("y",)))
    assert [entry.model.name for entry in registry.entries()] == ["a", "c"]
    assert registry.entries()[0].model.adapters == {"mine": "folder"}
