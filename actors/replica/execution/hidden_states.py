"""Finds the part of a model that gives hidden states: all up to the final norm, without the output layer.

Names of model families are not used. Candidates for that part are all modules with a list of layers, and the model
without its output layer. Candidates for the output layer are all modules with a row for each token of the vocabulary.
If the part's output, put through the output layer, agrees with the model's own logits, the two are found.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from ..device.device import as_numpy, multiplies_exactly
from ..kv.caches import ModelCacheSpec, read_spec
from ..proving.agreement import MODEL_ERRORS, TOLERANCE, TOLERANCE_16, agree
from ..proving.findings import NOWHERE, Findings
from ..proving.pieces import IN_ONE_PIECE, Pieces

DEPTH_MAX = 3
"""How deep in a model's modules the part is searched for."""

_LENGTHS = (7, 4)
"""Tokens of the texts that the search runs: the shorter one is padded, the longer one is cut into chunks."""
_CHUNK = 3

_WHAT, _VERSION = "hidden_states", 1
"""Increased whenever the search changes."""

_NOT_FOUND = "no part of the model gives hidden states from which its output layer makes its logits"

Layer = Callable[[mx.array], mx.array]
Places = Callable[[mx.array, int], dict[str, mx.array]]
"""Returns a model's other inputs for tokens `(sequences, tokens)`, given the index of the first token in its text."""


class Match(Enum):
    """How logits agree with others: they are equal, or only in the same order, as if a model caps or scales its
    own."""

    NONE = 0
    RISING = 1
    EQUAL = 2


@dataclass(frozen=True)
class HiddenStates:
    """Computes a model's hidden states, and logits of them.

    Attributes:
        dimensions: of a hidden state.
        batched: whether padded batches can be computed without caches; if not, each text is computed alone, with
            caches.
        exact: whether `head` gives the model's own logits.
        spec: of plain caches.
    """

    dimensions: int
    batched: bool
    exact: bool
    spec: ModelCacheSpec
    head: Layer
    """Returns logits `(..., vocabulary)` of hidden states `(..., dimensions)`."""
    new_caches: Callable[[], list[Any]]
    """Returns empty plain caches for one text, one a layer."""
    _part: Callable[..., Any]
    _places: Places

    def __call__(self, tokens: mx.array, caches: Sequence[Any] | None = None, start: int = 0) -> mx.array:
        """Returns `(sequences, tokens, dimensions)` in the model's dtype.

        Args:
            tokens: `(sequences, tokens)` token ids of an integer dtype. Texts are padded on the right: no token sees a
                later one.
            caches: what `new_caches` returned, with the tokens before these; None if there are none.
            start: how many tokens those are.
        """
        return _states(self._part, self._places, tokens, caches, start)

    def cache_bytes(self, tokens: int) -> int:
        """Returns how many bytes the caches of a text take."""
        return self.spec.bytes_per_sequence + tokens * self.spec.bytes_per_token


def find_hidden_states(
    model: Any,
    root: nn.Module,
    vocabulary: int,
    places: Places | None = None,
    *,
    spec: ModelCacheSpec | None = None,
    findings: Findings = NOWHERE,
    pieces: Pieces = IN_ONE_PIECE,
) -> HiddenStates:
    """Searches a loaded model by running a few tokens through it, or takes what an earlier load found.

    Args:
        model: called with tokens and caches, returns logits, as mlx-lm's models do.
        root: the module whose parts are searched.
        vocabulary: how many logits a token has.
        places: other inputs that the part may take; None for none.
        spec: the spec of plain caches; without it earlier findings are not used.
        findings: of this model, for any KV policy.
        pieces: a piece ends after each call of the model.

    Raises:
        ValueError: no part of the model agrees with it.
    """
    candidates = _candidates(root, vocabulary, places)
    known = None if spec is None else findings.read(_WHAT, _VERSION)
    if spec is not None and known is not None:
        if known == _NOT_FOUND:
            raise ValueError(_NOT_FOUND)
        if (found := _known(known, model, spec, candidates)) is not None:
            return found
        candidates = _candidates(root, vocabulary, places)
    step = max(1, vocabulary // sum(_LENGTHS))
    texts = [
        [(1 + (at + sequence) * step) % vocabulary for at in range(size)] for sequence, size in enumerate(_LENGTHS)
    ]
    expected = []
    for text in texts:
        expected.append(model(mx.array([text], mx.uint32), cache=make_prompt_cache(model))[0])
        mx.eval(expected[-1])
        pieces.pause()
    for candidate in candidates:
        found = _tried(model, candidate, texts, expected, pieces)
        if found is not None:
            kept = {"which": candidate.which, "dimensions": found.dimensions}
            findings.note(_WHAT, _VERSION, kept | {"batched": found.batched, "exact": found.exact})
            return found
    findings.note(_WHAT, _VERSION, _NOT_FOUND)
    raise ValueError(_NOT_FOUND)


@dataclass(frozen=True)
class _Candidate:
    """A possible source of hidden states: a part of the model, its other inputs, and an output layer. `which` is a name
    for them that is the same in every process."""

    which: str
    part: nn.Module
    places: Places
    head: Layer


def _candidates(root: nn.Module, vocabulary: int, places: Places | None) -> Iterator[_Candidate]:
    heads = dict(_heads(root, vocabulary))
    for name, part in (*_parts(root), *_headless(root, heads)):
        for given in (places, _nowhere) if places is not None else (_nowhere,):
            for head_name, head in heads.items():
                which = f"{name}{'' if given is _nowhere else ' with places'}, {head_name}"
                yield _Candidate(which, part, given, head)


def _known(found: Any, model: Any, spec: ModelCacheSpec, candidates: Iterator[_Candidate]) -> HiddenStates | None:
    """Returns what an earlier load found; None if it does not apply here."""
    match found:
        case {"which": str(which), "dimensions": int(dimensions), "batched": bool(batched), "exact": bool(exact)}:
            for each in candidates:
                if each.which == which:
                    return _hidden_states(model, each, spec, dimensions, batched=batched, exact=exact)
    return None


def _parts(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules in the model that have a list of modules, by name, from the outside in."""
    named = sorted(root.named_modules(), key=lambda each: each[0].count("."))
    for name, module in named:
        if name and name.count(".") < DEPTH_MAX and any(map(_is_list, module.children().values())):
            yield name, module


def _is_list(child: Any) -> bool:
    return isinstance(child, list) and any(isinstance(layer, nn.Module) for layer in child)


def _heads(root: nn.Module, vocabulary: int) -> Iterator[tuple[str, Layer]]:
    """Yields the modules that may be the output layer, by name. The embedding of tokens may be it too."""
    for name, module in root.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, mx.array) and weight.ndim == 2 and weight.shape[0] == vocabulary:
            yield name, getattr(module, "as_linear", module)


def _headless(root: nn.Module, heads: dict[str, Layer]) -> Iterator[tuple[str, nn.Module]]:
    """Yields the model without one of its output layers, by that layer's name; weights are shared with the model."""
    for name in heads:
        if name in root.children():
            part = copy.copy(root)
            part[name] = nn.Identity()
            yield f"all but {name}", part


def _nowhere(tokens: mx.array, start: int) -> dict[str, mx.array]:
    return {}


def _states(part: Callable[..., Any], places: Places, tokens: mx.array, caches: Any, start: int) -> mx.array:
    states = part(tokens, cache=caches, **places(tokens, start))
    return getattr(states, "logits", states)


def _tried(
    model: Any, candidate: _Candidate, texts: list[list[int]], expected: list[mx.array], pieces: Pieces
) -> HiddenStates | None:
    """Returns hidden states computed with a candidate's part and output layer; None if these do not agree with the
    model."""
    part, places, head = candidate.part, candidate.places, candidate.head
    try:
        chunked, spec = _in_chunks(model, part, places, texts[0], pieces)
        match = _match(expected[0], head(chunked))
    except MODEL_ERRORS:
        return None
    if match is Match.NONE:
        return None
    pieces.pause()
    try:
        together = _in_batch(part, places, texts)
        matches = [_match(logits, head(states)) for logits, states in zip(expected, together, strict=True)]
        batched = Match.NONE not in matches
    except MODEL_ERRORS:
        batched = False
    pieces.pause()
    exact = match is Match.EQUAL
    return _hidden_states(model, candidate, spec, chunked.shape[-1], batched=batched, exact=exact)


def _hidden_states(
    model: Any, candidate: _Candidate, spec: ModelCacheSpec, dimensions: int, *, batched: bool, exact: bool
) -> HiddenStates:
    return HiddenStates(
        dimensions=dimensions,
        batched=batched,
        exact=exact,
        spec=spec,
        head=candidate.head,
        new_caches=lambda: make_prompt_cache(model),
        _part=candidate.part,
        _places=candidate.places,
    )


def _in_chunks(
    model: Any, part: nn.Module, places: Places, text: list[int], pieces: Pieces
) -> tuple[mx.array, ModelCacheSpec]:
    """Returns the hidden states `(tokens, dimensions)` of a text in two chunks, and the spec of its caches."""
    caches, states = make_prompt_cache(model), []
    for start, stop in ((0, _CHUNK), (_CHUNK, len(text))):
        states.append(_states(part, places, mx.array([text[start:stop]], mx.uint32), caches, start)[0])
        mx.eval(states[-1], [cache.state for cache in caches])
        pieces.pause()
    return mx.concatenate(states), read_spec(caches, len(text))


def _in_batch(part: nn.Module, places: Places, texts: list[list[int]]) -> list[mx.array]:
    width = max(map(len, texts))
    tokens = mx.array([text + [0] * (width - len(text)) for text in texts], mx.uint32)
    states = _states(part, places, tokens, None, 0)
    return [states[sequence, : len(text)] for sequence, text in enumerate(texts)]


def _match(expected: mx.array, logits: mx.array) -> Match:
    """Compares logits `(tokens, vocabulary)`."""
    if logits.shape != expected.shape:
        return Match.NONE
    if agree([expected], [logits]):
        return Match.EQUAL
    tolerance = TOLERANCE if multiplies_exactly(expected.dtype) else TOLERANCE_16
    own, other = (as_numpy(array.astype(mx.float32)) for array in (expected, logits))
    sorted_own = np.take_along_axis(own, np.argsort(other, axis=-1, kind="stable"), axis=-1)
    falls = np.maximum.accumulate(sorted_own, axis=-1) - sorted_own
    reach = own.max(axis=-1) - own.min(axis=-1)
    return Match.RISING if (reach > 0).all() and (falls.max(axis=-1) <= tolerance * reach).all() else Match.NONE
