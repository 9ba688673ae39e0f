"""What the measurement of chat templates says of small templates whose habits are known."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.templates.run import DATED, measure, text_model
from benchmarks.templates.sessions import RecordedSession, RecordedStep, Words, answer, result
from tests.worlds.models.forgetful_templates import TEMPLATES


@pytest.fixture(scope="module")
def session() -> RecordedSession:
    """Three turns of two steps each."""
    words, steps = Words(["apple", "river", "stone", "cloud"], 1), list[RecordedStep]()
    for turn in range(3):
        asked = [{"role": "user", "content": words.text(300)}]
        opening = [{"role": "system", "content": words.text(700)}] if not turn else []
        steps.append(RecordedStep([*opening, *asked], answer("", words.text(200), "ls", turn)))
        steps.append(RecordedStep([result(words.text(400), turn)], answer(words.text(90), words.text(80), "", turn)))
    return RecordedSession("made", steps, tools=True)


def rows_of(tmp_path: Path, name: str, session: RecordedSession) -> dict[str, dict]:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATES[name][0], encoding="utf-8")
    return {
        f"{row['template']}, {row['sent back']}": row
        for row in measure(text_model(template, tmp_path / "m"), [session])
    }


def test_all_that_a_template_keeps_is_found(tmp_path: Path, session: RecordedSession):
    row = rows_of(tmp_path, "keeps all", session)["template, all"]
    assert row["tokens lost"] <= 5 and row["left out"] == 0, "what follows an answer's last token"
    assert row["full attention"] == row["recurrent"] == pytest.approx(row["in common"], abs=0.01)


def test_what_a_template_drops_is_read_again_and_nothing_else(tmp_path: Path, session: RecordedSession):
    """Recurrent layers' state is where the next turn begins; at the prompt's end it would be of no use."""
    rows = rows_of(tmp_path, "drops thinking", session)
    row = rows["template, all"]
    assert row["lost most"] == "where the last turn's first answer began" and row["tokens lost"] > 1000
    assert row["full attention"] == pytest.approx(row["in common"], abs=0.01)
    assert row["recurrent"] == pytest.approx(row["in common"], abs=0.02)
    assert row["recurrent, state at the prompt's end"] < row["recurrent"] - 0.1
    assert rows["template, without reasoning"]["lost most"] == "where the last answer began"


def test_a_new_day_is_read_from_the_date_on(tmp_path: Path, session: RecordedSession):
    rows = rows_of(tmp_path, "shows the date", session)
    assert rows["template, all"]["tokens lost"] <= 5
    row = rows[f"template, {DATED}, all"]
    assert row["lost most"] == "at the beginning" and row["tokens lost"] > 1500
