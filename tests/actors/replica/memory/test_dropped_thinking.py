"""A template drops from later prompts what the model thought: their KV is found up to where it did."""

from __future__ import annotations

from pathlib import Path

import pytest

from satchel.actors.replica.loading import models
from tests.worlds.models.families import write_model

from .test_disk_tier import AGENT, Node, node, process, prompt_of, write_down

__all__ = ["node"]

OPENS = [3001, 3002]
"""What the template puts where an answer begins, and leaves out of later prompts."""


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next"])
def test_a_turn_without_the_thinking_before_it_computes_what_follows_it(tmp_path: Path, node: Node, family: str):
    """Its prompt leaves the turn before, with two steps, where its first answer began: layers of full attention find
    all before that, those with a window too, and recurrent ones have their state there. After a restart at most a
    block more is computed."""
    loaded = models.load(
        str(write_model(tmp_path / family, family)),
        context_tokens_max=None,
        progress=lambda *_: None,
        weights="stored",
        numerics="reproducible",
    )
    bench, disk = process(loaded, node)
    asked = 450
    told, printed = prompt_of(asked), prompt_of(230, seed=2)
    thought = bench.run("asked", [*told, *OPENS], agent=AGENT, max_tokens=40, lasting=asked, saved=True).tokens
    stepped = [*told, *OPENS, *thought, *printed]
    step = bench.run("step", [*stepped, *OPENS], agent=AGENT, max_tokens=40, lasting=len(stepped))
    assert step.cached == asked + 2 + 40, "the step goes on behind the answer"
    dropped = [*told, *thought[-20:], *printed, *step.tokens[-20:], *prompt_of(40, seed=3), *OPENS]
    # Nobody's, so that it leaves nothing on the disk.
    assert bench.run("hot", dropped, max_tokens=5).cached == asked
    again = bench.run("step again", [*stepped[:-30], *OPENS], max_tokens=1)
    assert again.cached is not None and again.cached >= asked, "the line with the thinking is still there"
    write_down(bench, disk)
    node.restart()
    bench, disk = process(loaded, node)
    warm = bench.run("warm", dropped, agent=AGENT, max_tokens=1)
    assert warm.cached == asked if loaded.spec.recurrent else warm.cached in range(asked - 255, asked + 1)
    write_down(bench, disk)
