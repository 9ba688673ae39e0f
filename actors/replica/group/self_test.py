"""The self-test of a divided model: what the group computes with a batch and from cached KV must be what it computes
with one sequence alone. No process has the whole model, so it is not compared with the bare model."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ....cluster.config.config import Model
from ....cluster.errors import ModelLoadError
from ...model_files.source import Progress
from ..device.device import on_gpu
from ..execution.followers import Followers
from ..execution.loaded_model import LoadedModel
from ..proving.findings import Findings
from ..selftest import pictures
from ..selftest.forced_sequences import ForcedSequences
from ..selftest.self_test import Proven, reused, sequences_of
from .served_alone import ServedAlone

logger = logging.getLogger(__name__)

_VERSION = 1
"""Increased whenever the self-test, or what it tests, changes."""


@dataclass(frozen=True)
class GroupVerdict:
    """What is wrong, as the end of a sentence each; empty if nothing is. As `Faults`; `blind` and `stills` are those of
    `LoadedModel`."""

    alone: str = ""
    together: str = ""
    again: str = ""
    blind: str = ""
    stills: str = ""


def prove_group(
    loaded: LoadedModel,
    followers: Followers,
    layers: str,
    model: Model,
    progress: Progress,
    known: Path | None,
    served: ServedAlone | None = None,
) -> Proven:
    """Tests a divided model, or takes what an earlier self-test found.

    Args:
        loaded: the leader's stage.
        layers: how the layers are divided, for the findings.
        known: the file that keeps findings; None for no file.
        served: serves the model once it is known to compute one sequence alone; None for not before the test has ended.

    Raises:
        ModelLoadError: it computes something wrong with one sequence alone.
    """
    if not model.self_test:
        return Proven(loaded, notes=["its self-test was skipped (self_test: false)"])
    if model.source.startswith("embedded:") and not on_gpu():
        return Proven(loaded)
    # What a load lacks, such as a processor of pictures, was not tested.
    what = f"divided, {layers}{'' if loaded.vision is None else ', pictures'}"
    findings = Findings(known, loaded.model_id)
    found = findings.read(what, _VERSION)
    if isinstance(found, dict) and {"alone", "together", "again"} <= found.keys() <= asdict(GroupVerdict()).keys():
        verdict = GroupVerdict(**found)
    else:
        progress(f"testing {model.source}", None)
        verdict = _tested(loaded, followers, served)
        findings.note(what, _VERSION, asdict(verdict))
    if verdict.alone:
        raise ModelLoadError(f"{model.source} cannot be served: if a prompt is computed in chunks, {verdict.alone}")
    notes = ["its self-test compared the group with itself only: no process has the whole model"]
    if verdict.together:
        notes.append(f"sequences run one after the other: when batched, {verdict.together}")
    if verdict.blind or verdict.stills:
        vision = None if verdict.blind else loaded.vision
        loaded = replace(loaded, vision=vision, blind=verdict.blind or loaded.blind, stills=verdict.stills)
    notes += [f"it gets no pictures: {verdict.blind}"] * bool(verdict.blind)
    if verdict.again:
        notes.append(f"no KV is reused, every turn is prefilled from its beginning: {verdict.again}")
        loaded = replace(loaded, spec=replace(loaded.spec, kept=False))
    for note in notes[1:]:
        logger.warning("%s: %s", model.source, note)
    return Proven(loaded, not verdict.together, notes)


def _tested(loaded: LoadedModel, followers: Followers, served: ServedAlone | None) -> GroupVerdict:
    sequences = sequences_of(loaded)
    if not sequences:
        return GroupVerdict()
    between = None if served is None else served.serve
    test = ForcedSequences(loaded, sequences, followers=followers, between=between)
    alone, wrong = test.cold(loaded)
    if wrong:
        return GroupVerdict(alone=wrong)
    # Pictures are not tested yet, and a model that sees need not be what it is without them.
    if served is not None and loaded.vision is None:
        served.offer(loaded)
    again = test.again(loaded, reused(sequences)) if loaded.spec.reusable else ""
    together = test.batched(loaded, alone)
    if loaded.vision is None:
        return GroupVerdict(together=together, again=again)
    seen, stills = pictures.faults(loaded, followers=followers), ""
    if not seen.alone:
        stills = pictures.fault_of_videos(loaded, followers=followers)
        together, again = together or seen.together, again or seen.again
    return GroupVerdict(together=together, again=again, blind=seen.alone, stills=stills)
