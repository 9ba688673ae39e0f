"""The page of papers has what was measured, and says what was not. How fast anything is, is no test."""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from benchmarks import kept, parts
from benchmarks.energy import EnergySpent
from benchmarks.papers import (
    activations,
    agent_memory,
    agent_quality,
    engines,
    figures,
    folders,
    ml_drift,
    page,
    planning,
    run,
    vllm_mlx,
    vllm_mlx_media,
)
from benchmarks.papers.shapes import MODELS, SMALL_VOCABULARY
from benchmarks.serve import prompts
from benchmarks.serve.protocol import StreamedTimes, Trace
from benchmarks.serve.targets import CannotStart
from benchmarks.vision import servers

BILLIONS = {
    "gemma-2b": 2.51, "gemma2-2b": 2.61, "llama3.2-1b": 1.24, "llama3.2-3b": 3.21, "llama3.1-8b": 8.03,
    "qwen3-0.6b": 0.60, "qwen3-4b": 4.02, "qwen3-8b": 8.19, "qwen3-30b-a3b": 30.5, "gemma3-4b": 3.88,
    "gemma3-12b": 11.8, "nemotron-30b-a3b": 31.6, "deepseek-v2-lite": 15.7,
}  # fmt: skip
"""Parameters, as the models' publishers count them, without vision."""


def quiet(text: str) -> None:
    pass


def rows_of(table: page.PaperTable) -> list[dict[str, Any]]:
    return list(table.rows)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Gemma 2 in 8/4/4."""
    path = tmp_path_factory.mktemp("papers") / "gemma2-2b"
    folders.write_paper_folder("gemma2-2b", path, "8-4-4", mx.float32, small=True)
    return path


# Models.


@pytest.mark.parametrize("name", MODELS)
def test_a_whole_model_has_as_many_parameters_as_the_named_one(name: str) -> None:
    parameters: Any = tree_flatten(folders.random_model(MODELS[name].config(small=False)).parameters())
    assert sum(array.size for _, array in parameters) / 1e9 == pytest.approx(BILLIONS[name], rel=0.01)


@pytest.mark.parametrize("name", MODELS)
def test_a_scaled_down_model_is_named_so_and_has_the_same_kinds_of_layers(name: str) -> None:
    model = MODELS[name]
    assert "scaled down" in model.title(small=True) and model.title(small=False) == model.name
    whole, small = (folders.random_model(model.config(small=which)) for which in (False, True))
    kinds = [{type(layer) for _, layer in each.named_modules()} for each in (whole, small)]
    assert kinds[0] == kinds[1] and model.config(small=True)["vocab_size"] == SMALL_VOCABULARY


def test_a_written_model_draws_only_words_and_has_the_recipes_bits(folder: Path) -> None:
    model: Any = load_model(folder)[0]
    words = {id for _, id in json.loads((folder / prompts.WORDS_FILE).read_text())}
    drawn: Any = mx.argmax(model(mx.array([sorted(words)[:64]])), axis=-1)[0].tolist()
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    names = {id: name for name, id in vocabulary.items()}
    assert all(names[id].startswith("Ġ") and names[id][1:].isalpha() for id in drawn)
    layer = model.model.layers[0]
    assert (layer.self_attn.q_proj.bits, layer.mlp.up_proj.bits, model.model.embed_tokens.bits) == (8, 4, 4)


# The page.


def result_of(**tables: page.PaperTable) -> dict[str, Any]:
    machine = {"gpu": "", "processor": "P", "cores": 2, "memory_gb": 8, "system": "S", "python": "3", "load_before": 0}
    measured = {name: {**asdict(table), "seconds": 2.0} for name, table in tables.items()}
    known = {paper: [] for paper in figures.PAPERS} | {figures.ML_DRIFT: ["speed", "other"]}
    return {"machine": machine, "versions": {}, "when": "now", "parts": measured, "known": known}


def test_the_best_peer_stands_beside_ours_and_the_papers_figure() -> None:
    table = page.PaperTable("T", paper=figures.ML_DRIFT)
    figure = figures.Figure(28.0, "Table 7")
    table.compare("decode", "tokens/s", 30.0, {"a": 10.0, "b": 20.0}, figure=figure, joules={"": 0.5, "b": 0.25})
    table.compare("first token", "ms", 30.0, {"a": 10.0, "b": 20.0}, less=True)
    table.compare("alone", "tokens/s", 30.0, {})
    table.compare("failed", "tokens/s", None, {"a": 10.0})
    table.missing += ["the rest: no time."] * 2
    told = page.markdown(result_of(speed=table))
    assert "| decode | tokens/s | 28 (Table 7) | 20 | b | 30 | 1.5 | 0.25 | 0.5 |" in told
    assert "| first token | ms | – | 10 | a | 30 | 0.333 | – | – |" in told
    assert "| alone | tokens/s | – | – | – | 30 | – | – | – |" in told
    assert "| failed | tokens/s | – | 10 | a | – | – | – | – |" in told
    assert told.count("- speed: the rest: no time.") == 1 and "- `other` has not been run." in told
    assert "`speed` has not been run" not in told


def test_without_a_counter_of_energy_there_is_no_column_for_it() -> None:
    table = page.PaperTable("T", paper=figures.ML_DRIFT)
    table.compare("decode", "tokens/s", 30.0, {"a": 10.0}, joules={})
    assert "J, ours" not in page.markdown(result_of(speed=table))


def test_every_paper_says_where_its_figures_are_from() -> None:
    assert all(paper.sources and paper.never and "arXiv" in paper.reference for paper in figures.PAPERS.values())
    cold, warm, hot = (figures.first_token_ms("gemma3-12b", 4096, state) for state in ("cold", "warm", "hot"))
    assert cold and warm and hot and (cold.value, warm.value, hot.value) == (15_502, 513, 709)
    assert figures.first_token_ms("llama3.1-8b", 4096, "cold") is None
    assert figures.agents_that_fit("gemma3-12b", 8192, "q4") == figures.Figure(18, "Agent capacity comparison")


def test_a_part_is_chosen_by_its_first_words() -> None:
    assert run.chosen_parts("ml-drift speed") == [f"ml-drift speed {name}" for name in ml_drift.DRIFT_MODELS]
    assert run.chosen_parts("agent-memory capacity, vllm-mlx images") == ["agent-memory capacity", "vllm-mlx images"]
    with pytest.raises(argparse.ArgumentTypeError, match="ml: not among"):
        run.chosen_parts("ml")


def test_every_part_can_be_made_and_the_page_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part runs what it is named after; later runs keep what others have left."""
    monkeypatch.setattr(run.PapersRun, "_write", lambda self, called, *words: Path(called))
    asked: list[str] = []

    def noting(name: str) -> Any:
        def measure(*given: Any, **more: Any) -> page.PaperTable:
            asked.append(name)
            return page.PaperTable(name, paper=figures.ML_DRIFT)

        return measure

    modules = {ml_drift: ("speed", "planning", "images"), vllm_mlx: ("engines", "served"), vllm_mlx_media: ("media",)}
    modules |= {activations: ("activations",)}
    modules |= {agent_memory: ("first_tokens", "staggered", "capacity"), agent_quality: ("quality",)}
    for module, names in modules.items():
        for name in names:
            monkeypatch.setattr(module, name, noting(name))
    papers = run.PapersRun(run.read_options(["--parts", ",".join(run.PARTS)]), tmp_path)
    result: dict[str, Any] = {**result_of(), "parts": {}}
    kept.measure_all(papers.parts(), papers.budget, tmp_path / "papers", result, page.markdown, run.finish)
    assert list(result["parts"]) == list(run.PARTS) and set(asked) == {
        name for each in modules.values() for name in each
    }
    assert list(kept.earlier(tmp_path / "papers", result, run.PARTS)) == list(run.PARTS)


# Engines and servers.


class FakeTarget:
    """A target whose answers take 100 ms to the first token and 10 ms for each further one; those to a system prompt
    that it knows take 20."""

    def __init__(self, peak_bytes: int | None = 5_000_000) -> None:
        self.peak_bytes, self.known, self.sent = peak_bytes, set[str](), 0

    def run(self, command: Any) -> Trace:
        system = getattr(command, "system", "")
        first = 0.02 if system and system in self.known else 0.1
        self.known.add(system)
        texts = command.turns if system else command.prompts
        tokens = command.turns[0][0][1] if system else command.max_tokens
        self.sent += len(texts)
        times = [first + 0.01 * at for at in range(tokens)]
        stream = StreamedTimes(sent=0.0, ended=times[-1], times=times, tokens=tokens, prompt_tokens=4)
        return Trace([stream] * len(texts), peak_bytes=self.peak_bytes)

    def stop(self) -> None:
        pass


def starting(monkeypatch: pytest.MonkeyPatch, refused: str = "") -> None:
    def make(name: str, folder: Path, place: Any) -> FakeTarget:
        if name == refused:
            raise CannotStart("no such server")
        return FakeTarget()

    monkeypatch.setattr(engines, "Target", make)


def test_engines_are_measured_one_sequence_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starting(monkeypatch)
    place: Any = SimpleNamespace()
    given = (lambda name, recipe: folder, place, 50, 11, 1, parts.Budget(60.0))
    table = ml_drift.speed("gemma2-2b", *given, small=True)
    found = {row["what"]: (row["ours"], row["best peer"], row["which"]) for row in rows_of(table)}
    assert found["q8, prefill"] == pytest.approx((500.0, 500.0, engines.PEER))
    assert found["8/4/4, decode"] == pytest.approx((100.0, 100.0, engines.PEER))
    assert found["q8, peak memory"] == (5.0, 5.0, engines.PEER) and not table.missing


def test_an_engine_that_does_not_start_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starting(monkeypatch, refused=engines.PEER)
    place: Any = SimpleNamespace()
    table = vllm_mlx.engines("qwen3-4b", folder, place, 50, 11, 1, parts.Budget(60.0), small=True, weights="4-bit")
    assert table.missing == [f"{engines.PEER}: no such server"]
    assert [(row["ours"], row["best peer"]) for row in rows_of(table)] == [(pytest.approx(100.0), None), (500.0, None)]


def test_servers_are_compared_by_concurrency_and_a_shared_prefix(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starting(monkeypatch, refused="vllm-mlx")
    place: Any = SimpleNamespace()
    table = vllm_mlx.served(
        "qwen3-0.6b", folder, place, [1, 16], 20, 11, parts.Budget(60.0), small=True, weights="4-bit"
    )
    found = {(row["what"], row["unit"]): row for row in rows_of(table)}
    assert found["16 concurrent requests", "tokens/s"]["ours"] == pytest.approx(16 * 11 / 0.2)
    assert found["16 concurrent requests", "requests/s"]["ours"] == pytest.approx(16 / 0.2)
    assert found["16 requests over 1, tokens a second", "x"]["paper"] == "4.3 (abstract)"
    assert found["prefix of 512 tokens, known: first token", "ms"]["ours"] == pytest.approx(20.0)
    assert found["prefix of 512 tokens, new over known", "x"]["best peer"] == pytest.approx(5.0)
    assert table.missing == ["vllm-mlx: no such server"]


class FakeEyes:
    """Takes 200 ms for what it has not seen, and 20 for what it has."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def see(self, messages: Any, tokens_max: int) -> Any:
        shown = json.dumps(messages)
        stream = servers.server.ClusterStream(0.0, arrivals=[0.01], ended=0.02 if shown in self.seen else 0.2)
        self.seen.add(shown)
        return stream


@pytest.mark.parametrize(("kind", "sizes"), [("images", [32, 1024]), ("video", [4, 64])])
def test_media_are_shown_twice(monkeypatch: pytest.MonkeyPatch, kind: str, sizes: list[int]) -> None:
    def make(name: str, folder: Path, place: Any) -> Any:
        if name == "mlx_vlm.server":
            raise CannotStart("no such server")
        memory = SimpleNamespace(memory=lambda: SimpleNamespace(rss_bytes=3e6))
        return SimpleNamespace(name=name, eyes=FakeEyes(), server=memory, stop=lambda: None)

    monkeypatch.setattr(vllm_mlx_media, "VisionServer", make)
    monkeypatch.setattr(vllm_mlx_media, "FRAME_SIDE", 32)
    place: Any = SimpleNamespace()
    table = vllm_mlx_media.media(kind, sizes, Path(), "tiny", place, 4, parts.Budget(60.0))
    found = {row["what"]: row for row in rows_of(table)}
    what = {"images": "1024 x 1024", "video": "64 frames"}[kind]
    assert found[f"{what}, new: whole answer"]["ours"] == pytest.approx(200.0)
    assert found[f"{what}, new over again"]["ours"] == pytest.approx(10.0)
    assert found[f"{what}, new over again"]["paper"] is not None and table.missing == ["mlx_vlm.server: no such server"]
    if kind == "video":
        assert found["4 frames, new: frames"]["ours"] == pytest.approx(20.0)
        assert found["4 frames: memory of all processes"]["ours"] == 3.0


# Memory of activations.


def test_a_plan_has_room_for_all_that_live_at_once() -> None:
    """Against every step of random lifetimes."""
    rng = random.Random(4)
    for _ in range(50):
        usages = []
        for _ in range(rng.randrange(1, 40)):
            first = rng.randrange(30)
            usages.append(planning.Usage(rng.randrange(1, 50), first, first + rng.randrange(8)))
        used = [sum(each.nbytes for each in usages if each.first <= at <= each.last) for at in range(40)]
        planned = planning.greedy_by_size_bytes(usages)
        assert planning.least_bytes(usages) == max(used) <= planned <= planning.total_bytes(usages)


def test_a_plan_reuses_what_has_ended() -> None:
    """The last one fits where the first two were."""
    usages = [planning.Usage(4, 0, 1), planning.Usage(4, 1, 2), planning.Usage(8, 3, 4)]
    assert (planning.greedy_by_size_bytes(usages), planning.total_bytes(usages)) == (8, 16)


def test_views_take_no_memory_and_results_are_no_activations() -> None:
    weights = mx.ones((4, 4))
    mx.eval(weights)

    def call(given: mx.array) -> list[mx.array]:
        hidden = mx.exp(given @ weights)
        return [(hidden.T @ hidden).sum()]

    usages = planning.usages_of(call, mx.ones((2, 4)))
    assert [usage.nbytes for usage in usages] == [32, 32, 64]


def test_the_memory_of_a_models_activations_is_planned(folder: Path) -> None:
    table = ml_drift.planning("gemma2-2b", lambda name, recipe: folder, 16, small=True)
    assert [row["what"] for row in rows_of(table)] == ["prefill of 16 tokens, peak", "decode step, peak"]
    assert all(row["ours"] > 0 and row["which"] == "greedy by size, planned" for row in rows_of(table))


# Activations and images.


def test_activations_are_quantized_as_far_as_mlx_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """A way that the device has not is named, and the others are compared."""
    if mx.default_device() == mx.Device(mx.cpu):
        table = activations.activations("llama3.1-8b", 16, small=True)
        assert [(row["ours"] > 0, row["best peer"]) for row in rows_of(table)] == [(True, None)] * 2
        assert [each.partition(":")[0] for each in table.missing] == ["activations in mxfp8", "activations in nvfp4"]
        assert rows_of(table)[1]["ours"] < 2
    monkeypatch.setattr(mx, "qqmm", lambda x, codes, scales, mode: x @ mx.dequantize(codes, scales, mode=mode).T)
    table = activations.activations("llama3.1-8b", 16, small=True)
    assert not table.missing and rows_of(table)[1]["which"] == "qqmm, mxfp8"


def test_an_image_is_made_beside_mlx_vlm_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no more than a model's sizes and two times."""
    sizes = {"layers": 20, "transformer parameters": 4 * 10**8, "products of a step, G": 390}
    monkeypatch.setattr(ml_drift.image_benchmark, "write_model", lambda folder, *, small: sizes)
    lines = [{"way": "satchel", "s": 2.0}, {"way": "mlx-vlm", "s": 3.0}]
    monkeypatch.setattr(ml_drift.image_benchmark, "measure", lambda folder, *asked: lines)
    table = ml_drift.images(512, 20, 1, tmp_path, small=False)
    assert [(row["ours"], row["best peer"], row["ratio"]) for row in rows_of(table)] == [(2.0, 3.0, 1.5)]
    assert "860 million weights" in table.notes[0] and not list(tmp_path.iterdir())


# Agents.


@pytest.mark.slow
def test_an_agents_context_is_not_computed_again(folder: Path, tmp_path: Path) -> None:
    """Not when it is hot, nor when it is warm; and the peer's answer is as long."""
    given = ([300], 1, tmp_path, parts.Budget(120.0), quiet)
    table = agent_memory.first_tokens("gemma2-2b", folder, *given, small=True)
    assert table.missing == [f"{context:,} tokens: not asked for." for context in agent_memory.CONTEXTS]
    what = [row["what"] for row in rows_of(table)]
    assert what[:2] == ["300 tokens, cold: first token", "300 tokens, cold: 64 tokens"]
    assert what[-1] == "300 tokens, cold over hot: first token" and len(what) == 8
    assert all(row["ours"] > 0 and row["best peer"] > 0 for row in rows_of(table))


@pytest.mark.slow
def test_two_agents_arrive_one_after_the_other(folder: Path) -> None:
    table = agent_memory.staggered("gemma2-2b", folder, 40, 1, parts.Budget(120.0), quiet, small=True)
    assert [row["which"] for row in rows_of(table)] == ["mlx-lm, sequential", "mlx-lm, batched"] * 2
    assert all(row["ours"] > 0 for row in rows_of(table))


def test_windows_count_for_their_own_length_only() -> None:
    """Gemma 3 12B: 8 of 48 layers grow with the context."""
    full = agent_memory.cache_spec("gemma3-12b", "fp16")
    assert full.bytes_per_token == 8 * 2 * 8 * 256 * 2
    assert agent_memory.agents_in(full, 32_768) == int(15.2e9) // (full.bytes_per_sequence + 32_768 * 65_536)
    rows = {row["what"]: row for row in rows_of(agent_memory.capacity(["gemma3-12b"]))}
    assert rows["Gemma 3 12B, 8,192 tokens, fp16"]["paper"] == "5 (Agent capacity comparison)"
    assert rows["Gemma 3 12B, 8,192 tokens, q4"]["ours"] > rows["Gemma 3 12B, 8,192 tokens, fp16"]["ours"]


def test_quality_is_that_of_the_quality_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    scored = parts.ResultTable("scored", [{"cache": "q4", "tokens": 8, "change, %": 0.5},
                                          {"cache": agent_quality.PEER, "tokens": 8, "change, %": 9.0}])  # fmt: skip
    recalled = parts.ResultTable("recalled", [{"cache": "q4", "tokens": 8, "share": 1.0}])
    measure = SimpleNamespace(
        load=lambda source, name: SimpleNamespace(refused=()),
        divergence=lambda *given: scored,
        recall=lambda *given: recalled,
    )
    monkeypatch.setattr(agent_quality, "measure", measure)
    table = agent_quality.quality("embedded:recall", [8], 1, parts.Budget(9.0), quiet)
    assert rows_of(table)[0]["what"] == "code, 8 tokens, q4: change of perplexity"
    assert (rows_of(table)[0]["ours"], rows_of(table)[0]["best peer"], rows_of(table)[0]["ratio"]) == (0.5, 9.0, None)
    assert (rows_of(table)[-1]["what"], rows_of(table)[-1]["ours"]) == ("codes recalled at 8 tokens, q4", 1.0)


# Energy.


class Meter:
    def __init__(self, *readings: dict[str, float]) -> None:
        self.readings = list(readings)

    def read(self) -> dict[str, float]:
        return self.readings.pop(0)


def test_joules_a_token_are_what_counters_say_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.energy.SECONDS_LEAST", 0.0)
    counted: Any = Meter({"nvml": 1.0}, {"nvml": 9.0})
    assert EnergySpent(counted).per_token(4) == 2.0
    nothing: Any = Meter({}, {})
    assert EnergySpent(nothing).per_token(4) is None
    monkeypatch.setattr("benchmarks.energy.SECONDS_LEAST", 60.0)
    short: Any = Meter({"nvml": 1.0}, {"nvml": 9.0})
    assert EnergySpent(short).per_token(4) is None


def test_only_known_joules_are_shown() -> None:
    single = engines.SingleRun(1.0, 1.0, 1, 0.5)
    assert engines.joules_of(single, {"a": replace(single, joules=None)}) == {"": 0.5}
    assert engines.joules_of(None, {"a": single}) == {"a": 0.5}
