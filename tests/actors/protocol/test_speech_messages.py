"""What a request to a model of speech costs, and what its model does not take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from satchel.actors.protocol.speech_messages import (
    SPEAK,
    TRANSCRIBE,
    TRANSLATE,
    SpeechInfo,
    SpeechRequest,
    SpeechUpdate,
    speech_refusal,
)

EAR = SpeechInfo("whisper", listens=True, translates=True, words=True, language=True, prompt=True, temperature=True)
MOUTH = SpeechInfo("kokoro", speaks=True, speed=True, instructions=True, voices=["af_heart", "bm_fable"])
HEARD = SpeechRequest("", "m", TRANSCRIBE, bytes(4 * 16_000 * 2))
SAID = SpeechRequest("", "m", SPEAK, text="Hello", voice="af_heart")


def test_audio_and_characters_cost():
    assert (HEARD.seconds, HEARD.tokens) == (2.0, 100)
    assert (replace(HEARD, rate=32_000).seconds, replace(HEARD, text="Ada").tokens) == (1.0, 103)
    assert (SAID.seconds, SAID.tokens, replace(SAID, text="").tokens) == (0.0, 5, 1)


def test_an_update_is_the_last_if_it_is_done_or_failed():
    assert not SpeechUpdate(1).is_last
    assert SpeechUpdate(1, done=True).is_last and SpeechUpdate(1, error={}).is_last


@pytest.mark.parametrize(
    ("info", "request_", "field"),
    [
        (EAR, HEARD, None),
        (EAR, replace(HEARD, language="de", text="Ada", temperature=0.5, words=True, task=TRANSLATE), None),
        (SpeechInfo("mms", listens=True), replace(HEARD, temperature=0.0), None),
        (MOUTH, SAID, None),
        (MOUTH, replace(SAID, speed=1.5, instructions="softly"), None),
        (SpeechInfo("soprano", speaks=True), SAID, None),
        (EAR, SAID, "model"),
        (MOUTH, HEARD, "model"),
        (MOUTH, replace(SAID, voice="alloy"), "voice"),
        (replace(MOUTH, speed=False), replace(SAID, speed=1.5), "speed"),
        (replace(MOUTH, instructions=False), replace(SAID, instructions="softly"), "instructions"),
        (replace(EAR, translates=False), replace(HEARD, task=TRANSLATE), "model"),
        (replace(EAR, words=False), replace(HEARD, words=True), "timestamp_granularities"),
        (replace(EAR, language=False), replace(HEARD, language="de"), "language"),
        (replace(EAR, languages=["en"]), replace(HEARD, language="de"), "language"),
        (replace(EAR, languages=["en"]), replace(HEARD, language="en"), None),
        (replace(EAR, prompt=False), replace(HEARD, text="Ada"), "prompt"),
        (replace(EAR, temperature=False), replace(HEARD, temperature=0.5), "temperature"),
    ],
)
def test_what_a_model_does_not_take_is_refused_by_name(info: SpeechInfo, request_: SpeechRequest, field: str | None):
    refusal: Any = speech_refusal(info, request_)
    assert (refusal and refusal[0]) == field
    assert refusal is None or "'m'" in refusal[1]
