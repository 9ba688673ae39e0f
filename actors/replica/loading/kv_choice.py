"""Chooses a model's KV policy if its config says `kv: auto`: the smallest one that changes the model's output little.

At a model's first load the policies, the smallest first, are compared with full precision on the same real text
(teacher-forced), until one is within the bound. The result is stored under the model's files, how this machine
computes, the policies' formats and the device, so that later loads compare nothing. If policies cannot be compared, KV
is kept in full precision, which is right for every model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlx_lm.models.cache import make_prompt_cache

from ...model_files.foreign_code import own_code_only
from ...model_files.source import first_sentence
from ...protocol.block_ids import BLOCK_TOKENS
from ..device.device import on_gpu
from ..kernels.sealing import FULL_PRECISION, POLICIES
from ..kv.caches import ModelCacheSpec, new_caches, new_pool
from ..kv.paged_cache import Reads
from ..proving.divergence import NewCaches, compare
from ..proving.findings import Findings
from ..proving.pieces import IN_ONE_PIECE, Pieces
from . import real_text

logger = logging.getLogger(__name__)

AUTO = "auto"
"""The name in the config that lets Satchel choose the policy."""

USUAL = "q4"
"""The policy of the models that ship with Satchel."""

KL_MAX = 0.008
"""The most that a policy may change next-token distributions: the mean of KL(full precision || policy), in nats. Three
real models have 0.001 to 0.003 with `q4`, and 0.015 or more if its codes are chosen badly (docs/decisions/)."""

GPU_TOKENS, CPU_TOKENS = 1024, 384
"""Tokens of the text that is read. Those after the first block are scored: they have a sealed block before them."""

PLACES_MIN = 64
"""This many positions are enough if there is no time for more."""

COMPARING_S = 3.0
"""The time for all policies together on a GPU, in seconds. A CPU takes as long as `CPU_TOKENS` need."""

TOKENS_KNOWN_MIN = 32
"""The fewest different tokens in the text; if a tokenizer finds fewer, it does not know the text's words."""

CHARACTERS_PER_TOKEN = 8
_WHAT, _VERSION = "kv", 1
"""Increased whenever the comparison or its bound changes."""


@dataclass(frozen=True)
class KVChoice:
    """The name of the chosen policy, and `why`, as text that follows the name and a colon."""

    policy: str
    why: str


@dataclass(frozen=True)
class Measured:
    """The mean KL of a policy in nats, over `places` positions."""

    kl: float
    places: int


def decide(measured: Mapping[str, Measured]) -> KVChoice:
    """Chooses the first policy that is within the bound, else full precision. They are given in order, the smallest
    first."""
    refused: list[str] = []
    for name, found in measured.items():
        told = f"KL {found.kl:.2g} of at most {KL_MAX:g} over {found.places} places"
        # False for NaN too.
        if found.kl <= KL_MAX:
            return KVChoice(name, "; ".join([told, *refused]))
        refused.append(f"{name} has {told}")
    return KVChoice(FULL_PRECISION, "; ".join(refused) or "nothing else was compared")


def choose(
    source: str,
    folder: Path,
    model: Any,
    vocabulary_size: int,
    context_tokens: int,
    spec_under: Callable[[str], ModelCacheSpec],
    findings: Findings,
    pieces: Pieces = IN_ONE_PIECE,
    *,
    tested: bool,
    trusted: bool,
) -> KVChoice:
    """Chooses the KV policy of a loaded model. Never fails.

    Args:
        source: as the user gave it.
        model: the model in the form that takes a flat list of caches, with its attention installed.
        context_tokens: the model's own context.
        spec_under: returns its spec under a policy, by name.
        findings: of this model, for any KV policy.
        pieces: see `compare`.
        tested: whether it ships with Satchel, whose own tests cover it with `USUAL`.
        trusted: whether code in its folder may run.
    """
    if tested:
        return KVChoice(USUAL, "chosen by Satchel's own tests")
    if (known := _known(findings.read(_WHAT, _VERSION))) is not None:
        return known
    began = pieces.now_s()
    try:
        tokens = text_tokens(source, folder, vocabulary_size, context_tokens, trusted=trusted)
        choice = decide(_measure(model, tokens, spec_under, findings, pieces))
    except Exception as error:
        # Whatever a tokenizer or a model raises, the model can be served without this comparison.
        why = f"no other policy could be compared with it: {first_sentence(error)}"
        logger.warning("%s keeps its KV in full precision: %s", source, why, exc_info=True)
        return KVChoice(FULL_PRECISION, why)
    findings.note(_WHAT, _VERSION, asdict(choice))
    took_s = pieces.now_s() - began
    logger.info("%s keeps its KV as %s: %s (compared in %.1f s)", source, choice.policy, choice.why, took_s)
    return choice


def _known(found: Any) -> KVChoice | None:
    """Returns what an earlier load found; None if it does not apply here."""
    match found:
        case {"policy": str(policy), "why": str(why)} if policy in POLICIES:
            return KVChoice(policy, why)
    return None


def _measured(found: Any) -> Measured | None:
    """Returns what an earlier load, which ended before a choice, measured of a policy; None if it does not apply."""
    match found:
        case {"kl": float(kl), "places": int(places)}:
            return Measured(kl, places)
    return None


def text_tokens(source: str, folder: Path, vocabulary_size: int, context_tokens: int, *, trusted: bool) -> list[int]:
    """Returns the tokens of the text on which policies are compared.

    Raises:
        ValueError: there are too few tokens, or some are outside the model's vocabulary.
        Exception: whatever the tokenizer's library raises.
    """
    wanted = min(GPU_TOKENS if on_gpu() else CPU_TOKENS, context_tokens)
    least = BLOCK_TOKENS + PLACES_MIN
    if wanted < least:
        raise ValueError(f"its context of {context_tokens} tokens is too short")
    text = real_text.mixed(wanted * CHARACTERS_PER_TOKEN)
    tokens = encoded(source, folder, text, trusted=trusted)[:wanted]
    if len(tokens) < least or len(set(tokens)) < TOKENS_KNOWN_MIN:
        raise ValueError(f"its tokenizer makes {len(tokens)} tokens of a text, {len(set(tokens))} of them different")
    if max(tokens) >= vocabulary_size:
        raise ValueError(f"its tokenizer has token {max(tokens)}, and the model none above {vocabulary_size - 1}")
    return tokens


def encoded(source: str, folder: Path, text: str, *, trusted: bool = False) -> list[int]:
    """Returns a text's tokens, with the special tokens with which the tokenizer begins a text.

    Raises:
        Exception: whatever the tokenizer's library raises.
    """
    if (path := folder / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(path)).encode(text).ids
    from transformers import AutoTokenizer

    with own_code_only(source, folder, trusted=trusted):
        return list(AutoTokenizer.from_pretrained(folder, trust_remote_code=trusted).encode(text))


def _measure(
    model: Any,
    tokens: Sequence[int],
    spec_under: Callable[[str], ModelCacheSpec],
    findings: Findings,
    pieces: Pieces,
) -> dict[str, Measured]:
    """Measures policies, the smallest first, up to the first within the bound. Each result is stored at once."""
    began = pieces.now_s()
    specs = {name: spec_under(name) for name in POLICIES}

    def caches_of(name: str) -> NewCaches:
        spec = specs[name]
        return lambda: new_caches(spec, make_prompt_cache(model), new_pool(spec), Reads.DEQUANTIZED)

    def enough(places: int) -> bool:
        return on_gpu() and places >= PLACES_MIN and pieces.now_s() - began > COMPARING_S

    span = (BLOCK_TOKENS, len(tokens))
    measured: dict[str, Measured] = {}
    sealing = [name for name, policy in POLICIES.items() if policy.quantizes]
    for name in sorted(sealing, key=lambda name: specs[name].bytes_per_token):
        known = _measured(findings.read(f"{_WHAT} {name}", _VERSION))
        if known is None:
            others = {name: caches_of(name)}
            found = compare(model, tokens, [span], caches_of(FULL_PRECISION), others, enough=enough, work=pieces)
            (scores,) = found[name]
            known = Measured(float(scores.kl.mean()), len(scores.kl))
            findings.note(f"{_WHAT} {name}", _VERSION, asdict(known))
        measured[name] = known
        if measured[name].kl <= KL_MAX:
            break
    return measured
