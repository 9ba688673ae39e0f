"""`kv: auto` takes the smallest policy that changes little of what a model says, once, and never fails a load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from satchel.actors.replica.execution.loaded_model import IN_CONFIG, LoadedModel
from satchel.actors.replica.kernels import sealing
from satchel.actors.replica.kernels.sealing import POLICIES
from satchel.actors.replica.loading import kv_choice, models, real_text
from satchel.actors.replica.loading.kv_choice import KL_MAX, Measured, decide
from satchel.actors.replica.loading.models import EMBEDDED
from satchel.actors.replica.proving.divergence import Scores
from tests.worlds.models.families import write_model

GOOD, BAD, NONE = KL_MAX / 2, KL_MAX * 2, float("nan")


def load(folder: Path, kv: str = "auto", trials: Path | None = None, **how: Any) -> LoadedModel:
    return models.load(str(folder), context_tokens_max=None, progress=lambda *_: None, kv=kv, trials=trials, **how)


@pytest.fixture(scope="module")
def recall(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model, under a name that does not mark it as shipped with Satchel."""
    return Path(shutil.copytree(EMBEDDED / "recall", tmp_path_factory.mktemp("models") / "recall"))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, float], list[str]]:
    """Mean KLs by policy that a comparison finds (0 for others), and which were compared."""
    kls: dict[str, float] = {}
    asked: list[str] = []

    def compare(model: Any, tokens: Any, spans: Sequence[Any], reference: Any, others: dict[str, Any], **_: Any) -> Any:
        (name,) = others
        asked.append(name)
        found = np.full(100, kls.get(name, 0.0))
        return {name: [Scores(found, found == 0, found, found)]}

    monkeypatch.setattr(kv_choice, "compare", compare)
    return kls, asked


@pytest.mark.parametrize(
    ("kls", "wanted"),
    [
        ({"q4": GOOD}, "q4"),
        ({"q4": KL_MAX}, "q4"),
        ({"q4": BAD, "k8v4": GOOD}, "k8v4"),
        ({"q4": NONE, "k8v4": GOOD}, "k8v4"),
        ({"q4": BAD, "k8v4": BAD}, "fp16"),
        ({"q4": NONE, "k8v4": NONE}, "fp16"),
        ({}, "fp16"),
    ],
)
def test_the_first_within_the_bound_is_taken_else_full_precision(kls: dict[str, float], wanted: str) -> None:
    """NaN is within no bound; all refused policies are named with their KL."""
    choice = decide({name: Measured(kl, 256) for name, kl in kls.items()})
    assert choice.policy == wanted
    assert choice.why
    for name, kl in kls.items():
        assert f"KL {kl:.2g} of at most {KL_MAX:g} over 256 places" in choice.why
        assert (f"{name} has KL" in choice.why) == (name != wanted)


def test_policies_are_compared_from_the_smallest_up_to_the_first_that_is_good(recall: Path, told: Any) -> None:
    """And the model computes, and has the same id, as if the config named that policy."""
    kls, asked = told
    sealing = [name for name, policy in POLICIES.items() if policy.quantizes]
    kls |= dict.fromkeys(sealing, BAD)
    assert load(recall).kv == "fp16"
    sizes = [load(recall, name).spec.bytes_per_token for name in asked]
    assert sorted(asked) == sorted(sealing) and sizes == sorted(sizes)
    del kls[asked[-1]], asked[:-1]
    (best,) = asked
    chosen, named = load(recall), load(recall, best)
    assert chosen.kv == best and chosen.model_id == named.model_id and chosen.spec == named.spec
    assert "KL 0 of at most" in chosen.kv_why and named.kv_why == IN_CONFIG


def test_a_sound_model_has_the_smallest_and_the_next_load_compares_nothing(
    recall: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound is over real text: the embedded model, which knows little of it, is compared in earnest."""
    monkeypatch.setattr(kv_choice, "KL_MAX", 1.0)
    first = load(recall, trials=tmp_path / "trials.json")
    smallest = min(POLICIES, key=lambda name: load(recall, name).spec.bytes_per_token)
    assert first.kv == smallest
    kl = float(first.kv_why.split()[1])
    assert 0 < kl < 0.1 and f"over {kv_choice.CPU_TOKENS - 256} places" in first.kv_why
    monkeypatch.setattr(kv_choice, "compare", lambda *_, **__: pytest.fail("it was compared before"))
    again = load(recall, trials=tmp_path / "trials.json")
    assert (again.kv, again.kv_why, again.model_id) == (first.kv, first.kv_why, first.model_id)


def test_sealing_that_loses_what_keys_say_is_not_taken(recall: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured in earnest: with one number for each group no policy is within the bound."""
    honest = sealing.quantize

    def quantize(*given: Any) -> Any:
        codes, scales, biases = honest(*given)
        return codes, scales * 0, biases

    monkeypatch.setattr(sealing, "quantize", quantize)
    loaded = load(recall)
    assert loaded.kv == "fp16"
    assert all(f"{name} has KL" in loaded.kv_why for name, policy in POLICIES.items() if policy.quantizes)


@pytest.mark.slow
def test_what_was_found_belongs_to_how_the_model_computes(recall: Path, tmp_path: Path, told: Any) -> None:
    """Another dtype, another format of a policy, or a damaged entry: it is compared again."""
    _, asked = told
    trials = tmp_path / "trials.json"
    for how in ({}, {"dtype": "bfloat16"}, {}, {"dtype": "bfloat16"}):
        load(recall, trials=trials, **how)
    assert len(asked) == 2
    entries = json.loads(trials.read_text())
    choice, measured = {"policy": "q3", "why": "once upon a time"}, {"kl": "low", "places": 1}

    def spoil(found: Any) -> Any:
        kept = found if isinstance(found, dict) else {}
        return choice if "why" in kept else measured if "kl" in kept else found

    trials.write_text(json.dumps({key: spoil(found) for key, found in entries.items()}))
    assert load(recall, trials=trials).kv == asked[-1] and len(asked) == 3


def test_a_load_that_was_ended_goes_on_with_what_it_had_measured(
    recall: Path, tmp_path: Path, told: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first policy was refused, and the process ended while it compared the second."""
    kls, asked = told
    kls["q4"], compare = BAD, kv_choice.compare

    def once(model: Any, tokens: Any, spans: Any, reference: Any, others: dict[str, Any], **how: Any) -> Any:
        if asked:
            raise KeyboardInterrupt
        return compare(model, tokens, spans, reference, others, **how)

    monkeypatch.setattr(kv_choice, "compare", once)
    with pytest.raises(KeyboardInterrupt):
        load(recall, trials=tmp_path / "trials.json")
    monkeypatch.setattr(kv_choice, "compare", compare)
    chosen = load(recall, trials=tmp_path / "trials.json")
    assert asked == ["q4", chosen.kv] and chosen.kv != "q4" and "q4 has KL" in chosen.kv_why


def without_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


def with_one_word(folder: Path) -> None:
    model = {"type": "WordLevel", "vocab": {"?": 0}, "unk_token": "?"}
    whole = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(whole))


def damaged(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")


@pytest.mark.parametrize(
    ("spoil", "shape", "says"),
    [
        (without_tokenizer, {}, "could be compared"),
        (damaged, {}, "could be compared"),
        (with_one_word, {}, "tokens of a text, 1 of them different"),
        (lambda folder: None, {"max_position_embeddings": 300}, "its context of 300 tokens is too short"),
        (lambda folder: None, {"vocab_size": 500}, "and the model none above 499"),
    ],
)
def test_what_cannot_be_compared_is_kept_as_computed_and_loads(
    tmp_path: Path, spoil: Any, shape: dict[str, Any], says: str
) -> None:
    """The reason is reported but not stored: what was missing may be there next time."""
    folder = write_model(tmp_path / "model", "llama", **shape)
    spoil(folder)
    # Where a model ends is asked of its tokenizer only if its files do not say it.
    (folder / "generation_config.json").write_text('{"eos_token_id": 1}')
    loaded = load(folder, trials=tmp_path / "trials.json")
    assert loaded.kv == "fp16" and loaded.pool is not None and says in loaded.kv_why
    assert not (tmp_path / "trials.json").exists() or "why" not in (tmp_path / "trials.json").read_text()


def test_a_device_that_fails_while_comparing_fails_no_load(
    recall: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compare(*_: Any, **__: Any) -> Any:
        raise RuntimeError("[METAL] Command buffer execution failed: Insufficient Memory")

    monkeypatch.setattr(kv_choice, "compare", compare)
    loaded = load(recall, trials=tmp_path / "trials.json")
    assert loaded.kv == "fp16" and "Insufficient Memory" in loaded.kv_why


def test_layers_that_cannot_be_sealed_are_said_to_be_so(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "llama")
    chunked = models.read_spec
    loaded = load(folder, "fp16")
    assert loaded.kv_why == IN_CONFIG
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "read_spec", lambda caches, tokens, policy=None: chunked(caches, tokens, None))
        for kv in ("auto", "q4"):
            loaded = load(folder, kv)
            assert (loaded.kv, loaded.pool) == ("fp16", None) and "(2 full) cannot be sealed" in loaded.kv_why
        assert load(folder, "fp16").kv_why == IN_CONFIG


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_next", "gpt_oss", "deepseek_v2"])
def test_windows_states_and_sinks_are_compared_like_any(tmp_path: Path, family: str) -> None:
    loaded = load(write_model(tmp_path / "model", family))
    assert loaded.kv in POLICIES and " places" in loaded.kv_why, loaded.kv_why


def test_models_that_ship_are_not_compared(told: Any) -> None:
    loaded = models.load("embedded:recall", context_tokens_max=None, progress=lambda *_: None, kv="auto")
    assert (loaded.kv, told[1]) == ("q4", []) and "tests" in loaded.kv_why


def test_the_text_is_prose_and_code_by_turns_and_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where an installation lacks its documentation, or its library's sources."""
    text = real_text.mixed(8000)
    assert len(text) == 8000 and text == real_text.mixed(8000)
    assert text.count("def ") > 3 and any(paragraph[:200] in text for paragraph in real_text.paragraphs())
    with monkeypatch.context() as patch:
        patch.setattr(real_text, "paragraphs", list)
        assert len(real_text.mixed(4000)) == 4000
    monkeypatch.setattr(real_text, "MODULES", ("no.such.module", "sys"))
    assert len(list(real_text.sources())) > 3 and len(real_text.mixed(4000)) == 4000
