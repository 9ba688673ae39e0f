"""The memory benchmark counts rightly. How fast anything is, is no test."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from benchmarks import parts
from benchmarks.memory import recall, replay, rewriting, session, sizes
from benchmarks.memory.desk import Desk
from benchmarks.programs import ROOT, program
from satchel.actors.model_files.source import EMBEDDED

CONVERSATION = {
    "agents": ["planner", "worker", "human"],
    "system": {"planner": "You plan."},
    "messages": [
        {"agent": "human", "content": "Sort the parts " + "of the old clock " * 60},
        {"agent": "planner", "content": "First the springs. " * 50},
        {"agent": "worker", "content": "The springs are sorted. " * 40},
        {"agent": "planner", "content": "Now the wheels. " * 70},
        {"agent": "worker", "content": "Done."},
    ],
}


def test_prompts_are_what_the_chat_template_renders() -> None:
    """Each agent sees its own messages as the assistant's, and the others' as the user's."""
    turns = list(replay.Writer().turns(CONVERSATION))
    assert [turn.agent for turn in turns] == ["planner", "worker", "planner", "worker"]
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED / "recall")
    messages = CONVERSATION["messages"]
    seen = [{"role": "system", "content": "You plan."}] + [
        {
            "role": "assistant" if message["agent"] == "planner" else "user",
            "content": message["content"]
            if message["agent"] == "planner"
            else f"{message['agent']}: {message['content']}",
        }
        for message in messages[:3]
    ]
    text = tokenizer.apply_chat_template(seen, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(turns[2].prompt) == text
    assert tokenizer.decode(turns[2].reply) == messages[3]["content"] + "<|im_end|>"


def test_the_next_prompt_of_an_agent_extends_its_last_one_and_the_reply() -> None:
    first, _, second, _ = replay.Writer().turns(CONVERSATION)
    whole = first.prompt + first.reply
    assert second.prompt[: len(whole)] == whole


def test_ours_reuses_all_but_what_is_new() -> None:
    """Prompt and reply are known up to the last token, also inside a block."""
    ours = replay.OurBlocks()
    rng = random.Random(3)
    tokens = [rng.randrange(3000) for _ in range(1300)]
    assert ours.reuse(tokens) == 0
    ours.keep(tokens)
    assert ours.reuse([*tokens, 1, 2, 3]) == 1299
    assert ours.reuse(tokens[:700] + [1] * 100) == 512, "a cut inside a block computes that block again"
    assert ours.reuse(tokens[:1290] + [5000] * 100) == 1290, "a cut inside the tail does not"


def test_small_blocks_know_prompts_by_whole_blocks() -> None:
    """Against looking at every earlier prompt."""
    rng, small = random.Random(9), replay.SmallBlocks()
    prompts: list[list[int]] = []
    for _ in range(60):
        base = rng.choice(prompts)[: rng.randrange(80)] if prompts else []
        prompt = base + [rng.randrange(3) for _ in range(rng.randrange(1, 60))]
        common = 0
        for other in prompts:
            same = 0
            while same < min(len(prompt), len(other)) and prompt[same] == other[same]:
                same += 1
            common = max(common, min(same, len(prompt) - 1, len(other) // 16 * 16) // 16 * 16)
        assert small.reuse(prompt) == common
        prompts.append(prompt)


def test_a_round_is_not_begun_that_would_not_end_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(parts, "time", SimpleNamespace(monotonic=lambda: now[0]))
    done = []
    for number in parts.Budget(10.0).rounds(9):
        done.append(number)
        now[0] += 4.0
    assert done == [0, 1]
    assert list(parts.Budget(0.0).rounds(9)) == []


def test_sizes_meet_what_the_format_promises() -> None:
    part = sizes.sizes()
    assert part.rows and all(target.met for target in part.targets), part.targets
    assert all(row["bytes a token"] == pytest.approx(row["formula"]) for row in part.rows)


@pytest.mark.slow
def test_sealed_memory_recalls_what_full_precision_does() -> None:
    """8 codes in a conversation of 700 tokens, every one asked for under both."""
    part = recall.recall(8, parts.Budget(600.0), lambda text: None, policies=("fp16", "q4"), talks=[(8, 700)])
    full, sealed = (dict[str, Any](row) for row in part.rows)
    assert full["asked"] == sealed["asked"] == 8
    assert full["right"] >= 7 and sealed["right"] >= full["right"] - 1, part.notes


@pytest.mark.slow
def test_a_recorded_session_computes_nothing_twice(tmp_path: Path) -> None:
    """It grows from 256 tokens to 1,792, but for a request that goes back in the middle of a block, and one of another
    agent. A block that is shared in part is computed again up to there."""
    grown = [{"input": 64 * blocks, "output": 160, "blocks": [[0, blocks - 1]]} for blocks in range(4, 29, 6)]
    back = {"input": 64 * 19, "output": 16, "blocks": [[0, 16], [900, 901]]}
    other = {"input": 64 * 30, "output": 16, "blocks": [[500, 529]], "sub": True}
    trace = tmp_path / "claude_code_agents.jsonl.gz"
    with gzip.open(trace, "wt") as file:
        for requests in (grown[:3], [*grown, back, other]):
            file.write(json.dumps({"requests": requests}) + "\n")
    requests = session.recorded(trace, 1900)
    assert requests == [*grown, back]
    turns = list(session.play(Desk(str(EMBEDDED / "recall")), requests, parts.Budget(600.0)))
    assert [turn.computed for turn in turns[1:-1]] == [6 * 64] * (len(grown) - 1)
    assert [turn.again for turn in turns[:-1]] == [0] * len(grown)
    assert turns[-1].again == 17 * 64 % 256 and turns[-1].computed == turns[-1].again + 2 * 64
    with pytest.raises(ValueError, match="no session"):
        session.recorded(trace, 60_000)


def test_rewrites_of_programs_that_are_known_are_ready(tmp_path: Path) -> None:
    """Of recorded texts, the agents after the first; of recorded block ids, the kinds."""
    texts, blocks = tmp_path / "texts.jsonl.gz", tmp_path / "blocks.jsonl.gz"
    rng = random.Random(4)
    with gzip.open(texts, "wt") as lines:
        for _ in range(3):
            said, calls = "Do it.", list[dict[str, str]]()
            for turn in range(24):
                calls.append({"input": said, "output": f"Step {turn}: look further into the files."})
                said += "\n\n" + "".join(f"Line {rng.random()}\n" for _ in range(40))
            lines.write(json.dumps({"calls": calls}) + "\n")
    requests = [
        {"t": 0.0, "output": 10, "blocks": [[1, 100]]},
        {"t": 5.0, "output": 10, "blocks": [[1, 102]]},
        {"t": 90.0, "output": 10, "blocks": [[1, 10], [200, 300]]},
        {"t": 95.0, "output": 10, "blocks": [[1, 10], [400, 430]]},
    ]
    with gzip.open(blocks, "wt") as lines:
        lines.write(json.dumps({"requests": requests}) + "\n")
    part = rewriting.rewriting(texts, blocks, parts.Budget(600.0), lambda text: None)
    assert len(part.rows) == len(rewriting.published())
    for row in part.rows:
        assert row["rewritten"] and float(row["share"] or 0) > 0.3, row
    (kinds,) = (note for note in part.notes if "by the length" in note)
    assert "as long as before: 1 with 6,464 tokens" in kinds
    assert "shorter by more than a half: 1 with 1,984 tokens" in kinds
    recorded = list(rewriting.recorded_sessions(blocks))
    plain, prepared = (rewriting.waits(recorded, 500, chunk) for chunk in (0, 64))
    assert plain == pytest.approx([6400 / 500, 6400 / 500 + 0.2 + 128 / 500 - 5, 6464 / 500, 12.096], abs=0.01)
    assert [0 <= later - before <= 64 / 500 + 1e-9 for before, later in zip(plain, prepared, strict=True)] == [True] * 4
    assert rewriting.rewriting(None, None, parts.Budget(1.0), print).notes == [
        "Skipped: it needs agent_text.jsonl.gz (`--traces`)."
    ]


@pytest.mark.slow
@pytest.mark.slow
def test_the_command_writes_its_results_and_says_what_it_leaves_out(tmp_path: Path) -> None:
    (tmp_path / "whowhen_conversations.jsonl").write_text(json.dumps(CONVERSATION) + "\n")
    for arguments, share in ((["--traces", str(tmp_path)], True), ([], False)):
        command = program("memory.run", "--parts", "replay", "--machine", "test", *arguments, "--out", tmp_path)
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert run.returncode == 0, run.stderr
        written = (tmp_path / "memory-test.json").read_text()
        part = json.loads(written)["parts"]["replay"]
        assert bool(part["rows"]) == share
        assert share or "Left out" in part["notes"][0]
        assert ("| rule |" in (tmp_path / "memory-test.md").read_text()) == share
        assert str(tmp_path) not in written, "results hold no path of the machine"
    assert subprocess.run([*command, "--parts", "all"], cwd=ROOT, capture_output=True, timeout=60).returncode == 2
