"""What the span of a request says of its answers, by OpenTelemetry's conventions for generative AI. It has no words of
them."""

from __future__ import annotations

from ...actors.protocol.replica_messages import GenerateRequest
from ...cluster.telemetry.context import Span, span

CHAT, COMPLETION, EMBEDDINGS, IMAGES = "chat", "text_completion", "embeddings", "image_generation"
TRANSCRIPTION, SPEECH = "transcription", "speech"
"""Values of `gen_ai.operation.name`."""


def note_model(operation: str, asked: str, served: str) -> None:
    """Notes what a request wants, and which model answers.

    Args:
        operation: one of the constants above.
        asked: the name that the caller gave, "" for none.
    """
    span().set(
        {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "satchel",
            "gen_ai.request.model": asked or served,
            "gen_ai.response.model": served,
        }
    )


def note_sequence(sequence: GenerateRequest) -> None:
    """Notes how a request's sequences are drawn, and whose they are."""
    tenant, _, agent = sequence.agent.partition("/")
    sampling = sequence.sampling
    span().set(
        {
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.choice.count": sequence.choices if sequence.choices > 1 else None,
            "gen_ai.agent.id": agent or None,
            "satchel.tenant": tenant or sequence.tenant or None,
        }
    )


def note_usage(of: Span, prompt_tokens: int, cached_tokens: int = 0, completion_tokens: int = 0) -> None:
    """Adds the tokens of one answer, or of what there is of it, to its request's span."""
    of.add("gen_ai.usage.input_tokens", prompt_tokens)
    of.add("gen_ai.usage.cache_read.input_tokens", cached_tokens)
    of.add("gen_ai.usage.output_tokens", completion_tokens)


def note_finish(of: Span, reason: str) -> None:
    """Adds why one answer ended."""
    of.append("gen_ai.response.finish_reasons", reason)
