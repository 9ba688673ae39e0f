"""OpenAI's answers of models of speech: transcripts in five forms, audio as a file or piece by piece, and events."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from ....actors.protocol.speech_messages import SpeechPiece, Transcript, TranscriptSegment
from ...pipeline.speech import MadeSpeech

UNKNOWN_BYTES = 0xFFFFFFFF
"""What a WAV states as its length if that is not known when it begins."""

_HEADER_BYTES = 36


def transcript_json(made: MadeSpeech) -> dict[str, Any]:
    """Returns a transcript without times."""
    return {"text": _transcript(made).text.strip(), "usage": _duration(made)}


def transcript_verbose(made: MadeSpeech, task: str, granularities: Sequence[str]) -> dict[str, Any]:
    """Returns a transcript with times.

    Args:
        task: `transcribe` or `translate`.
        granularities: `segment`, `word` or both; segments if there is none.
    """
    transcript = _transcript(made)
    body: dict[str, Any] = {
        "task": task,
        "language": transcript.language,
        "duration": made.seconds,
        "text": transcript.text.strip(),
        "usage": _duration(made),
    }
    if "word" in granularities:
        body["words"] = [
            {"word": word.word.strip(), "start": word.start, "end": word.end}
            for segment in transcript.segments
            for word in segment.words
        ]
    if "segment" in granularities or not granularities:
        body["segments"] = [_segment(number, each) for number, each in enumerate(transcript.segments)]
    return body


def subtitles(made: MadeSpeech, kind: str) -> str:
    """Returns a transcript as subtitles: `srt` (SubRip) or `vtt` (WebVTT)."""
    point = "," if kind == "srt" else "."
    # A blank line would end a subtitle.
    spoken = [(each, " ".join(each.text.split())) for each in _transcript(made).segments]
    cues = [
        f"{_clock(each.start, point)} --> {_clock(each.end, point)}\n{text.replace('-->', '->')}\n"
        for each, text in spoken
        if text
    ]
    if kind == "vtt":
        return "\n".join(["WEBVTT\n", *cues])
    return "\n".join(f"{number}\n{cue}" for number, cue in enumerate(cues, 1))


def _transcript(made: MadeSpeech) -> Transcript:
    assert made.transcript is not None
    return made.transcript


def _segment(number: int, segment: TranscriptSegment) -> dict[str, Any]:
    return {
        "id": number,
        "seek": 0,
        "start": segment.start,
        "end": segment.end,
        "text": segment.text,
        "tokens": segment.tokens,
        "temperature": segment.temperature,
        "avg_logprob": segment.avg_logprob,
        "compression_ratio": segment.compression_ratio,
        "no_speech_prob": segment.no_speech_prob,
    }


def _clock(seconds: float, point: str) -> str:
    milliseconds = max(0, round(1000 * seconds))
    rest, milliseconds = divmod(milliseconds, 1000)
    minutes, rest = divmod(rest, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{rest:02d}{point}{milliseconds:03d}"


def _duration(made: MadeSpeech) -> dict[str, Any]:
    return {"type": "duration", "seconds": made.seconds}


async def transcript_events(news: AsyncGenerator[SpeechPiece | MadeSpeech, None]) -> AsyncGenerator[bytes, None]:
    """Yields the events of a streamed transcript: `transcript.text.delta`, then one `transcript.text.done`."""
    begun = False
    async with aclosing(news):
        async for each in news:
            if isinstance(each, MadeSpeech):
                given, made = each.tokens
                usage = {"type": "tokens", "input_tokens": given, "output_tokens": made, "total_tokens": given + made}
                text = _transcript(each).text.strip()
                yield _event({"type": "transcript.text.done", "text": text, "usage": usage})
            elif text := each.text if begun else each.text.lstrip():
                # A transcript begins with its first word, whatever the model writes before it.
                begun = True
                yield _event({"type": "transcript.text.delta", "delta": text})


async def speech_events(
    news: AsyncGenerator[SpeechPiece | MadeSpeech, None], kind: str, rate: int
) -> AsyncGenerator[bytes, None]:
    """Yields the events of a text that is spoken: `speech.audio.delta`, then one `speech.audio.done`. The audio of the
    events, joined, is a file of a format as in `file_pieces`."""
    async with aclosing(news):
        first = True
        async for each in news:
            if isinstance(each, MadeSpeech):
                given, made = each.tokens
                usage = {"input_tokens": given, "output_tokens": made, "total_tokens": given + made}
                yield _event({"type": "speech.audio.done", "usage": usage})
                continue
            # A piece may have many megabytes.
            yield await asyncio.to_thread(_audio_event, each.audio, rate if first and kind == "wav" else None)
            first = False


def _audio_event(audio: bytes, rate: int | None) -> bytes:
    """Returns an event with audio, with the header of a WAV before it if a rate is given."""
    data = audio if rate is None else wav_header(rate, None) + audio
    return _event({"type": "speech.audio.delta", "audio": base64.b64encode(data).decode("ascii")})


async def file_pieces(
    news: AsyncGenerator[SpeechPiece | MadeSpeech, None], kind: str, rate: int
) -> AsyncGenerator[bytes, None]:
    """Yields a file piece by piece.

    Args:
        kind: `wav`, of a length that its header does not state, or `pcm`.
    """
    async with aclosing(news):
        first = True
        async for each in news:
            if isinstance(each, SpeechPiece):
                yield wav_header(rate, None) + each.audio if first and kind == "wav" else each.audio
                first = False


def audio_file(pcm: bytes, kind: str, rate: int) -> bytes:
    """Returns 16-bit samples of one channel as a file, `wav` or `pcm`."""
    return wav_header(rate, len(pcm)) + pcm if kind == "wav" else pcm


def media_type(kind: str, rate: int) -> str:
    """Returns the media type of a file."""
    return "audio/wav" if kind == "wav" else f"audio/pcm;rate={rate};channels=1"


def wav_header(rate: int, nbytes: int | None) -> bytes:
    """Returns the header of a WAV with 16-bit samples of one channel.

    Args:
        nbytes: of the samples; None if that is not known.
    """
    data = UNKNOWN_BYTES if nbytes is None else nbytes
    whole = UNKNOWN_BYTES if nbytes is None else nbytes + _HEADER_BYTES
    form = struct.pack("<HHIIHH", 1, 1, rate, 2 * rate, 2, 16)
    begin = struct.pack("<4sI4s4sI", b"RIFF", whole, b"WAVE", b"fmt ", len(form))
    return begin + form + struct.pack("<4sI", b"data", data)


def _event(content: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(content, separators=(',', ':'))}\n\n".encode("ascii")
