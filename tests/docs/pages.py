"""The pages that readers see, and what stands in them: fenced blocks, the commands in these, and links."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "examples", "training", "benchmarks", "tests")
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in ROOT.glob(f"{folder}/**/*.md"))]
)
"""All pages, as paths from the root."""

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: what is said to be in it, and the text."""

    page: str
    language: str
    text: str


@dataclass(frozen=True)
class Command:
    """A command as it stands in a page, and what the page shows of its output; None if it shows nothing."""

    text: str
    output: str | None = None


def blocks(page: str) -> list[Block]:
    return [Block(page, *found) for found in _FENCE.findall((ROOT / page).read_text(encoding="utf-8"))]


def commands(block: Block) -> list[Command]:
    """The commands of a block of `sh` (each one ends where a shell would end it) or `console` (each behind a `$`)."""
    if block.language == "console":
        assert block.text.startswith("$ "), f"{block.page}: a console begins with a command"
        shown = [part.split("\n", 1) for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]]
        return [Command(text, output) for text, output in shown]
    found, begun = list[Command](), ""
    for line in block.text.splitlines():
        begun += line
        if not begun.strip():
            continue
        if line.endswith("\\") or not _is_whole(begun):
            begun += "\n"
            continue
        found.append(Command(begun))
        begun = ""
    assert not begun.strip(), f"{block.page}: a command that does not end: {begun}"
    return found


def _is_whole(text: str) -> bool:
    try:
        shlex.split(text)
    except ValueError:
        return False
    return True


def without_blocks(text: str) -> str:
    return _FENCE.sub("", text)


def links(page: str) -> list[str]:
    """Where a page's links go that stay in the repository."""
    text = re.sub(r"`[^`\n]*`", "", without_blocks((ROOT / page).read_text(encoding="utf-8")))
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and MkDocs make them."""
    headings = re.findall(r"^#+ (.+)$", without_blocks((ROOT / page).read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
