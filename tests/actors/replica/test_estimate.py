"""What a model needs, from its config and headers, compared with what it takes once it is loaded or converted."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from satchel.actors.model_files.conversion import convert
from satchel.actors.model_files.source import EMBEDDED
from satchel.actors.model_files.weights import bytes_in_memory, read_weight_files
from satchel.actors.pool.needs import weights_bytes
from satchel.actors.replica.estimate import AGENTS_TOKENS, estimate
from satchel.actors.replica.loading.models import load
from satchel.cluster.config.config import Drafting, Model
from satchel.cluster.errors import ModelLoadError
from tests.worlds.models.image_families import write_image_model
from tests.worlds.models.speech_families import write_speech_model

RECALL = EMBEDDED / "recall"


def silent(what: str, done: float | None) -> None:
    return None


@pytest.mark.parametrize("kv", ["q4", "fp16"])
def test_an_estimate_is_what_a_loaded_model_has(kv: str) -> None:
    loaded = load("embedded:recall", context_tokens_max=None, progress=silent, kv=kv)
    found = estimate("embedded:recall", RECALL, kv)
    assert found.spec.layers == loaded.spec.layers and found.kv == loaded.kv
    assert found.spec.bytes_per_token == loaded.spec.bytes_per_token
    assert (found.context_tokens, found.dtype) == (loaded.context_tokens, loaded.dtype)


@pytest.mark.parametrize("recipe", ["4", "8-4-4", "mixed_3_6"])
def test_the_size_after_a_recipe_is_that_of_the_conversion(recipe: str, tmp_path: Path) -> None:
    made = convert("embedded:recall", tmp_path / "made", recipe, "auto", silent)
    files = read_weight_files(made.folder)
    assert estimate("embedded:recall", RECALL).recipes[recipe] == bytes_in_memory(files, None)
    again = estimate("made", made.folder)
    assert again.recipes == {} and "is quantized already" in again.why_not


def test_weights_are_not_read(tmp_path: Path) -> None:
    """The same figures come from files whose data are holes."""
    (tmp_path / "config.json").write_bytes((RECALL / "config.json").read_bytes())
    with (RECALL / "model.safetensors").open("rb") as file:
        length = file.read(8)
        header = file.read(struct.unpack("<Q", length)[0])
    end = max(each["data_offsets"][1] for name, each in json.loads(header).items() if name != "__metadata__")
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(length + header)
        file.truncate(8 + len(header) + end)
    assert estimate("m", tmp_path) == estimate("m", RECALL)


def test_more_memory_holds_longer_contexts_and_more_agents() -> None:
    found = estimate("embedded:recall", RECALL)
    small, large = found.in_memory(400 * 10**6), found.in_memory(10**9)
    assert found.in_memory(10**7).context_tokens == 0, "not even the weights"
    assert 0 < small.context_tokens <= large.context_tokens == found.context_tokens
    assert small.agents.keys() == {AGENTS_TOKENS[0]}, "a longer agent has more than the model's context"
    assert small.agents[8000] < large.agents[8000]


def test_a_part_of_the_memory_stays_free() -> None:
    """A 32nd is slack (`budget.SLACK_PART`)."""
    found = estimate("embedded:recall", RECALL)
    token, own = found.spec.bytes_per_token, found.spec.bytes_per_sequence
    assert found.in_room((1_000 * token + own) * 32 // 31 + 32).context_tokens == 1_000


def test_the_recipe_with_most_bits_that_fits_is_recommended() -> None:
    found = estimate("embedded:recall", RECALL)
    need = next(size for size in range(10**7, 10**9, 10**6) if found.in_memory(size).context_tokens >= 8_000)
    assert found.fitting_recipe(need) == "8"
    assert found.fitting_recipe(need - 4 * 10**6) == "8"
    assert found.fitting_recipe(10**6) is None
    assert found.recipes["8"] > found.recipes["8-4-4"] > found.recipes["4"]
    least = need - (found.weights_bytes - found.recipes["8-4-4"]) + 10**6
    assert found.fitting_recipe(least) == "8-4-4"


def test_what_cannot_be_served_says_why(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "unheard_of"}')
    with pytest.raises(ModelLoadError, match="has no weights"):
        estimate("m", tmp_path)
    (tmp_path / "model.safetensors").write_bytes((RECALL / "model.safetensors").read_bytes())
    with pytest.raises(ModelLoadError, match="m cannot be loaded: "):
        estimate("m", tmp_path)


def test_a_model_that_makes_images_has_no_kv_to_estimate(tmp_path: Path):
    folder = write_image_model(tmp_path / "tiny", "z_image")
    with pytest.raises(ModelLoadError, match="makes images: it keeps no KV"):
        estimate("tiny", folder)


def test_a_model_of_speech_has_no_kv_to_estimate_and_its_weights_count(tmp_path: Path):
    folder = write_speech_model(tmp_path / "tiny", "whisper")
    with pytest.raises(ModelLoadError, match="is a model of speech: it keeps no KV"):
        estimate("tiny", folder)
    assert 0 < weights_bytes(Model(name="m", source=str(folder))) < (folder / "model.safetensors").stat().st_size


def test_a_drafting_model_counts_too_unless_it_is_damaged(tmp_path: Path):
    """Then its replica serves the model without it."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    alone, twice, damaged = (
        weights_bytes(Model(name="m", source="embedded:recall", drafts=drafts))
        for drafts in ("off", Drafting("embedded:recall"), Drafting(str(tmp_path)))
    )
    assert damaged == alone == twice // 2 > 0
