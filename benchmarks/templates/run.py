"""Measures how much of each turn is found again with published chat templates, over recorded sessions of agents.

    python -m benchmarks.templates.run --templates FOLDER --traces FOLDER [--only Qwen3,gpt-oss] [--json FILE]

The folder of templates has files `NAME.jinja`; the sdist of llama-cpp-python has dozens, in
`vendor/llama.cpp/models/templates`. Prompts are counted in tokens of the embedded model, with the template's markers
added to it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from satchel.actors.model_files.source import EMBEDDED
from satchel.api.text.model import TextModel, load_text_model
from satchel.cluster.errors import InvalidRequest

from .. import kept, machine
from ..parts import shown
from ..programs import RESULTS
from .sessions import RecordedSession, coding_agents, told
from .turns import KINDS, Client, FoundAgain, TemplateTurns

MARKERS = re.compile(
    r"<\|?[a-z_]*\|[^|<>\s]{1,40}\|>|<\|[^|<>\s]{1,40}\|?>|<[a-z_]{1,40}\|>|<｜[^｜<>]{1,40}｜>|\[/?[A-Z_]{3,20}\]"
    r"|\]~!?b[\]\[]|\[e~\[|</?think>|</?tool_call>|<(?:start|end)_of_turn>|</?arg_(?:key|value)>"
)
TOKENS_MAX = 60_000
DATED = "with the day's date"


def text_model(template: Path, folder: Path) -> TextModel:
    """The embedded model's tokenizer with a template and its markers."""
    tokenizer = Tokenizer.from_file(str(EMBEDDED / "recall" / "tokenizer.json"))
    written = template.read_text(encoding="utf-8")
    markers = sorted(set(MARKERS.findall(written)))
    tokenizer.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in markers])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "bos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(written, encoding="utf-8")
    (folder / "config.json").write_text("{}", encoding="utf-8")
    return load_text_model(folder, name=template.stem)


def sessions(traces: Path, most: int, steps: int) -> list[RecordedSession]:
    tokenizer = Tokenizer.from_file(str(EMBEDDED / "recall" / "tokenizer.json"))
    words = [word[1:] for word in sorted(tokenizer.get_vocab()) if re.fullmatch("Ġ[a-z]{2,}", word)]
    found = list(coding_agents(traces / "claude_code_agents.jsonl.gz", words, most, steps, TOKENS_MAX))
    for name in ("agent_text.jsonl.gz", "whowhen_conversations.jsonl"):
        found += told(traces / name, words, most, steps)
    return found


def measure(text: TextModel, recorded: Sequence[RecordedSession]) -> Iterator[dict[str, Any]]:
    """A row for each client, and with the day's date where the template shows one."""
    habits = text.template.habits()
    for client in Client:
        for moving in (False, True)[: 1 + habits.dated]:
            total, left_out = FoundAgain(), 0
            for session in recorded:
                try:
                    total.add(TemplateTurns(text, session, client, moving=moving).run())
                except InvalidRequest:
                    # It takes no tools, or wants turns of another order.
                    left_out += 1
            where = total.losses.most_common(1)
            yield {
                "template": text.name + (f", {DATED}" if moving else ""),
                "sent back": client.value,
                "prompt tokens": total.prompt,
                "in common": total.possible / max(1, total.prompt),
                **{name: total.kept[name] / max(1, total.prompt) for name in KINDS},
                "lost most": where[0][0] if where else None,
                "tokens lost": total.losses.total(),
                "left out": left_out,
                "first difference": total.examples.get(where[0][0], "") if where else "",
            }


def markdown(result: dict[str, Any]) -> str:
    facts = result["machine"]
    lines = [
        "# What templates forget",
        "",
        f"{facts['processor']}, {facts['cores']} cores, Python {facts['python']}; "
        f"{', '.join(f'{name} {version}' for name, version in result['versions'].items())}. {result['when']}.",
        "",
        result["sessions"],
        "",
        "Shares are of the prompts' tokens, without each session's first prompt. `in common` is what a prompt begins "
        "with as an earlier prompt and its answer did: no memory could find more. `sent back` is what of an answer the "
        "client sends with the next request.",
        "",
    ]
    for title, rows in (("Shares found", result["rows"]), ("What the templates are said to forget", result["notes"])):
        heads = [head for head in rows[0] if head != "first difference"]
        lines += [f"## {title}", "", "| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
        lines += ["| " + " | ".join(_cell(row[head]) for head in heads) + " |" for row in rows]
        lines.append("")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else shown(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--templates", type=Path, required=True, help="a folder with NAME.jinja")
    add("--traces", type=Path, required=True, help="the folder with the recorded sessions")
    add("--only", default="", help="parts of templates' names, with commas; all without")
    add("--sessions", type=int, default=8, help="of each recording; default %(default)s")
    add("--steps", type=int, default=40, help="requests of a session; default %(default)s")
    add("--out", type=Path, default=RESULTS / "templates")
    chosen = parser.parse_args()
    recorded = sessions(chosen.traces, chosen.sessions, chosen.steps)
    result: dict[str, Any] = {
        "machine": machine.facts("cpu"),
        "versions": machine.versions(sys.executable),
        "when": kept.now(),
        "sessions": f"{len(recorded)} sessions, {sum(len(one.steps) for one in recorded)} requests.",
        "rows": [],
        "notes": [],
    }
    print(result["sessions"], flush=True)
    wanted = [part for part in chosen.only.split(",") if part]
    with tempfile.TemporaryDirectory(prefix="satchel-templates-") as work:
        for template in sorted(chosen.templates.glob("*.jinja")):
            if wanted and not any(part in template.stem for part in wanted):
                continue
            text = text_model(template, Path(work) / template.stem)
            began = time.perf_counter()
            for row in measure(text, recorded):
                result["rows"].append(row)
                print({name: _cell(value) for name, value in row.items()}, flush=True)
            print(f"{time.perf_counter() - began:.0f} s", flush=True)
            result["notes"].append(
                {"template": text.name, "note": "; ".join(text.template.habits().notes) or "nothing"}
            )
            kept.save(chosen.out, result, markdown)
    print(markdown(result))


if __name__ == "__main__":
    main()
