"""The quality benchmark scores what it says it scores."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from benchmarks.parts import Budget
from benchmarks.programs import ROOT, program
from benchmarks.quality import measure
from benchmarks.quality.measure import SCORED_FROM, Subject, divergence, recall
from benchmarks.quality.texts import TEXTS
from satchel.actors.replica.loading.kv_choice import encoded


def silent(text: str) -> None:
    pass


@pytest.fixture(scope="module")
def subject() -> Subject:
    return measure.load("embedded:recall", "recall")


@pytest.mark.slow
def test_perplexity_is_that_of_the_text_in_the_models_own_caches(subject: Subject) -> None:
    """Of the shorter length too, though both come from one reading; and every cache has its row."""
    part = divergence(subject, "code", [560, 600], Budget(600.0), silent)
    tokens = encoded("", subject.loaded.folder, TEXTS["code"]()[:8000])[:601]
    model = subject.loaded.model
    logits = model(mx.array([tokens[:-1]]), cache=make_prompt_cache(model))[0].astype(mx.float32)
    told = np.array(mx.logsumexp(logits, axis=-1) - mx.take_along_axis(logits, mx.array(tokens[1:])[:, None], 1)[:, 0])
    names = ["q4", "k8v4", "MLX's own, 4 bits", "MLX's own, 8 bits"]
    assert {(row["cache"], row["tokens"]) for row in part.rows} >= {(name, at) for name in names for at in (560, 600)}
    for row in part.rows:
        at = row["tokens"]
        assert isinstance(at, int)
        assert row["in full precision"] == pytest.approx(np.exp(told[SCORED_FROM:at].mean()), rel=1e-3)
        change = 100 * (row["perplexity"] / row["in full precision"] - 1)  # type: ignore[operator]
        assert row["change, %"] == pytest.approx(change)
    assert len(part.targets) == 4


@pytest.mark.slow
def test_without_time_the_length_is_named_and_no_figure_is_told(subject: Subject) -> None:
    part = divergence(subject, "prose", [1024], Budget(0.0), silent)
    assert not part.rows and not part.targets and "There was no time for 1,024 tokens." in part.notes


def test_lengths_beyond_the_context_are_left_out(subject: Subject) -> None:
    part = divergence(subject, "prose", [10**6], Budget(600.0), silent)
    assert not part.rows and "too short" in part.notes[-1]


def test_every_cache_is_asked_the_same_questions(subject: Subject) -> None:
    part = recall(subject, [600], 1, Budget(600.0), silent)
    assert len({row["asked"] for row in part.rows}) == 1
    assert [row["cache"] for row in part.rows] == ["fp16", *subject.others]
    assert part.rows[0]["share"] == 1.0


@pytest.mark.slow
def test_the_program_writes_a_page_and_keeps_parts_of_earlier_runs(tmp_path: Path) -> None:
    """Without a name of this machine's folders, and by a part's name alone."""
    for text in ("code", "prose"):
        options = ["--models", "embedded:recall", "--lengths", 576, "--parts", text, "--out", tmp_path]
        run = program("quality.run", *options, "--machine", "here")
        done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "quality-here.json").read_text())
    assert set(found["parts"]) == {"embedded:recall code", "embedded:recall prose"}
    page = (tmp_path / "quality-here.md").read_text()
    assert page.startswith("# Quality") and str(tmp_path) not in page and "wanted at most" in page
