"""How a model's KV is kept where its config leaves that open (`kv: auto`): in the fewest bytes that change little of
what the model says.

At a model's first load every policy, the smallest first, is compared with full precision on the same real text
(teacher-forced), until one is within the bound. What is found is kept by the model's files, how this machine computes,
the policies' formats and the device, so that a later load compares nothing. If it cannot be compared, KV is kept as
computed, which is right for every model.
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
from ..execution.divergence import NewCaches, compare
from ..execution.findings import Findings
from ..execution.pieces import IN_ONE_PIECE, Pieces
from ..kernels.sealing import FULL_PRECISION, POLICIES
from ..kv.caches import ModelCacheSpec, new_caches, new_pool
from ..kv.paged_cache import Reads
from . import real_text

logger = logging.getLogger(__name__)

AUTO = "auto"
"""The name in the config that leaves the policy open."""

USUAL = "q4"
"""What models have that ship with Satchel."""

KL_MAX = 0.008
"""The most that a policy may change next-token distributions: the mean of KL(full precision || policy), in nats. Three
real models have 0.001 to 0.003 with `q4`, and from 0.015 on where its codes are chosen badly (docs/decisions/)."""

GPU_TOKENS, CPU_TOKENS = 1024, 384
"""Of the text that is read; those behind the first block, which have a sealed one before them, are scored."""

PLACES_MIN = 64
"""Positions that decide if there is no time for more."""

COMPARING_S = 3.0
"""For all policies together, on a GPU. A CPU takes as long as it takes for `CPU_TOKENS`."""

TOKENS_KNOWN_MIN = 32
"""Different tokens in the text; a tokenizer that finds fewer does not know it."""

CHARACTERS_PER_TOKEN = 8
_WHAT, _VERSION = "kv", 1
"""Raised whenever policies are compared otherwise, or with another bound."""


@dataclass(frozen=True)
class KVChoice:
    """How KV is kept, by a policy's name, and `why`, in words that follow the name and a colon."""

    policy: str
    why: str


@dataclass(frozen=True)
class Measured:
    """The mean KL of a policy in nats, over so many places."""

    kl: float
    places: int


def decide(measured: Mapping[str, Measured]) -> KVChoice:
    """Chooses among policies, in their order the smallest first: the first within the bound, else full precision."""
    refused: list[str] = []
    for name, found in measured.items():
        told = f"KL {found.kl:.2g} of at most {KL_MAX:g} over {found.places} places"
        # Also false for what is no number.
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
    """Chooses how a loaded model keeps its KV. Never fails.

    Args:
        source: as the user gave it.
        model: as it is called with a flat list of caches, its attention installed.
        context_tokens: of the model itself.
        spec_under: its spec under a policy, by name.
        findings: of this model, whatever policy it has.
        pieces: see `compare`.
        tested: whether it ships with Satchel, whose tests have tried it with `USUAL`.
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
        # Whatever a tokenizer or a model raises, the model can be served without knowing this.
        why = f"no other policy could be compared with it: {first_sentence(error)}"
        logger.warning("%s keeps its KV in full precision: %s", source, why, exc_info=True)
        return KVChoice(FULL_PRECISION, why)
    findings.note(_WHAT, _VERSION, asdict(choice))
    took_s = pieces.now_s() - began
    logger.info("%s keeps its KV as %s: %s (compared in %.1f s)", source, choice.policy, choice.why, took_s)
    return choice


def _known(found: Any) -> KVChoice | None:
    """Reads what an earlier load found; None if that says nothing here."""
    match found:
        case {"policy": str(policy), "why": str(why)} if policy in POLICIES:
            return KVChoice(policy, why)
    return None


def _measured(found: Any) -> Measured | None:
    """Reads what an earlier load, which did not come to a choice, measured of a policy; None if that says nothing."""
    match found:
        case {"kl": float(kl), "places": int(places)}:
            return Measured(kl, places)
    return None


def text_tokens(source: str, folder: Path, vocabulary_size: int, context_tokens: int, *, trusted: bool) -> list[int]:
    """Returns the tokens of the text on which policies are compared.

    Raises:
        ValueError: there are too few, or the model does not know them.
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
    """Returns a text's tokens, with those that the tokenizer begins a text with.

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
    """Measures policies, the smallest first, up to the first within the bound. Each is kept once it is measured."""
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
