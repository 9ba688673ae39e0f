"""The logprobs of prompts' tokens. They are computed apart from the answers and for whole prompts, because KV in memory
has no logits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...actors.protocol.replica_messages import PoolingRequest, TokenLogprobs
from ...cluster.errors import InvalidRequest
from ..requests.backend import Backend
from ..requests.requests import PreparedPrompt
from ..text.answers.logprobs import prompt_logprobs
from .kinds import check_pools
from .sending import sent_fields

TOKENS_MAX = 2**18
"""The most tokens of all prompts of one request together: each may have 20 likeliest ones."""


async def with_prompt_logprobs(
    backend: Backend, prompts: Sequence[PreparedPrompt], top: int, deadline: float
) -> list[PreparedPrompt]:
    """Returns the prompts of a request with their tokens' logprobs.

    Args:
        top: of how many of the likeliest tokens too.
        deadline: by the event loop's clock.

    Raises:
        InvalidRequest: the prompts are too long together, or the model has no such logprobs.
        Unavailable: it is not known yet whether it has, or no replica takes the request.
    """
    request, model = prompts[0].request, prompts[0].model
    check_pools(model, "logprobs of prompt tokens", "echo")
    if sum(len(prompt.prompt) for prompt in prompts) > TOKENS_MAX:
        message = f"logprobs: the prompts have more than {TOKENS_MAX} tokens together: send them in several requests"
        raise InvalidRequest(message, param="logprobs")
    pooling = PoolingRequest(
        model=model.info.name,
        texts=[prompt.prompt for prompt in prompts],
        logprobs=top,
        priority=request.caller.priority(request.options.priority),
        **sent_fields(request, "prompts", deadline),
    )
    answer = await backend.pool(model, pooling)
    return await asyncio.to_thread(_told, prompts, answer.array, top)


def _told(prompts: Sequence[PreparedPrompt], numbers: np.ndarray, top: int) -> list[PreparedPrompt]:
    ends = np.cumsum([len(prompt.prompt) - 1 for prompt in prompts])
    return [
        replace(
            prompt,
            prelude_tokens=prompt_logprobs(
                prompt.text_model.tokenizer,
                prompt.prompt,
                _logprobs_of(numbers[end - len(prompt.prompt) + 1 : end], top),
            ),
        )
        for prompt, end in zip(prompts, ends, strict=True)
    ]


def _logprobs_of(numbers: np.ndarray, top: int) -> list[TokenLogprobs]:
    """Returns the logprobs of a text's tokens.

    Args:
        numbers: as in `PooledTexts`.
    """
    ids, values = numbers[:, 1 : 1 + top].astype(int).tolist(), numbers[:, 1 + top :].tolist()
    likeliest = [list(zip(*each, strict=True)) for each in zip(ids, values, strict=True)]
    return list(zip(numbers[:, 0].tolist(), likeliest, strict=True))
