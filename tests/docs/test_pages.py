"""What the pages say of the code is so: links, the reference, configurations, and Python that is in an example."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from textwrap import dedent, indent

import pytest
import yaml

from docs import reference
from satchel.cluster.config.config import parse_config

from .pages import PAGES, ROOT, anchors, blocks, links

LANGUAGES = {"sh", "console", "python", "json", "yaml", "text"}
RUN = [page for page in PAGES if page.startswith(("README", "CONTRIBUTING", "SECURITY", "docs/", "examples/"))]


def test_the_reference_is_what_the_code_says() -> None:
    for path, text in reference.pages().items():
        assert path.read_text(encoding="utf-8") == text, f"make docs writes {path.name} anew"


def test_every_field_of_the_configuration_is_in_the_reference() -> None:
    said = reference.configuration()
    assert "| `models` | list of [model](#model) | required |" in said
    assert "| `port` | whole number (from 1, to 65535) | `8000` |" in said
    assert "| `disk_bytes_max` | size | `20 GiB` | Agents' KV on each node's disk" in said
    assert "### satchel agents pack" in reference.command_line()


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page: str) -> None:
    for link in links(page):
        name, _, anchor = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        assert target.is_file(), f"{page} links to {link}"
        if anchor:
            assert anchor in anchors(target.resolve().relative_to(ROOT).as_posix()), f"{page} links to {link}"


@pytest.mark.parametrize("page", RUN)
def test_every_block_says_what_it_is(page: str) -> None:
    assert {block.language for block in blocks(page)} <= LANGUAGES


@pytest.mark.parametrize("page", RUN)
def test_configurations_in_a_page_are_taken(page: str) -> None:
    for block in blocks(page):
        if block.language == "yaml":
            found = yaml.safe_load(block.text)
            parse_config({"models": [{"name": "a", "source": "b"}], **found}, source=page)
        elif block.language == "json":
            assert json.loads(block.text)


def test_workflows_and_issue_forms_can_be_read_and_run_what_the_makefile_has() -> None:
    forms = [yaml.safe_load(path.read_text()) for path in ROOT.glob(".github/ISSUE_TEMPLATE/*.yml")]
    assert all("body" in form or "blank_issues_enabled" in form for form in forms) and len(forms) == 3
    jobs = yaml.safe_load((ROOT / ".github/workflows/check.yml").read_text())["jobs"]
    steps = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert steps == ["make check test", "make docs"]
    assert {"ubuntu", "macos"} == {name.partition("-")[0] for name in jobs["check"]["strategy"]["matrix"]["os"]}
    for command in steps:
        subprocess.run([*command.split(), "--dry-run"], cwd=ROOT, capture_output=True, check=True, timeout=60)


def example_texts() -> list[str]:
    return [path.read_text(encoding="utf-8") for path in sorted(Path(ROOT, "examples").glob("*.py"))]


@pytest.mark.parametrize("page", RUN)
def test_python_in_a_page_is_a_part_of_an_example(page: str) -> None:
    """So it is run where the example is, and a reader finds all of it."""
    texts = example_texts()
    for block in blocks(page):
        if block.language == "python":
            body = dedent(block.text)
            assert any(body in text or indent(body, "    ") in text for text in texts), f"{page}:\n{block.text}"
