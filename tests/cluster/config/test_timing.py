"""The times by which processes wait for each other: each relation is refused where it does not hold, and documented."""

from __future__ import annotations

import ast
from dataclasses import FrozenInstanceError, fields, replace
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from satchel.cluster.config.config import Config, default_config, parse_config
from satchel.cluster.config.timing import RELATIONS, USUAL, Relation, Timing, broken
from satchel.cluster.errors import ConfigError

ROOT = Path(__file__).parents[3]
NAMES = [field.name for field in fields(Timing)]


def config(**groups: dict[str, float]) -> Config:
    return parse_config({"models": [{"name": "a", "source": "b"}], **groups}, source="my.yaml")


def value_of(found: Config, path: str) -> float:
    group, name = path.split(".")
    return getattr(getattr(found, group), name)


def terms(than: str) -> list[tuple[int, str]]:
    """`2 x a.b + c.d` as [(2, "a.b"), (1, "c.d")]."""
    parts = [term.rpartition(" x ") for term in than.split(" + ")]
    return [(int(times or 1), path) for times, _, path in parts]


def sum_of(found: Config, than: str) -> float:
    return sum(times * value_of(found, path) for times, path in terms(than))


def test_the_defaults_hold():
    assert list(broken(default_config())) == []
    assert config().timing == USUAL == Timing()


@pytest.mark.parametrize("relation", RELATIONS, ids=lambda relation: f"{relation.longer} over {relation.than}")
def test_a_relation_that_does_not_hold_is_refused_with_both_sides_and_the_reason(relation: Relation):
    longer, than, why = relation
    least = sum_of(default_config(), than)
    group, name = longer.split(".")
    with pytest.raises(ConfigError) as caught:
        config(**{group: {name: least}})
    said = caught.value.message
    assert said.startswith("my.yaml: ") and f"{longer} ({least}) must be more than " in said and why in said
    for times, path in terms(than):
        assert f"{f'{times} x ' if times > 1 else ''}{path} ({value_of(default_config(), path)})" in said
    assert caught.value.param == longer
    # One hair more, and this one holds, whatever others say.
    assert not any(why in one and than in one for one in broken(_with(longer, least + 0.001)))


def _with(path: str, seconds: float) -> Config:
    """The default config with one other time, which nobody has checked."""
    found, (group, name) = default_config(), path.split(".")
    return replace(found, **{group: replace(getattr(found, group), **{name: seconds})})


def test_all_that_does_not_hold_is_said_at_once():
    with pytest.raises(ConfigError) as caught:
        config(timing={"ask_s": 2.0, "retry_s": 6.0}, timeouts={"silent_s": 2.0})
    assert caught.value.message.split("; ") == [
        "my.yaml: timeouts.silent_s (2.0) must be more than 2 x timing.heartbeat_s (1.0): "
        "a process may miss a heartbeat",
        "timing.answer_s (5.0) must be more than 3 x timing.ask_s (2.0): a promotion asks all other nodes, "
        "fetches the latest copy, and tells the former primaries",
        "timing.turn_answer_s (10.0) must be more than routing.replica_timeout_s (5.0) + timing.nodes_s (1.0) + "
        "3 x timing.ask_s (2.0): a silent primary is noticed and a secondary promoted while a turn retries",
        "timing.turn_answer_s (10.0) must be more than 2 x timing.retry_s (6.0): a failed call is retried",
        "timing.node_leave_s (6.0) must be more than timing.node_drain_s (4.0) + timing.ask_s (2.0): "
        "a node lets its sequences finish, and announces that it leaves, before the head ends it",
    ]


def test_nobody_changes_a_time_that_others_have_read():
    with pytest.raises(FrozenInstanceError):
        USUAL.report_s = 1.0  # type: ignore[misc]


def test_a_renewal_is_a_third_of_its_lease():
    assert USUAL.turn_renewal_s == 20.0
    assert 2 * USUAL.turn_renewal_s < USUAL.turn_lease_s


def test_a_time_that_is_none_or_that_nobody_knows_is_refused():
    for wrong in ({"report_s": 0.0}, {"report_s": -1.0}, {"report_s": "soon"}, {"reports_s": 1.0}):
        with pytest.raises(ConfigError, match=r"timing\.report"):
            config(timing=wrong)  # type: ignore[arg-type]


def test_a_config_may_have_other_times_that_fit():
    example = (ROOT / "docs/timing.md").read_text().partition("```yaml\n")[2].partition("```")[0]
    found = config(**yaml.safe_load(example))
    assert found.timing.report_s == 1.0 and found.timing != USUAL and found.routing.replica_timeout_s == 6.0


def test_every_relation_is_of_times_that_there_are():
    for longer, than, _ in RELATIONS:
        for path in [longer, *(path for _, path in terms(than))]:
            assert value_of(default_config(), path) > 0


def said_of_fields() -> dict[str, str]:
    """What `Timing` says under each of its fields, in one line."""
    tree = ast.parse((ROOT / "cluster/config/timing.py").read_text())
    (body,) = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Timing"]
    said: dict[str, str] = {}
    for field, text in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            said[field.target.id] = " ".join(ast.literal_eval(text.value).split())
    return said


def test_the_document_lists_every_time_and_every_relation():
    said = said_of_fields()
    assert list(said) == NAMES, "each field says who waits for what"
    times = [f"| `{name}` | {getattr(USUAL, name):g} | {said[name]} |" for name in NAMES]
    relations = [f"| `{longer}` | `{than}` | {why} |" for longer, than, why in RELATIONS]
    lines = (ROOT / "docs/timing.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith("| `")]
    assert rows == times + relations, "docs/timing.md must have these rows:\n" + "\n".join(times + relations)
