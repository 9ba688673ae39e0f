"""The papers, and those of their figures that were found in a source; each says where. What was not found is not
here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Paper:
    """A paper.

    Attributes:
        sources: where its figures on the page are from, and which were not found.
        never: what of its experiments cannot be run anywhere here.
    """

    title: str
    reference: str
    sources: str
    never: tuple[str, ...]


@dataclass(frozen=True)
class Figure:
    """A figure of a paper; `where` names its table."""

    value: float
    where: str


ML_DRIFT, VLLM_MLX, AGENT_MEMORY = "ml-drift", "vllm-mlx", "agent-memory"

PAPERS = {
    ML_DRIFT: Paper(
        "ML Drift",
        'Tang et al., "Scaling On-Device GPU Inference for Large Generative Models", arXiv 2505.00232',
        "The figures of its tables were not found in a source that could be read, so none is shown.",
        (
            "ML Drift itself: its engine is for OpenCL, Metal and WebGPU, and no peer here contains it.",
            "Stable Diffusion 1.4 itself: mlx-vlm does not have it. `ml-drift images` times another of its scale.",
            "Scales for each channel: MLX has one for each 32, 64 or 128 weights of a channel, so `q8` and `8/4/4` are "
            "the recipes `8` and `8-4-4` of `satchel convert`.",
        ),
    ),
    VLLM_MLX: Paper(
        "vllm-mlx",
        'Barrios, "Native LLM and MLLM Inference at Scale on Apple Silicon", arXiv 2601.19139',
        "Its figures are those of its abstract, measured on an M4 Max; those of its tables were not found in a source "
        "that could be read.",
        ("llama.cpp and vLLM-metal: neither runs MLX models, and the latter needs Metal.",),
    ),
    AGENT_MEMORY: Paper(
        "Agent memory",
        'Shkolnikov, "Agent Memory Below the Prompt: Persistent Q4 KV Cache for Multi-Agent LLM Inference on Edge '
        'Devices", arXiv 2603.04428',
        "Its figures are those of the author's draft in the repository yshk-mxim/agent-memory "
        "(novelty/paper/semantic_colm2026.tex at 145ae213), measured on an M4 Pro with 24 GB, and may differ from the "
        "published ones. The draft does not number its tables, so each is named by its label or caption.",
        (
            "The author's own server: it is not among the peers that can be started here.",
            "The five-phase interrogation and the routing to ten experts: their texts are not here.",
        ),
    ),
}

_ABSTRACT = "abstract"
BATCHED_SPEEDUP_16 = Figure(4.3, _ABSTRACT)
IMAGE_SPEEDUP = Figure(28.0, _ABSTRACT)
VIDEO_SPEEDUP = Figure(24.7, f"{_ABSTRACT}, up to 64 frames")
VIDEO_FRAMES = 64
PEAK_TOKENS_PER_S = Figure(525.0, _ABSTRACT)

_CONTEXTS = (1024, 2048, 4096, 8192, 16_384, 32_768)
_TTFT_MS = {
    "gemma3-12b": {
        "cold": (4007, 7363, 15_502, 32_944, 71_132, 165_189),
        "warm": (527, 532, 513, 590, 808, 1621),
        "hot": (668, 688, 709, 762, 874, 1276),
    },
    "deepseek-v2-lite": {
        "cold": (1090, 1884, 3949, 8541, 19_193, 48_258),
        "warm": (217, 285, 252, 307, 430, 697),
        "hot": (356, 376, 372, 412, 484, 652),
    },
}
_CAPACITY = {
    "gemma3-12b": {4096: (10, 36), 8192: (5, 18), 16_384: (2, 8), 32_768: (1, 4)},
    "deepseek-v2-lite": {4096: (14, 50), 8192: (7, 25), 16_384: (3, 12), 32_768: (1, 6)},
}
CAPACITY_BUDGET_BYTES = int(15.2e9)
"""Of the draft's table of agents that fit."""

_STAGGERED_S = {
    "gemma3-12b": {"wall": (38.8, 38.6)},
    "deepseek-v2-lite": {"wall": (9.5, 9.4), "second": (8.7, 6.4)},
}
STAGGER_SHARE = 2.0 / 15.5
"""When its second agent arrives, as a share of the first one's prefill: after 2 s of Gemma 3's 15.5."""

_PERPLEXITY = {"gemma3-12b": (14.40, 14.46), "deepseek-v2-lite": (6.26, 6.33)}


def first_token_ms(model: str, context: int, state: str) -> Figure | None:
    """Returns the draft's time to the first token; None if it has none.

    Args:
        state: `cold`, `warm` or `hot`.
    """
    if model not in _TTFT_MS or context not in _CONTEXTS:
        return None
    return Figure(_TTFT_MS[model][state][_CONTEXTS.index(context)], "tab:ttft")


def agents_that_fit(model: str, context: int, kv: str) -> Figure | None:
    """Returns the draft's number of agents of that context in `CAPACITY_BUDGET_BYTES`.

    Args:
        kv: `fp16` or `q4`.
    """
    found = _CAPACITY.get(model, {}).get(context)
    return Figure(found[kv == "q4"], "Agent capacity comparison") if found else None


def staggered_s(model: str, what: str, *, batched: bool) -> Figure | None:
    """Returns the draft's seconds for two agents of 4K tokens: `wall`, or until the `second` has ended."""
    found = _STAGGERED_S.get(model, {}).get(what)
    return Figure(found[batched], "app:staggered") if found else None


def perplexity_changes() -> dict[str, Figure]:
    """Returns the draft's changes of perplexity through 4-bit KV, in percent, by model."""
    return {
        model: Figure(round(100 * (quantized / full - 1), 2), "tab:perplexity")
        for model, (full, quantized) in _PERPLEXITY.items()
    }
