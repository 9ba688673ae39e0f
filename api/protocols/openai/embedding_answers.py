"""OpenAI's embeddings, and Jina's and Cohere's rankings, on the way out.

Writing millions of numbers takes a second: call it in a worker thread.
"""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ...pipeline.embedding import Embeddings, Ranking


def embedding_json(made: Embeddings, *, base64_encoded: bool) -> bytes:
    """Returns the answer of `/v1/embeddings`.

    Args:
        base64_encoded: whether an embedding is a string, its float32 numbers in little-endian order in base64.
    """
    entries = ",".join(_entries(made.vectors, base64_encoded=base64_encoded))
    usage = json.dumps(_usage(made.tokens), separators=(",", ":"))
    return f'{{"object":"list","data":[{entries}],"model":{json.dumps(made.model.info.name)},"usage":{usage}}}'.encode()


def _entries(vectors: np.ndarray, *, base64_encoded: bool) -> Iterator[str]:
    for index, vector in enumerate(vectors):
        shown = f'"{base64.b64encode(vector.astype("<f4")).decode()}"' if base64_encoded else numbers_json(vector)
        yield f'{{"object":"embedding","index":{index},"embedding":{shown}}}'


def numbers_json(vector: np.ndarray) -> str:
    """Returns float32 numbers as a JSON list. Nine digits are enough to restore every float32 exactly."""
    return f"[{','.join(format(number, '.9g') for number in vector.tolist())}]"


def ranking_body(made: Ranking, documents: Sequence[str] | None) -> dict[str, Any]:
    """Returns the answer of `/v1/rerank`, with Jina's and Cohere's fields.

    Args:
        documents: their texts if the answer must have them, else None.
    """
    results: list[dict[str, Any]] = []
    for ranked in made.documents:
        shown = {} if documents is None else {"document": {"text": documents[ranked.index]}}
        results.append({"index": ranked.index, "relevance_score": ranked.score, **shown})
    return {
        "id": f"rerank-{secrets.token_hex(12)}",
        "object": "list",
        "model": made.model.info.name,
        "results": results,
        "usage": _usage(made.tokens),
        "meta": {"tokens": {"input_tokens": made.tokens}},
    }


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": tokens, "total_tokens": tokens}
