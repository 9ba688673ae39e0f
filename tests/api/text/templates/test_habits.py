"""What a chat template drops in a growing conversation is found at load and shown; its date can be chosen."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from satchel.api.requests.requests import lasting_tokens
from satchel.api.text.model import TextModel, load_text_model
from tests.worlds.models.forgetful_templates import ASKS, SYSTEM, TEMPLATES, messages, write_template


def load(folder: Path, template: str) -> TextModel:
    return load_text_model(write_template(folder, template))


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_what_a_template_forgets_is_found_and_soon(tmp_path: Path, name: str):
    template, habits, end = TEMPLATES[name]
    text = load(tmp_path, template)
    assert text.template.habits() == replace(habits, passing_end=end)
    began = time.perf_counter()
    text.template.habits({"another": 1})
    assert time.perf_counter() - began < 10


def test_what_a_prompt_ends_with_for_its_answer_alone_is_not_lasting(tmp_path: Path):
    """Neither is the name of the role before it, whose last line break may become part of another token."""
    text = load(tmp_path, TEMPLATES["drops thinking"][0])
    rendered = text.template.render([{"role": "user", "content": "Hi"}])
    prompt = text.tokenizer.encode(rendered)
    assert (
        text.tokenizer.decode(prompt[: lasting_tokens(text, prompt, rendered, {})])
        == "<|im_start|>user\nHi<|im_start|>"
    )
    assert lasting_tokens(text, prompt, rendered + "It is", {}) == 0
    keeps = load(tmp_path / "keeps", TEMPLATES["keeps all"][0])
    assert lasting_tokens(keeps, prompt, rendered, {}) == 0


@pytest.mark.parametrize("format", ["'%d %b %Y'", '"%Y-%m-%d"', "format"])
def test_the_date_that_a_template_shows_can_be_chosen(tmp_path: Path, format: str):
    """Other functions between are kept, and its first line stays; only a format that the template computes is not
    possible."""
    whole = (
        "\n{%- set format = '%Y' %}{%- macro day() %}{% if strftime_now is defined %}It is "
        + "{{ strftime_now(" + format + ") }}.{% endif %}{% endmacro %}{{ day() }}{{ messages[0].content }}"
    )  # fmt: skip
    text = load(tmp_path, whole)
    said = [{"role": "user", "content": "Hi"}]
    then = datetime(2024, 2, 29, 23, 59)
    assert text.template.shows_date and text.template.habits().dated
    assert text.template.render(said) == text.template.render(said, at=datetime.now())
    shown = {"'%d %b %Y'": "It is 29 Feb 2024.Hi", '"%Y-%m-%d"': "It is 2024-02-29.Hi"}
    assert text.template.render(said, at=then) == shown.get(format, text.template.render(said))
    assert not load(tmp_path / "none", SYSTEM + messages() + ASKS).template.shows_date
