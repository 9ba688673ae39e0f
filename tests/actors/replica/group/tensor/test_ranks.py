"""Ranks in several processes compute what one process computes that adds the same parts in the same order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from satchel.actors.replica.group.tensor.ranks import Ranks
from satchel.actors.replica.loading import models
from tests.actors.replica.group.test_group import same
from tests.worlds.models.families import write_model
from tests.worlds.replica.bench import Bench
from tests.worlds.replica.ranks import answer_until_broken, conversation, in_one_process, ranks_of, stop, sums

LENGTHS = (40, 255)


def folder_of(path: Path, count: int) -> Path:
    heads = {"num_attention_heads": 2 * count, "num_key_value_heads": count, "intermediate_size": 64 * count}
    return write_model(path / "llama", "llama", **heads)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_ranks_answer_as_one_process_with_the_same_sums_to_the_bit(tmp_path: Path, count: int):
    """Logarithms of probabilities too. And a sequence's answer does not depend on those beside it, nor on what of its
    KV was kept."""
    folder = folder_of(tmp_path, count)
    with ranks_of(folder, count) as ranks:
        found = ranks.ask(conversation, LENGTHS)
        assert ranks.end() == [0] * count
    same(conversation(Bench(in_one_process(folder, count)), LENGTHS), found)
    for number in range(len(LENGTHS)):
        alone, together = found[f"alone {number}"], found[f"cold {number}"]
        assert (alone.tokens, alone.logprobs) == (together.tokens, together.logprobs)
        assert found[f"next {number}"].cached == LENGTHS[number] + 8


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_sum_does_not_depend_on_its_place_in_the_batch(count: int):
    """MLX's own sum over three ranks does: it cuts arrays into pieces, each of which begins at another rank."""
    found = sums(count)
    for places, alone, rows in found:
        total = rows[0]
        for row in rows[1:]:
            total = total + row
        assert {*places, alone} == {total.astype(np.float32).tobytes()}
    assert all(np.array_equal(rows, found[0][2]) for *_, rows in found)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_stopped_is_ended_with_all_others_and_the_group_forms_again(tmp_path: Path, rank: int):
    """Though the others wait in a sum that never ends, and the stopped one cannot end itself."""
    folder = folder_of(tmp_path, 2)
    with ranks_of(folder, 2) as ranks:
        # A rank may be silent for 3 s here.
        assert stop(ranks, rank) < 8.0
        ended = [process.exitcode for process in ranks.processes]
        assert ended[rank] == -9 and ended[1 - rank] == 7
    with ranks_of(folder, 2) as ranks:
        assert ranks.ask(conversation, (40,))["cold 0"].tokens
        assert ranks.end() == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("fails_at", [1, 4])
def test_what_fails_in_one_rank_ends_all_though_the_leader_waits_for_its_sum(tmp_path: Path, fails_at: int):
    """In a prompt, and in a decode step."""
    folder = folder_of(tmp_path, 2)
    with ranks_of(folder, 2, fails_at) as ranks:
        ranks.begin(answer_until_broken)
        for process in ranks.processes:
            process.join(30.0)
        assert [process.exitcode for process in ranks.processes] == [7, 7]


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, more",
    [
        ("gpt_oss", {"layer_types": ["sliding_attention", "full_attention"]}),
        ("qwen3_moe", {}),
        ("deepseek_v2", {}),
        ("qwen2", {"bits": 4}),
    ],
)
def test_shares_of_every_kind_answer_as_the_whole_model_within_rounding(
    tmp_path: Path, family: str, more: dict[str, Any]
):
    """Windows, sinks, experts, latent attention and quantized weights. A sum over shares rounds otherwise than a whole
    product, so probabilities of first tokens are compared, which no rounding of earlier tokens changes."""
    folder = write_model(tmp_path / family, family, **more)
    how: dict[str, Any] = {"context_tokens_max": None, "progress": lambda *_: None, "weights": "stored"}
    expected = conversation(Bench(models.load(str(folder), numerics="reproducible", **how)), LENGTHS)
    with ranks_of(folder, 2) as ranks:
        found = ranks.ask(conversation, LENGTHS)
        assert ranks.end() == [0, 0]
    for name in (f"cold {number}" for number in range(len(LENGTHS))):
        assert found[name].tokens[0] == expected[name].tokens[0]
        (drawn, likeliest), (other, others) = found[name].logprobs[0], expected[name].logprobs[0]
        assert drawn == pytest.approx(other, abs=1e-3)
        assert likeliest == [(token, pytest.approx(value, abs=1e-3)) for token, value in others]


def test_there_are_no_other_ranks_than_those_of_the_group():
    with pytest.raises(ValueError, match="no rank 2 of 2"):
        Ranks(2, 2)
