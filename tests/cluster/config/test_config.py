from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from satchel.cluster.config.config import (
    Config,
    Drafting,
    Model,
    default_config,
    load_config,
    name_refusal,
    parse_config,
    parse_model,
)
from satchel.cluster.config.stages import Split
from satchel.cluster.errors import ConfigError

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("data", "place"),
    [
        ({}, "models"),
        ({"models": []}, "models"),
        ({"models": [{"name": "a"}]}, "models[0].source"),
        ({"models": [{"name": "a", "source": "b", "replicas": 0}]}, "models[0].replicas"),
        ({"models": [{"name": "a", "source": "b"}, {"name": "a", "source": "c"}]}, "models[1].name"),
        ({"models": [{"name": "a", "source": "b"}], "endpoint": {"port": 70000}}, "endpoint.port"),
        ({"models": [{"name": "a", "source": "b"}], "endpoint": {"prot": 8000}}, "endpoint.prot"),
        ({"models": [{"name": "a", "source": "b"}], "scheduling": {"prefix_bytes_max": "2 fish"}}, "prefix_bytes_max"),
        ({"models": [{"name": "a/b", "source": "b"}, {"name": "a-b", "source": "c"}]}, "models[1].name"),
        ({"models": [{"name": "///", "source": "b"}]}, "models[0].name"),
        ({"models": [{"name": "two words", "source": "b"}]}, "models[0].name"),
        ({"models": [{"name": "a", "source": "b", "adapter": ""}]}, "models[0].adapter"),
        ({"models": [{"name": "a", "source": "b", "adapters": {"x": ""}}]}, "models[0].adapters.x"),
        ({"models": [{"name": "a", "source": "b", "adapters": {"two words": "c"}}]}, "models[0].adapters.two words"),
        ({"models": [{"name": "a", "source": "b", "adapters": {"a": "c"}}]}, "models[0].adapters"),
        ({"models": [{"name": "a", "source": "b", "aliases": ["x"], "adapters": {"x": "c"}}]}, "models[0].adapters"),
        ({"models": [{"name": "a", "source": "b", "adapter": "c", "adapters": {"x": "d"}}]}, "models[0]"),
        (
            {"models": [{"name": "a", "source": "b", "adapters": {"x": "c"}}, {"name": "x", "source": "b"}]},
            "models[1].name",
        ),
        (
            {
                "models": [
                    {"name": "a", "source": "b", "adapters": {"x": "c"}},
                    {"name": "d", "source": "b", "aliases": ["x"]},
                ]
            },
            "models[1].aliases",
        ),
        (
            {
                "models": [
                    {"name": "a", "source": "b", "adapters": {"x": "c"}},
                    {"name": "d", "source": "b", "adapters": {"x": "c"}},
                ]
            },
            "models[1].adapters",
        ),
        (
            {"models": [{"name": "a", "source": "b", "control_tokens_in_text": "both"}]},
            "models[0].control_tokens_in_text",
        ),
        ({"models": [{"name": "a", "source": "b", "schema_in_prompt": "yes"}]}, "models[0].schema_in_prompt"),
        ({"models": [{"name": "a", "source": "b", "unseen_media": "hide"}]}, "models[0].unseen_media"),
        ({"models": [{"name": "a", "source": "b", "load": "never"}]}, "models[0].load"),
        ({"models": [{"name": "a", "source": "b", "drafts": True}]}, "models[0].drafts"),
        ({"models": [{"name": "a", "source": "b", "idle_s": 60}]}, "models[0]"),
        ({"models": [{"name": "a", "source": "b", "load": "request", "idle_s": 0}]}, "models[0].idle_s"),
        ({"models": [{"name": "a", "source": "b", "aliases": ["two words"]}]}, "models[0].aliases[0]"),
        ({"models": [{"name": "a", "source": "b", "aliases": ["a"]}]}, "models[0].aliases"),
        ({"models": [{"name": "a", "source": "b", "aliases": ["c", "c"]}]}, "models[0].aliases"),
        (
            {"models": [{"name": "a", "source": "b", "aliases": ["c"]}, {"name": "c", "source": "d"}]},
            "models[1].name",
        ),
        (
            {"models": [{"name": "a", "source": "b"}, {"name": "c", "source": "d", "aliases": ["a"]}]},
            "models[1].aliases",
        ),
        (
            {
                "models": [
                    {"name": "a", "source": "b", "aliases": ["x"]},
                    {"name": "c", "source": "d", "aliases": ["x"]},
                ]
            },
            "models[1].aliases",
        ),
        ([1], "(top level)"),
    ],
)
def test_a_mistake_is_named_by_its_place(data: object, place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(data, source="my.yaml")
    assert place in caught.value.message
    assert caught.value.message.startswith("my.yaml: ")
    assert place in (caught.value.param or "")


def test_every_mistake_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"models": [{"name": "a"}], "endpoint": {"port": "x"}})
    assert "models[0].source" in caught.value.message and "endpoint.port" in caught.value.message


def test_one_model_is_checked_as_in_a_file() -> None:
    """What is loaded into a running cluster obeys the same rules, and None means the default."""
    model = parse_model(name="a", source="b", adapter=None, context_tokens_max=None, replicas=2)
    assert model == Model(name="a", source="b", replicas=2)
    with pytest.raises(ConfigError) as caught:
        parse_model(name="two words", source="b", replicas=0)
    variables = parse_model(name="a", source="b", template_kwargs={"clear_thinking": False, "tools": [1]})
    assert parse_model(**json.loads(json.dumps(asdict(variables)))) == variables and hash(variables)
    assert "model: name: " in caught.value.message and "replicas: " in caught.value.message


RING = {"backend": "ring", "trusted_wires": True}


@pytest.mark.parametrize(
    "more, why",
    [
        ({"load": "request"}, "load: request"),
        ({"replicas": 2}, "replicas"),
        ({"adapter": "a/b"}, "adapter"),
        ({"adapters": {"x": "a/b"}}, "has no adapters"),
        ({"numerics": "reproducible"}, "numerics: reproducible"),
        ({"split": {"pipeline": []}}, "split.pipeline"),
        ({"split": {"pipeline": [3, 0]}}, "split.pipeline"),
        ({"split": {}}, "needs either `pipeline` or `tensor`"),
        ({"split": {"pipeline": "auto", "tensor": 2}}, "needs either `pipeline` or `tensor`"),
        ({"split": {"pipeline": "auto", "backend": "ring"}}, "are for tensor"),
        ({"split": {"tensor": 1, "backend": "ring", "trusted_wires": True}}, "split.tensor"),
        ({"split": {"tensor": 2}}, "tensor needs a backend: jaccl, nccl or ring"),
        ({"split": {"tensor": 2, "backend": "ring"}}, "ring protects nothing: it needs trusted_wires: true"),
        ({"split": {"tensor": 2, "backend": "nccl"}}, "nccl protects nothing"),
        ({"split": {"tensor": 2, "backend": "jaccl"}}, "jaccl needs rdma: 2 rows of 2 devices"),
        ({"split": {"tensor": 2, "backend": "jaccl", "rdma": [["en5", None], [None, "en5"]]}}, "null for each node"),
    ],
)
def test_what_a_divided_model_does_not_support_is_refused(more: dict[str, object], why: str) -> None:
    model = {"name": "a", "source": "b", "split": {"pipeline": "auto"}}
    assert parse_config({"models": [model]}).models[0].split == Split("auto")
    assert parse_config({"models": [{**model, "split": {"pipeline": [3, 5]}}]}).models[0].split == Split((3, 5))
    with pytest.raises(ConfigError, match=why):
        parse_config({"models": [{**model, **more}]})


def test_a_model_may_be_divided_within_its_layers() -> None:
    model = {"name": "a", "source": "b", "split": {**RING, "tensor": 3}}
    assert parse_config({"models": [model]}).models[0].split == Split(tensor=3, backend="ring", trusted_wires=True)
    devices = [[None, "rdma_en5"], ["rdma_en4", None]]
    model["split"] = {"tensor": 2, "backend": "jaccl", "rdma": devices}
    (found,) = parse_config({"models": [model]}).models
    assert found.split is not None and [list(row) for row in found.split.rdma] == devices
    assert parse_model(**json.loads(json.dumps(asdict(found)))) == found


def test_names_must_differ_in_what_their_replicas_are_called() -> None:
    served = [Model(name="a/b", source="s"), Model(name="c", source="s")]
    assert name_refusal(Model(name="d", source="s"), served) is None
    assert name_refusal(Model(name="c", source="s"), served) == "two models are called 'c'"
    assert name_refusal(Model(name="a:b", source="s"), served) == "too much like 'a/b'"


def test_sizes_may_have_units() -> None:
    config = parse_config({"models": [{"name": "a", "source": "b"}], "scheduling": {"prefix_bytes_max": "1.5 GiB"}})
    assert config.scheduling.prefix_bytes_max == 3 * 2**29


def test_waiting_for_copies_is_a_time_or_strict() -> None:
    data = {"models": [{"name": "x", "source": "x"}], "timeouts": {"replication_s": 20}}
    waits = [("1s", 1.0), ("0.5 s", 0.5), (2, 2.0), ("strict", 20.0)]
    assert [parse_config({**data, "replication_wait": given}).copy_wait_s for given, _ in waits] == [
        s for _, s in waits
    ]
    assert parse_config(data).copy_wait_s == 1.0
    for wrong in ("soon", "0s", -1, "1m"):
        with pytest.raises(ConfigError, match="replication_wait"):
            parse_config({**data, "replication_wait": wrong})


@pytest.mark.parametrize(("written", "means"), [("", "exact"), ("drafts: off", "off"), ("drafts: auto", "auto")])
def test_off_is_what_yaml_takes_for_false(written: str, means: str, tmp_path: Path) -> None:
    file = tmp_path / "satchel.yaml"
    file.write_text(f"models:\n  - name: a\n    source: b\n    {written}\n")
    assert load_config(file).models[0].drafts == means


def test_a_drafting_model_is_a_source_or_another_model_of_the_config() -> None:
    """As a source, because a replica knows its own model only."""
    models = [
        {"name": "large", "source": "l", "drafts": {"model": "small", "exact": True}},
        {"name": "small", "source": "owner/small", "drafts": {"model": "owner/tiny"}},
    ]
    assert [model.drafts for model in parse_config({"models": models}).models] == [
        Drafting("owner/small", exact=True),
        Drafting("owner/tiny"),
    ]
    for wrong in ({"model": ""}, {"small": "a"}, {}):
        with pytest.raises(ConfigError, match=r"models\[0\].drafts"):
            parse_config({"models": [{"name": "a", "source": "b", "drafts": wrong}]})
    with pytest.raises(ConfigError, match="has no drafting model"):
        parse_config({"models": [{**models[0], "split": {"pipeline": "auto"}}]})


def test_trusted_code_is_pinned_by_its_commit() -> None:
    def parsed(source: str) -> Config:
        return parse_config({"models": [{"name": "a", "source": source, "trust_remote_code": True}]})

    for pinned in ("owner/name@" + "0a" * 20, "/a/folder", "./folder", "~/folder", "folder", "embedded:recall"):
        assert parsed(pinned).models[0].trust_remote_code
    for moving in ("owner/name", "owner/name@main", "owner/name@0a0a0a0", "owner/name@" + "0A" * 20):
        with pytest.raises(ConfigError, match=r"models\[0\].*40 digits"):
            parsed(moving)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml: No such file"):
        load_config(tmp_path / "absent.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("models: [")
    with pytest.raises(ConfigError, match=r"broken\.yaml: not YAML"):
        load_config(broken)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_config_that_ships_is_valid(path: Path) -> None:
    assert isinstance(load_config(path), Config)


def test_the_built_in_config_is_the_file_for_one_mac() -> None:
    assert default_config() == load_config(ROOT / "configs" / "one-mac.yaml")
    assert [model.name for model in default_config().models] == ["satchel/recall", "satchel/shapes"]


def test_names_of_parts_of_the_memory_are_read_and_say_what_to_use(caplog: pytest.LogCaptureFixture) -> None:
    data = {"models": [{"name": "x", "source": "x"}], "scheduling": {"prefix_bytes_max": "1 MiB"}}
    assert parse_config(data).scheduling.prefix_bytes_max == 2**20
    assert "prefix_bytes_max bounds only a part of the memory: use memory_bytes_max instead" in caplog.text
    caplog.clear()
    parse_config({**data, "scheduling": {"memory_bytes_max": "1 GiB"}})
    assert not caplog.text


def test_former_names_are_still_read():
    """But not both at once."""
    models = [{"name": "a/b", "source": "embedded:recall", "trial": False}]
    config = parse_config({"models": models, "scheduling": {"rows_max": 3, "prefill_rows_max": 2}})
    scheduling = config.scheduling
    assert (config.models[0].self_test, scheduling.sequences_max, scheduling.prefill_sequences_max) == (False, 3, 2)
    with pytest.raises(ConfigError, match=r"scheduling\.rows_max"):
        parse_config({"models": models, "scheduling": {"rows_max": 3, "sequences_max": 3}})
    with pytest.raises(ConfigError, match="greater than 0"):
        parse_config({"models": models, "scheduling": {"rows_max": 0}})


def test_models_stay_loaded_unless_the_config_says_that_they_come_and_go() -> None:
    first, second = parse_config(
        {
            "models": [
                {"name": "a", "source": "s", "aliases": ["gpt-4o", "openai/gpt-4o"]},
                {"name": "b", "source": "s", "load": "request", "idle_s": 90},
            ]
        }
    ).models
    assert (first.load, first.idle_s, first.aliases) == ("start", None, ("gpt-4o", "openai/gpt-4o"))
    assert (second.load, second.idle_s) == ("request", 90.0)
    assert parse_model(**json.loads(json.dumps(asdict(first)))) == first, "as the registry stores it"
