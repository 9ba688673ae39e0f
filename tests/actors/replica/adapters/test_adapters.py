"""A row with an adapter, in a batch with rows of other adapters and of none, equals the adapter alone.

On a CPU in float32: the same bits, as for every batch.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from satchel.actors.model_files.checkpoints import load_checkpoint
from satchel.actors.model_files.identity.model_identity import adapted_id
from satchel.actors.replica.adapters import layers
from satchel.actors.replica.adapters.rows import Rows
from satchel.actors.replica.execution import executor
from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.loading import models
from satchel.cluster.errors import ComputesOtherwise
from tests.worlds.models.adapters import KEYS, write_adapter
from tests.worlds.models.families import VOCABULARY, write_model
from tests.worlds.replica.bench import Bench, Forced, Logits
from tests.worlds.replica.bench_disk import Node, process, write_down

ADAPTERS: dict[str, dict[str, Any]] = {
    "one": {"rank": 4, "seed": 1},
    "two": {"rank": 7, "seed": 2, "scale": 20.0},
    # Of one layer only, and others than those of the first two.
    "three": {"rank": 16, "seed": 3, "layers": 1, "keys": ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj")},
}
NAMES = ("", "one", "two", "three")

MODELS: dict[str, tuple[str, int | None]] = {"plain": ("qwen3", None), "quantized": ("llama", 4)}


def quiet(what: str, fraction: float | None) -> None: ...


def load(folder: Path, **how: Any) -> LoadedModel:
    return models.load(str(folder), context_tokens_max=None, progress=quiet, numerics="reproducible", **how)


class Made:
    """A model on disk, its adapters, and sequences: one of each adapter and of none, twice."""

    def __init__(self, folder: Path, family: str, bits: int | None, **how: Any) -> None:
        self.folder = write_model(folder / "model", family, bits=bits)
        self.how = how
        whole = load_checkpoint(self.folder, trusted=False)[0]
        self.adapters = {name: str(write_adapter(folder / name, whole, **fields)) for name, fields in ADAPTERS.items()}
        self.loaded = load(self.folder, adapters=self.adapters, **how)
        rng = random.Random(0)
        self.prompts, self.answers = [300, 20, 511, 7, 256, 64, 40, 530], [12, 20, 8, 30, 6, 14, 260, 9]
        self.whose = [NAMES[number % len(NAMES)] for number in range(len(self.prompts))]
        lengths = [prompt + answer for prompt, answer in zip(self.prompts, self.answers, strict=True)]
        self.scripts = {number: rng.choices(range(VOCABULARY - 10), k=length) for number, length in enumerate(lengths)}

    def submit(self, bench: Bench, number: int, adapter: str | None = None, **more: Any) -> None:
        prompt = self.scripts[number][: self.prompts[number]]
        own = self.whose[number] if adapter is None else adapter
        bench.submit(f"s{number}", prompt, seed=number, max_tokens=self.answers[number], adapter=own, **more)


@pytest.fixture(scope="module", params=MODELS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("made"), *MODELS[request.param], weights="stored")


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Bench, Logits]]:
    def make(made: Made, loaded: LoadedModel | None = None, **scheduling: Any) -> tuple[Bench, Logits]:
        noted: Logits = {}
        monkeypatch.setattr(executor, "BatchSampler", lambda *_: Forced(made.scripts, noted))
        return Bench(loaded or made.loaded, **scheduling), noted

    return make


def compare(left: Logits, right: Logits) -> None:
    assert left.keys() == right.keys() and left
    differing = [key for key in left if not np.array_equal(left[key], right[key])]
    assert not differing, f"{len(differing)} of {len(left)} logits differ, the first at {differing[0]}"


def alone(made: Made, forced: Callable[..., tuple[Bench, Logits]], loaded: LoadedModel, number: int) -> Logits:
    """A sequence as a server computes it that has only its adapter, as `adapter` beside the source, or none."""
    bench, noted = forced(made, loaded)
    made.submit(bench, number, adapter="")
    bench.drain()
    return noted


@pytest.mark.variants(1)
def test_rows_of_several_adapters_and_of_none_equal_each_alone(
    made: Made, forced: Callable[..., tuple[Bench, Logits]]
) -> None:
    """Prefill together and in chunks, decode, joins and leaves: as by mlx-lm's own layers of one adapter alone, and
    without an adapter as by a server that has none."""
    expected: Logits = {}
    for name in NAMES:
        bare = load(made.folder, adapter=made.adapters.get(name), **made.how)
        for number, whose in enumerate(made.whose):
            if whose == name:
                expected |= alone(made, forced, bare, number)
    for chunk in (256, 4096):
        bench, noted = forced(made, prefill_chunk_tokens=chunk)
        rng = random.Random(chunk)
        waiting = [*range(len(made.whose))]
        rng.shuffle(waiting)
        while waiting or bench.turn():
            if waiting and rng.random() < 0.4:
                made.submit(bench, waiting.pop())
            bench.turn()
        compare(noted, expected)


def test_adapters_differ(made: Made, forced: Callable[..., tuple[Bench, Logits]]) -> None:
    """The test above would pass if none were used."""
    found = []
    for name in NAMES:
        bench, noted = forced(made)
        made.submit(bench, 1, adapter=name)
        bench.drain()
        found.append(np.stack([noted[key] for key in sorted(noted)]))
    scale = np.abs(found[0]).max()
    for index, one in enumerate(found):
        for other in found[index + 1 :]:
            assert np.abs(one - other).max() > 0.05 * scale


def test_kv_is_reused_by_the_same_adapter_only(made: Made, forced: Callable[..., tuple[Bench, Logits]]) -> None:
    """The same prompt with every adapter: nothing is found at first, all whole blocks by the same one again."""
    bench, first = forced(made)
    cached = {}
    for name in NAMES:
        made.submit(bench, 2, adapter=name)
        bench.drain()
        cached[name] = bench.sequences.pop("s2").cached
    assert cached == dict.fromkeys(NAMES, 0)
    for name in reversed(NAMES):
        expected, noted = forced(made)
        made.submit(expected, 2, adapter=name)
        expected.drain()
        first.clear()
        monkeyed = bench.engine.executor
        monkeyed.make_sampler = lambda: Forced(made.scripts, first)
        monkeyed.forget()
        made.submit(bench, 2, adapter=name)
        bench.drain()
        assert (bench.sequences.pop("s2").cached or 0) >= 256, name
        compare(first, noted)


def test_a_prompt_is_prepared_with_its_adapter(made: Made, forced: Callable[..., tuple[Bench, Logits]]) -> None:
    """What is prepared for one adapter is used by it alone, and is what it would compute."""
    prompt = made.scripts[2][:511]
    bench, expected = forced(made)
    bench.submit("plain", prompt, seed=2, adapter="one", max_tokens=4)
    bench.drain()
    bench, noted = forced(made)
    bench.prepare("t/a", prompt, adapter="one")
    bench.submit("other", prompt, seed=7, adapter="two", max_tokens=4)
    bench.drain()
    assert bench.sequences["other"].cached == 0
    noted.clear()
    bench.submit("own", prompt, seed=2, adapter="one", max_tokens=4)
    bench.drain()
    assert bench.sequences["own"].cached == 256
    compare(noted, expected)


def test_model_ids_of_adapters_differ(made: Made) -> None:
    ids = {adapted_id(made.loaded.model_id, each.digest) for each in made.loaded.adapters.all}
    assert len({made.loaded.model_id, *ids}) == 1 + len(ADAPTERS)
    assert adapted_id(made.loaded.model_id, b"") == made.loaded.model_id and adapted_id(b"", b"x" * 32) == b""


def test_a_request_with_an_unknown_adapter_or_the_wrong_model_id_is_refused(made: Made) -> None:
    bench = Bench(made.loaded)
    sent: list[Any] = []
    bench.engine.submit = lambda request, *_: sent.append(request)  # type: ignore[method-assign]
    bench.submit("plain", [1, 2, 3], adapter="one")
    (request,) = sent
    bench = Bench(made.loaded)
    refused: list[Any] = []
    for wrong in (
        dataclasses.replace(request, adapter=b"x" * 32),
        dataclasses.replace(request, adapter=b""),
        dataclasses.replace(request, model_id=made.loaded.model_id),
    ):
        bench.engine.submit(wrong, refused.append)
        bench.turn()
    assert [type(error) for error in refused] == [ComputesOtherwise] * 3


def test_drafts_are_computed_with_the_adapter(made: Made) -> None:
    """A prompt that repeats itself: with drafts the same tokens as without."""
    prompt = [5, 70, 900, 33, 12, 44] * 12
    plain, drafting = Bench(made.loaded), Bench(made.loaded, drafts=True)
    for name in NAMES:
        expected = plain.run(name or "none", prompt, adapter=name, max_tokens=40).tokens
        assert drafting.run(name or "none", prompt, adapter=name, max_tokens=40).tokens == expected
    assert made.loaded.undrafted or drafting.engine.executor.drafts.count


def test_gathered_rows_agree_with_groups(made: Made) -> None:
    """As on a GPU: one stack of all adapters, ranks padded with zeros."""
    stacked = load(made.folder, adapters=made.adapters, gathers=True, **made.how)
    numbers = [0, 1, 2, 3, 2, 0]
    tokens = mx.array([[5 + row, 70, 900] for row in range(len(numbers))], mx.uint32)
    logits = []
    for loaded in (made.loaded, stacked):
        with loaded.adapters.adapted.calling(numbers):
            logits.append(np.array(loaded.model(tokens)))
    adapted = stacked.adapters.adapted
    assert adapted.gathers, "the test at load has found the same"
    for copies in (True, False):
        for rows in (
            Rows(numbers, gathers=True, copies=copies),
            Rows(mx.array(numbers, mx.uint32), copies=copies),
        ):
            with adapted.using(rows):
                logits.append(np.array(stacked.model(tokens)))
    plain = np.array(stacked.model(tokens))
    scale = np.abs(logits[0]).max()
    for other in logits[1:]:
        assert np.abs(logits[0] - other).max() < 1e-5 * scale
    bare = [row for row, number in enumerate(numbers) if not number]
    assert all(np.array_equal(each[bare], plain[bare]) for each in logits)


def test_rows_that_cannot_be_gathered_are_computed_in_groups(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device whose product is wrong, or raises."""

    def wrong(x: mx.array, matrices: mx.array, numbers: mx.array, **_: Any) -> mx.array:
        return x @ matrices[0]

    def missing(*_: Any, **__: Any) -> mx.array:
        raise RuntimeError("GatherMM has no GPU implementation.")

    for product in (wrong, missing):
        monkeypatch.setattr(layers, "_product", product)
        stacked = load(made.folder, adapters=made.adapters, gathers=True, **made.how)
        assert not stacked.adapters.adapted.gathers
        with stacked.adapters.adapted.calling([0, 1, 2]):
            found = np.array(stacked.model(mx.array([[5, 70]] * 3, mx.uint32)))
        with made.loaded.adapters.adapted.calling([0, 1, 2]):
            assert np.allclose(found, np.array(made.loaded.model(mx.array([[5, 70]] * 3, mx.uint32))), atol=1e-3)


def test_unbatched_sequences_have_their_own_adapters(made: Made, forced: Callable[..., tuple[Bench, Logits]]) -> None:
    expected: Logits = {}
    for number in (1, 3, 5):
        bench, noted = forced(made)
        made.submit(bench, number)
        bench.drain()
        expected |= noted
    bench, noted = forced(made, dataclasses.replace(made.loaded, unbatched=True))
    for number in (1, 3, 5):
        made.submit(bench, number)
    bench.drain()
    compare(noted, expected)


def test_embeddings_and_output_layers_have_adapters(tmp_path: Path) -> None:
    """As mlx-lm's own layers compute it; the embedding of the first model is its output layer too."""
    for family, keys in (("qwen3", ("embed_tokens", *KEYS)), ("llama", ("embed_tokens", "lm_head"))):
        folder = write_model(tmp_path / family, family)
        whole = load_checkpoint(folder, trusted=False)[0]
        adapters = {
            name: str(write_adapter(tmp_path / f"{family}-{name}", whole, rank=rank, seed=rank, keys=keys))
            for name, rank in (("a", 3), ("b", 5))
        }
        tokens = mx.array([[5, 70, 900]] * 3, mx.uint32)
        expected = [
            np.array(load(folder, adapter=adapter).model(tokens[:1]))[0]
            for adapter in (adapters["a"], adapters["b"], None)
        ]
        for gathers in (False, True):
            loaded = load(folder, adapters=adapters, gathers=gathers)
            with loaded.adapters.adapted.calling([1, 2, 0]):
                found = np.array(loaded.model(tokens))
            for one, other in zip(expected, found, strict=True):
                assert np.abs(one - other).max() <= (1e-5 * np.abs(one).max() if gathers else 0.0)


def test_only_a_call_with_rows_of_adapters_costs_something(made: Made) -> None:
    """A batch without adapters runs the layers' own code."""
    adapted = made.loaded.adapters.adapted
    with adapted.calling([0, 0, 0]):
        assert adapted.rows is None
    with adapted.calling([0, 1]):
        assert adapted.rows is not None
    assert adapted.rows is None


def test_kv_on_disk_is_the_adapters_own(made: Made, tmp_path: Path) -> None:
    """A turn with an adapter, and another process: with another adapter or none nothing is read, with the same one all
    of it, and the answer is the same."""
    node = Node(tmp_path / "kv")
    prompt = [*made.scripts[0][:300], *made.scripts[2][:300]]
    bench, disk = process(made.loaded, node)
    first = bench.run("first", prompt, agent="t/alice", adapter="one", max_tokens=6)
    write_down(bench, disk)
    for name in ("", "two", "one"):
        bench, disk = process(made.loaded, node)
        again = bench.run("again", prompt, agent="t/alice", adapter=name, remembered=600, max_tokens=6)
        assert (again.read, again.cached) == ((599, 599) if name == "one" else (0, 0)), name
        assert (again.tokens == first.tokens) == (name == "one")
        bench.run("away", made.scripts[7][:20], adapter="three", max_tokens=1)
