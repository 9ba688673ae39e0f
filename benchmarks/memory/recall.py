"""Codes told in long conversations and asked for at their end: how many come back with KV sealed and unsealed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from satchel.actors.replica.kernels.sealing import FULL_PRECISION, POLICIES
from satchel.actors.replica.kv.caches import merge
from satchel.actors.replica.loading import models
from satchel.actors.replica.selftest.probe import caches_of, spec_of

from ..embedded import recall_questions as questioner
from ..embedded.recall import MODEL, TextSpeaker
from ..parts import Budget, ResultTable, Say

COMPARED = (FULL_PRECISION, *(name for name in POLICIES if name != FULL_PRECISION))
LOSS_MAX = 0.005
SEED = 23
SHAPE_TOKENS = 64
"""What a GPU reads at once is a multiple of it, because it prepares itself for every new shape."""


def recall(
    questions: int,
    budget: Budget,
    say: Say,
    *,
    policies: Sequence[str] = COMPARED,
    talks: Sequence[tuple[int, int]] | None = None,
) -> ResultTable:
    """About `questions` codes at each length, every one asked for after the same conversation under every policy.

    Args:
        policies: full precision and `q4` among them.
        talks: codes and tokens of the conversations; all that fit the model's context where there are none.
    """
    part = ResultTable("Codes that the embedded model recalls")
    loaded = models.load(
        str(MODEL),
        context_tokens_max=None,
        progress=lambda what, fraction: None,
        kv=FULL_PRECISION,
        warm=False,
    )
    speaker = TextSpeaker(MODEL, loaded.model)
    makers = {name: caches_of(loaded, spec_of(loaded, name)) for name in policies}
    lengths = talks or [(facts, length) for facts, length in questioner.LONG if length < loaded.context_tokens]
    total = dict.fromkeys(policies, 0)
    asked = 0
    for index, (facts, length) in enumerate(lengths):
        rng, right, count = random.Random(f"{SEED}/{length}"), dict.fromkeys(policies, 0), 0
        differ = 0
        # Every length has its share of the time that is left.
        share = length / sum(tokens for _, tokens in lengths[index:])
        for _ in Budget(budget.left_s * share).rounds(-(-questions // facts)):
            messages, codes = questioner.long_talk(rng, facts, length, speaker.size_of)
            tokens = speaker.tokens(messages, ask=False)
            cases = [questioner.asked(rng, {name: code}, True) for name, code in codes.items()]
            said = {name: _answers(speaker, make(), tokens, cases) for name, make in makers.items()}
            for name, found in said.items():
                right[name] += sum(found)
            differ += sum(a != b for a, b in zip(said["q4"], said[FULL_PRECISION], strict=True))
            count += len(cases)
        say(f"  {count} codes in {length:,} tokens")
        if not count:
            part.notes.append(f"There was no time for {length:,} tokens.")
            continue
        part.rows += [
            {"KV": name, "tokens": length, "asked": count, "right": right[name], "share": right[name] / count}
            for name in policies
        ]
        part.notes.append(f"{length:,} tokens: q4 and full precision differ in {differ} of {count} answers.")
        total = {name: total[name] + right[name] for name in policies}
        asked += count
    if asked:
        loss = (total[FULL_PRECISION] - total["q4"]) / asked
        part.at_most(f"share of {asked:,} answers that q4 loses", loss, LOSS_MAX)
    part.notes.append("An answer is right if greedy decoding says all of it, to its end; the names are made up.")
    return part


def _answers(speaker: Any, caches: list[Any], tokens: list[int], cases: Sequence[Any]) -> list[bool]:
    """Whether each answer is what follows its question greedily; the questions are rows of one batch."""
    multiple = SHAPE_TOKENS if mx.default_device().type == mx.DeviceType.gpu else 1
    read = len(tokens) // multiple * multiple
    speaker.read(tokens[:read], caches)
    asked = [[*tokens[read:], *speaker.tokens([message])] for message, _ in cases]
    replies = [speaker.whole_reply(wanted) for _, wanted in cases]
    rows = [question + reply[:-1] for question, reply in zip(asked, replies, strict=True)]
    width = -(-max(map(len, rows)) // multiple) * multiple
    # Padding comes last, where nothing that is looked at sees it.
    padded = mx.array([row + [0] * (width - len(row)) for row in rows])
    logits = speaker.model(padded, cache=merge([caches] * len(rows)))
    likeliest: Any = mx.argmax(logits, axis=-1).tolist()
    return [
        said[len(question) - 1 : len(row)] == reply
        for said, question, row, reply in zip(likeliest, asked, rows, replies, strict=True)
    ]
