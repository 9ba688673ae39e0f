from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.loading import models
from satchel.actors.replica.proving.divergence import Scores, compare
from satchel.actors.replica.selftest import probe as probing
from satchel.actors.replica.selftest import probe_texts
from satchel.actors.replica.selftest.probe import (
    KVSize,
    ProbeResult,
    Report,
    caches_of,
    continue_greedily,
    probe,
    recommend,
    right_answers,
    scored_spans,
    spec_of,
)
from satchel.actors.replica.selftest.probe_texts import Quiz, Texts, load_tokenizer
from satchel.api.cli.main import app
from satchel.api.cli.models import probe as cli_probe
from satchel.cluster.errors import GenerationFailed, InvalidRequest, ModelLoadError
from tests.worlds.models.table_model import VOCABULARY, Table, Tape


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return models.load(
        "embedded:recall",
        context_tokens_max=None,
        progress=lambda what, fraction: None,
        kv="fp16",
        numerics="reproducible",
    )


@pytest.fixture(scope="module")
def texts(loaded: LoadedModel) -> Texts:
    return Texts(load_tokenizer(loaded.folder))


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Distributions are not looked at, which takes most of a probe's time."""

    def compare(model: Any, tokens: Any, spans: Sequence[tuple[int, int]], reference: Any, others: Any) -> Any:
        zeros = np.zeros(3)
        return {name: [Scores(zeros, np.ones(3, bool), zeros, zeros) for _ in spans] for name in others}

    monkeypatch.setattr(probing, "compare", compare)


def silent(what: str, fraction: float | None) -> None:
    pass


def ask(loaded: LoadedModel, texts: Texts, **fields: Any) -> probing.Report:
    wanted = {"lengths": [512], "policies": ["q4"], "samples": 1, "seed": 1, "progress": silent, **fields}
    return probe("m", loaded, texts, **wanted)


def test_spans_are_the_last_block_before_each_length_and_never_overlap() -> None:
    assert scored_spans([512, 600, 2048]) == [(256, 512), (512, 600), (1792, 2048)]


def test_an_answer_is_right_only_if_each_token_of_the_code_would_be_said() -> None:
    table, tokens = Table(), [1] * 30
    for place in range(29):
        tokens[place + 1] = int(table.logits_at(place, tokens[place], 1.0).argmax())
    codes = [(10, 14), (20, 24)]
    assert right_answers(table, Quiz(tokens, codes, [0.1, 0.2]), [Tape()]) == 2
    for spoiled in (10, 13, 20, 23):
        wrong = list(tokens)
        wrong[spoiled] = (wrong[spoiled] + 1) % VOCABULARY
        # What comes after it is read as it was written, and the last place is the code's own.
        assert right_answers(table, Quiz(wrong, codes, [0.1, 0.2]), [Tape()]) == 1, spoiled


def test_own_words_are_the_greedy_ones_without_the_banned() -> None:
    table = Table()
    said = continue_greedily(table, [Tape()], 4, 6, [])
    last = 4
    for place, token in enumerate(said):
        assert token == int(table.logits_at(place, last, 1.0).argmax())
        last = token
    other = continue_greedily(table, [Tape()], 4, 6, [said[0]])
    assert said[0] not in other and other != said


def test_inside_the_first_block_a_sealing_policy_changes_nothing(loaded: LoadedModel, texts: Texts) -> None:
    """The position law: a query sees its own block in full precision."""
    tokens = texts.talk(random.Random(2), 600)
    make = {name: caches_of(loaded, spec_of(loaded, name)) for name in ("fp16", "q4", "k8v4")}
    reference = make.pop("fp16")
    found = compare(loaded.model, tokens, [(0, 256), (256, 600)], reference, make)
    for first, later in found.values():
        assert first.kl.max() < 1e-9 and first.same.all()
        assert later.kl.mean() > 1e-6
    assert found["k8v4"][1].kl.mean() < found["q4"][1].kl.mean() < 0.05


def test_a_quiz_asks_for_codes_that_were_told_evenly(loaded: LoadedModel, texts: Texts) -> None:
    tokenizer = load_tokenizer(loaded.folder)
    for seed, (size, questions) in enumerate([(512, 5), (1024, 8), (2048, 16)]):
        quiz = texts.quiz(random.Random(seed), size, questions)
        text = tokenizer.decode(quiz.tokens)
        assert size - 250 < len(quiz.tokens) <= size and len(quiz.codes) == questions
        for start, stop in quiz.codes:
            answer = tokenizer.decode(quiz.tokens[start - 30 : stop])
            name = answer.rpartition("The code of ")[2].partition(" is ")[0]
            code = tokenizer.decode(quiz.tokens[start:stop]).strip()
            assert f"Remember: the code of {name} is {code}." in text and len(code) == 4
            assert tokenizer.decode(quiz.tokens[start]).strip(), "a space of its own is no part of the code"
        assert min(quiz.depths) < 0.1 and max(quiz.depths) > 0.4


def test_a_quiz_that_does_not_fit_has_fewer_questions(texts: Texts) -> None:
    quiz = texts.quiz(random.Random(1), 512, 40)
    assert 3 < len(quiz.codes) < 40 and len(quiz.tokens) <= 512


def test_the_same_seed_writes_the_same_and_another_one_something_else(texts: Texts) -> None:
    for write in (lambda rng: texts.talk(rng, 700), lambda rng: texts.quiz(rng, 700, 4).tokens):
        assert write(random.Random(4)) == write(random.Random(4)) != write(random.Random(5))
    assert len(texts.talk(random.Random(4), 700)) == 700


def test_without_documentation_the_prose_is_common_words(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_texts, "paragraphs", list)
    plain = Texts(load_tokenizer(loaded.folder))
    assert plain.source == "common words" and len(plain.talk(random.Random(1), 600)) == 600


def test_without_a_chat_template_codes_are_asked_for_in_plain_text(loaded: LoadedModel) -> None:
    """Each code's span has that code, and the words that ask for it stand before it."""
    tokenizer = load_tokenizer(loaded.folder)
    tokenizer.chat_template = None
    bare = Texts(tokenizer)
    assert not bare.chats
    quiz = bare.quiz(random.Random(3), 1024, 6)
    text = tokenizer.decode(quiz.tokens)
    assert len(quiz.codes) == 6 and len(quiz.tokens) <= 1024 and "<|im_start|>" not in text
    for start, stop in quiz.codes:
        name = tokenizer.decode(quiz.tokens[:start]).rpartition("The code of ")[2].partition(" is")[0]
        assert f"Remember: the code of {name} is {tokenizer.decode(quiz.tokens[start:stop]).strip()}." in text


def test_without_places_of_tokens_recall_is_left_out_with_a_note(
    loaded: LoadedModel, blind: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Texts(load_tokenizer(loaded.folder))
    monkeypatch.setattr(Texts, "quizzes", False)
    report = ask(loaded, slow)
    assert all(row.right is None for row in report.rows)
    assert any(note.startswith("Recall is left out") for note in report.notes)


def test_recall_that_full_precision_lacks_is_left_out_with_a_note(
    loaded: LoadedModel, texts: Texts, blind: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probing, "right_answers", lambda model, quiz, caches: 1)
    report = ask(loaded, texts)
    assert all(row.right is None for row in report.rows)
    assert any("knows only 1 of 5 codes" in note for note in report.notes)


def test_a_probe_finds_what_the_model_bears(loaded: LoadedModel, texts: Texts) -> None:
    report = ask(loaded, texts, lengths=[9000, 512], policies=["q4"])
    rows = {row.policy: row for row in report.rows}
    assert list(rows) == ["fp16", "q4"] and {row.tokens for row in report.rows} == {512}
    assert rows["fp16"].kl_mean == 0 and rows["fp16"].right == rows["fp16"].questions == 5
    assert all(row.places == 256 and row.top1 > 0.97 for row in report.rows)
    assert 0 < rows["q4"].kl_mean < rows["q4"].kl_p99 < 0.1
    memory = {kept.policy: kept.token_bytes for kept in report.memory}
    # Six layers of two heads of 64, keys and values: 4.875 bits an element, and the type it computes in.
    assert memory == {"fp16": 6 * 2 * 128 * 4, "q4": 936}
    assert any(note.startswith("9000 tokens are left out") for note in report.notes)


def test_layers_that_cannot_be_sealed_are_said_to_be_so(
    loaded: LoadedModel, texts: Texts, blind: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = probing.spec_of
    monkeypatch.setattr(probing, "spec_of", lambda model, name: replace(honest(model, "fp16"), policy=None))
    report = ask(loaded, texts)
    assert [kept.policy for kept in report.memory] == ["fp16"] and report.recommended == "fp16"
    assert any("q4 is left out" in note and "cannot be sealed" in note for note in report.notes)


@pytest.mark.parametrize(
    "fields", [{"lengths": [9000]}, {"lengths": []}, {"lengths": [511]}, {"policies": ["q3"]}, {"samples": 0}]
)
def test_what_cannot_be_measured_is_refused(loaded: LoadedModel, texts: Texts, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        ask(loaded, texts, **fields)


def test_a_model_that_fails_is_an_error_in_a_sentence(loaded: LoadedModel, texts: Texts) -> None:
    class Broken:
        layers = loaded.model.layers

        def __call__(self, *arguments: Any, **named: Any) -> Any:
            raise RuntimeError("no memory\nat all")

    with pytest.raises(GenerationFailed, match="m failed while it was probed: no memory at all"):
        ask(replace(loaded, model=Broken()), texts)


def test_a_folder_without_a_tokenizer_is_an_error_in_a_sentence(tmp_path) -> None:
    with pytest.raises(ModelLoadError, match="tokenizer"):
        load_tokenizer(tmp_path)


MEMORY = [KVSize("fp16", 16, 100, 1600), KVSize("q4", 4, 100, 400), KVSize("k8v4", 6, 100, 600)]


def rows_with(policy: str, tops: Sequence[float], right: int | None = None) -> list[ProbeResult]:
    questions = None if right is None else 200
    return [
        ProbeResult(policy, 512 * number, 0.0, 0.0, top, 1000, right, questions)
        for number, top in enumerate(tops, start=1)
    ]


@pytest.mark.parametrize(
    ("q4", "k8v4", "fp16", "wanted"),
    [
        (([0.99, 0.99], 200), ([1.0, 1.0], 200), 200, "q4"),
        (([1.0, 0.989], 200), ([1.0, 0.99], 200), 200, "k8v4"),
        (([1.0, 1.0], 198), ([1.0, 1.0], 199), 200, "k8v4"),
        (([1.0, 1.0], 198), ([1.0, 1.0], 198), 200, "fp16"),
        (([0.9, 0.9], None), ([0.989, 1.0], None), None, "fp16"),
        (([1.0, 1.0], None), ([1.0, 1.0], None), None, "q4"),
        (([1.0, 1.0], 190), ([1.0, 1.0], 200), 190, "q4"),
    ],
)
def test_the_smallest_memory_that_agrees_and_recalls_is_recommended(q4, k8v4, fp16, wanted: str) -> None:
    rows = [*rows_with("fp16", [1.0, 1.0], fp16), *rows_with("q4", *q4), *rows_with("k8v4", *k8v4)]
    name, why = recommend(MEMORY, rows)
    assert name == wanted
    assert ("q4" in why) == (wanted != "q4"), "why the smaller ones are refused is said"


def test_the_command_prints_json_alone(blind: None) -> None:
    arguments = ["probe", "embedded:recall", "--lengths", "512", "--samples", "1", "--policies", "q4", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["recommended"] in ("q4", "fp16") and {row["policy"] for row in found["rows"]} == {"q4", "fp16"}


def test_the_command_prints_a_table_and_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [*rows_with("fp16", [1.0, 1.0], 200), *rows_with("q4", [0.993, 0.995], 199)]
    report = Report("m", "6 full", "float32", "prose", MEMORY, rows, "q4", "it agrees", "the rule", ["A note."])
    monkeypatch.setattr(cli_probe, "_measure", lambda *arguments: report)
    result = CliRunner().invoke(app, ["probe", "m"])
    assert result.exit_code == 0, result.output
    for words in ("Recommended: q4, because it agrees.", "The rule: the rule.", "A note.", "99.30%", "199/200"):
        assert words in result.output, result.output


@pytest.mark.parametrize(
    "wrong",
    [["--lengths", "many"], ["--lengths", "100"], ["--lengths", ","], ["--policies", "q3"], ["--samples", "0"]],
)
def test_a_wrong_command_line_is_a_usage_error(wrong: list[str]) -> None:
    assert CliRunner().invoke(app, ["probe", "embedded:recall", *wrong]).exit_code == 2


def test_the_command_hides_no_error_of_the_tree() -> None:
    result = CliRunner().invoke(app, ["probe", "embedded:nothing"])
    assert isinstance(result.exception, ModelLoadError)
